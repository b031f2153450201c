"""Operations that compute each element of the result from one element of each operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from passes.analysis.batch.call import Call
from passes.analysis.batch.role import Role, Same, Total
from passes.graph.schemas import packet

__all__ = ["elementwise", "keep_total"]

aten = torch.ops.aten


def elementwise(call: Call) -> Role:
    """Broadcast operands: their dimensions are aligned at the ends."""
    totals = [operand for operand in call.operands if isinstance(call.role(operand), Total)]
    if totals:
        return _of_totals(call)
    if any(call.depends_on_batch(value) for value in call.arguments.values()):
        return call.mixed
    return call.aligned({operand: call.from_the_right(operand) for operand in call.operands})


def keep_total(rule: Callable[[Call], Role]) -> Callable[[Call], Role]:
    """A rule for an operation that only moves elements, or sums them: it gives a mean of means, and a sum of sums.

    A mean over counted targets is only followed as far as it can be counted over the whole batch: see ``passes.spmd.mean_to_sum``.
    """

    def with_totals(call: Call) -> Role:
        roles = {call.role(operand) for operand in call.operands}
        total = next((role for role in roles if isinstance(role, Total)), None)
        if total is None:
            return rule(call)
        return total if roles == {total} and not total.counted else call.mixed

    return with_totals


def _of_totals(call: Call) -> Role:
    """Linear combinations of means are means, of sums are sums."""
    result = _LINEAR.get(packet(call.node.target), _mixed)(call)
    if isinstance(result, Total) and result.counted and call.node.target not in _COUNTED:
        return call.mixed
    return result


def _mixed(call: Call) -> Role:
    return call.mixed


def _converted(call: Call) -> Role:
    value = call.node.meta["val"]
    return call.role(call.operands[0]) if value.is_floating_point() or value.is_complex() else call.mixed


def _added(call: Call) -> Role:
    """Mean + mean, sum + sum, and mean + anything that is the same in every microbatch."""
    first, second = call["self"], call["other"]
    if call.depends_on_batch(call.get("alpha")) or isinstance(call.get("alpha"), fx.Node):
        return call.mixed
    roles = [call.role(part) if isinstance(part, fx.Node) else Same() for part in (first, second)]
    totals = {role.kind for role in roles if isinstance(role, Total)}
    if any(not isinstance(role, Total | Same) for role in roles) or len(totals) != 1 or call.depends_on_batch([first, second]):
        return call.mixed
    counted = any(isinstance(role, Total) and role.counted for role in roles)
    kind = totals.pop()
    if kind == "sum" and any(isinstance(role, Same) for role in roles):
        return call.mixed
    if counted and not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return call.mixed
    return Total(kind, counted)


def _scaled(call: Call) -> Role:
    """A total times, or divided by, a constant; sum / batch is a mean, mean * batch a sum."""
    if call.get("rounding_mode") is not None:
        return call.mixed
    divides = packet(call.node.target) in (aten.div, aten.true_divide)
    first, second = call["self"], call["other"]
    if not isinstance(first, fx.Node) or not isinstance(call.role(first), Total):
        first, second = second, first
        if divides:
            return call.mixed
    total = call.role(first)
    assert isinstance(total, Total)
    if isinstance(second, fx.Node):
        return total if isinstance(call.role(second), Same) and not total.counted else call.mixed
    return _times(call, total, 1 / sympy.sympify(second) if divides else sympy.sympify(second))


def _times(call: Call, total: Total, factor: Any) -> Role:
    if not call.depends_on_batch(factor):
        return total
    if total == Total("sum") and not call.depends_on_batch(factor * call.batch):
        return Total("mean")
    if total == Total("mean") and not call.depends_on_batch(factor / call.batch):
        return Total("sum")
    return call.mixed


_LINEAR: dict[Any, Callable[[Call], Role]] = {
    aten._to_copy: _converted,  # noqa: SLF001
    aten.add: _added,
    aten.alias: _converted,
    aten.clone: _converted,
    aten.contiguous: _converted,
    aten.detach: _converted,
    aten.div: _scaled,
    aten.imag: lambda call: call.role(call.operands[0]),
    aten.mul: _scaled,
    aten.neg: _converted,
    aten.real: lambda call: call.role(call.operands[0]),
    aten.sub: _added,
    aten.to: _converted,
    aten.true_divide: _scaled,
    aten.type_as: lambda call: _converted(call) if isinstance(call.role(call["other"]), Same | Total) else call.mixed,
}
"""What may be done with a total."""

_COUNTED = frozenset(
    {
        aten._to_copy.default,  # noqa: SLF001
        aten.add.Tensor,
        aten.alias.default,
        aten.clone.default,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.sub.Tensor,
        aten.to.dtype,
    }
)
"""What may be done with a mean over counted targets: what ``passes.spmd.mean_to_sum`` follows."""
