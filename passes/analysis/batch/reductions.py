"""Operations along dimensions: reductions, scans, sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from passes.analysis.batch.call import Call
from passes.analysis.batch.role import Role, RowNumbers, Rows, Total

__all__ = ["along", "compared", "reduce"]


def reduce(kind: Literal["mean", "sum"] | None, *, dim: str = "dim") -> Callable[[Call], Role]:
    """Dimensions leave (all of them when none is named, and in a list of none).

    Args:
        kind: what is left of the batch when it is among them; None when nothing is.
        dim: name of the argument that lists them.
    """

    def rule(call: Call) -> Role:
        source = call["self"] if "self" in call.arguments else call["input"]
        role = call.role(source)
        if isinstance(role, Total):
            return role if kind is not None and not role.counted else call.mixed
        rank = call.rank(source)
        given = call.get(dim)
        named = given if isinstance(given, list | tuple) else [] if given is None else [given]
        left = {call.dimension(source, each) for each in named} or set(range(rank))
        keep = bool(call.get("keepdim"))
        if isinstance(role, Rows) and role.dimension in left:
            return Total(kind) if kind is not None else call.mixed
        if isinstance(role, RowNumbers):
            return call.mixed
        moved = [None if index in left else index if keep else index - sum(other < index for other in left) for index in range(rank)]
        return call.aligned({source: moved})

    return rule


def compared(call: Call) -> Role:
    """Two tensors, broadcast, whose vectors along one dimension (the last one where none is named) are compared."""
    rank = max(call.rank(operand) for operand in call.operands)
    given: Any = call.get("dim")
    whole = (-1 if given is None else given) % max(rank, 1)
    keep = bool(call.get("keepdim"))

    def left(dimension: int | None) -> int | None:
        if dimension is None or dimension == whole:
            return None
        return dimension if keep or dimension < whole else dimension - 1

    return call.aligned({operand: [left(each) for each in call.from_the_right(operand, rank)] for operand in call.operands})


def along(name: str = "dim") -> Callable[[Call], Role]:
    """The result has the dimensions of the operand; each of its elements needs all of one dimension (softmax, cumsum, sort)."""

    def rule(call: Call) -> Role:
        source = call["self"]
        given: Any = call.get(name)
        if given is None:
            return call.mixed
        whole = call.dimension(source, given)
        return call.aligned({source: [None if index == whole else index for index in range(call.rank(source))]})

    return rule
