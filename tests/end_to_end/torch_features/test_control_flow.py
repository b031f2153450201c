"""``torch.cond``, ``scan`` and ``map`` give the values and gradients of the model, or are refused by name."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as _map

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.ir.errors import TraceError

map_rows: Callable[..., Any] = _map


class Model(nn.Module):
    """Does as a test says with its two layers."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.left, self.right, self.does = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8), does

    def wide(self, x: Tensor) -> Tensor:
        return self.right(torch.tanh(self.left(x)))

    def forward(self, x: Tensor, flag: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.does(self, hidden) if flag is None else self.does(self, hidden, flag)


def chosen(model: Model, x: Tensor, flag: Tensor) -> Any:
    return torch.cond(flag, model.wide, lambda y: (y - y) / (y - y) * model.right.bias, (x,))


def nested(model: Model, x: Tensor, flag: Tensor) -> Any:
    def inner(y: Tensor) -> Any:
        with torch.no_grad():
            scale = y.abs().amax()
        return torch.cond(flag, lambda z: z * scale, lambda z: (z * 0).sqrt(), (y,))

    def other(y: Tensor) -> Any:
        with torch.no_grad():
            scale = model.wide(y)
        return y * scale

    return torch.cond(flag.logical_not().logical_not(), inner, other, (x,))


def two_results(model: Model, x: Tensor, flag: Tensor) -> Any:
    one, other = torch.cond(flag.reshape(1), lambda y: (model.wide(y), y * 2), lambda y: (y + 1, model.wide(y)), (x,))
    return one * other


def by_values(model: Model, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, model.wide, torch.cos, (x,))


def recurrent(model: Model, x: Tensor) -> Any:
    return scan(lambda state, y: (torch.tanh(state * 0.5 + model.wide(y)), state + y), torch.zeros_like(x[:, 0]), x, dim=1)[1]


def each_step(model: Model, x: Tensor) -> Any:
    return map_rows(lambda y: model.wide(y) * 2, x.transpose(0, 1)).transpose(0, 1)


FLAGS = [torch.tensor(True), torch.tensor(False)]
CASES = [(chosen, FLAGS[:1]), (nested, FLAGS), (two_results, FLAGS), (by_values, [None]), (recurrent, [None]), (each_step, [None])]
QUICK = {(by_values, "data")}
MODES: dict[str, dict[str, Any]] = {
    "model": {"devices": 2, "mode": "model"},
    "pipeline": {"devices": 2, "mode": "pipeline", "n_microbatches": 2},
    "data": {"devices": 2, "mode": "data"},
    "fsdp": {"devices": 2, "mode": "fsdp"},
    "tensor": {"devices": 2, "mode": "tensor"},
    "mesh": {"devices": 4, "mode": {"pipeline": 2, "tensor": 2}, "n_microbatches": 1},
}


@pytest.mark.parametrize(
    ("function", "flags", "mode"),
    [
        pytest.param(function, flags, mode, marks=() if (function, mode) in QUICK else pytest.mark.slow, id=f"{function.__name__}-{mode}")
        for function, flags in CASES
        for mode in MODES
        if mode != "pipeline" or function not in (by_values, nested)  # all rows of the batch decide or scale
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_equal(function: Callable[..., Any], flags: list[Tensor | None], mode: str) -> None:
    """Whichever branch is chosen, also if the other one gives no number."""
    torch.manual_seed(0)
    model, x = Model(function).double(), torch.randn(4, 3, 8, dtype=torch.float64)
    pm = None
    for flag in flags:
        inputs = (x,) if flag is None else (x, flag)
        pm = partition(copy.deepcopy(model), example_inputs=inputs, progress=False, **MODES[mode]) if pm is None else pm
        model.zero_grad()
        pm.zero_grad()
        wanted, found = model(*inputs), pm(*inputs)
        wanted.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        for name, gradient in pm.full_gradients().items():
            expected = model.get_parameter(name).grad
            expected = torch.zeros_like(model.get_parameter(name)) if expected is None else expected
            torch.testing.assert_close(torch.zeros_like(expected) if gradient is None else gradient, expected, rtol=1e-9, atol=1e-9)


def draws(_: Model, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: torch.dropout(y, 0.5, True), torch.cos, (x,))


def by_size(_: Model, x: Tensor) -> Any:
    return torch.cond(x.shape[0] > 4, torch.sin, torch.cos, (x,))


def loops(_: Model, x: Tensor) -> Any:
    return while_loop(lambda y: y.sum() > 0, lambda y: (y - 1,), (x,))[0]


def over_the_batch(model: Model, x: Tensor) -> Any:
    return map_rows(model.wide, x)


@pytest.mark.parametrize(
    ("function", "reason", "remedy"),
    [
        (draws, "a branch of torch.cond draws random numbers", "outside of torch.cond"),
        (by_size, "chooses a branch by a size", "Python's if"),
        (loops, "while_loop", "torch.where"),
        (over_the_batch, "map goes over a dimension whose size is open", "torch.vmap"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_refused_by_name(function: Callable[..., Any], reason: str, remedy: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        trace(Model(function), (torch.randn(4, 8),), training=False)
    assert remedy in str(caught.value)
    assert "test_control_flow.py" in str(caught.value)
