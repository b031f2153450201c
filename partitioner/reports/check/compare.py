"""Compare two tensors up to rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest error, relative to the largest element: rounding of sums in another order stays far below, a wrong number far above."""

_ORDINARY = 1e30
"""Larger magnitudes are masks (the least number of a dtype, added to attention scores), not values that others scale with."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a tensor with its reference.

    Attributes:
        what: ``"output logits"``, ``"gradient of head.weight"``.
        error: largest absolute difference; infinite if shapes or dtypes differ or one tensor is missing.
        largest: largest magnitude of the reference.
        allowed: largest error that rounding explains.
        problem: the difference of shape, dtype or presence, in words; empty if there is none.
    """

    what: str
    error: float
    largest: float
    allowed: float
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Whether the tensors are the same up to rounding."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        if self.problem:
            return f"{self.what}: {self.problem}"
        return f"{self.what}: differs by {self.error:.1e}, allowed {self.allowed:.1e}, largest value {self.largest:.1e}"


def compare(
    what: str, reference: Tensor | None, actual: Tensor | None, *, scale: float = 0.0, computed_in: torch.dtype | None = None
) -> Comparison:
    """Compare a tensor with a reference.

    Args:
        what: the name of the tensor.
        reference: the tensor of the original; None for a missing gradient.
        actual: the tensor of the partitioned model; None for a missing gradient.
        scale: largest magnitude of the inputs that the tensor was computed from. It is added to the tensor's own magnitude, which is too
            small a measure if the exact value is zero.
        computed_in: the dtype of those inputs, if it is less precise than the tensor's own.
    """
    if reference is None and actual is None:
        return Comparison(what, 0.0, 0.0, 0.0)
    if reference is None or actual is None:
        return _incomparable(what, "none, where the original has one" if actual is None else "there is one, where the original has none")
    if (reference.shape, reference.dtype) != (actual.shape, actual.dtype):
        return _incomparable(
            what, f"{actual.dtype} {tuple(actual.shape)}, where the original has {reference.dtype} {tuple(reference.shape)}"
        )
    is_inexact = reference.is_floating_point() or reference.is_complex()
    tolerance = TOLERANCE.get((computed_in or reference.dtype).to_real(), 0.0) if is_inexact else 0.0
    expected, computed = _as_double(reference), _as_double(actual)
    same = (expected == computed) | (expected.isnan() & computed.isnan())
    difference = torch.where(same, 0.0, (expected - computed).abs().nan_to_num(nan=float("inf"), posinf=float("inf")))
    allowed_of_masks = torch.where(expected.abs() > _ORDINARY, tolerance * expected.abs().nan_to_num(posinf=0.0), 0.0)
    error = (difference - allowed_of_masks).clamp(min=0.0).max().item() if difference.numel() else 0.0
    largest = largest_magnitude(reference)
    return Comparison(what, error, largest, tolerance * (largest + scale))


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value that is neither infinite nor a mask; 0 if there is none."""
    magnitude = _as_double(tensor).abs()
    ordinary = torch.where(magnitude < _ORDINARY, magnitude, 0.0)
    return ordinary.max().item() if ordinary.numel() else 0.0


def _incomparable(what: str, problem: str) -> Comparison:
    return Comparison(what, float("inf"), 0.0, 0.0, problem)


def _as_double(tensor: Tensor) -> Tensor:
    """Return the tensor as float64 on the CPU; a complex tensor gets a last dimension of its real and imaginary parts."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
