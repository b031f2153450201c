"""The rewrites that bring an exported graph into form, one by one, compared with the model."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner.tracing.trace import trace
from passes.graph.schemas import functional
from passes.ir.graph import ModelGraph
from passes.normalize.tidy import name_nodes, place_getitems
from tests.support.running.traced import assert_equal_runs, run_model, run_traced

ROWS = 4


class Function(nn.Module):
    """A function of what a linear layer gives for the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), x)


def traced(function: Callable[[Tensor, Tensor], Tensor]) -> ModelGraph:
    """Traced in float64, and compared with the model at another batch size than the traced one."""
    torch.manual_seed(0)
    model = Function(function).double()
    graph = trace(model, (torch.randn(ROWS, 6, dtype=torch.float64),))
    assert graph.batch is not None, graph.notes
    args = (torch.randn(ROWS + 1, 6, dtype=torch.float64),)
    assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))
    return graph


def operations(graph: ModelGraph) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.computing_nodes()]


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda y, x: y.add_(x, alpha=2),
    "add_broadcast": lambda y, x: y.add_(x[:, :1]),
    "addcmul": lambda y, x: y.addcmul_(x, x),
    "clamp": lambda y, x: y.clamp_(-0.3, 0.3),
    "copy": lambda y, x: y.copy_(x[:, 1].unsqueeze(1)),
    "copy_of_another_type": lambda y, x: y.copy_(x > 0),
    "div": lambda y, x: y.div_(x.exp()),
    "dropout": lambda y, x: nn.functional.dropout(y, 0.5, inplace=True),
    "elu": lambda y, x: nn.functional.elu(y, inplace=True),
    "exp": lambda y, x: y.exp_(),
    "fill": lambda y, x: y.fill_(2.0),
    "hardswish": lambda y, x: nn.functional.hardswish(y, inplace=True),
    "hardtanh": lambda y, x: nn.functional.hardtanh(y, inplace=True),
    "index_add": lambda y, x: y.index_add_(1, torch.tensor([0, 2]), x[:, :2]),
    "index_copy": lambda y, x: y.index_copy_(1, torch.tensor([0, 2]), x[:, :2]),
    "index_fill": lambda y, x: y.index_fill_(1, torch.tensor([0, 2]), 3.0),
    "index_put": lambda y, x: y.__setitem__((slice(None), torch.tensor([0, 2])), x[:, :2]),
    "leaky_relu": lambda y, x: nn.functional.leaky_relu(y, inplace=True),
    "lerp": lambda y, x: y.lerp_(x, 0.3),
    "masked_fill": lambda y, x: y.masked_fill_(x > 0, 1.5),
    "masked_scatter": lambda y, x: y.masked_scatter_(x > 0, x),
    "mul": lambda y, x: y.mul_(x).mul_(0.5),
    "neg": lambda y, x: y.neg_(),
    "pow": lambda y, x: y.pow_(2),
    "relu": lambda y, x: y.relu_(),
    "scatter": lambda y, x: y.scatter_(1, torch.zeros(1, 2, dtype=torch.int64).expand(y.shape[0], 2), x[:, :2].sign()),
    "scatter_add": lambda y, x: y.scatter_add_(1, torch.ones(1, 2, dtype=torch.int64).expand(y.shape[0], 2), x[:, :2]),
    "sigmoid": lambda y, x: y.sigmoid_(),
    "silu": lambda y, x: nn.functional.silu(y, inplace=True),
    "sub": lambda y, x: y.sub_(x),
    "tanh": lambda y, x: y.tanh_(),
    "threshold": lambda y, x: nn.functional.threshold(y, 0.1, 0.2, inplace=True),
    "zero": lambda y, x: y.zero_(),
    "element": lambda y, x: y.__setitem__((slice(None), 1), x[:, 0]),
    "rows_and_columns": lambda y, x: y[:, 1:5:2].transpose(0, 1).unsqueeze(0)[:, 1].mul_(2.0),
    "viewed": lambda y, x: y.view(-1, 3)[:, 1].add_(1.0),
    "permuted": lambda y, x: y.view(-1, 2, 3).permute(2, 0, 1)[0].mul_(3.0),
    "from_itself": lambda y, x: y[:, 1:].add_(y[:, :-1].clone()),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_become_functional(name: str) -> None:
    def function(y: Tensor, x: Tensor) -> Tensor:
        y = y * 1
        before = y.sum(1, keepdim=True)
        WRITES[name](y, x)
        return y.sin() + before

    graph = traced(function)
    assert not [each for each in operations(graph) if each.split(".")[0].endswith("_")]


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x: y.t_().sin().t(),
        lambda y, x: y.unsqueeze_(1).squeeze_(1) * 2,
        lambda y, x: y.transpose_(0, 1).sin().transpose(0, 1),
        lambda y, x: y.detach_() * x,
    ],
)
def test_in_place_views_become_views(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = traced(lambda y, x: function(y * 1, x))
    assert not [each for each in operations(graph) if each.split(".")[0].endswith("_")]


def test_a_write_through_a_detached_name_keeps_the_history() -> None:
    def function(y: Tensor, x: Tensor) -> Tensor:
        y = y * 1
        y.detach().mul_(2.0)
        return y.sin()

    assert "mul_.Tensor" not in operations(traced(function))


def test_functional_forms_take_the_same_arguments() -> None:
    """Of every in-place operation of ATen that has one."""
    for packet in (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.endswith("_") and not name.endswith("__")):
        for overload in (getattr(packet, name) for name in packet.overloads()):
            form = functional(overload)
            if form is not None and form is not torch.ops.aten.normal_functional.default:
                types = [[str(argument.type) for argument in each._schema.arguments] for each in (overload, form)]
                assert types[0] == types[1], overload


def test_what_does_nothing_goes() -> None:
    def function(y: Tensor, x: Tensor) -> Tensor:
        y = y.to(torch.float64).to("cpu").type_as(x)
        y = nn.functional.dropout(y, 0.0)[:, :]
        y = nn.functional.dropout(y, 0.5, training=False) + torch.tensor([1.0, 2.0]).double().repeat(3)
        return y.to(torch.float32).to(torch.float64)

    names = operations(traced(function))
    assert names == ["linear.default", "to.dtype", "repeat.default", "add.Tensor", "to.dtype", "to.dtype"]


def test_only_dimensions_that_are_one_by_construction_are_squeezed() -> None:
    graph = traced(lambda y, x: y.unsqueeze(1).unsqueeze(0).squeeze() + y.squeeze(0) + y.unsqueeze(2).squeeze(-1))
    node = next(node for node in graph.computing_nodes() if node.target is torch.ops.aten.squeeze.dims)
    assert node.args[1] == [0, 2]
    assert graph.module(1, torch.eye(6).double(), torch.zeros(6).double(), torch.ones(1, 6).double())[0].shape == (1, 6)


def test_vmap_is_inlined_with_an_open_batch() -> None:
    def function(y: Tensor, x: Tensor) -> Tensor:
        mask = torch.vmap(lambda row: torch.vmap(lambda column: (row + column) % 2 == 0)(torch.arange(6)))(torch.arange(6))
        return torch.vmap(lambda row, other: (row.outer(other) * mask).sum(0))(y, x)

    assert not [node for node in traced(function).computing_nodes() if "functorch" in str(getattr(node.target, "__module__", ""))]


def test_sizes_are_arithmetic_on_the_batch() -> None:
    graph = traced(lambda y, x: y.reshape(x.shape[0] * 2, 3).reshape(x.shape[0] * 2 // 2, y.numel() // y.shape[0]))
    numbers = [node for node in graph.computing_nodes() if not isinstance(node.meta["val"], Tensor)]
    assert all(node.target in (operator.mul, operator.floordiv) for node in numbers)
    sources = {source.name for node in numbers for source in node.all_input_nodes}
    assert sources <= {"batch", *(node.name for node in numbers)}


def test_items_stand_behind_their_producer() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    split = graph.call_function(torch.ops.aten.split.Tensor, (x, 1))
    other = graph.call_function(torch.ops.aten.relu.default, (x,))
    second, first = (graph.call_function(operator.getitem, (split, index)) for index in (1, 0))
    graph.output((first, second, other))
    place_getitems(graph)
    graph.lint()
    assert list(graph.nodes)[1:5] == [split, second, first, other]


def test_nodes_are_named_after_their_operation() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    node.name = "anything"
    node.meta["val"] = torch.zeros(1)
    graph.output(graph.call_function(torch.ops.aten.add_.Tensor, (node, graph.call_function(operator.mul, (3, 4)))))
    named = name_nodes(graph)
    assert [each.name for each in named.nodes] == ["x", "add", "mul", "add_1", "output"]
    assert next(each for each in named.nodes if each.name == "add").meta == node.meta
