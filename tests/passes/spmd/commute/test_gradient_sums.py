"""Sums of gradients move through calls that every rank computes whole, to where they are fewest bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, partition
from partitioner.tracing.trace import trace
from passes.analysis.axis_names import axes_named, axis_names
from passes.analysis.layout_facts import LayoutFacts
from passes.analysis.merge_axes import find_axes_to_cut
from passes.ir.mesh import Mesh
from passes.spmd.commute.min_cut import min_cut
from passes.spmd.propagate.walk import assign_layouts
from passes.spmd.shard_graph import AxisCut, layouts_of_cut
from tests.support.running.transparency import assert_step_equals

ROWS, LENGTH, WIDTH, HEAD, KEY_HEADS, QUERIES = 4, 6, 16, 4, 2, 3


def cost(capacities: dict[tuple[int, int], float], side: set[int]) -> float:
    return sum(capacity for (start, end), capacity in capacities.items() if start in side and end not in side)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_costs_less(seed: int) -> None:
    """Beside every set of nodes of small networks; of equal ones the smallest."""
    draw = random.Random(seed)
    inner = range(2, 7)
    capacities = {
        (start, end): float(draw.randrange(6)) for start in (0, *inner) for end in (*inner, 1) if start != end and draw.random() < 0.5
    }
    every = [{0, *inside} for count in range(len(inner) + 1) for inside in itertools.combinations(inner, count)]
    best = min(every, key=lambda side: (cost(capacities, side), len(side)))
    found = min_cut(capacities, 0, 1)
    assert (cost(capacities, found), len(found)) == (cost(capacities, best), len(best))


class Grouped(nn.Module):
    """Attention of six heads over two heads of keys, with rotary positions, and nothing else with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, KEY_HEADS * QUERIES * HEAD)
        self.key, self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD), nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.project = nn.Linear(KEY_HEADS * QUERIES * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
        key = key * angles.cos() + torch.cat((-key[..., 2:], key[..., :2]), -1) * angles.sin()
        key, value = (each[:, :, None].expand(-1, -1, QUERIES, -1, -1).flatten(1, 2) for each in (key, value))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = x + self.project(attended.transpose(1, 2).flatten(2))
        return result


def grouped() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Grouped(), Grouped()).double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)


def test_gradients_of_copied_keys_are_those_of_their_projections() -> None:
    """Over four ranks, which share two heads of keys: neither are gradients of heads gathered, nor those of keys summed."""
    model, x = grouped()
    graph, mesh = trace(model, (x,), {}, training=True), Mesh((("tensor", 4),))
    axes = find_axes_to_cut(graph, mesh)
    names = axis_names(graph, axes)
    heads = tuple(axis for axis in axes_named("heads", names) if axes.sizes[axis] == KEY_HEADS * QUERIES)
    facts = LayoutFacts(graph, axes)
    before = assign_layouts(graph, axes, mesh.dimensions, {"tensor": heads}, (), facts=facts)
    after = layouts_of_cut(facts, AxisCut(mesh, {"tensor": heads}, (), ()))
    projections = {name for name, original in graph.parameters.items() if "key" in original or "value" in original}
    assert not any(before.varying[name] for name in projections)
    assert {name for name, over in after.varying.items() if over} == projections


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", {"data": 2, "tensor": 4}], ids=str)
def test_gradients_of_copied_keys_are_right(mode: str | dict[str, int]) -> None:
    model, x = grouped()
    constraints, devices = Constraints(axes={"heads": "tensor"}), 4 if mode == "tensor" else 8
    pm = partition(model, devices=devices, mode=mode, example_inputs=(x,), constraints=constraints, progress=False)
    assert_step_equals(pm, model, x, target=torch.zeros_like(x))
