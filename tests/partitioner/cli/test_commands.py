"""The commands beyond planning: what they write for machines, pictures, sweeps; golden texts of three of them."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from partitioner import partition
from partitioner.cli import main
from partitioner.cli.run import EXIT_CODES
from partitioner.experiments.results.store import Store
from passes.ir.plan import Plan
from tests.support.golden_text import Golden
from tests.support.running.slow_values import all_but

NET = """
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def factory():
    return nn.Sequential(*(Residual() for _ in range(4))), (torch.zeros(16, 8),)
"""

SWEEP = """
devices = [2, 4, 64]
modes = ["data", "pipeline"]
clusters = { fast = "h100:8x8" }
workers = 0

[models]
net = "net.py:factory"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a model and a sweep."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def printed(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Return the output of a command that ends with a code, without errors if that is 0."""
    capsys.readouterr()
    assert main(shlex.split(line)) == code
    output, complaint = capsys.readouterr()
    assert (complaint == "") == (code == 0)
    return output if code == 0 else complaint


# -- golden texts ----------------------------------------------------------------------------------------------------------------------

GOLDEN = {
    "command_plan": "plan net.py:factory --devices 2 --mode pipeline --schedule 1F1B --microbatches 2 --cluster h100:1x2",
    "command_inspect": "inspect net.py:factory --devices 2 --mode pipeline --schedule 1F1B --microbatches 2 --cluster h100:1x2 --rank 1",
    "command_simulate": "simulate net.py:factory --devices 4 --mode data=2,tensor=2 --cluster h100:1x4",
}


@pytest.mark.parametrize("name", all_but(("command_simulate",), GOLDEN))
def test_golden_texts_of_commands(name: str, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    golden(name, printed(GOLDEN[name], capsys))


# -- simulate --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulate_tells_what_the_model_tells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "simulate net.py:factory --devices 2 --mode pipeline --microbatches 2 --cluster h100:1x2"
    found = json.loads(printed(f"{line} --json", capsys))
    names: dict[str, Any] = {}
    exec(NET, names)  # noqa: S102  the text above
    model, inputs = names["factory"]()
    simulation = partition(model, 2, "pipeline", example_inputs=inputs, n_microbatches=2, cluster="h100:1x2").simulate()
    assert found["step_time"] == simulation.step_time
    assert found["peak_memory"] == list(simulation.peak_memory)
    assert {(each["source"], each["destination"]): each["bytes"] for each in found["communication"]} == dict(simulation.communication)
    printed(f"{line} --timeline step.svg", capsys)
    assert (folder / "step.svg").read_text().startswith("<svg")
    told = printed(f"{line} --timeline step.json --json numbers.json", capsys)
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    assert json.loads((folder / "numbers.json").read_text()) == found
    assert told.endswith("timeline written to step.json\n\nsimulation written to numbers.json\n")


def test_inference_is_simulated_for_batches_of_several_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    line = "simulate net.py:factory --devices 2 --mode data --cluster h100:1x2 --inference --batches 2,8"
    found = json.loads(printed(f"{line} --json", capsys))
    assert [each["batch"] for each in found["batches"]] == [2, 8]
    assert all(each["throughput"] == pytest.approx(each["batch"] / each["latency"]) for each in found["batches"])
    text = printed(line, capsys)
    assert "one forward a batch" in text
    assert re.search(r"^ +2 +\S+ .s +[\d,.]+ rows/s", text, re.MULTILINE)


@pytest.mark.slow
def test_a_plan_is_simulated_on_another_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    printed("plan net.py:factory --devices 2 --mode data --cluster h100:1x2 --json plan.json", capsys)
    times = [
        json.loads(printed(f"simulate net.py:factory --devices 2 --plan plan.json --cluster {cluster} --json", capsys))["step_time"]
        for cluster in ("h100:1x2", "v100:2x1")
    ]
    assert times[0] < times[1]


# -- for machines ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_on_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.from_json(printed("plan net.py:factory --devices 2 --mode data --json", capsys))
    assert plan.n_ranks == 2
    assert json.loads(printed("check net.py:factory --devices 2 --mode data --json", capsys))["equal"] is True
    assert len(json.loads(printed("sweep sweep.toml --store runs.db --json", capsys))) == 6
    assert len(json.loads(printed("report runs.db --json", capsys))) == 6


# -- inspect ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ("--format dot", "digraph"),
        pytest.param("--format svg", "<svg", marks=pytest.mark.slow),
        pytest.param("--output m.dot", "digraph", marks=pytest.mark.slow),
        ("--output m.svg --rank 1", "<svg"),
    ],
)
def test_inspect_draws(options: str, begins: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(f"inspect net.py:factory --devices 2 --mode pipeline --microbatches 2 {options}", capsys)
    files = [path for path in folder.iterdir() if path.name.startswith("m.")]
    assert (files[0].read_text() if files else text).startswith(begins)
    assert not files or text == f"{files[0].suffix[1:]} written to {files[0].name}\n"


def test_inspect_writes_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed("inspect net.py:factory --devices 2 --mode pipeline --microbatches 2 --output model.html", capsys)
    assert (folder / "model.html").read_text().startswith("<!DOCTYPE html>")
    assert "a page needs a file" in printed("inspect net.py:factory --devices 2 --format html", capsys, code=2)
    assert "a page shows all ranks" in printed("inspect net.py:factory --devices 2 --rank 0 --output model.html", capsys, code=2)


# -- sweep and report ------------------------------------------------------------------------------------------------------------------


def test_a_sweep_is_kept_resumed_and_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = printed("sweep sweep.toml --store runs.db", capsys)
    assert "6 placements, 1 failed\n" in first
    rows = Store("runs.db").rows()
    assert {(row.model, row.cluster, row.status) for row in rows if row.devices < 64} == {("net", "fast", "ok")}
    assert "has 6 placements of this sweep already\n  remedy: resume" in printed("sweep sweep.toml --store runs.db", capsys, code=2)
    assert printed("sweep sweep.toml --store runs.db --resume", capsys) == first
    assert Store("runs.db").rows() == rows
    told = printed("report runs.db --html out.html --csv rows.csv", capsys)
    assert told == "html written to out.html\ncsv written to rows.csv\n"
    assert "<h1>runs</h1>" in (folder / "out.html").read_text()
    with (folder / "rows.csv").open(newline="") as file:
        assert [row["key"] for row in csv.DictReader(file)] == [row.key for row in rows]
    assert "\n6 placements, 1 failed\n1 x 64 devices with 1 stage each" in printed("report runs.db", capsys)


@pytest.mark.slow
def test_a_sweep_takes_some_by_chance(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(json.loads(printed("sweep sweep.toml --store runs.db --samples 2 --seed 3 --json", capsys))) == 2


def test_a_sweep_of_failures_ends_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sweep.toml").write_text(SWEEP.replace("[2, 4, 64]", "[64]").replace('"data", ', ""))
    assert main(["sweep", "sweep.toml", "--store", "runs.db"]) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("devices = [", "the sweep file sweep.toml cannot be read: "),
        (SWEEP.replace("modes", "moods"), "has an unknown 'moods'\n  remedy: did you mean modes? choose from models, devices"),
        (SWEEP.replace("devices", "timeout"), "has no devices"),
        ("devices = 2\nmodels = ['net.py:factory']", "have no names"),
        (SWEEP.replace("net.py", "nowhere.py"), "there is no file nowhere.py"),
        (SWEEP.replace('"data", ', '"sideways", '), "there is no mode 'sideways'"),
    ],
)
def test_a_sweep_file_that_does_not_fit(text: str, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sweep.toml").write_text(text)
    complaint = printed("sweep sweep.toml --store runs.db", capsys, code=2)
    assert problem in complaint
    assert "\n  remedy: " in complaint


def test_a_report_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no store runs.db" in printed("report runs.db", capsys, code=2)
    Store("runs.db").close()
    assert "the sweep has no rows" in printed("report runs.db --html out.html", capsys, code=2)


# -- how a process ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("a gear is loose"), 3)])
def test_whatever_happens_is_told_in_words(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_arguments: Any, **_keywords: Any) -> nn.Module:
        raise error

    monkeypatch.setattr("partitioner.cli.partition_commands.partition", fails)
    complaint = printed("plan net.py:factory --devices 2", capsys, code=code)
    assert code in EXIT_CODES.values()
    assert "Traceback" not in complaint
    assert complaint.startswith("interrupted" if code == 130 else "error: RuntimeError: a gear is loose\n")


# -- configurations of transformers ----------------------------------------------------------------------------------------------------


def test_a_configuration_of_transformers_is_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **sizes}
    (folder / "llama.json").write_text(json.dumps(config))
    options = "--cluster h100:1x2 --mode fsdp --precision bf16-mixed --batch 4 --sequence 32"
    plan = Plan.from_json(printed(f"plan transformers:llama.json {options} --json", capsys))
    assert (plan.n_ranks, plan.batch_size) == (2, 4)


# -- options of placements -------------------------------------------------------------------------------------------------------------

OPTIONS = """
devices = 2
mode = ["fsdp"]
cluster = "h100:1x2"
precision = ["bf16-mixed", "32-true"]
optimizer = "sgd"
recompute = [{ "0.*" = "full" }, "none"]
axes = { batch = "fsdp" }
workers = 0

[models]
net = "net.py:factory"
"""


def test_a_sweep_file_has_the_options_of_partition(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sweep.toml").write_text(OPTIONS)
    rows = json.loads(printed("sweep sweep.toml --store runs.db --json", capsys))
    assert [row["reason"] for row in rows] == [""] * 4
    assert {(json.loads(row["options"]).get("precision"), row["recompute"]) for row in rows} == {
        (precision, recompute) for precision in ("bf16-mixed", "32-true") for recompute in ("0.*=full", "none")
    }
    assert all(json.loads(row["options"])["constraints"] == {"axes": {"batch": "fsdp"}} for row in rows)
    for name, near in {"precison": "precision", "axis": "axes", "stage_per_device": "stages_per_device"}.items():
        (folder / "wrong.toml").write_text(f'{name} = "x"\n{OPTIONS}')
        assert f"has an unknown '{name}'\n  remedy: did you mean {near}?" in printed("sweep wrong.toml --store runs.db", capsys, code=2)


def test_the_plan_of_a_row_is_lowered_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sweep.toml").write_text(SWEEP.replace("[2, 4, 64]", "[2]"))
    rows = json.loads(printed("sweep sweep.toml --store runs.db --json", capsys))
    key = rows[1]["key"]
    assert printed(f"report runs.db --plan {key} --json plan.json", capsys).endswith("\nplan written to plan.json\n")
    assert Plan.from_json((folder / "plan.json").read_text()).hash == rows[1]["plan_hash"]
    found = json.loads(printed("simulate net.py:factory --plan plan.json --cluster h100:1x2 --json", capsys))
    assert found["step_time"] == pytest.approx(rows[1]["step_time"])
    assert f"did you mean {key}?" in printed(f"report runs.db --plan {key[:-1]}", capsys, code=2)
    assert "leave out --html" in printed(f"report runs.db --plan {key} --html out.html", capsys, code=2)


# -- bad input -------------------------------------------------------------------------------------------------------------------------

WRONG = {
    "swep sweep.toml": "did you mean sweep?",
    "plan": "the following arguments are required: FACTORY",
    "plan net.py:factory --microbatches x": "invalid int value: 'x'",
    "inspect net.py:factory --devices 2 --format htm": "did you mean html?",
    "plan net.py:factory --devices 2 --objectve memory": "did you mean --objective?",
    "plan net.py:factory --devices 2 --mode tensr": "did you mean 'tensor'?",
    "plan net.py:factory --devices 2 --mode data --axes bach=data": "did you mean 'batch'?",
    "plan net.py:factory --devices 2 --cluster h100:1x2 --time-limit 0": "time_limit must be more than 0",
    "plan net.py:factory --devices 2 --cluster h100:1x2 --time-limit 1e-9": "no plan was found within time_limit=1e-09 seconds",
    "plan net.py:factory --devices 2 --cluster h100:1x2 --objective cost": "needs the price of a device for an hour, and h100 has none",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_words_are_one_message(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complaint = printed(line, capsys, code=2)
    assert WRONG[line] in complaint
    assert complaint.startswith("error: ")
    assert "\n  remedy: " in complaint
    assert "usage:" not in complaint


WRONG_SWEEPS = {
    'objective = "cost"': (1, '1 x objective="cost" needs the price of a device for an hour, and h100 has none'),
    "time_limit = 1e-9": (1, "1 x no plan was found within time_limit=1e-09 seconds"),
    "time_limit = -1": (2, "time_limit must be more than 0"),
    'objectve = "cost"': (2, "did you mean objective?"),
    'objective = "speed"': (2, "there is no objective='speed'"),
    'constraints = { axs = { batch = "data" } }': (2, "did you mean axes?"),
    'axes = { bach = "data" }': (1, "did you mean 'batch'?"),
    'mode = "dta"': (2, "did you mean 'data'?"),
}


@pytest.mark.parametrize("line", WRONG_SWEEPS)
def test_wrong_options_of_a_sweep_file_are_one_message(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mode = "" if "mode" in line else 'mode = "data"\n' if "axes" in line else 'mode = "auto"\n'
    text = f'devices = 2\n{mode}cluster = "h100:1x2"\nworkers = 0\n{line}\n[models]\nnet = "net.py:factory"\n'
    (folder / "sweep.toml").write_text(text)
    code, message = WRONG_SWEEPS[line]
    assert main(shlex.split("sweep sweep.toml --store runs.db")) == code
    text = "".join(capsys.readouterr())
    assert message in text
    assert "\n  remedy: " in text
