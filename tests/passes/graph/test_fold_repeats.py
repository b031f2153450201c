"""A folded model has the prices of the whole one, block for block, and stands for all of its nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from partitioner import Constraints, partition
from partitioner.planner.sharding.rank_shard import part_graph, unfolded, whole_part
from partitioner.planner.solvers.stage_problem import stages_of
from partitioner.tracing.trace import trace
from passes.graph.repeated_subgraphs import fold_repeats
from passes.ir.graph import ModelGraph
from tests.support.running.slow_values import slow

BLOCKS = 7


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x)))) * scale
        return result


class Stack(nn.Module):
    """Blocks that share what they scale by, between layers of their own; one of them may be wider."""

    def __init__(self, different: int | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(BLOCKS))
        if different is not None:
            self.blocks[different] = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, self.scale) if isinstance(block, Block) else block(x)
        result: Tensor = self.last(x)
        return result


def traced(different: int | None = None) -> ModelGraph:
    return trace(Stack(different), (torch.rand(4, 6),), training=True)


def test_three_copies_stay_and_one_stands_for_the_rest() -> None:
    graph = traced()
    folded = fold_repeats(graph)
    length = (len(graph.computing_nodes()) - 2) // BLOCKS
    assert folded.n_copies == BLOCKS - 2
    assert len(folded.graph.computing_nodes()) == 2 + 3 * length
    names = {node.name for node in graph.graph.nodes}
    stays = {node.name for node in folded.graph.graph.nodes}
    stood_for = {name for copies in folded.copies.values() for name in copies}
    assert stays | stood_for == names


@pytest.mark.parametrize("different", [*slow(1), 3, *slow(5)])
def test_an_unlike_block_ends_a_run(different: int) -> None:
    folded = fold_repeats(traced(different))
    assert folded.n_copies in (1, max(different, BLOCKS - 1 - different) - 2)


def test_folded_prices_are_those_of_the_whole_model() -> None:
    graph = traced()
    kinds = (Cluster.preset("v100").devices[0],)
    whole = whole_part(unfolded(graph))
    folded = whole_part(part_graph(fold_repeats(graph), graph, lambda each: each))
    assert folded.source.unfolding is not None
    assert folded.points.units == whole.points.units
    one, other = (part.prices(kinds, Roofline(), "adamw").at(2) for part in (whole, folded))
    np.testing.assert_allclose(other.halves, one.halves)
    np.testing.assert_allclose(other.flops, one.flops)
    assert sorted((value.producer, value.readers, value.size) for value in other.units.values) == sorted(
        (value.producer, value.readers, value.size) for value in one.units.values
    )
    n_units = len(whole.points.units)
    for starts in ((0,), (0, 9), (0, 5, 20, 31)):
        stage_of = stages_of(starts, n_units)
        for items in ("fixed_uses", "kept_uses"):
            found, wanted = (getattr(each.units, items).per_stage(stage_of, len(starts)) for each in (other, one))
            np.testing.assert_allclose(found, wanted)
    prices = folded.prices(kinds, Roofline(), "adamw"), whole.prices(kinds, Roofline(), "adamw")
    for name in graph.parameters:
        assert prices[0].users[name] == prices[1].users[name]
    assert prices[0].held_bytes == prices[1].held_bytes
    of_folded, of_whole = (each.times(2) for each in prices)
    assert of_folded.fractions.through == pytest.approx(of_whole.fractions.through)
    assert of_folded.fractions.forward == pytest.approx(of_whole.fractions.forward)
    assert of_folded.fractions.halves.sum() == pytest.approx(of_whole.fractions.halves.sum())
    assert of_folded.kept.least == of_whole.kept.least
    assert prices[0].fixed_bytes == prices[1].fixed_bytes
    np.testing.assert_allclose(prices[0].starting(), prices[1].starting())
    np.testing.assert_allclose(prices[0].limits(2), prices[1].limits(2))


@pytest.mark.parametrize("constraints", [None, *slow(Constraints(axes={"ffn": "tensor"}))])
def test_a_plan_of_a_folded_model_runs_as_the_model_does(constraints: Constraints | None) -> None:
    """Stages, by the names of all nodes; and axes, by the names that they have in the whole model."""
    model, x = Stack(), torch.rand(4, 6)
    schedule = "1F1B" if constraints is None else None
    pm = partition(model, devices=2, example_inputs=(x,), progress=False, schedule=schedule, constraints=constraints)
    torch.testing.assert_close(pm(x), model(x))
    if constraints is not None:
        assert ("ffn", "tensor") in pm.plan.axes
