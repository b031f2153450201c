"""What the alias analysis claims, against real memory: every storage that a run shares must lie in one claimed alias set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from passes.graph.aliasing import aliasing, mutated_arguments
from passes.ir.comm.primitives import draw_alike
from passes.ir.torch_private import OpOverload

aten = torch.ops.aten


class Views(nn.Module):
    """Views of many kinds, declared and undeclared, of one value."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        a, b = y.chunk(2, dim=1)
        c = F.dropout(y, 0.5, False)
        d = torch.einsum("ij->ji", y)
        e, _ = torch.broadcast_tensors(y, y[0])
        f = y.type_as(x).to(torch.float32).contiguous()
        g = y.reshape(-1).view(2, -1)[0]
        h = y * 2
        return a, b, c, d, e, f, g, h, torch.atleast_3d(h)


class Writes(nn.Module):
    """In-place writes: through a view, into a buffer, and by batch normalisation."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        y[:, 0].add_(1.0)
        self.count.add_(1)
        return y.relu() * self.count


def exported(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return torch.export.export(model, inputs, strict=False).module(check_guards=False)


class Storages(fx.Interpreter):
    """Runs a graph and keeps every value, so that equal addresses mean shared memory."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value
        return value

    def addresses(self, name: str) -> set[int]:
        return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(self.values[name]) if isinstance(leaf, Tensor)}


@pytest.mark.parametrize(
    ("model", "shape"),
    [(Views(), (4, 6)), (Writes(), (2, 3, 4, 4)), (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8))],
    ids=["views", "writes", "transformer"],
)
def test_every_shared_storage_is_known(model: nn.Module, shape: tuple[int, ...]) -> None:
    module = exported(model, torch.randn(shape))
    memory = aliasing(module.graph)
    run = Storages(module)
    run.run(torch.randn(shape))
    names = [name for name in run.values if name != "output" and run.addresses(name)]
    for name in names:
        for other in names:
            if run.addresses(name) & run.addresses(other):
                assert memory.storages[name] & memory.storages[other], (name, other)


def test_a_fresh_value_shares_nothing() -> None:
    module = exported(Views(), torch.randn(4, 6))
    memory = aliasing(module.graph)
    assert not memory.storages["add"] & memory.storages["mul"]
    assert not memory.storages["x"] & memory.storages["add"]


def test_writers_are_found_through_views_and_hidden_statistics() -> None:
    module = exported(Writes().train(), torch.randn(2, 3, 4, 4))
    memory = aliasing(module.graph)
    nodes = {node.name: node for node in module.graph.nodes}
    written = {name for name, node in nodes.items() if memory.written(node)}
    assert {"norm_running_mean", "norm_running_var", "norm_num_batches_tracked", "count", "batch_norm", "select"} <= written
    assert not {"x", "norm_weight", "relu", "mul"} & written
    assert [node.name for node in mutated_arguments(nodes["batch_norm"])] == ["norm_running_mean", "norm_running_var"]


def test_batch_norm_in_evaluation_writes_nothing() -> None:
    module = exported(nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4))
    assert not aliasing(module.graph).writers


def test_alias_sets_are_numbered_the_same_each_time() -> None:
    graph = exported(Writes(), torch.randn(2, 3, 4, 4)).graph
    assert aliasing(graph) == aliasing(graph)


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,ij->ij", "ij,->ij", "i...,jk->i..."])
def test_an_einsum_of_two_operands_is_no_view(equation: str) -> None:
    """Joined with a parameter, memory that tiles are written in one by one would look like the parameter's."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.einsum(equation, x, y)

    inputs = torch.rand(3, 3), torch.rand(()) if ",->" in equation else torch.rand(3, 3)
    product = Product()(*inputs)
    assert product.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in inputs}
    graph = exported(Product(), *inputs).graph
    storages = aliasing(graph).storages
    found = [storages[node.name] for node in graph.nodes if node.name in {"x", "y", "einsum"}]
    assert len(found) == len(set(found)) == 3


@pytest.mark.parametrize(
    ("operator", "is_shared"), [(aten.bernoulli.p, False), (aten.rrelu_with_noise_functional.default, False), (aten.dropout.default, True)]
)
def test_numbers_that_ranks_draw_alike_lie_where_the_operator_puts_them(operator: OpOverload, *, is_shared: bool) -> None:
    """A dropout may return its argument; other draws are new memory, though ``draw_alike`` has no schema that says so."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(draw_alike, (operator, (0, 1), x, 0.5, True))
    graph.output(drawn)
    x.meta["val"], drawn.meta["val"] = torch.ones(3), torch.ones(3)
    memory = aliasing(graph)
    assert bool(memory.storages[x.name] & memory.storages[drawn.name]) == is_shared
