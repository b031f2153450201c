"""Losses: what each row gives, and its mean or sum."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from passes.analysis.batch.call import Call
from passes.analysis.batch.role import Role, Rows, Total

__all__ = ["classification", "elementwise_loss", "vector_loss"]

_NONE, _MEAN, _SUM = 0, 1, 2
"""What ``reduction`` is in the schemas."""


def elementwise_loss(call: Call) -> Role:
    """Between elements of two tensors, weighted or not."""
    rank = max(call.rank(operand) for operand in call.operands)
    return _reduced(call, call.aligned({operand: call.from_the_right(operand, rank) for operand in call.operands}))


def vector_loss(*names: str) -> Callable[[Call], Role]:
    """Between the vectors in the rows of several tensors: the first dimension is the batch."""

    def rule(call: Call) -> Role:
        operands = [call[name] for name in names]
        return _reduced(call, call.aligned({operand: [0, *[None] * (call.rank(operand) - 1)] for operand in operands}))

    return rule


def classification(call: Call) -> Role:
    """Cross entropy of ``(batch, classes, space*)`` with classes ``(batch, space*)`` or probabilities.

    A mean over class targets divides by those that are not ignored, weighted by class: it is followed where targets are known from the
    inputs alone, see ``passes.spmd.mean_to_sum``.
    """
    source, target = call["self"], call["target"]
    if call.rank(source) < 2:
        return call.aligned({})
    probabilities = target.meta["val"].is_floating_point()
    space = range(1, call.rank(source) - 1)
    dimensions: dict[fx.Node, list[int | None]] = {source: [0, None, *space], target: [0, *([None] if probabilities else []), *space]}
    role = _reduced(call, call.aligned(dimensions))
    if role != Total("mean") or probabilities:
        return role
    return Total("mean", counted=True)


def _reduced(call: Call, role: Role) -> Role:
    """After the reduction of the loss."""
    if not isinstance(role, Rows) or call["reduction"] == _NONE:
        return role
    return {_MEAN: Total("mean"), _SUM: Total("sum")}.get(call["reduction"], call.mixed)
