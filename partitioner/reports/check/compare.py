"""When two tensors are equal but for rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "Comparison", "compare", "largest_magnitude"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest error, relative to the largest element: rounding of sums in another order stays far below, a wrong number far above."""

_ORDINARY = 1e30
"""Larger magnitudes are masks (the least number of a dtype, added to attention scores), not values that others scale with."""


@dataclass(frozen=True)
class Comparison:
    """Two tensors beside each other.

    Attributes:
        what: ``"output logits"``, ``"gradient of head.weight"``.
        error: largest absolute difference; infinite where they cannot be subtracted.
        largest: largest magnitude of the reference.
        allowed: largest error that rounding explains.
        problem: what differs besides the values; empty when they can be subtracted.
    """

    what: str
    error: float
    largest: float
    allowed: float
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Whether they are the same but for rounding."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        if self.problem:
            return f"{self.what}: {self.problem}"
        return f"{self.what}: differs by {self.error:.1e}, allowed {self.allowed:.1e}, largest value {self.largest:.1e}"


def compare(
    what: str, reference: Tensor | None, found: Tensor | None, *, scale: float = 0.0, computed_in: torch.dtype | None = None
) -> Comparison:
    """Compare a tensor with a reference.

    Args:
        what: its name.
        reference: what it should be; None for a gradient that there is none of.
        found: what it is.
        scale: magnitude of what it was computed from: a value that is zero but for rounding has no scale of its own.
        computed_in: the dtype of what it was computed from, where that is less precise than its own.
    """
    if reference is None and found is None:
        return Comparison(what, 0.0, 0.0, 0.0)
    if reference is None or found is None:
        return _unlike(what, "none, where the original has one" if found is None else "there is one, where the original has none")
    if (reference.shape, reference.dtype) != (found.shape, found.dtype):
        return _unlike(what, f"{found.dtype} {tuple(found.shape)}, where the original has {reference.dtype} {tuple(reference.shape)}")
    is_inexact = reference.is_floating_point() or reference.is_complex()
    tolerance = TOLERANCE.get((computed_in or reference.dtype).to_real(), 0.0) if is_inexact else 0.0
    one, other = _wide(reference), _wide(found)
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")))
    masks = torch.where(one.abs() > _ORDINARY, tolerance * one.abs().nan_to_num(posinf=0.0), 0.0)
    error = (difference - masks).clamp(min=0.0).max().item() if difference.numel() else 0.0
    largest = largest_magnitude(reference)
    return Comparison(what, error, largest, tolerance * (largest + scale))


def largest_magnitude(tensor: Tensor) -> float:
    """The largest ordinary magnitude: neither infinite nor a mask; 0 when there is none."""
    magnitude = _wide(tensor).abs()
    ordinary = torch.where(magnitude < _ORDINARY, magnitude, 0.0)
    return ordinary.max().item() if ordinary.numel() else 0.0


def _unlike(what: str, problem: str) -> Comparison:
    return Comparison(what, float("inf"), 0.0, 0.0, problem)


def _wide(tensor: Tensor) -> Tensor:
    """Double precision on the CPU; the parts of a complex tensor side by side."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
