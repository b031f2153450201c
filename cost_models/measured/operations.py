"""Time one call of an operator on made-up tensors of its shapes and types."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cost_models.calls import Call, tensors_in
from cost_models.measurement.clock import median_seconds
from cost_models.sizes import TensorShape

__all__ = ["measure_call"]


def measure_call(call: Call, device: torch.device) -> float | None:
    """Seconds of a call; None where made-up arguments will not do: the operator refuses them.

    Args:
        call: all sizes are numbers.
        device: where it runs.
    """
    for spread in (True, False):
        try:
            arguments = call.filled(partial(_made_up, places=_places(call) if spread else 1, device=device), device)
            with torch.no_grad():
                return median_seconds(lambda given=arguments: call.operator(**given), device, among_others=True)  # type: ignore[misc]
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
    return None


def _made_up(_name: str, shape: TensorShape, *, places: int, device: torch.device) -> Tensor:
    """Random numbers; whole numbers may be places, so they are kept below the sizes of the other tensors, or are all zero."""
    if shape.dtype == torch.bool:
        return torch.rand(shape.shape, device=device) < 0.5
    if shape.dtype.is_floating_point or shape.dtype.is_complex:
        return torch.rand(shape.shape, device=device, dtype=shape.dtype)
    return torch.randint(places, shape.shape, device=device, dtype=shape.dtype)


def _places(call: Call) -> int:
    """A number that is a place in every dimension that could be looked up: the least first size of its floating-point tensors."""
    sizes = [each.shape[0] for _, value in call.values for each in tensors_in(value) if each.dtype.is_floating_point and each.shape]
    return max(1, min(sizes, default=1))
