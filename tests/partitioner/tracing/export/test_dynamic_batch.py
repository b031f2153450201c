"""The batch of a trace is open where the model allows it, and the graph names the reason where it is not."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from partitioner.tracing.export import guards
from partitioner.tracing.trace import trace
from passes.ir.torch_private import Mod
from tests.support.running.traced import Call, assert_equal_runs, run_model, run_traced


@pytest.mark.parametrize("batch_size", [1, 2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_mask_as_long_as_the_batch_is_no_batch(batch_size: int) -> None:
    """Of (sequence, sequence) with as many tokens as rows; the key mask of (batch, sequence) beside it is one."""

    def function(layer: nn.Module, x: Tensor, causal: Tensor, keep: Tensor) -> Tensor:
        scores = layer(x) @ x.transpose(1, 2) + causal
        return scores.masked_fill(~keep.unsqueeze(1), 0.0)

    length = batch_size
    model = Call(function).double()

    def inputs(rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, length, 6, dtype=torch.float64), torch.ones(length, length).double(), torch.rand(rows, length) > 0.3

    graph = trace(model, inputs(batch_size))
    assert [leaf.batch_dim for leaf in graph.inputs] == [0, None, 0] or batch_size == 1
    for rows in (1, 3, 6):
        if batch_size != 1 or rows == 1:
            args = inputs(rows)
            assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))


def test_a_batch_of_one_leaves_the_batch_open() -> None:
    graph = trace(Call(lambda layer, x: layer(x)), (torch.zeros(1, 6),))
    assert graph.batch is not None
    assert graph.batch_size == 1
    assert graph.module(4, torch.eye(6), torch.zeros(6), torch.ones(4, 6))[0].shape == (4, 6)


def eight_rows(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x) * torch.ones(8, 1, dtype=x.dtype)
    return result


def test_a_model_for_one_batch_size_is_traced_for_it() -> None:
    graph = trace(Call(eight_rows), (torch.zeros(8, 6),))
    assert graph.batch is None
    assert graph.batch_size == 8
    assert "batch" not in [node.name for node in graph.graph.nodes]
    assert [output.combine for output in graph.outputs] == ["mixed"]
    assert "fixed at 8" in graph.notes[0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda layer, x: layer(x).view(int(x.shape[0]), 6), "turns it into a constant"),
        (lambda layer, x: layer(x) if x.shape[0] % 2 == 0 else x, "% 2"),
        (lambda layer, x: layer(x) if x.shape[0] >= 4 else x, "batch >= 4"),
    ],
    ids=["constant", "even", "bound"],
)
def test_a_batch_that_cannot_be_open_is_found_by_comparing_traces(function: Callable[..., Any], reason: str) -> None:
    model = Call(function)
    graph = trace(model, (torch.zeros(4, 6),))
    assert graph.batch is None
    assert reason in graph.notes[0]
    assert [(leaf.batch_dim, leaf.shape) for leaf in graph.inputs] == [(0, (4, 6))]
    assert [(output.combine, output.batch_dim) for output in graph.outputs] == [("concatenate", 0)]
    other = trace(model, (torch.zeros(4, 6),), batch_size=2)
    assert (other.batch, other.batch_size) == (None, 2)
    args = (torch.randn(2, 6),)
    assert_equal_runs(run_traced(other, model, args, {}), run_model(model, args, {}))


@pytest.mark.parametrize(
    ("function", "limit"),
    [
        (lambda layer, x: layer(x) if x.shape[0] < 64 else x, 63),
        (lambda layer, x: layer(x) if x.shape[0] <= 1000 else x, 1000),
        (lambda layer, x: layer(x) if x.shape[0] != 7 else x, 6),
    ],
    ids=["bound", "large", "seven"],
)
def test_a_batch_is_open_up_to_the_size_at_which_the_model_branches(function: Callable[..., Any], limit: int) -> None:
    graph = trace(Call(function), (torch.zeros(4, 6),))
    assert graph.batch is not None
    assert (graph.batch_limit, graph.serves(limit), graph.serves(limit + 1)) == (limit, True, False)
    assert f"a batch of more than {limit} rows is traced anew" in graph.notes[0]
    fixed = trace(Call(function), (torch.zeros(limit + 1, 6),))
    assert (fixed.batch, fixed.batch_size) == (None, limit + 1)


def test_an_assumption_that_divides_by_zero_for_some_sizes_does_not_hold_for_them() -> None:
    batch = sympy.Symbol("batch", positive=True, integer=True)
    assert guards._largest_that_holds(sympy.Eq(Mod(24 * batch, 5 - batch), 0), batch) == 4


@pytest.mark.parametrize(
    ("forward", "exports", "batch_dims"),
    [
        (lambda x, y: (x * 2, y * 3), 1, [0, 0]),  # the two never meet
        (lambda x, y: (x * 2, y.reshape(4, 3).sum()), 4, [0, None]),
        (lambda x, y: (x * 2, y.take_along_dim(y.argmax(1, keepdim=True), 1)), 5, [0, 0]),  # an operation of torch fixes the size
        (lambda x, y: (x * int(x.shape[0]), y * int(y.shape[0])), 4, [0, 0]),
    ],
    ids=["open", "one of two", "fixed by one of two", "fixed"],
)
def test_how_often_a_model_is_exported(
    forward: Callable[..., Any], exports: int, batch_dims: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return forward(x, y)

    calls, original = [], torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    graph = trace(Model(), (torch.zeros(4, 6), torch.zeros(4, 3)))
    assert ([leaf.batch_dim for leaf in graph.inputs], len(calls)) == (batch_dims, exports)


def test_what_is_always_true_is_no_reason_to_fix_the_batch() -> None:
    def function(layer: nn.Module, x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(-1, 6).view(4, x.shape[0], 6).transpose(0, 1)

    graph = trace(Call(function), (torch.zeros(5, 4, 6),))
    assert graph.batch is not None
    assert not any("_assert" in str(node.target) for node in graph.computing_nodes())


def test_the_batch_is_the_second_dimension_where_layers_expect_it_there() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0).double()
    graph = trace(model, (torch.zeros(5, 3, 8, dtype=torch.float64),))
    assert [leaf.batch_dim for leaf in graph.inputs] == [1]
    assert [(output.combine, output.batch_dim) for output in graph.outputs] == [("concatenate", 1)]
    args = (torch.randn(5, 2, 8, dtype=torch.float64),)
    assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))


def test_sizes_are_expressions_in_the_batch() -> None:
    graph = trace(Call(lambda layer, x: layer(x).reshape(-1, 3)), (torch.zeros(4, 6),))
    node = next(node for node in graph.computing_nodes() if "reshape" in node.name)
    size = node.meta["val"].shape[0].node.expr
    assert isinstance(graph.batch, sympy.Symbol)
    assert size == 2 * graph.batch
