"""Equal calls share fake tensors, and are each's own results: sizes, strides, and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from partitioner import partition
from partitioner.tracing.trace import trace
from partitioner.tracing.traced_model import trace_model
from passes.graph.aliasing import aliasing, allocations
from passes.graph.fake_tensors import FakeTensorCache
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import FakeTensorMode
from passes.normalize.specialize_batch import fix_batch
from passes.spmd.shard_stages import cut_by_plan, facts_to_cut
from tests.support.models.attention.gpt import Gpt
from tests.support.running.slow_values import all_but

TOKENS = torch.zeros(4, 6, dtype=torch.int64)


class Pieces(nn.Module):
    """Views of views, items of lists, a value that is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            query, key, value = layer(x).chunk(3, -1)
            x = x + torch.cat([query[..., :4], key.transpose(0, 1).transpose(0, 1)[..., 4:]], -1) * value.contiguous() * (value * value)
        return x


def described(graph: ModelGraph) -> list[Any]:
    """Return every node with the memory layout of its value."""
    return [
        (
            node.name,
            str(node.target),
            [
                (*map(size_of, (*leaf.shape, *leaf.stride(), leaf.storage_offset())), leaf.dtype, leaf.requires_grad)
                for leaf in pytree.tree_leaves(node.meta.get("val"))
                if isinstance(leaf, Tensor)
            ],
        )
        for node in graph.graph.nodes
    ]


def assert_alike(one: ModelGraph, other: ModelGraph) -> None:
    assert described(one) == described(other)
    assert aliasing(one.graph) == aliasing(other.graph)
    assert allocations(one.graph).allocations_of == allocations(other.graph).allocations_of


@pytest.mark.parametrize("case", [pytest.param("gpt", marks=pytest.mark.slow), "pieces"])
def test_a_fixed_graph(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = (Gpt(depth=4), TOKENS) if case == "gpt" else (Pieces(), torch.zeros(4, 6, 8))
    graph = trace(model, (example,), {})
    shared = fix_batch(graph, 6)
    values = [id(node.meta["val"]) for node in shared.computing_nodes()]
    assert len(set(values)) < len(values) / 2
    monkeypatch.setattr(FakeTensorCache, "_call_key", lambda *_: None)
    assert_alike(shared, fix_batch(graph, 6))


class Written(nn.Module):
    """Running statistics and a counter that are written; the counter is read before and after, and its view, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.get_buffer("seen")
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).relu() + seen[:, None, None]
            seen[1:3].add_(x.detach().sum())
            x = x + x.unbind(1)[0].unsqueeze(1) * seen.view(2, 2).sum()
        return x.mean((2, 3))


PARTS: dict[str, Callable[[], tuple[nn.Module, Tensor, dict[str, int]]]] = {
    "gpt": lambda: (Gpt(depth=4, width=16, heads=4), TOKENS, {"data": 2, "tensor": 2}),
    "gpt_rows": lambda: (Gpt(depth=2, width=16, heads=4), TOKENS, {"data": 2}),
    "gpt_uneven": lambda: (Gpt(depth=2, width=24, heads=3), TOKENS, {"tensor": 2}),
    "pieces": lambda: (Pieces(), torch.zeros(4, 6, 8), {"tensor": 2}),
    "pieces_rows": lambda: (Pieces(), torch.zeros(4, 6, 8), {"data": 2}),
    "written": lambda: (Written(), torch.zeros(4, 4, 6, 6), {"data": 2}),
    "written_tiles": lambda: (Written(), torch.zeros(4, 4, 7, 6), {"tile": 2}),
}


@pytest.mark.parametrize("case", all_but(["gpt_rows"], PARTS))
def test_parts_of_a_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ranks that share one cache, which has taken the results of the trace, as if every call were run."""
    model, example, mesh = PARTS[case]()
    plan = partition(model, math.prod(mesh.values()), mesh, example_inputs=(example,), progress=False).plan
    graph = trace_model(model, (example,), {}, None).graph  # with open sizes, which have got numbers: views have memory of their own
    shared = cut_by_plan(facts_to_cut(graph, plan), plan).widest.parts
    monkeypatch.setattr(FakeTensorCache, "_call_key", lambda *_: None)
    for one, other in zip(shared, cut_by_plan(facts_to_cut(graph, plan), plan).widest.parts, strict=True):
        assert_alike(one, other)


@pytest.mark.parametrize("operator", [torch.ops.aten.select.int, torch.ops.aten.relu.default])
def test_a_traced_result_that_lies_elsewhere_is_not_taken(operator: Any) -> None:
    """Another pass may have left a copy in place of a view, or a part of other memory in place of a result of its own."""
    with FakeTensorMode():
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 6)
        arguments = (x, 0, 1) if operator is torch.ops.aten.select.int else (x,)
        copied = torch.empty(6) if operator is torch.ops.aten.select.int else torch.empty(8, 6)[4:]
        traced = graph.call_function(operator, arguments)
        traced.meta["val"] = copied
        fakes = FakeTensorCache()
        fakes.add_traced(traced, operator)
        again = graph.call_function(operator, arguments)
        fakes.describe(again)
        alone = operator(*(argument.meta["val"] if argument is x else argument for argument in arguments))
    value = again.meta["val"]
    assert value is not copied
    assert (value.shape, value.stride(), value.storage_offset()) == (alone.shape, alone.stride(), alone.storage_offset())
    is_view = value.untyped_storage()._cdata == x.meta["val"].untyped_storage()._cdata
    assert is_view == (operator is torch.ops.aten.select.int)
