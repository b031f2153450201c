"""Axes that a mesh dimension shards: the best of all choices by its own prices; more ranks gain; memory can force more cuts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster
from partitioner import Constraints, partition
from partitioner.planner.costs.links import ClockRate
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.sharding.axis_costs import axis_terms, contractions_of
from partitioner.planner.sharding.axis_problem import AxisProblem, axis_groups
from partitioner.planner.sharding.rank_shard import part_graph
from partitioner.planner.solvers.variable_elimination import ChoiceProblem
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.analysis.layout_facts import LayoutFacts
from passes.graph.repeated_subgraphs import fold_repeats
from passes.ir.graph import ModelGraph
from passes.ir.layout import Placement
from passes.normalize.randomness.functional_rng import split_randomness
from passes.spmd.propagate.enumerate_layouts import CallLayout, layout_choices
from passes.spmd.propagate.walk import assign_layouts
from tests.support.models.attention.gpt import Gpt
from tests.support.models.zoo import case_named
from tests.support.planning.fixed_options import graph_of, plan_of
from tests.support.running.slow_values import slow


def problem_of(graph: ModelGraph, pace: ClockRate | None, count: int) -> tuple[ChoiceProblem, list[tuple[int, ...]]]:
    axes = find_axes(graph.graph)
    facts = LayoutFacts(graph, axes)
    groups = [group.axes for group in axis_groups(graph, axes, count, ())]
    choices = layout_choices(graph, axes, ("tensor", count), groups, facts=facts)
    return ChoiceProblem((2,) * len(groups), tuple(axis_terms(graph, axes, choices, count, lambda _: 1, pace, facts.bytes))), groups


@pytest.mark.parametrize(
    "pace", [None, ClockRate(1e9, 1e9, 1e-9), ClockRate(1e12, 1e9, 1e-6)], ids=["asked for", "slow ranks", "fast ranks"]
)
@pytest.mark.parametrize("name", ["perceptron", *slow("gpt")])
def test_no_choice_costs_less(name: str, pace: ClockRate | None) -> None:
    instance = case_named(name).build()
    graph = trace(instance.model, instance.args, dict(instance.kwargs), training=True)
    problem, groups = problem_of(graph, pace, 2)
    every = [options for options in itertools.product((0, 1), repeat=len(groups)) if any(options)]
    free = AxisProblem(graph, find_axes(graph.graph), ("tensor", 2), clock_rate=pace)
    found = free.solve(2)
    assert found is not None
    chosen = tuple(int(group[0] in found.axes) for group in groups)
    best = min(problem.totals(options)[0] for options in every)
    if problem.totals(chosen)[0] > problem.totals((0,) * len(groups))[0]:  # nothing is worth its messages: one cut all the same
        best = min(problem.totals(options)[0] for options in every if sum(options) == 1)
    assert problem.totals(chosen)[0] == pytest.approx(best)


@pytest.mark.slow
def test_memory_forces_more_cuts() -> None:
    """On fast ranks with slow links the fewest bytes are sent when little is cut; that holds more than fits."""
    graph = trace(Gpt(depth=6), (torch.zeros(4, 6, dtype=torch.long),), {}, training=True)
    pace = ClockRate(1e15, 1e6, 1e-6)
    problem, groups = problem_of(graph, pace, 2)
    axes = find_axes(graph.graph)
    choice = AxisProblem(graph, axes, ("tensor", 2), clock_rate=pace)
    free = choice.solve(2)
    assert free is not None
    held = problem.totals(tuple(int(group[0] in free.axes) for group in groups))[1]
    tight = choice.solve(2, held * 0.9)
    assert tight is not None
    assert set(tight.axes) != set(free.axes)
    alone = [(axis,) for group in groups for axis in group]
    choices = layout_choices(graph, axes, ("tensor", 2), alone)
    terms = axis_terms(graph, axes, choices, 2, lambda _: 1, pace, LayoutFacts(graph, axes).bytes)
    assert ChoiceProblem((2,) * len(alone), tuple(terms)).totals([int(axis in tight.axes) for (axis,) in alone])[1] <= held * 0.9
    assert choice.solve(2, 1.0) is None


@pytest.mark.slow
@pytest.mark.parametrize("rows", [256, 8192])
def test_more_ranks_of_a_tensor_dimension_take_less_time(rows: int) -> None:
    """A GPT of a size that is worth it, at a small and at a large batch: heads, feed-forward layers are cut."""
    with torch.device("meta"):
        model, tokens = Gpt(width=4096, heads=32, depth=5).half(), torch.zeros(rows, 6, dtype=torch.long)
    times = []
    for count in (1, 2, 4):
        mode = "tensor" if count > 1 else "model"
        plan = partition(model, count, mode, example_inputs=(tokens,), cluster=f"a100-80gb:1x{count}", progress=False).plan
        times.append(plan.step_time)
        if count > 1:  # attention is cut by its heads, the feed-forward layers by their width or over the sequence
            axes = {name.partition("[")[0] for name, _ in plan.axes}
            assert "heads" in axes
            assert axes & {"ffn", "sequence"}
    assert all(later < 0.85 * earlier for earlier, later in itertools.pairwise(times)), times


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "OPT"])
def test_flattened_rows_count_as_rows(name: str) -> None:
    """A product with (batch * sequence, hidden) has the multiply-adds of (batch, sequence, hidden): 8 x 128 rows, not 8."""
    graph = graph_of(name)
    axes = find_axes(graph.graph)
    found = contractions_of(axes, graph.batch_size)
    nodes = {node.name: node for node in graph.graph.nodes}
    products = [each for each in found if nodes[each].target in (torch.ops.aten.addmm.default, torch.ops.aten.linear.default)]
    counted = {found[each] for each in products}
    shapes = [tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.name in graph.parameters]
    assert counted
    assert counted <= {8.0 * 128 * math.prod(shape) for shape in shapes if len(shape) == 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "OPT"])
@pytest.mark.parametrize("cluster", ["cpu:1x2", "h100:1x2"])
def test_no_axis_named_by_hand_beats_the_chosen_ones(name: str, cluster: str) -> None:
    """Rows that are flattened before a product are work, too: heads and feed-forward layers are cut, not the vocabulary alone."""
    default = plan_of(name, "tensor", cluster)
    by_hand = plan_of(name, "tensor", cluster, constraints=Constraints(axes={"heads": "tensor", "ffn": "tensor"}))
    assert default.gap is not None
    assert default.step_time * (1 - default.gap) <= by_hand.step_time * (1 + 1e-9)
    assert not [note for note in default.notes if "multiply-adds whole" in note]


def dropping_blocks() -> ModelGraph:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
    model = nn.Sequential(*(nn.Sequential(*(type(layer)(*_arguments(layer)) for layer in block)) for _ in range(8)))
    return trace(model, (torch.rand(8, 16),), {}, training=True)


def test_what_is_written_in_a_block_counts_for_all_its_copies() -> None:
    """Masks, and what is multiplied with them, stand in each of the eight blocks: as often is sent what they are cut for."""
    graph = dropping_blocks()
    of = part_graph(fold_repeats(graph), graph, split_randomness)
    whole = [node.name for node in split_randomness(graph).graph.nodes if node.op == "call_function"]
    assert len(of.graph.graph.nodes) < len(whole)
    assert sorted(copy for node in of.graph.computing_nodes() for copy in of.copies(node.name)) == sorted(whole)


@pytest.mark.slow
def test_dropout_in_repeated_blocks_is_planned() -> None:
    """Masks that are drawn apart are nodes that the model has not: stages are named all the same."""
    graph = dropping_blocks()
    plan = plans_auto(graph, Cluster.preset("v100", 1, 4), PlanRequest("auto", tuple(f"cuda:{rank}" for rank in range(4))))[0]
    assert math.prod(size for _, size in plan.mesh) == 4


def _arguments(layer: nn.Module) -> tuple[float, ...]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return (layer.p,) if isinstance(layer, nn.Dropout) else ()


@pytest.mark.parametrize("rows", [2, 4096])
def test_work_is_cut_whatever_the_batch(rows: int) -> None:
    """The sums grow with the batch, and so does the work: neither few rows nor many leave it whole on every rank."""
    width, devices = 1024, 4
    with torch.device("meta"):
        layers = (nn.Embedding(64, width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        inputs = (torch.zeros(rows, 16, dtype=torch.long),)
    pm = partition(nn.Sequential(*layers), devices, "tensor", example_inputs=inputs, cluster="h100:1x4", progress=False)
    assert not [note for note in pm.plan.notes if "multiply-adds whole" in note]


@pytest.mark.parametrize("name", ["perceptron", "group_norm_convolution", *slow("gpt", "llama", "resnet")])
@pytest.mark.parametrize("count", [3, *slow(4, 8)])
def test_choices_for_more_ranks_are_those_among_the_axes_that_are_long_enough(name: str, count: int) -> None:
    """The layouts for two ranks, without what is too short: those that are enumerated for more ranks, and the same choice."""
    instance = case_named(name).build()
    graph = trace(instance.model, instance.args, dict(instance.kwargs), training=True)
    axes, pace = find_axes(graph.graph), ClockRate(1e12, 1e9, 1e-6)
    narrowed = AxisProblem(graph, axes, ("tensor", 2), clock_rate=pace).for_more_ranks(count)
    direct = AxisProblem(graph, axes, ("tensor", count), clock_rate=pace)
    assert narrowed is not None
    assert narrowed.solve(count) == direct.solve(count)


def test_layouts_of_fewer_groups_are_those_enumerated_for_these() -> None:
    """Each choice of the groups that are left has the layouts that it has when no other groups are there."""
    graph = trace(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 6)), (torch.rand(4, 8),), {})
    axes = find_axes(graph.graph)
    groups = [group.axes for group in axis_groups(graph, axes, 2, ())]
    kept = [0, 2]
    fewer, alone = (
        layout_choices(graph, axes, ("tensor", 2), groups).only(kept),
        layout_choices(graph, axes, ("tensor", 2), [groups[number] for number in kept]),
    )
    for choice in itertools.product((0, 1), repeat=len(kept)):
        for name, outcomes in alone.calls.items():
            assert fewer.calls[name].at(range(len(kept)), choice) == outcomes.at(range(len(kept)), choice)
        for name, held in alone.held.items():
            assert fewer.held[name].at(range(len(kept)), choice) == held.at(range(len(kept)), choice)


class _OnlyMemory:
    """Prices that ask for as many shards of parameters as possible."""

    message = 0.0

    def work(self, name: str, layout: CallLayout) -> float:
        return 0.0

    def replicate(self, name: str) -> float:
        return 1.0

    def reshard(self, value: str, have: Placement, need: Placement, size: float) -> float:
        return 0.0


class _TwoBranches(nn.Module):
    """A perceptron along positions, and a linear layer of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(nn.functional.gelu(self.up(x))), self.other(y)


def test_chosen_axes_leave_some_call_to_each_name_of_the_user() -> None:
    """Calls cut along the inner width of the perceptron are none along its positions."""
    graph = trace(_TwoBranches(), (torch.zeros(4, 6, 8), torch.zeros(4, 4)), {}, training=True)
    axes = find_axes(graph.graph)
    (position,), (kept,) = axes.of("x")[1], axes.of("p_other_weight")[0]

    def cut_by_position(problem: AxisProblem) -> bool:
        found = problem.solve(2)
        assert found is not None
        layouts = assign_layouts(graph, axes, (("tensor", 2),), {"tensor": found.axes}, ())
        return any(cut is not None and cut.axis == position for (cut,) in layouts.cuts.values())

    fixed = (position, kept)
    assert not cut_by_position(AxisProblem(graph, axes, ("tensor", 2), fixed, prices=_OnlyMemory()))
    assert cut_by_position(AxisProblem(graph, axes, ("tensor", 2), fixed, prices=_OnlyMemory(), named=[[position], [kept]]))
