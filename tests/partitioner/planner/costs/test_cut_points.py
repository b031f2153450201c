"""Cut points of a graph, proved by cutting it: only copies of boundary values reach the second side.

Every side has its own copy of buffers and inputs, as ranks have; replicable nodes are computed again on each. If some boundary parted
memory that is written, or let a value cross that may not, a result would differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from partitioner.planner.costs.cut_points import CutPoints, find_cut_points
from partitioner.tracing.trace import trace
from passes.analysis.replicable import replicable_nodes
from passes.graph.schemas import bound_arguments
from passes.ir.graph import Autocast, ModelGraph
from tests.support.models.zoo import case_named
from tests.support.running.slow_values import slow

MOST_CUTS = 12
"""Cuts tried on one model, evenly spread."""

MODELS = (
    *slow("batch_norm_convolution", "gpt", "unet", "padded_attention"),
    "branches",
    "in_place",
    *slow("integers_and_flags", "nested_outputs", "bert"),
)


def placeholder_values(graph: ModelGraph, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: dict[str, Any] = dict(graph.constants)
    values.update({placeholder: tensors[name] for placeholder, name in (*graph.parameters.items(), *graph.buffers.items())})
    for leaf, value in zip(graph.inputs, tree_flatten((args, dict(kwargs)))[0], strict=True):
        if leaf.placeholder is not None:
            values[leaf.placeholder] = value
    values["batch"] = graph.batch_size
    return values


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def run(nodes: Iterable[fx.Node], values: dict[str, Any]) -> None:
    """Run nodes one by one; everything they read is in ``values``, and so is what they give."""
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: values[argument.name])
        assert callable(node.target)
        values[node.name] = node.target(*args, **kwargs)


def run_cut(graph: ModelGraph, points: CutPoints, boundary: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all nodes when the graph is cut before a unit."""
    replicated = [node for node in graph.computing_nodes() if node.name in points.replicated]
    unit_of = points.unit_of
    sides: list[dict[str, Any]] = []
    for is_second in (False, True):
        side = copied(values)
        if is_second:
            crossing = [value.node for value in points.values if value.producer < boundary and value.readers[-1] >= boundary]
            side.update(copied({name: sides[0][name] for name in crossing}))
        run(replicated, side)
        run(
            (node for node in graph.computing_nodes() if (unit_of.get(node.name, -1) >= boundary) == is_second and node.name in unit_of),
            side,
        )
        sides.append(side)
    return {**sides[0], **sides[1]}


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_model_computes_the_same(name: str) -> None:
    instance = case_named(name).build()
    graph = trace(instance.model, instance.args, dict(instance.kwargs), True)
    points = find_cut_points(graph)
    values = placeholder_values(graph, instance.model, instance.args, instance.kwargs)
    whole = copied(values)
    with torch.no_grad():
        torch.manual_seed(0)
        run(graph.computing_nodes(), whole)
        n_units = len(points.units)
        for boundary in sorted({round(1 + step * (n_units - 2) / MOST_CUTS) for step in range(MOST_CUTS + 1)}):
            torch.manual_seed(0)
            cut = run_cut(graph, points, boundary, values)
            for returned in graph.returned:
                torch.testing.assert_close(cut[returned], whole[returned], rtol=1e-12, atol=1e-12)


def points_of(model: nn.Module, *inputs: Tensor) -> CutPoints:
    return find_cut_points(trace(model, inputs, training=True))


class Lists(nn.Module):
    """A list of tensors, and an integer that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.relu().chunk(2, dim=1)
        return first * second


class WritesView(nn.Module):
    """Memory that is written through a view after others have read it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y.tanh()
        y[:, 0].add_(1.0)
        return (y * z).relu()


class Counts(nn.Module):
    """A buffer that is written at one place and read at another."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        self.total.add_(y.detach().sum())
        z = y.relu().sigmoid()
        return (z + self.total).exp()


def test_a_list_does_not_cross() -> None:
    units = points_of(Lists(), torch.rand(4, 6)).units
    assert units == (("relu",), ("chunk", "getitem", "getitem_1"), ("mul",))


def test_memory_stays_together_until_its_last_write() -> None:
    x = torch.rand(4, 6)
    exported = torch.export.export(WritesView(), (x,), strict=False).graph_module  # in-place operations as they were written
    traced = trace(WritesView(), (x,), batch_size=4)
    (returned,) = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    outputs = (dataclasses.replace(traced.outputs[0], node=returned.name),)
    points = find_cut_points(dataclasses.replace(traced, module=exported, outputs=outputs))
    together = points.units[0]
    assert together[:2] == ("mul", "tanh")
    assert together[-1].startswith("add_")
    assert points.units[1:] == (("mul_1",), ("relu",))


def test_a_written_buffer_stays_with_its_readers() -> None:
    """Those of its old value; the new one is a value like others."""
    units = points_of(Counts(), torch.rand(4, 6)).units
    assert ("add", "copy") in units
    assert units[-3:] == (("sigmoid",), ("add_1",), ("exp",))


@pytest.mark.slow
def test_position_ids_and_masks_are_replicated_and_cost_no_cut() -> None:
    instance = case_named("bert").build()
    graph = trace(instance.model, instance.args, dict(instance.kwargs), True)
    replicable = replicable_nodes(graph)
    points = find_cut_points(graph)
    attention = [node for node in graph.computing_nodes() if node.target is torch.ops.aten.scaled_dot_product_attention.default]
    masks = {bound_arguments(node)["attn_mask"] for node in attention}
    assert len(attention) == cast(Any, instance.model).config.num_hidden_layers  # one a block
    assert all(mask.name in replicable for mask in masks if mask is not None)
    assert not replicable & {node.name for node in attention}
    assert not replicable & {value.node for value in points.values}
    assert any(mask is not None for mask in masks)


def test_a_float_input_is_not_replicated_but_its_mask_is() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            mask = x > 0
            scaled = x * 2
            hidden: Tensor = self.layer(scaled)
            return hidden * mask + torch.zeros_like(x)

    graph = trace(Masked(), (torch.rand(4, 6),))
    assert {"gt", "zeros_like"} <= replicable_nodes(graph)
    assert "mul" not in replicable_nodes(graph)


def test_random_and_learned_values_are_not_replicated() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(6)
            return x + noise + self.weight.exp()

    assert replicable_nodes(trace(Noisy(), (torch.rand(4, 6),))) == frozenset()


def test_a_model_that_only_replicates_still_has_a_unit() -> None:
    class OneHot(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return (ids + 1) * 2

    points = points_of(OneHot(), torch.arange(4))
    assert len(points.units) == 2
    assert not points.replicated


def test_a_cut_between_blocks_goes_through_fewer_modules_than_one_inside() -> None:
    instance = case_named("gpt").build()
    points = find_cut_points(trace(instance.model, instance.args, dict(instance.kwargs), True))
    depth = {unit[0]: points.depth[index] for index, unit in enumerate(points.units)}
    assert depth["embedding"] == depth["layer_norm"] == depth["layer_norm_2"] == depth["layer_norm_4"] == 0
    assert depth["gelu"] == depth["layer_norm_1"] == depth["layer_norm_3"] == 1


class Forgotten(nn.Module):
    """Draws numbers that it does not read: to skip layers at random, of which none is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (self.training and torch.rand([]) < 0.0):
                x = layer(x)
        torch.rand([])
        return x


def test_a_number_that_nobody_reads_is_no_unit_of_its_own() -> None:
    points = find_cut_points(trace(Forgotten().train(), (torch.zeros(2, 4),), {}))
    assert [[name.partition("_")[0] for name in unit] for unit in points.units] == [["rand", "linear"]] * 2 + [["rand", "linear", "rand"]]


def test_casts_of_parameters_stay_with_the_calls_that_read_them() -> None:
    """A stage would send the cast of a weight in every microbatch, where the next stage can hold the weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    points = find_cut_points(trace(model.train(), (torch.zeros(2, 4),), {}, autocast=Autocast("cpu", torch.bfloat16)))
    units = [[name.partition("_")[0] for name in unit] for unit in points.units]
    assert units == [["to", "to", "to", "linear"], ["relu"], ["to", "to", "linear"]]
