"""Shape and dtype of a tensor in a program, in symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

__all__ = ["Size", "TensorSpec"]

Size: TypeAlias = int | sympy.Expr
"""A number, or an expression in the symbols of a program."""


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

    def resized(self, dim: int, size: Size) -> TensorSpec:
        """With another size of one dimension."""
        dim %= len(self.shape)
        return TensorSpec((*self.shape[:dim], size, *self.shape[dim + 1 :]), self.dtype)
