"""Autograd over a whole partitioned forward: ``pm(x)`` then ``.backward()``, as with any module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ir.errors import ConfigError

__all__ = ["refuse_backward", "tracked_call"]

Forward = Callable[[], tuple[tuple[Tensor, ...], Any]]
Backward = Callable[[Any, tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]


class _PartitionedCall(torch.autograd.Function):
    """One forward of all ranks as one node of the autograd graph. Parameter gradients are added to ``.grad`` by the backward programs."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, tracked: Sequence[bool], anchor: Tensor, *inputs: Tensor) -> Any:
        outputs, saved = forward()
        ctx.saved = saved
        ctx.run = backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output, track in zip(outputs, tracked, strict=True) if not track))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise RuntimeError("the backward of this call has run already: a partitioned forward keeps nothing for a second one")
        return None, None, None, None, *ctx.run(saved, gradients)


def tracked_call(forward: Forward, backward: Backward, tracked: Sequence[bool], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a forward so that ``.backward()`` on its results runs the backward.

    Args:
        forward: gives the results and what the backward needs.
        backward: takes that and the gradients of the results (None where there is none); gives those of ``inputs``.
        tracked: for each result, whether it has a gradient.
        inputs: tensors whose gradients are wanted besides those of the parameters.
    """
    # Autograd runs a function's backward only if one of its inputs requires grad: parameters do not appear among ours.
    anchor = torch.empty(0, requires_grad=True)
    results: tuple[Tensor, ...] = _PartitionedCall.apply(forward, backward, tuple(tracked), anchor, *inputs)  # type: ignore[no-untyped-call]
    return results


def refuse_backward(_saved: Any, _gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The backward of a pipeline whose stages are in several processes.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        ".backward() on the result cannot reach the other processes of a pipeline",
        remedy="loss = pm.train_step(*inputs, target=target, loss_fn=loss_fn) runs forward and backward on all ranks",
    )
