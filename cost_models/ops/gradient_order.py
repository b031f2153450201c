"""The order in which the backward of a call computes the gradients of its arguments, if each has a kernel of its own.

y = linear(x, w)         dw = dy' x, then dx = dy w        autograd knows mm(x, w'), and takes its arguments by their names: mat2, self
y = linear(x, w, b)      dx, then dw, then db              of addmm(b, x, w'): mat1, mat2, self
y = a * b                db, then da                       of mul: other, self

Source: torch's generated ``Functions.cpp``, which sorts the formulas of ``derivatives.yaml`` by argument.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from cost_models.ops.work import Family
from passes.graph.schemas import packet
from passes.rules.call import Call

_APART: Collection[Family] = ("pointwise", "matrix product")
"""Families of operators whose backward has a kernel for each gradient."""


def gradient_order(call: Call, family: Family, gradients: Collection[str]) -> tuple[str, ...]:
    """Return the arguments whose gradients a backward computes, in order; empty if one kernel computes all.

    Args:
        family: of the operator.
        gradients: the arguments.
    """
    if family not in _APART:
        return ()
    if packet(call.operator) is torch.ops.aten.linear:
        has_bias = call.arguments.get("bias") is not None
        return tuple(name for name in (("input", "weight", "bias") if has_bias else ("weight", "input")) if name in gradients)
    is_own = call.operator.namespace == "partitioner"
    return tuple(gradients) if is_own else tuple(sorted(gradients))
