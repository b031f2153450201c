"""Mark the nodes of a trace that are computed under ``torch.utils.checkpoint``, which PyTorch computes again in the backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from passes.graph.provenance import mark_checkpoint, mark_saved
from passes.ir.torch_private import last_traced_node

_depth: ContextVar[int] = ContextVar("depth", default=0)

_SAVE = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
"""Decisions of a policy by which the value of an operation is saved."""

_before: ContextVar[fx.Node | None] = ContextVar("before", default=None)
"""The last node of the trace before the outermost checkpoint; None if nothing is traced."""


def enter_checkpoint() -> None:
    """Begin a region that PyTorch would compute again."""
    if _depth.get() == 0:
        _before.set(last_traced_node())
    _depth.set(_depth.get() + 1)


def leave_checkpoint() -> None:
    """End the region; mark its nodes if it is the outermost."""
    _depth.set(_depth.get() - 1)
    before = _before.get()
    if _depth.get() == 0 and before is not None:
        node = before.next
        while node.op != "root":
            mark_checkpoint(node, before.name)
            node = node.next


def with_marked_decisions(original: Callable[..., None], _: object) -> Callable[..., None]:
    """Return the ``__init__`` of a mode of selective checkpointing that marks the nodes that its policy saves."""

    def initialize(mode: Any, policy: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(mode, functools.partial(_decide, policy), *args, **kwargs)

    return initialize


def _decide(policy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask a policy about an operation; mark the last node of the trace, which called it, if it is saved."""
    decision, before = policy(*args, **kwargs), _before.get()
    if decision in _SAVE and before is not None:
        mark_saved(next(reversed(before.graph.nodes)))
    return decision


@contextlib.contextmanager
def in_checkpoint() -> Iterator[None]:
    """Run a region that PyTorch would compute again."""
    enter_checkpoint()
    try:
        yield
    finally:
        leave_checkpoint()
