"""One call of an op as loops over factors, as its rule describes it.

    linear(x, weight, bias), shapes (8, 16, 64), (256, 64), (256,):

    factors   0: batch0 8    1: batch1 16    2: in 64 summed    3: out 256
    operands  x ((0,), (1,), (2,))    weight ((3,), (2,))    bias ((3,),), added
    results   ((0,), (1,), (3,))

Cutting a factor cuts the loop: every part runs the same operation on its parts of the operands that have the factor and on the whole
of those that do not, and gives its part of the results that have the factor. A result that does not have it is reduced over the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import sympy

from passes.rules.window import Window

Size: TypeAlias = "int | sympy.Expr"
"""A number, or an expression in the batch size."""

Dimension: TypeAlias = tuple[int, ...]
"""The factors of one dimension of a tensor, outermost first; none for a dimension of size one, or one that is not sharded."""

Reduction = Literal["sum", "mean", "max", "min", "whole"]
"""How the results of parts are combined if no result has the factor (``"mean"``: weighted by the sizes of the parts);
``"whole"``: the factor cannot be cut."""


@dataclass(frozen=True)
class Factor:
    """One loop of a call.

    Attributes:
        name: in the rule (``"in"``, ``"heads"``, ``"batch0"``); gives axes their readable names.
        size: number of steps.
        reduction: None if all results have the factor, so that each part gives its own part of them. Otherwise how the parts' results are
            combined, or ``"whole"``.
    """

    name: str
    size: Size
    reduction: Reduction | None = None


@dataclass(frozen=True)
class LocalCall:
    """The sizes of one part of a call, for ``Loops.localize``.

    Attributes:
        arguments: of the whole call, by parameter.
        operands: shape of each tensor operand of the part.
        results: shape of each result of the part.
        factors: size of each factor of the part; for a factor that a window slides over (``Window.part``), the number of elements read.
        cut: the factors that are cut.
    """

    arguments: Mapping[str, Any]
    operands: tuple[tuple[Size, ...], ...]
    results: tuple[tuple[Size, ...], ...]
    factors: tuple[Size, ...]
    cut: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Loops:
    """A call as loops.

    Attributes:
        factors: the loops; dimensions name them by index.
        operands: for each tensor among the arguments (in the order of the operator's schema, lists of tensors spread, None left out),
            its dimensions.
        results: for each tensor that it returns, its dimensions.
        added: operands that are added to the result (a bias): if a factor is cut that is summed over, only one part adds them.
        linear: sets of operands in each of which the results are linear (homogeneous of degree one, all operands of the set together).
        windows: dimensions of operands over which a factor slides; no factor that is cut runs over them.
        unread: operands of which only dtype and device are used (``new_zeros``), neither values nor sizes.
        localize: returns the arguments that depend on sizes, by parameter, as a part passes them; None if there are none.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[Dimension, ...], ...]
    results: tuple[tuple[Dimension, ...], ...]
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    unread: frozenset[int] = frozenset()
    windows: tuple[Window, ...] = ()
    localize: Callable[[LocalCall], Mapping[str, Any]] | None = field(default=None, compare=False)

    @cached_property
    def running(self) -> tuple[tuple[int, ...], ...]:
        """For each factor, the operands that have it in a dimension."""
        factors_of = [{factor for dimension in dimensions for factor in dimension} for dimensions in self.operands]
        operands = range(len(factors_of))
        return tuple(tuple(operand for operand in operands if factor in factors_of[operand]) for factor in range(len(self.factors)))
