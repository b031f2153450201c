"""One table: a call that differs from the first in one thing, and whether its trace is found, served by a known one, made, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from partitioner import ConfigError, PartitionedModel, partition

Outcome = Literal["found", "served", "made", "refused"]
"""``found``: by its signature; ``served``: by a trace that there is, and found from then on; ``made``: traced; ``refused``: an error."""

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class Model(nn.Module):
    """A model with an optional input, an option and a module of other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 1.0) -> Tensor:
        hidden = self.dropout(self.first(x)).relu()
        result: Tensor = self.last(hidden) * scale
        return result if shift is None else result + shift


def rows(count: int, **options: Any) -> Tensor:
    return torch.rand(count, 4, **options)


TABLE: Mapping[str, tuple[Outcome, Callable[[], Call]]] = {
    "other values": ("found", lambda: ((rows(8),), {})),
    "by keyword": ("served", lambda: ((), {"x": rows(8)})),
    "a default that is passed": ("served", lambda: ((rows(8),), {"scale": 1.0})),
    "other rows": ("served", lambda: ((rows(6),), {})),
    "other strides": ("served", lambda: ((rows(16)[::2],), {})),
    "a gradient is wanted": ("served", lambda: ((rows(8, requires_grad=True),), {})),
    "another argument": ("made", lambda: ((rows(8),), {"shift": torch.rand(3)})),
    "another option": ("made", lambda: ((rows(8),), {"scale": 2.0})),
    "another precision": ("refused", lambda: ((rows(8).double(),), {})),
    "another width": ("refused", lambda: ((torch.rand(8, 5),), {})),
    "no tensor": ("refused", lambda: (("text",), {})),
    "an unknown argument": ("refused", lambda: ((rows(8),), {"shfit": rows(8)})),
}
"""Difference -> outcome, and the call; the first call passes ``rows(8)``."""


def outcome(pm: PartitionedModel, call: Callable[[], object]) -> Outcome:
    """Return how a call is served, by what it adds to the tables."""
    before = sum(map(len, pm._traces._traces.values())), len(pm._traces._matches)
    try:
        call()
    except ConfigError:
        return "refused"
    after = sum(map(len, pm._traces._traces.values())), len(pm._traces._matches)
    return "made" if after[0] > before[0] else "served" if after[1] > before[1] else "found"


@pytest.fixture
def pm() -> PartitionedModel:
    made = partition(Model(), devices=2, mode="pipeline", example_inputs=(rows(8),), training=True, progress=False)
    made(rows(8))
    return made


@pytest.mark.parametrize("difference", TABLE)
def test_arguments(pm: PartitionedModel, difference: str) -> None:
    expected, call = TABLE[difference]
    args, kwargs = call()
    assert outcome(pm, lambda: pm(*args, **kwargs)) == expected
    assert outcome(pm, lambda: pm(*args, **kwargs)) == ("refused" if expected == "refused" else "found")


@pytest.mark.parametrize(
    ("name", "expected"), [("eval", "made"), ("part", "made"), ("no_grad", "served"), ("autocast", "made"), ("train_step", "found")]
)
def test_what_is_around_a_call(pm: PartitionedModel, name: str, expected: Outcome) -> None:
    contexts: Mapping[str, contextlib.AbstractContextManager[object]] = {
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    if name == "eval":
        pm.eval()
    if name == "part":
        pm.dropout.eval()

    def call() -> object:
        if name == "train_step":
            return pm.train_step(rows(8), target=torch.rand(8, 3), loss_fn=nn.functional.mse_loss)
        return pm(rows(8))

    with contexts.get(name, contextlib.nullcontext()):
        assert outcome(pm, call) == expected
        assert outcome(pm, call) == "found"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_arguments_that_hold_no_rows_are_refused_by_kind(kind: str) -> None:
    x = torch.randn(4, 16)
    pm = partition(nn.Linear(16, 4), 2, "data", example_inputs=(x,), progress=False)
    later = torch.nested.nested_tensor([x, x]) if kind == "nested" else torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    with pytest.raises(ConfigError, match=f"is {kind} .*"):
        pm(later)


def test_an_argument_that_is_passed_twice_is_not_taken_for_two() -> None:
    """Equal signatures, other memory: the second call reads its own tensors."""
    model = nn.Bilinear(4, 4, 2)
    own = partition(model, devices=2, mode="data", example_inputs=(rows(4), rows(4)), training=False, progress=False)
    x, y = rows(4), rows(4)
    for pair in ((x, x), (x, y), (y, y), (y, x)):
        torch.testing.assert_close(own(*pair), model(*pair))


class Adapted(nn.Module):
    """Adds a second input after its other layers; whether the input requires a gradient, a checkpoint asks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.adapter = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = (self.first(x) + x).relu()
        return x if y is None else checkpoint(lambda x, y: x + self.adapter(y), x, y, use_reentrant=True)


def test_a_trace_with_a_stage_that_computes_nothing_is_traced_again() -> None:
    """The first rank holds the adapter, so the second stage is empty where the adapter is called."""
    model, x, y = Adapted(), rows(4, dtype=torch.float64), rows(4, dtype=torch.float64)
    own = partition(model, devices=2, mode="pipeline", n_microbatches=1, example_inputs=(x,), progress=False)
    torch.testing.assert_close(own(x, y), model(x, y))
    expected = F.mse_loss(model(x, y), x)
    torch.testing.assert_close(own.train_step(x, y, target=x, loss_fn=F.mse_loss), expected.detach())
    expected.backward()
    torch.testing.assert_close(own.full_gradients(), {name: each.grad for name, each in model.named_parameters()})
    torch.testing.assert_close(own(x, y.requires_grad_()), model(x, y))
