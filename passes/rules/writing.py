"""How rules that depend on a call write their line of the language: numbered dimensions with marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from passes.rules.bind import MisfitError
from passes.rules.call import Operand

__all__ = ["dimension", "dimensions", "numbered", "write"]


def numbered(rank: int, marks: Mapping[int, str] | None = None, *, name: str = "dim") -> list[str]:
    """``dim0 dim1! dim2``: every dimension of a tensor, some with a mark."""
    return [f"{name}{index}{marks.get(index, '') if marks else ''}" for index in range(rank)]


def write(operands: Iterable[Sequence[str]], results: Iterable[Sequence[str]], *clauses: str) -> str:
    """The line of terms given as lists of dimensions."""
    left, right = (", ".join(" ".join(term) or "()" for term in terms) for terms in (operands, results))
    return "; ".join([f"{left} -> {right}", *clauses])


def dimension(rank: int, given: Any) -> int:
    """A dimension counted from the front."""
    if isinstance(given, bool) or not isinstance(given, int):
        raise MisfitError(f"{given!r} is no number of a dimension")
    return given % max(rank, 1)


def dimensions(operand: Operand, given: Any) -> list[int]:
    """Dimensions counted from the front, of one or a list; all of them when none is named."""
    rank = len(operand.shape)
    named = given if isinstance(given, tuple) else () if given is None else (given,)
    return [dimension(rank, each) for each in named] or list(range(rank))
