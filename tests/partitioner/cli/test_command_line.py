"""The command line: what it prints, the codes that it ends with, and errors that a user can act on."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import partitioner
from partitioner.cli import main
from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import Row, failed_row
from partitioner.experiments.results.store import Store
from passes.ir.plan import Plan
from tests import ROOT
from tests.support.running.slow_values import all_but, slow

FACTORIES = """
import itertools

import torch
from torch import nn
from beside import WIDTH


def factory():
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(8, WIDTH),)


def batch_norm():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)), (torch.randn(8, WIDTH),)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        return self.second(self.first(x) * mask)


def masked():
    return Masked(), (torch.randn(8, WIDTH),), {"mask": torch.ones(8, 1)}


class Counts(nn.Module):  # by an iterator, whose state is in no attribute: tracing sees one number
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.numbers = itertools.count(1)

    def forward(self, x):
        return self.second(self.first(x) * next(self.numbers))


def counts():
    return Counts(), (torch.randn(8, WIDTH),)


class Branches(Counts):
    def forward(self, x):
        return self.first(x) if x.sum() > 0 else self.second(x)


def branches():
    return Branches(), (torch.randn(8, WIDTH),)


def no_inputs():
    return nn.Linear(2, 2)


def inputs_in_a_list():
    return nn.Linear(2, 2), [torch.randn(2, 2)]


def too_many():
    return nn.Linear(2, 2), (), {}, 3


def nothing():
    pass


def fails():
    return 1 / 0


def ends():
    raise SystemExit


number = 3
"""

FAILING_LINE = FACTORIES.splitlines().index("    return 1 / 0") + 1

SWEEP = """
devices = [2, 4]
modes = ["data", { pipeline = 2, data = -1 }]
clusters = ["h100:1x4"]
workers = 0

[models]
net = "net.py:factory"
"""

COMMANDS = ("plan", "inspect", "simulate", "check", "sweep", "report")
OF_MODELS = ("plan", "inspect", "simulate", "check")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a file of factories that imports another file there."""
    (tmp_path / "net.py").write_text(FACTORIES)
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return tmp_path


class Ran:
    """Output and exit code of a command."""

    def __init__(self, line: str, capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        try:
            self.code: object = main(shlex.split(line))
        except SystemExit as end:  # argparse ends the process for --help and for words that it does not know
            self.code = end.code
        self.printed, self.complaint = capsys.readouterr()


# -- help ------------------------------------------------------------------------------------------------------------------------------


def example_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    ran = Ran(f"{command} --help", capsys)
    assert ran.code == 0
    examples = re.findall(r"^example: partitioner (.*)$", ran.printed, re.MULTILINE)
    assert len(examples) == 1
    return str(examples[0])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert Ran("--version", capsys).printed == f"partitioner {partitioner.__version__}\n"


def test_the_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("--help", capsys)
    assert ran.code == 0
    for command in COMMANDS:
        assert re.search(rf"^ +{command} +\w", ran.printed, re.MULTILINE)


@pytest.mark.parametrize("command", all_but(("inspect", "report"), COMMANDS))
def test_the_example_in_the_help_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = example_of(command, capsys)
    assert example.startswith(f"{command} net.py:factory " if command in OF_MODELS else f"{command} ")
    if command == "report":
        keep_rows(Path("runs.db"))
    ran = Ran(example, capsys)
    assert (ran.code, ran.complaint) == (0, "")
    assert ran.printed


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_a_terminal(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = Ran(f"{command} --help", capsys).printed.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("exit code: ") for line in lines)


def keep_rows(path: Path) -> None:
    """Fill a store with a planned placement and an unplanned one."""
    store = Store(path)
    placements = [Placement("net", devices, "data", "h100:1x4") for devices in (2, 4)]
    good = Row("a", "net", 2, "data", "h100:1x4", "GPipe", 1, step_time=0.25, bubble_fraction=0.5, peak_memory=2**20, communication=512)
    for row in (good, failed_row("b", placements[1], "there is no room\n  remedy: make some")):
        store.add(row)
    store.close()


def documented() -> list[str]:
    """Return the command lines of the README and of the module."""
    texts = [(ROOT / "README.md").read_text(), (ROOT / "partitioner/cli/__init__.py").read_text()]
    return [line for text in texts for line in re.findall(r"^    partitioner (.*?)(?:  +#.*)?$", text, re.MULTILINE)]


def test_the_documents_name_every_command() -> None:
    assert [line.split()[0] for line in documented()] == [*COMMANDS, *COMMANDS]


OF_README, OF_MODULE = documented()[: len(COMMANDS)], documented()[len(COMMANDS) :]


@pytest.mark.parametrize(
    "line", [*slow(*OF_README), *all_but((line for line in OF_MODULE if line.startswith(("inspect", "report"))), OF_MODULE)]
)
def test_documented_command_lines_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if line.startswith("report"):
        keep_rows(Path("runs.db"))
    ran = Ran(line, capsys)
    assert (ran.code, ran.complaint) == (0, "")


# -- plan ------------------------------------------------------------------------------------------------------------------------------


def test_plan_tells_the_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("plan net.py:factory --devices 2 --mode pipeline --schedule GPipe --microbatches 4", capsys)
    assert (ran.code, ran.complaint) == (0, "")
    assert ran.printed.startswith("Sequential: pipeline 2, GPipe, batch of 8 in 4 microbatches, training\n")
    for title in ("STAGES", "MEMORY", "COMMUNICATION", "SCHEDULE"):
        assert f"\n{title}\n" in ran.printed
    assert "|0F0|0F1|0F2|0F3|" in ran.printed


@pytest.mark.slow
def test_a_plan_that_is_written_is_lowered_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--mode pipeline --schedule ZBV --microbatches 2 --cluster h100:1x4 --memory-limit 1GiB"
    first = Ran(f"plan net.py:factory --devices 2 {options} --json plan.json", capsys)
    assert first.printed.endswith("\nplan written to plan.json\n")
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert (plan.schedule, plan.n_microbatches, plan.n_ranks) == ("ZBV", 2, 2)
    again = Ran("plan net.py:factory --devices 2 --plan plan.json --json again.json", capsys)
    of_programs = [ran.printed.partition("\nSTAGES\n")[2] for ran in (first, again)]  # above stand the memory and pins of what was asked
    assert of_programs[1] == of_programs[0].replace("plan.json", "again.json") != ""
    assert (folder / "again.json").read_text() == (folder / "plan.json").read_text()
    assert Ran("check net.py:factory --devices 2 --plan plan.json", capsys).code == 0
    programs = [Ran(f"inspect net.py:factory --devices 2 {how}", capsys).printed for how in (options, "--plan plan.json")]
    assert programs[0] == programs[1] != ""


def test_a_plan_leaves_nothing_to_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    Ran("plan net.py:factory --devices 2 --json plan.json", capsys)
    ran = Ran("plan net.py:factory --devices 2 --plan plan.json --schedule ZBV --memory-limit 1GiB", capsys)
    assert ran.code == 2
    assert "remedy: leave out --schedule, --memory-limit" in ran.complaint


# -- inspect ---------------------------------------------------------------------------------------------------------------------------


def test_inspect_prints_every_ranks_program(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("inspect net.py:factory --devices 2 --schedule ZBV --microbatches 2", capsys)
    assert (ran.code, ran.complaint) == (0, "")
    headings = [line for line in ran.printed.splitlines() if line.startswith("# rank")]
    assert headings == ["# rank 0 of 2, on cpu: stages 0 and 3", "# rank 1 of 2, on cpu: stages 1 and 2"]
    programs = [node for node in ast.parse(ran.printed).body if isinstance(node, ast.FunctionDef)]
    assert [program.name for program in programs] == ["forward", "forward"]
    for heading in ("0F0: forward of stage 0 on microbatch 0", "2I1: input gradients of stage 2 on microbatch 1"):
        assert f"    # {heading}\n" in ran.printed
    assert re.search(r"send\(.*destination=1", ran.printed)


@pytest.mark.slow
def test_inspect_prints_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    options = "net.py:factory --devices 2 --schedule 1F1B"
    everything = Ran(f"inspect {options}", capsys).printed
    each = [Ran(f"inspect {options} --rank {rank}", capsys).printed for rank in range(2)]
    assert each[0] + "\n\n" + each[1] == everything


@pytest.mark.parametrize("rank", [-1, 2])
def test_inspect_of_a_rank_that_is_not_there(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(f"inspect net.py:factory --devices 2 --rank {rank}", capsys)
    assert (ran.code, ran.printed) == (2, "")
    assert ran.complaint == f"error: there is no rank {rank}\n  remedy: ranks are 0 to 1\n"


# -- check -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [*slow("factory"), "masked"])
def test_check_of_an_equal_model(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(f"check net.py:{factory} --devices 2 --schedule 1F1B --microbatches 2", capsys)
    assert (ran.code, ran.complaint) == (0, "")
    assert "the original beside 1F1B on 2 ranks, a batch of 8 in 2 microbatches" in ran.printed
    assert ran.printed.endswith("EQUAL: the partitioned model computes what the original computes\n")


@pytest.mark.slow
def test_a_mode_may_be_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("plan net.py:factory --devices 4 --mode pipeline=2,tensor=2 --microbatches 2", capsys)
    assert ran.code == 0
    assert "\n  mesh       pipeline 2 x tensor 2, every rank on " in ran.printed
    ran = Ran("inspect net.py:factory --devices 4 --mode pipeline=2,tensor=2 --microbatches 2", capsys)
    headings = [line for line in ran.printed.splitlines() if line.startswith("# rank ")]
    assert [line.rpartition(": ")[2] for line in headings] == ["stage 0", "stage 0", "stage 1", "stage 1"]
    ran = Ran("check net.py:factory --devices 2 --mode dp=2", capsys)
    assert ran.code == 0


@pytest.mark.parametrize("mode", ["data=", "data=two", "=2", "data=2,", "data=2,data=2", "data=2;tensor=2", "data=-2"])
def test_a_mesh_that_cannot_be_read_is_told(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(f"plan net.py:factory --devices 4 --mode '{mode}'", capsys)
    assert ran.code == 2
    assert ran.complaint == f"error: --mode {mode} is no mesh\n  remedy: name each dimension once with its size: --mode data=2,tensor=2\n"


def test_check_of_a_model_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("check net.py:counts --devices 2", capsys)
    assert (ran.code, ran.complaint) == (1, "")
    assert "gradient of second.weight: differs by" in ran.printed
    assert ran.printed.endswith("DIFFERENT: the partitioned model does not compute what the original computes\n")


def test_check_tells_what_differs_by_definition(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("check net.py:batch_norm --devices 2 --schedule 1F1B --microbatches 2", capsys)
    assert ran.code == 0
    assert "note: BatchNorm in training (1) normalises over the rows of each microbatch" in ran.printed
    assert ran.complaint.startswith("warning: BatchNorm under microbatches: batch normalisation in training (1) takes its statistics")
    assert ran.complaint.count("warning:") == 1
    assert ".py" not in ran.complaint


# -- errors ----------------------------------------------------------------------------------------------------------------------------

ERRORS = [
    ("missing.py:factory --devices 2", "there is no file missing.py"),
    ("net.py --devices 2", "'net.py' names no factory"),
    ("net.py:factory --devices two", "two"),
    ("net.txt:factory --devices 2", "net.txt is no Python file"),
    ("broken.py:factory --devices 2", "broken.py failed: ModuleNotFoundError: No module named 'nowhere'\n  where: at broken.py:2"),
    ("misspelt.py:factory --devices 2", "misspelt.py failed: SyntaxError"),
    ("net.py:factry --devices 2", "net.py has no 'factry'\n  remedy: its functions are factory, batch_norm, masked, "),
    ("net.py:number --devices 2", "'number' in net.py is no function, but an object of type int"),
    ("net.py:fails --devices 2", f"fails() failed: ZeroDivisionError: division by zero\n  where: at net.py:{FAILING_LINE}"),
    ("net.py:ends --devices 2", "ends() failed: SystemExit: \n  where: at net.py:"),
    ("script.py:main --devices 2", "script.py failed: SystemExit: 3\n  where: at script.py:1"),
    ("net.py:nothing --devices 2", "nothing() returned nothing\n  remedy: return (model, args)"),
    ("net.py:no_inputs --devices 2", "no_inputs() returned an object of type Linear\n  remedy: return (model, args)"),
    ("net.py:inputs_in_a_list --devices 2", "inputs_in_a_list() returned (Linear, list)\n  remedy: return (model, args)"),
    ("net.py:too_many --devices 2", "too_many() returned (Linear, tuple, dict, int)\n  remedy: return (model, args)"),
    ("net.py:branches --devices 2", "Branches cannot be traced"),
    ("net.py:factory --devices 0", "devices=0: there must be at least one device"),
    (
        "net.py:factory --devices 99 --mode pipeline",
        "99 devices with 1 stage each: 99 stages, the model can be cut into 8\n  remedy: pass devices=8 or fewer\n",
    ),
    ("net.py:factory --devices 2 --mode sideways", "there is no mode 'sideways'"),
    ("net.py:factory --devices 2 --schedule 1f1b", "did you mean '1F1B'"),
    ("net.py:factory --devices 2 --cluster abacus", "there is no device preset 'abacus'"),
    ("net.py:factory --devices 2 --cluster c.toml", "the cluster file c.toml cannot be read: No such file"),
    ("net.py:factory --devices 2 --memory-limit 100", "lacks"),
    ("net.py:factory --devices 2 --plan missing.json", "the plan file missing.json cannot be read: No such file"),
    ("net.py:factory --devices 2 --plan bytes.json", "the plan file bytes.json cannot be read: it is no text"),
    ("net.py:factory --devices 2 --plan net.py", "the plan is not JSON"),
    ("net.py:factory --devices 2 --plan list.json", "the plan"),
]


@pytest.mark.parametrize(("line", "message"), ERRORS, ids=[line for line, _ in ERRORS])
def test_errors_end_with_2_and_say_what_to_do(line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "net.txt").write_text(FACTORIES)
    (folder / "broken.py").write_text("import os\nimport nowhere\n")
    (folder / "script.py").write_text("raise SystemExit(3)\n")
    (folder / "misspelt.py").write_text("def factory(:\n")
    (folder / "bytes.json").write_bytes(b"\xff\xfe\xff")
    (folder / "list.json").write_text("[]")
    ran = Ran(f"plan {line}", capsys)
    assert (ran.code, ran.printed) == (2, "")
    assert ran.complaint.startswith("error: ")
    assert message in ran.complaint
    assert "\n  remedy: " in ran.complaint
    assert "Traceback" not in ran.complaint


def test_a_plan_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("plan net.py:factory --devices 2 --json nowhere/plan.json", capsys)
    assert ran.code == 2
    assert "plan written" not in ran.printed
    assert "error: the plan cannot be written to nowhere/plan.json: No such file or directory\n  remedy: " in ran.complaint


@pytest.mark.parametrize("line", ["", "plan", "plan net.py:factory --n-microbatches two", "draw net.py:factory"])
def test_words_that_do_not_fit_end_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(line, capsys)
    assert (ran.code, ran.printed) == (2, "")
    assert ran.complaint.startswith("error: partitioner")
    assert "--help lists what it takes\n" in ran.complaint


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran("plan net.py:fails --devices 2 --debug", capsys)
    assert ran.code == 2
    assert "Traceback (most recent call last)" in ran.complaint
    assert re.search(rf"net\.py\", line {FAILING_LINE}, in fails\n", ran.complaint)
    assert "error: fails() failed: ZeroDivisionError" in ran.complaint


# -- the process -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_no_error(folder: Path) -> None:
    """As in ``partitioner inspect ... | head -1``."""
    command = [sys.executable, "-m", "partitioner", "inspect", "net.py:factory", "--devices", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), complaint) == (0, "")
