"""Rules of reshapes: in row-major order both shapes are factored from the left into common factors.

(batch, 12, 64) -> (batch, 768)            factors batch, 12, 64
(6, 4) -> (2, 12)                          factors 2, 3, 4:   ((2 3), 4) -> (2, (3 4))
(4, 6, 5) -> (6, 4, 5)                     factors 2, 5, and _ that are not common and cannot be cut: ((2 _), _, 5) -> ((2 _), _, 5)
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


def reshape(argument: str | None) -> Callable[[Call], Loops]:
    """Return the rule of ops that reshape; the argument holds the new shape (None: the op takes none)."""

    def rule(call: Call) -> Loops:
        factors, before, after = refine(call.operand("self").shape, call.results[0])
        return Loops(factors, (before,), (after,), linear=linear_sets(_LINEAR_IN_SELF, call), localize=_localize_shape(argument))

    return rule


_LINEAR_IN_SELF = ((("self", None),),)


def _localize_shape(argument: str | None) -> Callable[[LocalCall], Mapping[str, Any]] | None:
    """Return ``Loops.localize`` for an argument that is the shape of the result."""
    return None if argument is None else lambda part: {argument: list(part.results[0])}


def unflatten(call: Call) -> Loops:
    """Split one dimension into several."""
    loops = reshape(None)(call)
    rank = len(call.operand("self").shape)
    dim = dimension(rank, call["dim"])
    n_new_dims = len(call.results[0]) - rank + 1
    return dataclasses.replace(loops, localize=lambda part: {"sizes": list(part.results[0][dim : dim + n_new_dims])})


def shaped_like(call: Call) -> Loops:
    """Reshape to the shape of a second operand (``view_as``), which is cut like the result."""
    factors, before, after = refine(call.operand("self").shape, call.results[0])
    return Loops(factors, (before, after), (after,), linear=linear_sets(_LINEAR_IN_SELF, call))


def refine(before: Shape, after: Shape) -> tuple[tuple[Factor, ...], tuple[Dimension, ...], tuple[Dimension, ...]]:
    """Return the common factors of two shapes with equally many elements, and the factors of each dimension of both shapes."""
    if 0 in before or 0 in after:
        raise MisfitError("there are no elements")
    return _Refinement(before, after).run()


class _Refinement:
    """Walks over both shapes at once, from the left. In all pairs, 0 is the shape before and 1 the shape after."""

    def __init__(self, before: Shape, after: Shape) -> None:
        self.shapes = (before, after)
        self.dimensions: tuple[list[list[int]], list[list[int]]] = ([[] for _ in before], [[] for _ in after])  # factors of each
        self.current = [-1, -1]  # index of the current dimension
        self.left: list[Size] = [1, 1]  # the quotient of the current dimension's size that has no factors yet
        self.factors: list[Factor] = []

    def run(self) -> tuple[tuple[Factor, ...], tuple[Dimension, ...], tuple[Dimension, ...]]:
        while self.advance(0) | self.advance(1):
            common = _common_factor(*self.left)
            if common != 1:
                self.add_common(common)
            else:
                self.add_uncut()
        before, after = (tuple(tuple(dim) for dim in dimensions) for dimensions in self.dimensions)
        return tuple(self.factors), before, after

    def advance(self, side: int) -> bool:
        """Go on to the next dimension if the current one is factored; return whether anything is left."""
        while self.left[side] == 1 and self.current[side] + 1 < len(self.shapes[side]):
            self.current[side] += 1
            self.left[side] = self.shapes[side][self.current[side]]
        return self.left[side] != 1

    def add(self, sides: tuple[int, ...], size: Size, *, whole: bool) -> None:
        """Add a factor to the current dimension of one or both shapes; ``whole``: it cannot be cut."""
        for side in sides:
            self.dimensions[side][self.current[side]].append(len(self.factors))
        self.factors.append(Factor(f"dim{len(self.factors)}", size, "whole" if whole else None))

    def add_common(self, size: Size) -> None:
        self.add((0, 1), size, whole=False)
        for side in (0, 1):
            rest = quotient(self.left[side], size)
            assert rest is not None
            self.left[side] = rest

    def add_uncut(self) -> None:
        """Without a common factor, add factors that cannot be cut until both shapes have covered equally many elements."""
        covered: list[Size] = [1, 1]
        while covered[0] == 1 or covered[0] != covered[1]:
            side = self.side_behind(covered)
            if not self.advance(side):
                side = 1 - side
                if not self.advance(side):
                    raise MisfitError("the shapes do not hold equally many elements")
            self.add((side,), self.left[side], whole=True)
            covered[side] = covered[side] * self.left[side]
            self.left[side] = 1

    def side_behind(self, covered: list[Size]) -> int:
        """Return the side that has covered fewer elements; either if symbolic numbers do not compare: then both go on to the end."""
        if isinstance(covered[0], int) and isinstance(covered[1], int):
            return int(covered[1] < covered[0])
        return int(quotient(covered[0], covered[1]) is not None)


def _common_factor(first: Size, second: Size) -> Size:
    """Return the greatest common factor that two sizes have for every batch size."""
    if first == second:
        return first
    if isinstance(first, int) and isinstance(second, int):
        return math.gcd(first, second)
    if 1 in (first, second):
        return 1
    if quotient(first, second) is not None:
        return second
    if quotient(second, first) is not None:
        return first
    common = sympy.gcd(first, second)
    if quotient(first, common) is None or quotient(second, common) is None:
        return 1
    return int(common) if common.is_Integer else common
