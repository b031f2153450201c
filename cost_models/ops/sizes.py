"""Sizes of tensors: numbers, or sympy expressions in the batch symbol."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["Size", "TensorShape", "numel"]

Size: TypeAlias = Any
"""A number that may depend on the batch symbol: an int or a sympy expression."""


def numel(shape: Iterable[Size]) -> Size:
    """Product of the sizes."""
    return math.prod(shape)


@dataclass(frozen=True)
class TensorShape:
    """What an operation's cost depends on in one tensor."""

    shape: tuple[Size, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> Size:
        return numel(self.shape)

    @property
    def bytes(self) -> Size:
        return self.numel * self.dtype.itemsize
