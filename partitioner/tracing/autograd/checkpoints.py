"""Find what ``torch.utils.checkpoint`` does to buffers: PyTorch computes its region again in the backward, and writes them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F

__all__ = [
    "STATISTICS_NOTE", "enter_checkpoint", "in_checkpoint", "leave_checkpoint", "note_statistics", "record_statistics_in_checkpoints",
]  # fmt: skip

STATISTICS_NOTE = (
    "BatchNorm under torch.utils.checkpoint: PyTorch updates its running statistics twice in a training step, forward and when it computes "
    "the region again; the programs update them once. To have the model do so, leave the checkpoint out and pass recompute="
)
"""What a partitioned model does otherwise."""

_depth: ContextVar[int] = ContextVar("depth", default=0)
_found: ContextVar[set[str] | None] = ContextVar("found", default=None)


def enter_checkpoint() -> None:
    """Begin a region that PyTorch would compute again."""
    _depth.set(_depth.get() + 1)


def leave_checkpoint() -> None:
    """End the region."""
    _depth.set(_depth.get() - 1)


@contextlib.contextmanager
def in_checkpoint() -> Iterator[None]:
    """Run a region that PyTorch would compute again."""
    enter_checkpoint()
    try:
        yield
    finally:
        leave_checkpoint()


def note_statistics() -> None:
    """Note that running statistics are updated, if it is in a region that PyTorch would compute again."""
    found = _found.get()
    if found is not None and _depth.get() > 0:
        found.add(STATISTICS_NOTE)


@contextlib.contextmanager
def record_statistics_in_checkpoints() -> Iterator[set[str]]:
    """Return a set that holds a note once running statistics were updated in a region that PyTorch would compute again."""
    found: set[str] = set()
    original = F.batch_norm

    def batch_norm(
        input: Any,  # noqa: A002  of torch
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if training and running_mean is not None:
            note_statistics()
        return original(input, running_mean, running_var, weight, bias, training, momentum, eps)

    F.batch_norm = batch_norm
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)
        F.batch_norm = original
