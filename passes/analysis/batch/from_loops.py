"""The role of a result from the loops of its call: for operations with a sharding rule where the rules of this folder find no role."""

from __future__ import annotations

from passes.analysis.axes import tensor_operands
from passes.analysis.batch.call import Call
from passes.analysis.batch.role import Role, Rows, Same
from passes.graph.schemas import draws
from passes.rules.loops import Dimension
from passes.rules.registry import loops_of

__all__ = ["by_loops"]


def by_loops(call: Call) -> Role | tuple[Role, ...]:
    """Rows stay rows where the factor of the batch is the same whole dimension in every operand that has rows, and in every result."""
    if draws(call.node) or any(call.depends_on_batch(value) for value in call.arguments.values()):
        return call.mixed
    loops = loops_of(call.node)
    if loops is None or not set(call.operands) <= set(tensor_operands(call.node)):
        return call.mixed
    rows: set[tuple[int, int]] = set()
    for operand, dimensions in zip(tensor_operands(call.node), loops.operands, strict=True):
        role = call.role(operand)
        if isinstance(role, Rows) and len(dimensions[role.dimension]) == 1:
            rows.add((dimensions[role.dimension][0], role.before))
        elif not isinstance(role, Same):
            return call.mixed
    if len(rows) != 1:
        return call.mixed
    ((factor, before),) = rows
    same = (each for node, each in zip(tensor_operands(call.node), loops.operands, strict=True) if isinstance(call.role(node), Same))
    if loops.factors[factor].reduction is not None or any((factor,) in each for each in same):
        return call.mixed
    places = [_place(dimensions, factor) for dimensions in loops.results]
    found = tuple(Rows(place, before) for place in places if place is not None)
    if len(found) != len(places):
        return call.mixed
    return found if len(found) > 1 else found[0]


def _place(dimensions: tuple[Dimension, ...], factor: int) -> int | None:
    """The dimension of a result that is the factor alone."""
    return next((place for place, each in enumerate(dimensions) if each == (factor,)), None)
