"""Formulas in the batch symbol as numbers, and as text."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy

from passes.ir.errors import TraceError
from passes.ir.tensor_spec import Size


def _modular_indexing(base: int, divisor: int, modulus: int) -> int:
    return base // divisor % modulus


def _ceiling_division(one: int, other: int) -> int:
    return -(-one // other)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Add": lambda *terms: sum(terms),
    "CeilDiv": _ceiling_division,
    "CleanDiv": operator.floordiv,
    "FloorDiv": operator.floordiv,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "ModularIndexing": _modular_indexing,
    "Mul": lambda *factors: reduce(operator.mul, factors),
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "PythonMod": operator.mod,
    "ceiling": math.ceil,
    "floor": math.floor,
}
"""Meaning of sympy's and torch's functions of sizes, by class name."""


class Numbers:
    """Sizes at one batch size: ``Numbers(8)[3 * batch]`` is 24. Each distinct formula is worked out once.

    A size that depends on the values of tensors (the count of ``nonzero``) has a symbol of its own. It is taken to be as large as
    the batch: nothing better is known before the run.

    Args:
        batch_size: what the batch symbol stands for.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._known: dict[sympy.Basic, float] = {}

    def __getitem__(self, size: Size) -> float:
        """Return the value of a formula; a number is its own value.

        Raises:
            TraceError: the formula holds a function that is not known.
        """
        if not isinstance(size, sympy.Basic):
            return size
        known = self._known.get(size)
        if known is None:
            known = self._known[size] = self._evaluate(size)
        return known

    def _evaluate(self, size: sympy.Basic) -> float:
        if size.is_Symbol:
            return self.batch_size
        if size.is_Integer:
            return int(size)
        if size.is_Number:
            return float(size)
        function = _FUNCTIONS.get(type(size).__name__)
        if function is None:
            raise TraceError(f"the size {size} holds a function that no price knows", remedy="report the model that has such a size")
        return function(*(self[argument] for argument in size.args))  # type: ignore[no-any-return]


def readable(expression: sympy.Expr) -> str:
    """Format a formula as text: large numbers with four digits."""
    rounded = expression.xreplace({number: sympy.Float(number, 4) for number in expression.atoms(sympy.Integer) if abs(number) >= 10**5})
    return str(rounded)
