"""Windows: the elements of an operand's dimension that a part of a loop reads, as formulas in the part's first and last step.

    convolution, kernel k, stride s, padding p, dilation d       first  s o - p                    last  s o - p + d (k - 1)
    transposed                                                   first  ceil((o + p - d (k - 1)) / s)      last  floor((o + p) / s)
    slice from a in steps of s                                   first  a + s o                    last  a + s o
    linear interpolation by a factor f                           first  floor((o + 1/2) / f - 1/2)         last  first + 1

``through`` substitutes the formulas of a chain of ops into each other: from a part of the last result to the first operand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sympy

from passes.ir.comm.index_ranges import Runs, forward_runs

STEP = sympy.Symbol("o", integer=True)
"""A step of the loop."""

Border = Literal["fill", "clamp", "replicate", "reflect", "circular"]
"""Reads beyond the ends of a dimension: a fill value; nothing; the last element; mirrored elements; elements of the other end."""


@dataclass(frozen=True)
class Reach:
    """The elements of a dimension that a part of a loop reads.

    Attributes:
        first: the first element, in the part's first step.
        last: the last element, in the part's last step.
        size: of the dimension.
        border: the elements beyond its ends.
        fill: value of the padding.
        skip: number of surplus results before those of the part, if the op gives more on the elements read; by the part's first step.
        written: whether a part needs another op on the elements read: a decomposition (``passes.spmd.decompose``).
    """

    first: sympy.Expr
    last: sympy.Expr
    size: int
    border: Border = "fill"
    fill: float = 0.0
    skip: sympy.Expr | int = 0
    written: bool = False

    @functools.lru_cache(maxsize=2**16)  # noqa: B019  a reach is a value; the cache is of all of them
    def reads(self, start: int, stop: int) -> Runs:
        """Return the elements that the steps from ``start`` to ``stop`` (exclusive) read."""
        first, last = _at(self.first, start), _at(self.last, stop - 1)
        step = 1 if last >= first else -1
        return forward_runs(self._elements(range(first, last + step, step)))

    def skipped(self, start: int) -> int:
        """Return how many surplus results come before those of a part that begins at ``start``."""
        return _at(self.skip, start)

    def _elements(self, indices: Sequence[int]) -> list[int | None]:
        """Return the elements at indices, which may be beyond the ends; None for padding."""
        size = self.size
        if self.border == "clamp":
            return [index for index in indices if 0 <= index < size]
        if self.border == "fill":
            return [index if 0 <= index < size else None for index in indices]
        if self.border == "replicate":
            return [min(max(index, 0), size - 1) for index in indices]
        if self.border == "circular":
            return [index % size for index in indices]
        return [_mirrored(index, size) for index in indices]


@dataclass(frozen=True)
class Window:
    """A dimension of an operand over which a loop slides.

    Attributes:
        operand: index of the operand.
        dimension: of the operand.
        factor: the loop; None for one of a single step.
        reach: the elements that a part of the loop reads.
        part: in a dimension of several factors (windows of ``fold``, rows times columns), the factor that is slid over; None: all of it.
    """

    operand: int
    dimension: int
    factor: int | None
    reach: Reach
    part: int | None = None


def through(reaches: Sequence[Reach]) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the first and last element that a chain of windows reads, as formulas in the first and last step of the last window.

    >>> three = Reach(STEP - 1, STEP + 1, 64)
    >>> through([three, Reach(2 * STEP - 1, 2 * STEP + 1, 64)])
    (2*o - 2, 2*o + 2)
    """
    first, last = STEP, STEP
    for reach in reversed(reaches):
        first, last = reach.first.subs(STEP, first), reach.last.subs(STEP, last)
    return sympy.expand(first), sympy.expand(last)


def _mirrored(index: int, size: int) -> int:
    """Reflect an index at the ends of a dimension, without repeating the element at the end: -1 is 1."""
    period = 2 * (size - 1)
    index = index % period if period else 0
    return min(index, period - index)


@functools.lru_cache(maxsize=65536)
def _at(expression: sympy.Expr | int, step: int) -> int:
    """Evaluate a formula in ``STEP`` at a step."""
    return int(sympy.sympify(expression).subs(STEP, step))
