"""Plans: equal inputs give equal plans, predictions are their formulas, limits are kept, and what cannot be is refused by name."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster, Device, Link
from cost_models.ops.work import Work
from partitioner.planner.pipeline.candidate import StageTimes, simulate_step
from partitioner.planner.pipeline.candidates import microbatch_choices
from partitioner.planner.search.make_plan import PlanRequest, make_plan
from partitioner.schedules.catalog import SCHEDULES, make_schedule
from partitioner.schedules.clocks.unit_time import Durations, simulate
from partitioner.schedules.kind import MOST_FORWARDS
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError, InfeasiblePlanError, VerificationError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.ir.schedule import Action, Schedule

WIDTH = 16
LAYERS = 8
BATCH = 16
LINK = Link(latency=0.0, bandwidth=1e12)


class Stack(nn.Module):
    """Tokens of shape (batch, length) through equal layers; the last weight is the embedding's."""

    def __init__(self, layers: int = LAYERS, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embedding.weight) if self.tied else x


class Mixing(nn.Module):
    """Every row depends on every other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.second(self.first(x))
        return {"similarity": hidden @ hidden.T}


@functools.cache
def stack(layers: int = LAYERS, tied: bool = False) -> ModelGraph:
    return trace(Stack(layers, tied), (torch.zeros(BATCH, 4, dtype=torch.long),), training=True)


@functools.cache
def mixing() -> ModelGraph:
    return trace(Mixing(), (torch.rand(BATCH, WIDTH),), training=True)


class CountsFlops:
    """A second for every floating-point operation; nothing else takes time."""

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        return float(work.flops) / device.flops(dtype)

    def transfer_time(self, size: float, link: Link) -> float:
        return link.latency + size / link.bandwidth


def device(speed: float = 1.0, memory: int = 2**40) -> Device:
    return Device("test", {"float32": speed}, memory, 1.0, launch_overhead=0.0, compute_efficiency=1.0, bandwidth_efficiency=1.0)


def equal_devices(count: int, memory: int = 2**40) -> Cluster:
    return Cluster([device(memory=memory)] * count, Link(latency=0.0, bandwidth=1e30))


def request(count: int, mode: str = "pipeline", **fields: Any) -> PlanRequest:
    return PlanRequest(mode, tuple(f"cuda:{rank}" for rank in range(count)), **fields)


def layer_flops(rows: int) -> int:
    return 2 * rows * 4 * WIDTH * WIDTH


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("n_microbatches", [1, 4, 8])
def test_a_balanced_pipeline_takes_its_formula(schedule: str, n_microbatches: int) -> None:
    plan = make_plan(stack(), equal_devices(4), request(4, schedule=schedule, n_microbatches=n_microbatches), CountsFlops())
    microbatch = 3 * 2 * layer_flops(BATCH // n_microbatches)  # two layers a stage, the backward is twice the forward
    assert [stage.forward_time + stage.backward_time for stage in plan.stages] == [microbatch] * 4
    assert plan.step_time == pytest.approx((n_microbatches + 3) * microbatch)
    assert [stage.flops for stage in plan.stages] == [2 * layer_flops(BATCH // n_microbatches)] * 4


def test_memory_is_parameters_gradients_states_and_activations_in_flight() -> None:
    plan = make_plan(stack(), equal_devices(2), request(2, schedule="1F1B", n_microbatches=4, optimizer="adamw", recompute="none"))
    weights = 4 * LAYERS // 2 * WIDTH * WIDTH
    rows = BATCH // 4 * 4
    kept = LAYERS // 2 * rows * WIDTH * 4  # every layer keeps its input
    embedding, indices = 10 * WIDTH * 4, rows * 8
    value = rows * WIDTH * 4
    working = weights + value  # a microbatch's own gradients are there beside their sums; that of a layer's argument when its input is free
    working += value  # and what is on its way from the other stage
    freed = (LAYERS // 2 - 1) * value  # when all of them are there, inputs of all layers but the first are free
    loss = 4 * value  # the gradient of the result, which the loss computes with three copies of it
    assert plan.memory == (4 * (weights + embedding + indices) + 2 * kept - freed + working, 4 * weights + kept + loss)
    frugal = make_plan(stack(), equal_devices(2), request(2, schedule="1F1B", n_microbatches=4, optimizer="sgd", recompute="none"))
    assert [more - less for more, less in zip(plan.memory, frugal.memory, strict=True)] == [2 * (weights + embedding), 2 * weights]


def test_a_tied_parameter_is_held_by_every_stage_that_uses_it() -> None:
    plan = make_plan(stack(tied=True), equal_devices(2), request(2, schedule="1F1B"))
    embedding, layer = 10 * WIDTH, WIDTH * WIDTH
    assert sum(stage.parameter_count for stage in plan.stages) == LAYERS * layer + 2 * embedding
    assert all(stage.parameter_count % layer == embedding for stage in plan.stages)
    assert all(stage.parameter_bytes == 4 * stage.parameter_count for stage in plan.stages)


def test_a_faster_device_gets_more_layers() -> None:
    cluster = Cluster([device(3.0), device(1.0)], LINK)
    plan = make_plan(stack(), cluster, request(2, schedule="1F1B", n_microbatches=4), CountsFlops())
    assert [stage.flops / layer_flops(BATCH // 4) for stage in plan.stages] == [7, 1]
    seconds = 3 * layer_flops(BATCH // 4)  # of a layer at speed 1
    by_hand = {}  # seconds of a step in units of that: the first stage never waits but for the first microbatch
    for first in range(1, 8):
        thirds = (first / 3 / 3, (8 - first) / 3)  # a forward and the halves of a backward take as long
        times = [StageTimes(third, third, third, 0, 0) for third in thirds]
        by_hand[first] = simulate_step(make_schedule("1F1B", 2, 4), times).makespan
    assert min(by_hand, key=lambda first: by_hand[first]) == 7
    assert plan.step_time == pytest.approx(by_hand[7] * seconds)


def test_a_slow_link_is_crossed_where_little_is_sent() -> None:
    class Waist(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 2), nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x)
            return y

    graph = trace(Waist(), (torch.rand(BATCH, 64),), training=True)
    fast, slow = (Cluster([device(1e6)] * 2, Link(0.0, bandwidth)) for bandwidth in (1e30, 1e4))
    plans = [make_plan(graph, cluster, request(2, schedule="1F1B", n_microbatches=2), CountsFlops()) for cluster in (fast, slow)]
    assert plans[1].stages[0].send_bytes == BATCH // 2 * 2 * 4
    assert plans[1].stages[0].send_bytes < plans[0].stages[0].send_bytes
    assert "sending" not in plans[0].prediction.bound_by


def test_equal_inputs_give_equal_plans_that_survive_json() -> None:
    plans = [make_plan(stack(), Cluster.preset("v100", 1, 4), request(4)) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].hash == plans[1].hash
    assert Plan.from_json(plans[0].to_json()) == plans[0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_places_its_stages(name: str) -> None:
    plan = make_plan(stack(), equal_devices(3), request(3, schedule=name))
    assert plan.schedule == name
    assert plan.stage_ranks == SCHEDULES[name].stage_ranks(3)
    firsts = [stage.first_node for stage in plan.stages]
    nodes = [node.name for node in stack().computing_nodes()]
    assert sorted(firsts, key=nodes.index) == firsts
    assert len(set(firsts)) == len(firsts)
    assert firsts[0] == "embedding"


def test_mode_model_cuts_no_batch() -> None:
    plan = make_plan(stack(), equal_devices(4), request(4, mode="model"))
    assert (plan.schedule, plan.n_microbatches, len(plan.stages)) == ("GPipe", 1, 4)
    assert plan.stage_ranks == ((0,), (1,), (2,), (3,))


def test_mode_auto_is_the_faster_of_the_two() -> None:
    for cluster in (Cluster.preset("v100", 1, 4), Cluster([device(1e9)] * 4, Link(1.0, 1e30))):
        plans = {mode: make_plan(stack(), cluster, request(4, mode=mode)) for mode in ("auto", "model", "pipeline")}
        assert plans["auto"].step_time <= 1.1 * min(plans["model"].step_time, plans["pipeline"].step_time)


def test_starting_kernels_is_traded_against_the_bubble() -> None:
    quick, slow = (Cluster([Device("d", {"float32": 1e9}, 2**40, 1e12, launch_overhead=overhead)] * 2, LINK) for overhead in (0.0, 1e-3))
    plans = [make_plan(stack(), cluster, request(2, schedule="1F1B")) for cluster in (quick, slow)]
    assert plans[0].n_microbatches > plans[1].n_microbatches
    assert "starting kernels" in plans[1].prediction.bound_by
    assert "arithmetic" in plans[0].prediction.bound_by


def test_a_batch_that_nothing_divides_has_a_smaller_last_microbatch() -> None:
    graph = dataclasses.replace(stack(), batch_size=13)
    assert make_plan(graph, equal_devices(4), request(4, schedule="1F1B")).n_microbatches in (4, 8, 13)
    small = dataclasses.replace(stack(), batch_size=3)
    assert make_plan(small, equal_devices(4), request(4, schedule="1F1B")).n_microbatches == 3


def test_a_batch_that_is_mixed_is_not_cut() -> None:
    plan = make_plan(mixing(), equal_devices(2), request(2))
    assert plan.n_microbatches == 1
    assert any("similarity" in note for note in plan.notes)
    with pytest.raises(ConfigError, match="similarity"):
        make_plan(mixing(), equal_devices(2), request(2, n_microbatches=2))


def test_what_microbatching_does_to_batch_normalisation_is_in_the_notes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    graph = trace(model, (torch.rand(8, 4),), training=True)
    exact = make_plan(graph, equal_devices(2), request(2))
    assert exact.n_microbatches == 1
    cut = make_plan(graph, equal_devices(2), request(2, n_microbatches=2))
    for plan, said in ((exact, "not cut into microbatches"), (cut, "takes its statistics over each of 2 microbatches")):
        assert set(graph.notes) <= set(plan.notes)
        assert any("batch normalisation in training (1)" in note and said in note for note in plan.notes)


def test_an_operator_without_a_price_is_in_the_notes() -> None:
    class Transform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            spectrum: Tensor = torch.fft.fft(self.layer(x)).real
            return spectrum

    plan = make_plan(trace(Transform(), (torch.rand(4, 8),)), equal_devices(2), request(2))
    assert any("fft_fft" in note for note in plan.notes)


def test_too_little_memory_says_what_is_missing_and_what_would_do() -> None:
    layer = 4 * WIDTH * WIDTH
    asked = request(2, memory_limit=4 * 3 * layer, schedule="1F1B", n_microbatches=8)
    with pytest.raises(InfeasiblePlanError, match=r"lacks [\d.]+ KiB") as raised:
        make_plan(stack(), equal_devices(2), asked)
    words = str(raised.value).split("remedy: ")[1].split()
    enough = int(words[0])
    assert enough > 2
    wider = dataclasses.replace(asked, devices=("cuda",) * enough)
    assert max(make_plan(stack(), equal_devices(enough), wider).memory) <= 12 * layer
    with pytest.raises(InfeasiblePlanError):
        make_plan(stack(), equal_devices(enough - 1), dataclasses.replace(asked, devices=("cuda",) * (enough - 1)))
    with pytest.raises(InfeasiblePlanError, match="no number of such devices"):
        make_plan(stack(), equal_devices(2), dataclasses.replace(asked, memory_limit=layer))


@pytest.mark.parametrize(
    ("count", "fields", "message"),
    [
        (2, {"schedule": "1f1b"}, "did you mean '1F1B'"),
        (2, {"schedule": "ZBV", "stages_per_rank": 3}, "exactly 2"),
        (2, {"mode": "model", "n_microbatches": 2}, "cuts no batch"),
        (2, {"mode": "model", "schedule": "1F1B"}, "schedule='1F1B' does not fit a mode without a \"pipeline\" dimension"),
        (2, {"optimizer": "magic"}, "'magic'"),
        (2, {"memory_limit": "lots"}, "'lots'"),
        (12, {"schedule": "1F1B"}, "12 stages, the model can be cut into 9"),
        (5, {"schedule": "Interleaved1F1B"}, "10 stages, the model can be cut into 9"),
    ],
)
def test_bad_requests_are_refused_by_name(count: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(stack(), equal_devices(count), request(count, **fields))


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 devices were asked for, the cluster has 2"):
        make_plan(stack(), equal_devices(2), request(4))


class Constant(nn.Module):
    def forward(self, x: Tensor) -> int:
        return 3


def test_an_empty_batch_and_an_empty_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 rows"):
        make_plan(dataclasses.replace(stack(), batch_size=0), equal_devices(2), request(2))
    with pytest.raises(ConfigError, match="computes nothing"):
        make_plan(trace(Constant(), (torch.rand(4, 2),)), equal_devices(1), request(1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_clock_agrees_with_the_unit_time_clock(name: str) -> None:
    for n_ranks, n_microbatches in ((1, 3), (2, 4), (3, 5), (4, 8)):
        schedule = make_schedule(name, n_ranks, n_microbatches)
        reference = simulate(schedule, Durations(forward=2, backward_input=3, backward_weight=1))
        step = simulate_step(schedule, [StageTimes(2, 3, 1, 0, 0)] * schedule.n_stages)
        assert step.makespan == reference.makespan
        assert step.busy == reference.busy
        assert step.bubble_fraction == pytest.approx(reference.bubble_fraction)


def test_messages_delay_what_waits_for_them() -> None:
    schedule = make_schedule("GPipe", 2, 1)
    step = simulate_step(schedule, [StageTimes(1, 1, 1, 0.5, 0), StageTimes(1, 1, 1, 0, 0.25)])
    assert step.makespan == 1 + 0.5 + 3 + 0.25 + 2
    assert step.start == ((0, 1 + 0.5 + 3 + 0.25), (1 + 0.5, 1 + 0.5 + 1))
    assert step.busy == (3, 3)


def test_messages_of_two_microbatches_overlap_compute() -> None:
    """1F1B on two ranks: 0F1 runs while F0 is on its way, and rank 0 waits for the gradient alone."""
    step = simulate_step(make_schedule("1F1B", 2, 2), [StageTimes(2, 1, 1, 1, 0), StageTimes(1, 1, 1, 0, 2)])
    first = 2 + 1  # F0 has arrived
    second = max(2 + 2 + 1, first + 3)  # F1 has arrived, or rank 1 is free
    gradients = first + 3 + 2, second + 3 + 2
    assert step.start == ((0, 2, gradients[0], max(gradients[0] + 2, gradients[1])), (first, first + 1, second, second + 1))


def test_a_step_that_takes_no_time_has_no_bubble() -> None:
    step = simulate_step(make_schedule("1F1B", 2, 2), [StageTimes(0, 0, 0, 0, 0)] * 2)
    assert (step.makespan, step.bubble_fraction) == (0, 0)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    ranks = tuple(tuple(Action.parse(text) for text in texts.split()) for texts in ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    with pytest.raises(VerificationError, match="rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0"):
        simulate_step(Schedule("hand-made", 2, ((0,), (1,)), ranks), [StageTimes(1, 1, 1, 0, 0)] * 2)


def test_the_default_prices_are_the_roofline() -> None:
    cluster = Cluster.preset("h100", 1, 2)
    assert make_plan(stack(), cluster, request(2)) == make_plan(stack(), cluster, request(2), Roofline())


def test_no_step_that_is_planned_has_more_forwards_than_a_schedule_may_have() -> None:
    graph = dataclasses.replace(stack(), batch_size=4096)
    assert max(microbatch_choices(graph, request(4), 4)) == 4096
    assert max(microbatch_choices(graph, request(256), 256)) == MOST_FORWARDS // (2 * 256)
