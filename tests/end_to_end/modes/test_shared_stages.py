"""Stages on different numbers of ranks, to which microbatches are distributed round-robin: exactly the model, in every such schedule."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, PartitionedModel, Plan, partition
from partitioner.options.mode import mode_text, parse_mode, without_rest
from partitioner.planner.pipeline.candidate import StageTimes, simulate_step
from partitioner.schedules.catalog import make_schedule
from partitioner.schedules.clocks.order import order_of
from partitioner.schedules.clocks.unit_time import Durations, draw, simulate
from partitioner.schedules.kind import peak_in_flight
from passes.ir.errors import ConfigError, InfeasiblePlanError
from passes.ir.program import StageCall
from passes.ir.schedule import ActionKind
from tests.support.models.zoo import case_named
from tests.support.planning.small_pipelines import (
    ALIKE,
    FEATURES,
    ROWS,
    assert_accumulated_and_clipped,
    assert_alike,
    assert_training_goes_on,
    inputs,
    perceptron,
    planned_and_simulated,
    wide,
)
from tests.support.running.slow_values import slow
from tests.support.running.transparency import backward_steps, compare, first_difference, reference_steps

SCHEDULES = ("GPipe", "1F1B", "ZB1P")
Shape = tuple[int, ...]


def mode(shape: Shape, **beside: int) -> dict[str, Any]:
    return {"pipeline": shape, **beside}


# -- schedules ---------------------------------------------------------------------------------------------------------------------


def test_microbatches_are_dealt_in_turn() -> None:
    """Each rank runs ahead as far as later ranks need: two microbatches, and one on the last."""
    assert draw(make_schedule("1F1B", 3, 4, None, (2, 1)), Durations(1, 1, 1)).splitlines() == [
        "rank 0 |0F0|0F2|.......|0B0    |...............|0B2    |",
        "rank 1 |0F1|0F3|...................|0B1    |...............|0B3    |",
        "rank 2 |...|1F0|1B0    |1F1|1B1    |1F2|1B2    |1F3|1B3    |",
    ]


SHAPES = [(2, 1), (1, 2), (3, 2), (2, 3), (4, 2, 2), (1, 3, 1), (2, 1, 3), (5, 1, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_number_of_microbatches_can_run(name: str, shape: Shape) -> None:
    n_ranks = sum(shape)
    for count in (1, 2, 3, 5, 8, 13, 40):
        schedule = make_schedule(name, n_ranks, count, None, shape)
        simulate(schedule)  # raises where ranks wait for each other, or for a value that is not computed
        assert [len(ranks) for ranks in schedule.stage_ranks] == list(shape)
        for stage, ranks in enumerate(schedule.stage_ranks):
            for place, rank in enumerate(ranks):
                forwards = [action.microbatch for action in schedule.actions[rank] if action.kind is ActionKind.FORWARD]
                assert forwards == list(range(place, count, shape[stage]))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_rank_holds_one_more_than_its_part_of_what_the_next_stage_holds(shape: Shape) -> None:
    n_ranks = sum(shape)
    held = order_of("1F1B", n_ranks, 100, 1, shape).in_flight
    assert held == peak_in_flight(make_schedule("1F1B", n_ranks, 100, None, shape))
    assert held[-1] == 1
    for stage, (here, behind) in enumerate(itertools.pairwise(shape)):
        assert held[stage] == 1 + math.ceil(held[stage + 1] * behind / here)
    assert order_of("ZB1P", n_ranks, 100, 1, shape).in_flight == tuple(math.ceil(held[0] * shape[0] / count) for count in shape)
    assert order_of("GPipe", n_ranks, 100, 1, shape).in_flight == tuple(math.ceil(100 / count) for count in shape)


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 1, 1), (4, 2, 2), (1, 2), (1, 2, 1), (3, 2, 1), (1, 3, 2), (2, 3)])
def test_stages_that_take_as_long_as_they_have_ranks_leave_nobody_waiting_in_the_middle(shape: Shape) -> None:
    """Filled, the pipeline gives a microbatch each unit of time: another 24 microbatches take 24 units longer, forward and backward."""

    def seconds(count: int) -> float:
        schedule = make_schedule("1F1B", sum(shape), count, None, shape)
        return simulate_step(schedule, [StageTimes(each, each, each, 0, 0) for each in map(float, shape)]).makespan

    assert seconds(64) - seconds(40) == pytest.approx(24 * 3)


def test_schedules_with_several_stages_on_a_rank_share_none() -> None:
    for name in ("Interleaved1F1B", "ZBV", "DualPipeV"):
        with pytest.raises(ConfigError, match=r"2 \+ 1 ranks"):
            make_schedule(name, 3, 4, None, (2, 1))


# -- exactness ---------------------------------------------------------------------------------------------------------------------

TRAININGS = [
    pytest.param("perceptron", (2, 1), {}, "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("perceptron", (1, 2), {}, "ZB1P", 9, marks=pytest.mark.slow),
    pytest.param("residual", (3, 1), {}, "GPipe", 7, marks=pytest.mark.slow),
    pytest.param("group_norm_convolution", (2, 1), {}, "ZB1P", 9, marks=pytest.mark.slow),
    pytest.param("gpt", (2, 1), {}, "1F1B", 9, marks=pytest.mark.slow),  # its embedding is read by both stages
    pytest.param("gpt", (1, 2), {}, "GPipe", 8, marks=pytest.mark.slow),
    pytest.param("gpt", (2, 1), {"tensor": 2}, "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("gpt", (1, 2), {"data": 2}, "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("shared_layer", (3, 2, 1), {}, "ZB1P", 11, marks=pytest.mark.slow),
    pytest.param("unet", (1, 2, 1), {}, "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("branches", (2, 2), {}, "1F1B", 8, marks=pytest.mark.slow),
    pytest.param("nested_outputs", (2, 1), {}, "GPipe", 2, marks=pytest.mark.slow),  # a batch of fewer rows than microbatches
    ("returns_loss", (1, 2), {}, "1F1B", 7),
    pytest.param("integers_and_flags", (2, 1), {"fsdp": 2}, "1F1B", 8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "shape", "beside", "schedule", "rows"), TRAININGS)
def test_training(name: str, shape: Shape, beside: Mapping[str, int], schedule: str, rows: int) -> None:
    """Losses, gradients, and weights after three steps of AdamW."""
    devices = sum(shape) * next(iter(beside.values()), 1)
    assert first_difference(case_named(name), rows, devices=devices, mode=mode(shape, **beside), schedule=schedule) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("nested_outputs", (2, 1), marks=pytest.mark.slow),
        ("returns_loss", (1, 3)),
        pytest.param("gpt", (1, 2), marks=pytest.mark.slow),
        pytest.param("unet", (1, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_backward_as_any_module(name: str, shape: Shape) -> None:
    case = case_named(name)
    reference = reference_steps(case, batch_size=9)
    other = backward_steps(case, batch_size=9, n_microbatches=4, devices=sum(shape), mode=mode(shape))
    assert compare(reference, other, case.tolerance) is None


def on(shape: Shape, **arguments: Any) -> PartitionedModel:
    return partition(perceptron(), sum(shape), mode(shape), example_inputs=inputs(12)[:1], progress=False, **arguments)


@pytest.mark.parametrize("rows", [1, *slow(2, 5, 7, 23)])
@pytest.mark.parametrize("shape", [(2, 1), *slow((1, 2))])
def test_batches_of_any_size(shape: Shape, rows: int) -> None:
    """Fewer microbatches than ranks of a stage leave some without any; gradients of inputs are those of all rows."""
    assert_alike(perceptron(), on(shape, n_microbatches=5), rows)


def test_accumulated_and_clipped_gradients() -> None:
    assert_accumulated_and_clipped(perceptron(), on((2, 1), n_microbatches=4))


@pytest.mark.slow
def test_a_training_goes_on_under_other_plans() -> None:
    """Weights and what AdamW knows of them go from (2, 1) to one device and on to (1, 2), as if nothing had happened."""
    alone = partition(perceptron(), 1, example_inputs=inputs(12)[:1], progress=False)
    assert_training_goes_on(perceptron(), (on((2, 1)), alone, on((1, 2))))


# -- what is seen of it ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plans_and_reports_name_all_ranks_of_a_stage() -> None:
    pm = on((2, 1), n_microbatches=4, schedule="1F1B", constraints=Constraints(split_spec={"4": "beginning"}))
    assert pm.plan.mesh == (("pipeline", 3),)
    assert pm.plan.stage_ranks == ((0, 1), (2,))
    assert Plan.from_json(pm.plan.to_json()) == pm.plan
    pm.verify()
    assert pm.check(inputs(12)[0])
    told = pm.explain()
    assert "pipeline 2 + 1" in told
    assert "stage 0, ranks 0 and 1" in told
    assert "rank 1 |0F1|0F3|" in told
    assert "pipeline 2 + 1" in str(pm)
    rows = [line.split()[:3] for line in str(pm).splitlines()[3:6]]
    assert rows == [["0", "cpu", "0"], ["1", "cpu", "0"], ["2", "cpu", "1"]]
    again = partition(perceptron(), 3, example_inputs=inputs(12)[:1], plan=pm.plan, progress=False)
    assert [str(graph) for graph in again.graphs] == [str(graph) for graph in pm.graphs]
    with pytest.raises(ConfigError, match="no formula"):
        pm.cost_formula()


def test_a_report_has_no_formula_of_a_step(tmp_path: Any) -> None:
    on((1, 2)).save_report(tmp_path / "report.html")
    assert "1 + 2" in (tmp_path / "report.html").read_text()


def test_a_stage_of_twice_the_work_is_as_fast_on_twice_the_ranks() -> None:
    """Three layers on 2 + 1 ranks: two of them on two.

    Of M microbatches, the first ends its forward at 2f; from then on the last rank works without a pause, M (f + b)
    for a layer; and the gradients of the last microbatch go back through two layers, of which the first has no gradient of its input.
    """
    count = 16
    planned, simulated, forward = planned_and_simulated(mode((2, 1)), count)
    expected = 2 * forward + count * 3 * forward + (2 + 1) * forward
    assert (planned, simulated) == pytest.approx((expected, expected), rel=0.02)
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64)
    asked: dict[str, Any] = {"n_microbatches": count, "schedule": "1F1B", "optimizer": "none", "cluster": ALIKE, "progress": False}
    alone = partition(wide(), 3, "pipeline", example_inputs=(x,), **asked)
    assert alone.plan.step_time == pytest.approx(planned, rel=0.1)  # three equal stages are as good


def test_memory_counts_the_microbatches_of_each_rank() -> None:
    pm = on((2, 1), n_microbatches=6, schedule="GPipe")
    simulated = pm.simulate().peak_memory
    for rank in range(3):
        assert pm.plan.memory[rank] == pytest.approx(simulated[rank], rel=0.25)
    whole = [sum(parameter.numel() for parameter in perceptron()[: index + 1].parameters()) for index in range(5)]
    assert pm.plan.stages[0].parameter_count in whole
    with pytest.raises(InfeasiblePlanError, match="3 devices"):
        on((2, 1), memory_limit=1000)


# -- modes -------------------------------------------------------------------------------------------------------------------------


def test_modes_as_text() -> None:
    assert mode_text({"pp": (4, 2, 2), "tensor": 2}) == "pp=4+2+2,tensor=2"
    assert parse_mode("pipeline=2+1,tile=2x2") == {"pipeline": (2, 1), "tile": (2, 2)}
    assert without_rest({"pipeline": (2, 1), "data": -1}, 12) == {"pipeline": (2, 1), "data": 4}
    assert without_rest({"pipeline": (2, 1)}, 4) is None


@pytest.mark.slow
def test_stages_of_one_rank_each_are_a_pipeline_as_ever() -> None:
    plans = [on((1, 1, 1)).plan, partition(perceptron(), 3, "pipeline", example_inputs=inputs(12)[:1], progress=False).plan]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ({"pipeline": (2, 2)}, {}, "has 4 devices and 3 were given"),
        ({"pipeline": (3, 0)}, {}, "a size is a number of ranks"),
        ({"data": (2, 1)}, {}, r"only stages have different numbers of ranks"),
        ({"model": (2, 1)}, {}, r"only stages have different numbers of ranks"),
        ({"pipeline": (2, 1)}, {"schedule": "ZBV"}, "GPipe, 1F1B or ZB1P"),
        ({"pipeline": (2, 1)}, {"stages_per_device": 2}, "cannot be combined with replicated stages"),
        ({"pipeline": (2, 1)}, {"n_microbatches": 1}, "a stage has 2 replicas, and there is 1 microbatch"),
    ],
)
def test_what_does_not_fit_is_refused(given: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(perceptron(), 3, given, example_inputs=inputs(12)[:1], progress=False, **arguments)


@pytest.mark.filterwarnings("ignore:BatchNorm under microbatches:partitioner.PartitionWarning")
def test_running_statistics_belong_to_one_rank() -> None:
    """A stage with batch normalisation may not be shared, by a plan that is made or given; another stage of the model may be."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))).double()
    x = torch.randn(12, 8, dtype=torch.float64)
    arguments: dict[str, Any] = {"example_inputs": (x,), "n_microbatches": 4, "constraints": Constraints(split_spec={"2": "beginning"})}
    with pytest.raises(ConfigError, match=r"1\.running_mean and 1\.running_var would diverge between ranks 0 and 1"):
        partition(model, 3, mode((2, 1)), progress=False, **arguments)
    pm = partition(model, 3, mode((1, 2)), progress=False, **arguments)
    plan = dataclasses.replace(
        pm.plan, stages=tuple(dataclasses.replace(stage, ranks=ranks) for stage, ranks in zip(pm.plan.stages, ((0, 1), (2,)), strict=True))
    )
    with pytest.raises(ConfigError, match=r"1\.running_mean"):
        partition(model, 3, example_inputs=(x,), plan=plan, progress=False)
    partition(model.eval(), 3, mode((2, 1)), progress=False, **arguments)


def test_ranks_that_share_a_stage_may_run_on_unlike_devices() -> None:
    """Each has graphs that create tensors on its own device."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.first(x) + torch.arange(4)
            out: Tensor = self.second(hidden)
            return out

    model, x = Shifted(), torch.empty(8, 4)
    pm = partition(model, ["cpu", "meta", "cpu"], mode((2, 1)), example_inputs=(x,), n_microbatches=4, progress=False)
    devices = []
    for graph in pm.graphs[:2]:
        call = graph.get_submodule("stage0_forward")
        assert isinstance(call, StageCall)
        devices.append({str(node.kwargs["device"]) for node in call.graph.graph.nodes if "device" in node.kwargs})
    assert devices == [{"cpu"}, {"meta"}]
