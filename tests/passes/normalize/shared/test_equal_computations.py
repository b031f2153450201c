"""Casts and tables that a model computes several times are computed once, unless that would change a number, or memory that is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.ir.graph import Autocast

aten = torch.ops.aten

MIXED = Autocast("cpu", torch.bfloat16)


class Of(nn.Module):
    """A model of one function of itself and its input."""

    table: Tensor

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def count(function: Callable[..., Tensor], target: object, of: str = "", autocast: Autocast | None = None) -> int:
    """Count a traced model's calls of an operation on a value of a name."""
    torch.manual_seed(0)
    model, x = Of(function), torch.randn(3, 4, requires_grad=True)
    graph = trace(model, (x,), autocast=autocast).graph
    return sum(node.target is target and of in str(node.args[0]) for node in graph.nodes)


def three_readers(model: Of, x: Tensor) -> Tensor:
    hidden = torch.tanh(x)
    result: Tensor = model.first(hidden) + model.second(hidden) + hidden.bfloat16()
    return result


def test_readers_share_a_cast_that_autocast_or_the_model_writes() -> None:
    assert count(three_readers, aten.to.dtype, "tanh", MIXED) == 1


def test_a_cast_of_a_parameter_stays_with_its_reader() -> None:
    def shared_layer(model: Of, x: Tensor) -> Tensor:
        result: Tensor = model.first(torch.tanh(model.first(x)))
        return result

    assert count(shared_layer, aten.to.dtype, "first_weight", MIXED) == 2


def test_tables_are_shared_and_their_positions_are_not() -> None:
    def rotated(model: Of, x: Tensor) -> Tensor:
        tables = [torch.outer(torch.arange(3.0), model.table).cos() for _ in range(2)]
        result: Tensor = model.first(x * tables[0]) * tables[1]
        return result

    assert count(rotated, aten.cos.default) == 1

    def by_distance(model: Of, x: Tensor) -> Tensor:
        distance = torch.arange(4.0)[:, None] - torch.arange(4.0)[None]
        result: Tensor = model.first(x) @ distance
        return result

    assert count(by_distance, aten.arange.default, "4") == 2


def written_between(_: Of, x: Tensor) -> Tensor:
    hidden = torch.tanh(x)
    before = hidden.bfloat16()
    hidden.mul_(2.0)
    return before + hidden.bfloat16()


def written_copy(_: Of, x: Tensor) -> Tensor:
    hidden = torch.tanh(x)
    one = hidden.bfloat16()
    one.mul_(2.0)
    return one + hidden.bfloat16()


def drawn(_: Of, x: Tensor) -> Tensor:
    return x * torch.rand_like(x.detach()) + x * torch.rand_like(x.detach())


@pytest.mark.parametrize(
    ("function", "target"),
    [(written_between, aten.to.dtype), (written_copy, aten.to.dtype), (drawn, aten.rand_like.default)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_written_or_drawn_is_not_shared(function: Callable[..., Tensor], target: object) -> None:
    assert count(function, target) == 2
    torch.manual_seed(0)
    model, x = Of(function), torch.randn(3, 4)
    graph = trace(model, (x,))
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    given = {**{name: model.get_parameter(key) for name, key in graph.parameters.items()}, "x": x, "batch": 3}
    given |= {name: model.get_buffer(key) for name, key in graph.buffers.items()}
    torch.manual_seed(1)
    (found,) = graph.module(*(given[name] for name in placeholders))
    torch.manual_seed(1)
    assert torch.equal(found, model(x))


def test_results_that_a_caller_may_write_stay_two() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.linear(x)
            return hidden.bfloat16(), hidden.bfloat16()

    graph = trace(Two(), (torch.randn(3, 4),)).graph
    assert sum(node.target is aten.to.dtype for node in graph.nodes) == 2
