"""The losses that steps were called with: each is looked at once, and all ranks agree on what is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.loss_form import LossDependence, loss_dependence, loss_key
from partitioner.lowering import Lowering
from partitioner.runtime.runtime import Runtime
from passes.ir.microbatch import split_target

__all__ = ["Losses"]


class Losses:
    """What is known of losses.

    Args:
        runtime: reaches the other ranks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[Any, LossDependence] = {}

    def dependence(
        self,
        lowering: Lowering,
        loss_fn: Callable[..., Tensor] | None,
        target: Any,
        wanted: frozenset[str],
        sizes: Sequence[int],
        rows: int,
    ) -> LossDependence:
        """What a loss depends on. A rank that computes no loss may be without a target: the others tell it.

        Args:
            target: for the rows of this rank, or for all where results are whole.
            wanted: inputs whose gradients are wanted.
            sizes: rows of the target in each microbatch.
            rows: that this rank computes in the first microbatch.
        """
        known, error = None, None
        try:
            known = self._own(lowering, loss_fn, target, wanted, sizes, rows)
        except Exception as raised:
            if target is not None or not lowering.collectors.isdisjoint(self._runtime.local_ranks):
                raise
            error = raised
        told = self._runtime.agree("dependence of the loss", None if known is None else _text(known), in_step=True)
        if told is None:
            assert error is not None
            raise error
        return _dependence(told)

    def _own(
        self,
        lowering: Lowering,
        loss_fn: Callable[..., Tensor] | None,
        target: Any,
        wanted: frozenset[str],
        sizes: Sequence[int],
        rows: int,
    ) -> LossDependence:
        key = (loss_key(loss_fn), wanted, tuple(lowering.graph.returned))  # a batch that is not cut has other names
        if key not in self._known:
            part = split_target(target, sizes)[0]
            self._known[key] = loss_dependence(lowering.graph, lowering.requiring(wanted), loss_fn, part, rows)
        return self._known[key]


def _text(dependence: LossDependence) -> str:
    """One line for the others."""
    dtype = str(dependence.dtype).removeprefix("torch.")
    return " ".join([f"{dtype}:", *sorted(dependence.outputs), *([f"= {dependence.own}"] if dependence.own is not None else [])])


def _dependence(text: str) -> LossDependence:
    dtype, _, rest = text.partition(":")
    outputs, _, own = rest.partition("=")
    return LossDependence(frozenset(outputs.split()), getattr(torch, dtype), own.strip() or None)
