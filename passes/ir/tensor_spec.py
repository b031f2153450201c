"""Shape and dtype of a tensor, in numbers or symbols."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import sympy
import torch

Size: TypeAlias = int | sympy.Expr
"""A number, or an expression in the symbols of a program."""


class RowCount(sympy.Symbol):  # type: ignore[misc]  # sympy has no types
    """A number of rows that go from rank to rank, which is known when a program runs: tokens, to the ranks that store their experts.

    Attributes:
        expected: the number if each rank receives as many as it has: what memory and time are counted for.
    """

    expected: Size


def row_count(expected: Size, name: str = "") -> RowCount:
    """Return a symbol, equal to those of the same name and expected value; without a name, different from all others of this process."""
    symbol = RowCount(f"{name}, {expected} expected" if name else f"rows_{next(_COUNTED)}", integer=True, nonnegative=True)
    symbol.expected = expected
    return symbol


_COUNTED = itertools.count()


def numel(shape: Iterable[Size]) -> Any:
    """Return the product of sizes: an int or an expression; typed Any, so that callers can compute with either."""
    return math.prod(shape)


def total(sizes: Iterable[Size]) -> Any:
    """Return the sum of sizes, typed Any as ``numel``; equal ones, of which repeated blocks have many, are counted first."""
    counts = Counter(sizes)
    numbers = sum(size * count for size, count in counts.items() if not isinstance(size, sympy.Basic))
    symbolic = [size * count for size, count in counts.items() if isinstance(size, sympy.Basic)]
    if not symbolic:
        return numbers
    result = sympy.Add(numbers, *symbolic)
    return int(result) if result.is_Integer else result


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Attributes:
        shape: sizes in the symbols of the program.
        dtype: None where it is known only when the program runs (that of a loss).
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype | None

    def __str__(self) -> str:
        dtype = "any dtype" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{dtype} ({', '.join(str(size) for size in self.shape)})"

    @property
    def numel(self) -> Any:
        """The number of elements."""
        return numel(self.shape)

    @property
    def known_dtype(self) -> torch.dtype:
        """The dtype; an assertion fails if it is unknown."""
        assert self.dtype is not None
        return self.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.known_dtype.itemsize

    @cached_property
    def bytes(self) -> Any:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    def resized(self, dim: int, size: Size) -> TensorSpec:
        """Return the spec with another size of one dimension."""
        dim %= len(self.shape)
        return TensorSpec((*self.shape[:dim], size, *self.shape[dim + 1 :]), self.dtype)
