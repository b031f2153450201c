"""Operations that give the same elements another shape.

Row-major order makes a reshape a question of sizes: both shapes are cut into their common factors, from the left.

    (batch, 12, 64) -> (batch, 768)            factors batch, 12, 64
    (6, 4) -> (2, 12)                          factors 2, 3, 4:   ((2 3), 4) -> (2, (3 4))
    (4, 6, 5) -> (6, 4, 5)                     factors 2, 5 and what has none in common:   ((2 _), _, 5) -> ((2 _), _, 5)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from passes.rules.bind import MisfitError, dimension, linear_sets, quotient
from passes.rules.call import Call, Shape
from passes.rules.loops import Dimension, Factor, LocalCall, Loops, Size

__all__ = ["refine", "reshape", "shaped_like", "unflatten"]


def reshape(argument: str | None) -> Callable[[Call], Loops]:
    """A rule of ``view`` and its kin.

    Args:
        argument: that holds the new shape.
    """

    def rule(call: Call) -> Loops:
        source = call.operand("self")
        factors, before, after = refine(source.shape, call.results[0])
        return Loops(factors, (before,), (after,), linear=linear_sets(_SELF, call), localize=_shape(argument))

    return rule


_SELF = ((("self", None),),)


def _shape(argument: str | None) -> Callable[[LocalCall], Mapping[str, Any]] | None:
    return None if argument is None else lambda part: {argument: list(part.results[0])}


def unflatten(call: Call) -> Loops:
    """One dimension becomes several."""
    loops = reshape(None)(call)
    rank = len(call.operand("self").shape)
    chosen = dimension(rank, call["dim"])
    count = len(call.results[0]) - rank + 1
    return dataclasses.replace(loops, localize=lambda part: {"sizes": list(part.results[0][chosen : chosen + count])})


def shaped_like(call: Call) -> Loops:
    """``view_as``: the shape is that of a second operand, whose parts therefore have the shape of the result's."""
    source = call.operand("self")
    factors, before, after = refine(source.shape, call.results[0])
    return Loops(factors, (before, after), (after,), linear=linear_sets(_SELF, call))


def refine(before: Shape, after: Shape) -> tuple[tuple[Factor, ...], tuple[Dimension, ...], tuple[Dimension, ...]]:
    """The common factors of two shapes of the same elements, and the dimensions of both in them."""
    if 0 in before or 0 in after:
        raise MisfitError("there are no elements")
    return _Refinement(before, after).run()


class _Refinement:
    """Walks over both shapes at once; what is left of the dimension at hand is ``left[side]``."""

    def __init__(self, before: Shape, after: Shape) -> None:
        self.shapes = (before, after)
        self.found: tuple[list[list[int]], list[list[int]]] = ([[] for _ in before], [[] for _ in after])
        self.at = [-1, -1]
        self.left: list[Size] = [1, 1]
        self.factors: list[Factor] = []

    def run(self) -> tuple[tuple[Factor, ...], tuple[Dimension, ...], tuple[Dimension, ...]]:
        while self.fill(0) | self.fill(1):
            one, other = self.left
            shared = _common(one, other)
            if shared != 1:
                self.share(shared)
            else:
                self.skip()
        dimensions = [tuple(tuple(dim) for dim in side) for side in self.found]
        return tuple(self.factors), dimensions[0], dimensions[1]

    def fill(self, side: int) -> bool:
        """Go on to the next dimension that is not used up; whether there is one."""
        while self.left[side] == 1 and self.at[side] + 1 < len(self.shapes[side]):
            self.at[side] += 1
            self.left[side] = self.shapes[side][self.at[side]]
        return self.left[side] != 1

    def add(self, sides: tuple[int, ...], size: Size, *, whole: bool) -> None:
        for side in sides:
            self.found[side][self.at[side]].append(len(self.factors))
        self.factors.append(Factor(f"dim{len(self.factors)}", size, "whole" if whole else None))

    def share(self, size: Size) -> None:
        self.add((0, 1), size, whole=False)
        for side in (0, 1):
            rest = quotient(self.left[side], size)
            assert rest is not None
            self.left[side] = rest

    def skip(self) -> None:
        """No common factor: nothing is cut until both shapes have covered equally many elements."""
        covered: list[Size] = [1, 1]
        while covered[0] == 1 or covered[0] != covered[1]:
            side = self.behind(covered)
            if not self.fill(side):
                side = 1 - side
                if not self.fill(side):
                    raise MisfitError("the shapes do not hold equally many elements")
            self.add((side,), self.left[side], whole=True)
            covered[side] = covered[side] * self.left[side]
            self.left[side] = 1

    def behind(self, covered: list[Size]) -> int:
        """The side that has covered less; any when that cannot be told, as both then go on to the end."""
        if isinstance(covered[0], int) and isinstance(covered[1], int):
            return int(covered[1] < covered[0])
        return int(quotient(covered[0], covered[1]) is not None)


def _common(one: Size, other: Size) -> Size:
    """The greatest common factor, for every batch."""
    if one == other:
        return one
    if isinstance(one, int) and isinstance(other, int):
        return math.gcd(one, other)
    if 1 in (one, other):
        return 1
    if quotient(one, other) is not None:
        return other
    if quotient(other, one) is not None:
        return one
    shared = sympy.gcd(one, other)
    if quotient(one, shared) is None or quotient(other, shared) is None:
        return 1
    return int(shared) if shared.is_Integer else shared
