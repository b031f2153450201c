"""Reports of a partitioned model: the numbers are those of a run, the tables are aligned."""

from __future__ import annotations

import doctest
import html
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.hardware import units
from cost_models.hardware.units import format_bytes
from partitioner import Constraints, PartitionedModel, partition
from partitioner.reports import module_names as module_range
from partitioner.reports.communication.summary import transfers
from partitioner.reports.explain.explanation import explanation, sections
from partitioner.reports.explain.timetable import timetable
from partitioner.reports.sources import RankClass
from partitioner.reports.tables import table
from partitioner.reports.tables.table import Table
from partitioner.runtime import embedded
from partitioner.schedules.catalog import SCHEDULES, make_schedule
from passes.autograd.staged_model import SplitModel
from tests.support.models.attention.gpt import Gpt
from tests.support.models.case import Case, Instance
from tests.support.models.zoo import case_named
from tests.support.running.transparency import make_partitioned


def partitioned(name: str, **arguments: Any) -> tuple[Case, Instance, PartitionedModel]:
    case = case_named(name)
    instance = case.build()
    return case, instance, make_partitioned(instance, mode="pipeline", n_microbatches=4, **arguments)


@pytest.mark.parametrize("module", [module_range, table, units])
def test_examples_in_docstrings(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


# -- the table -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_counts_the_parameters_of_ranks() -> None:
    """A parameter that stages share counts on each of them."""
    *_, pm = partitioned("gpt", devices=3)
    lines = str(pm).splitlines()
    assert lines[0].startswith("Gpt: pipeline 3, ")
    assert "batch of 8 in 4 microbatches, training" in lines[0]
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]
    held = [_held(pm, rank) for rank in range(3)]
    for line, parameters in zip(lines[3:6], held, strict=True):
        assert f" {sum(parameter.numel() for parameter in parameters):,} " in line
    total = next(line for line in lines if "all ranks" in line)
    assert f" {sum(parameter.numel() for parameters in held for parameter in parameters):,} " in total
    assert format_bytes(sum(parameter.nbytes for parameters in held for parameter in parameters)) in total


def _held(pm: PartitionedModel, rank: int) -> list[Tensor]:
    return [part for _, part in pm.named_parts(rank)]


def test_the_notebook_shows_the_same_cells() -> None:
    *_, pm = partitioned("residual", devices=2)
    shown = html.unescape(pm._repr_html_())
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", shown)
    table = "\n".join(str(pm).splitlines()[2:]).partition("parameters: held")[0]
    assert " ".join(" ".join(cells).split()) == " ".join(table.split())
    assert f"{str(pm).splitlines()[0]} (parameters: held by the rank" in shown


def test_html_is_escaped() -> None:
    assert "<b>" not in table.html_table([("a",), ("<b>",)], "<")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "depth", "schedule"),
    [
        (2, 3, None),
        (8, 12, None),
        (4, 6, "ZBV"),
        (4, 12, "Interleaved1F1B"),
    ],
)
def test_what_is_printed_fits_a_terminal(n_ranks: int, depth: int, schedule: str | None) -> None:
    tokens = torch.zeros(16, 6, dtype=torch.long)
    pm = partition(Gpt(depth=depth), devices=n_ranks, mode="pipeline", example_inputs=(tokens,), schedule=schedule, progress=False)
    text = pm.explain()
    assert max(map(len, str(pm).splitlines())) <= 140
    assert max(map(len, text.splitlines())) <= 140
    for title in ("STAGES", "MEMORY"):  # numbers end where their heading ends
        heading, *rows = text.partition(f"\n{title}\n")[2].splitlines()[: len(pm.plan.stages) + 1]
        ends = [re.match(r"\s*\d+\s+\d+", row) for row in rows]
        assert {match.end() for match in ends if match} == {heading.index("rank") + len("rank")}
    drawn = [line for line in text.partition("\nSCHEDULE\n")[2].splitlines() if line.startswith("  rank")]
    assert len(drawn) == n_ranks
    assert len({len(line) for line in drawn}) == 1


# -- the explanation -------------------------------------------------------------------------------------------------------------------


class Counter:
    """Bytes that every rank of the embedded runtime sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        transport = embedded._EmbeddedTransport
        send, all_reduce = transport.send, transport.all_reduce

        def counted_send(this: Any, tensor: Tensor, destination: int, tag: int) -> None:
            self.bytes += tensor.nbytes
            send(this, tensor, destination, tag)

        def counted_all_reduce(this: Any, tensors: Any, group: tuple[int, ...]) -> Any:
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            return all_reduce(this, tensors, group)

        monkeypatch.setattr(transport, "send", counted_send)
        monkeypatch.setattr(transport, "all_reduce", counted_all_reduce)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param("gpt", "ZB1P", marks=pytest.mark.slow),
        pytest.param("unet", "1F1B", marks=pytest.mark.slow),
        pytest.param("encoder_decoder", "ZBV", marks=pytest.mark.slow),
        ("returns_loss", "GPipe"),
    ],
)
def test_communication_is_what_a_step_sends(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, instance, pm = partitioned(name, devices=3, schedule=schedule)
    pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
    counter = Counter(monkeypatch)
    pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
    inspected = pm.inspected()
    lowered, programs = inspected.stages, inspected.programs
    assert sum(transfer.bytes for transfer in transfers(lowered, RankClass.of_each(programs))) == counter.bytes
    total = next(line for line in pm.explain().splitlines() if line.startswith("  total"))
    assert format_bytes(counter.bytes) in total


@pytest.mark.slow
def test_kept_bytes_are_what_a_forward_keeps() -> None:
    _, instance, pm = partitioned("gpt", devices=2, schedule="1F1B")
    lowered = pm.inspected().stages
    kept = [_saved_bytes(pm, lowered, instance.args[0], stage) for stage in range(2)]
    section = pm.explain().partition("MEMORY")[2].partition("COMMUNICATION")[0].splitlines()
    for stage, line in enumerate(section[2:4]):
        assert f"  {format_bytes(kept[stage])}  " in line


def _saved_bytes(pm: PartitionedModel, lowered: SplitModel, tokens: Tensor, last: int) -> int:
    """Run the stages up to one on the first microbatch of two rows; the bytes that its forward saves."""
    values: dict[str, Any] = {"batch": 2, "tokens": tokens[:2]}
    saved: tuple[Any, ...] = ()
    for stage, training in zip(lowered.stages[: last + 1], lowered.training, strict=False):
        given = {**pm.traced.state.of_rank(lowered.stage_ranks[stage.index][0]).tensors, **values}
        *results, saved = training.forward(*(given[name] for name in stage.bound + stage.arguments))
        values.update(zip(stage.outputs, results, strict=True))
    return sum(value.nbytes for value in saved if isinstance(value, Tensor))


@pytest.mark.slow
def test_the_explanation_says_why() -> None:
    *_, pm = partitioned("gpt", devices=2, schedule="1F1B")
    text = pm.explain()
    for title in ("STAGES", "MEMORY", "COMMUNICATION", "TIED PARAMETERS", "SCHEDULE"):
        assert f"\n{title}\n" in text
    plan = pm.plan
    assert plan.prediction.bound_by.split(":")[0] in text
    inspected = pm.inspected()
    lowered, programs = inspected.stages, inspected.programs
    value = lowered.stages[0].outputs[0]
    line = next(line for line in text.partition("\nCOMMUNICATION\n")[2].splitlines() if line.startswith(f"  {value} "))
    assert "stage 0, rank 0" in line
    assert "stage 1, rank 1" in line
    assert re.search(r"blocks\.\d\S* -> blocks\.\d", line)
    assert any("token.weight  also head.weight  held by ranks 0 and 1" in line for line in text.splitlines())
    assert any(line.startswith("  rank 1 |...|1F0|1B0    |") for line in text.splitlines())
    assert len({transfer.value for transfer in transfers(lowered, RankClass.of_each(programs))}) >= 4


@pytest.mark.slow
def test_notes_are_told() -> None:
    *_, pm = partitioned("batch_norm_convolution", devices=2)
    assert "NOTES\n  1. batch normalisation in training (1, 5)" in pm.explain()


@pytest.mark.slow
def test_the_hardware_that_was_planned_for_is_named() -> None:
    """Memory "of 68.5 GiB" is 92 % of that of an H100, not of the CPU that runs the programs."""
    instance = case_named("perceptron").build()
    pm = make_partitioned(instance, devices=2, mode="data", cluster="h100:1x2")
    assert "\n  mesh       data 2, planned for 2 x h100, run on cpu\n" in pm.explain()
    assert "of 68.5 GiB on rank 0" in pm.explain()
    for text in (repr(pm), pm._repr_html_()):
        assert "planned for 2 x h100, whose memory is predicted; the column device says where the programs run" in text
    here = make_partitioned(instance, devices=2, mode="pipeline")
    assert "\n  mesh       pipeline 2, every rank on cpu\n" in here.explain()
    assert "planned for" not in repr(here)


def test_what_is_kept_is_that_of_a_rank_of_a_mesh() -> None:
    """Two pipelines with half of the rows each keep on every rank what one pipeline keeps of half of the rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 6))
    options: dict[str, Any] = {"n_microbatches": 4, "schedule": "GPipe", "constraints": Constraints(split_spec={"2": "beginning"})}
    kept = []
    for rows, mesh in ((16, {"pipeline": 2}), (32, {"pipeline": 2, "data": 2}), (32, {"pipeline": 2, "fsdp": 2})):
        pm = partition(model, mode=mesh, example_inputs=(torch.rand(rows, 6),), progress=False, **options)
        lines = pm.explain().partition("\nMEMORY\n")[2].splitlines()[1:3]
        kept.append([re.split(r" {2,}", line.strip())[2] for line in lines])
    assert kept[0] == kept[1] == kept[2]


def test_gradients_that_come_after_the_peak_are_told() -> None:
    """With many rows the peak is at the end of the forward, where there are no gradients yet."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.ReLU())]
    x = torch.rand(1000, 16)
    simulation = partition(torch.nn.Sequential(*layers), 2, "data", example_inputs=(x,), cluster="h100:1x2", progress=False).simulate()
    size = 4 * (16 * 16 + 16) * 4
    assert (simulation.memory[0].gradients, simulation.memory[0].highest["gradients"][0]) == (0, size)
    assert f"  0 B ({format_bytes(size)} after)  " in str(simulation)
    assert "in brackets the most of one that is not there then" in str(simulation)


def test_an_explanation_in_evaluation() -> None:
    case = case_named("gpt")
    instance = case.build()
    instance.model.eval()
    text = make_partitioned(instance, devices=2, mode="model").explain()
    assert "none: a forward alone, stages one after the other" in text
    assert "SCHEDULE" not in text
    assert "all ranks return it" in text


# -- the drawing -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 2), (4, 8), (8, 16)])
def test_the_drawing_fits_a_terminal(name: str, n_ranks: int, n_microbatches: int) -> None:
    schedule = make_schedule(name, n_ranks, n_microbatches)
    lines = timetable(schedule, 130)
    assert len(lines) == n_ranks + 1
    assert all(len(line) <= 135 for line in lines[:-1])
    for rank, line in enumerate(lines[:-1]):
        assert line.startswith(f"rank {rank} |")
    first, last = schedule.actions[0][0], schedule.actions[0][-1]
    assert f"|{first}" in lines[0]
    assert str(last) in lines[0] or n_microbatches == 16


def test_reports_are_kept_while_the_programs_are_the_same(tmp_path: Path) -> None:
    """A step with a loss of all rows runs other programs: reports are of these then, as those of a model that knows no other step."""
    model, x, target = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), torch.rand(8, 6), torch.rand(8, 6)
    pm = partition(model, 2, "pipeline", example_inputs=(x,), n_microbatches=4, progress=False)
    before, explained = pm.simulate(), pm.explained()
    pm.save_report(tmp_path / "report.html")
    assert pm.simulate() is before
    assert pm.explained() is explained
    assert pm.simulate("h100:1x2") is not before

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        return (output - wanted).square().sum().sqrt()

    pm.train_step(x, target=target, loss_fn=loss, loss_reduction="batch")
    fresh = partition(model, 2, "pipeline", example_inputs=(x,), n_microbatches=4, progress=False)
    fresh.train_step(x, target=target, loss_fn=loss, loss_reduction="batch")
    assert pm.explained() is not explained
    assert pm.simulate().step_time == fresh.simulate().step_time != before.step_time


def names_of_summary(text: str) -> list[str]:
    """Return the names on the left of the first lines of ``explain()``."""
    block = text.split("\n\n")[1]
    return [line.split("  ")[1].strip() for line in block.splitlines() if line[2] != " "]


def test_an_explanation_begins_with_what_decides() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    pm = partition(model, 2, "data", example_inputs=(torch.rand(8, 16),), progress=False)
    text = pm.explain()
    assert text.startswith("Sequential: data 2, batch of 8, training\n")  # one microbatch, and no schedule without stages
    assert names_of_summary(text)[:5] == ["mesh", "step", "memory", "bound by", "runner-up"]
    assert "schedule" not in names_of_summary(text)
    explained = pm.explained()
    far = replace(explained, plan=pm.plan.predicted(gap=0.4))
    assert explanation(far).split("\n\n")[1].startswith("  gap        not proved: another plan could take up to 40 % less time")
    near = replace(explained, plan=pm.plan.predicted(gap=0.08))
    assert names_of_summary(explanation(near))[0] == "mesh"


def test_equal_stages_and_their_messages_share_a_row() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(16)))
    pm = partition(model, 16, "pipeline", example_inputs=(torch.rand(16, 16),), n_microbatches=16, progress=False)
    bodies = dict(sections(pm.explained()))
    stages, communication, schedule = bodies["STAGES"], bodies["COMMUNICATION"], bodies["SCHEDULE"]
    assert isinstance(stages, Table)
    assert isinstance(communication, Table)
    assert isinstance(schedule, list)
    assert len(stages.rows) < 8
    sent = [row for row in communication.rows if row[4].startswith("stage")]
    assert [row[3] for row in sent] == [str(15 * 16)] * 2  # activations, and their gradients
    assert sent[0][4:6] == ("stage 0 and 14 more", "stage 1 and 14 more")
    assert len(schedule) == 14  # of 16 ranks, the first and the last
