"""Stages of different width, ``{"pipeline": 2, "tensor": (2, 1)}``: exactly the model, in every schedule, on every width."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Plan, draw, draw_weight, partition
from partitioner.experiments import sweep
from partitioner.options.mode import mode_text
from passes.ir.comm.primitives import all_reduce, receive, send
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh, mesh_words, owning_pipelines, pipelines, receivers
from tests.support.models.zoo import case_named
from tests.support.planning.small_pipelines import assert_accumulated_and_clipped, assert_alike, assert_training_goes_on, inputs, perceptron
from tests.support.planning.unlike_widths import Widths, mode, on, ranks_of
from tests.support.running.slow_values import all_but, slow
from tests.support.running.transparency import backward_steps, compare, first_difference, reference_steps

# -- meshes ------------------------------------------------------------------------------------------------------------------------


def test_ranks_are_counted_without_the_places_that_nobody_has() -> None:
    """Check the numbers of ranks.

    data 0     pipeline 0: ranks 0 1    pipeline 1: rank 2
    data 1     pipeline 0: ranks 3 4    pipeline 1: rank 5
    """
    mesh = Mesh((("data", 2), ("pipeline", 2), ("tensor", 2)), widths=(2, 1))
    assert mesh.size == 6
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(6)] == list(range(6))
    assert mesh.coordinate(5) == {"data": 1, "pipeline": 1, "tensor": 0}
    assert pipelines(mesh) == ((0, 2), (1, 2), (3, 5), (4, 5))
    assert [mesh.group(rank, ("tensor",)) for rank in range(3)] == [(0, 1), (0, 1), (2,)]
    assert mesh.group(2, ("data",)) == (2, 5)
    assert mesh.cutting.dimensions == (("data", 2), ("tensor", 2))
    assert mesh.cutting_at(1).dimensions == (("data", 2),)
    assert mesh_words(mesh) == "data 2 x pipeline 2 x tensor 2 + 1"


@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (4, 2), (3, 2), (2, 3, 1), (1, 4, 2)])
def test_everybody_receives_what_crosses_once(widths: Widths) -> None:
    mesh = Mesh((("pipeline", len(widths)), ("tensor", max(widths))), widths)
    ranks = [sorted({pipeline[place] for pipeline in pipelines(mesh)}) for place in range(len(widths))]
    assert [len(each) for each in ranks] == list(widths)
    for one in range(len(widths)):
        for other in range(len(widths)):
            if one != other:
                received = [each for rank in ranks[one] for each in receivers(mesh, rank, one, other)]
                assert sorted(received) == ranks[other]
    assert all(rank in pipelines(mesh)[home] for rank, home in owning_pipelines(mesh).items())


# -- exactness ---------------------------------------------------------------------------------------------------------------------

TRAININGS = [
    pytest.param("perceptron", mode((2, 1)), "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("perceptron", mode((1, 2)), "ZB1P", 9, marks=pytest.mark.slow),
    pytest.param("perceptron", mode((1, 3, 2)), "GPipe", 7, marks=pytest.mark.slow),
    pytest.param("residual", mode((4, 2)), "1F1B", 7, marks=pytest.mark.slow),
    pytest.param("residual", mode((2, 1)), "ZBV", 8, marks=pytest.mark.slow),
    pytest.param("residual", mode((1, 2)), "Interleaved1F1B", 8, marks=pytest.mark.slow),
    pytest.param("group_norm_convolution", mode((2, 1)), "ZB1P", 9, marks=pytest.mark.slow),
    pytest.param("group_norm_convolution", {"data": 2, **mode((1, 2))}, "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("branches", mode((2, 1)), "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("unet", mode((1, 2, 1)), "1F1B", 8, marks=pytest.mark.slow),
    # A size that is computed bears the name of a call.
    pytest.param("padded_attention", mode((1, 2)), "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("padded_attention", mode((2, 1)), "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("encoder_decoder", mode((2, 1)), "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("batch_norm_convolution", mode((1, 2)), "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("in_place", mode((2, 1)), "ZB1P", 8, marks=pytest.mark.slow),
    pytest.param("mixture_of_experts", mode((1, 2)), "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("nested_outputs", mode((2, 1)), "GPipe", 2, marks=pytest.mark.slow),
    pytest.param("returns_loss", mode((1, 2)), "1F1B", 7, marks=pytest.mark.slow),
    pytest.param("integers_and_flags", {"fsdp": 2, **mode((2, 1))}, "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("perceptron", {"tensor": (2, 1), "pipeline": 2}, "1F1B", 8, marks=pytest.mark.slow),
    # Microbatches round-robin, then one on both.
    pytest.param("perceptron", {"pipeline": (2, 1), "tensor": (1, 2)}, "1F1B", 8, marks=pytest.mark.slow),
    ("perceptron", {"pipeline": (1, 2), "tensor": (2, 1)}, "ZB1P", 9),  # two ranks have parts of the loss
    # The stages that read its embedding are as wide.
    pytest.param("gpt", mode((2, 1, 2)), "1F1B", 8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh", "schedule", "rows"), TRAININGS)
def test_training(name: str, mesh: Mapping[str, Any], schedule: str, rows: int) -> None:
    """Losses, gradients, and weights after three steps of AdamW."""
    assert first_difference(case_named(name), rows, devices=ranks_of(mesh), mode=mesh, schedule=schedule) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("nested_outputs", (2, 1)),
        pytest.param("returns_loss", (1, 3), marks=pytest.mark.slow),
        pytest.param("perceptron", (2, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_backward_as_any_module(name: str, widths: Widths) -> None:
    case = case_named(name)
    reference = reference_steps(case, batch_size=9)
    other = backward_steps(case, batch_size=9, n_microbatches=4, devices=sum(widths), mode=mode(widths))
    assert compare(reference, other, case.tolerance) is None


@pytest.mark.parametrize("rows", [1, *slow(5)])
@pytest.mark.parametrize("widths", [*slow((2, 1)), (1, 2)])
def test_batches_of_any_size(widths: Widths, rows: int) -> None:
    """Gradients of inputs are those of all rows, on every rank."""
    assert_alike(perceptron(), on(widths, n_microbatches=5), rows)


@pytest.mark.slow
def test_a_value_that_lies_in_parts_is_made_whole_where_it_crosses() -> None:
    """Cut between a layer that gives columns and one that reads rows: each alone would send its half."""
    split = Constraints(split_spec={"1": "beginning"})
    for widths in ((2, 1), (1, 2), (2, 4)):
        pm = on(widths, n_microbatches=3, constraints=split)
        assert_alike(perceptron(), pm, 12)


class Decoder(nn.Module):
    """Layers that all read what the first one gave, or the input itself, in parts; and numbers that nothing computes from the input."""

    def __init__(self, source: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source = source
        self.first = nn.Linear(8, 8)
        self.up, self.down = (nn.ModuleList(nn.Linear(*size) for _ in range(3)) for size in ((8, 24), (24, 8)))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map any number of rows."""
        memory = self.first(x).tanh() if self.source == "memory" else x
        total = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            row = torch.linspace(0, 1, 8, dtype=x.dtype) if self.source == "numbers" else 0.0
            total = total + down(nn.functional.gelu(up(memory + row))).tanh()
        result: Tensor = self.last(total)
        return result


@pytest.mark.parametrize("source", ["input", *slow("memory", "numbers")])
@pytest.mark.parametrize("widths", all_but([(4, 1, 2)], [(1, 2, 4), (4, 1, 2), (2, 1, 2)]))
def test_stages_that_read_the_same_value_begin_with_it(widths: Widths, source: str) -> None:
    """Each sums its own part of the gradient, whatever the others are cut into."""
    split = Constraints(split_spec={"up.1": "beginning", "up.2": "beginning"})
    asked: dict[str, Any] = {"n_microbatches": 2, "schedule": "1F1B", "constraints": split, "progress": False}
    pm = partition(Decoder(source).double(), sum(widths), mode(widths), example_inputs=inputs(12)[:1], **asked)
    assert_alike(Decoder(source).double(), pm, 12)


def test_accumulated_and_clipped_gradients() -> None:
    assert_accumulated_and_clipped(perceptron(), on((2, 1), n_microbatches=4))


@pytest.mark.slow
def test_a_training_goes_on_under_other_plans() -> None:
    """Weights and what AdamW knows of them go from (2, 1) to one device and on to (1, 2), as if nothing had happened."""
    alone = partition(perceptron(), 1, example_inputs=inputs(12)[:1], progress=False)
    assert_training_goes_on(perceptron(), (on((2, 1)), alone, on((1, 2))))


# -- what is seen of it ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plans_programs_and_reports() -> None:
    pm = on((2, 1), n_microbatches=2, schedule="1F1B", constraints=Constraints(split_spec={"4": "beginning"}))
    assert (pm.plan.mesh, pm.plan.widths) == ((("pipeline", 2), ("tensor", 2)), (2, 1))
    assert Plan.from_json(pm.plan.to_json()) == pm.plan
    pm.verify()
    assert pm.check(inputs(12)[0])
    counts = [[sum(node.target is function for node in graph.graph.nodes) for function in (send, receive)] for graph in pm.graphs]
    loss = 1  # sent by rank 2 to the other two
    assert counts == [[2, 2 + loss], [0, 2 + loss], [2 * 2 + 2 * loss, 2]]
    assert not any(node.target is all_reduce for node in pm.graph(2).graph.nodes)
    told = pm.explain()
    assert "pipeline 2 x tensor 2 + 1" in told
    rows = [line.split()[:5] for line in str(pm).splitlines()[3:6]]
    assert rows == [["0", "tensor", "0", "cpu", "0"], ["1", "tensor", "1", "cpu", "0"], ["2", "tensor", "0", "cpu", "1"]]
    again = partition(perceptron(), 3, example_inputs=inputs(12)[:1], plan=pm.plan, progress=False)
    assert [str(graph) for graph in again.graphs] == [str(graph) for graph in pm.graphs]
    with pytest.raises(ConfigError, match="no formula"):
        pm.cost_formula()


@pytest.mark.slow
def test_drawings() -> None:
    pm = on((2, 1), n_microbatches=2, schedule="1F1B", constraints=Constraints(split_spec={"4": "beginning"}))
    drawn = draw(pm).svg()
    assert all(f"rank {rank}" in drawn for rank in range(3))
    assert str(draw_weight(pm, "4.weight")).count("rank 2") == 2
    assert "rank 1" in str(draw_weight(pm, "0.weight"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mode((2, 1)), {"data": 2, **mode((1, 2))}, {"pipeline": (2, 1), "tensor": (1, 2)}], ids=str)
def test_sweeps_say_what_a_simulation_says(mesh: Mapping[str, Any], tmp_path: Path) -> None:
    cluster, count = f"v100:1x{ranks_of(mesh)}", ranks_of(mesh)

    def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return perceptron(), inputs(12)[:1]

    found = sweep(models={"model": factory}, devices=[count], modes=[mesh], clusters=[cluster], store=tmp_path / "runs.db", workers=0)
    (row,) = found.rows()
    pm = partition(perceptron(), count, mesh, example_inputs=inputs(12)[:1], cluster=cluster, progress=False)
    assert row["step_time"] == pytest.approx(pm.simulate().step_time)
    assert row["peak_memory"] == max(pm.simulate().peak_memory)


@pytest.mark.slow
def test_a_sweep_tells_widths_apart(tmp_path: Path) -> None:
    """Two layers can be cut in one place alone: stages of the same nodes, on meshes of the same dimensions, and different programs."""

    def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 256)).double(), inputs(12)[:1]

    modes = [mode((2, 1)), mode((1, 2))]
    fixed: dict[str, Any] = {"schedules": "1F1B", "microbatches": 2, "clusters": ["v100:1x3"], "workers": 0}
    rows = sweep(models={"model": factory}, devices=[3], modes=modes, store=tmp_path / "runs.db", **fixed).rows()
    found = {row["mode"]: row["peak_memory"] for row in rows}
    for each in modes:
        model, args = factory()
        asked: dict[str, Any] = {"n_microbatches": 2, "schedule": "1F1B", "cluster": "v100:1x3", "progress": False}
        pm = partition(model, 3, each, example_inputs=args, **asked)
        assert found[mode_text(each)] == max(pm.simulate().peak_memory)
    assert len(set(found.values())) == 2


def test_a_report(tmp_path: Any) -> None:
    on((1, 2)).save_report(tmp_path / "report.html")
    assert "1 + 2" in (tmp_path / "report.html").read_text()
