"""Tiles beside the whole: outputs, gradients of inputs and of parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import Constraints, partition


class Tiled(nn.Module):
    """A function of an image with parameters, as a module."""

    def __init__(self, function: Any, **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, **dict(self.named_parameters()))


def first_difference_of_tiles(
    model: nn.Module,
    x: Tensor,
    devices: int,
    mode: str | Mapping[str, int | Sequence[int]] = "tile",
    tolerance: float = 1e-9,
    constraints: Constraints | None = None,
) -> str:
    """Describe the differences from the unpartitioned model; empty when there are none.

    Args:
        constraints: None: halos are exchanged before every layer.
    """
    if constraints is None and "tile" in mode:
        constraints = Constraints(halo="exchange")
    whole = copy.deepcopy(model)
    parts = partition(model, devices=devices, mode=mode, example_inputs=(x,), constraints=constraints, progress=False)
    parts.verify()
    of_whole, of_parts = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = whole(of_whole), parts(of_parts)
    expected = getattr(expected, "sample", getattr(expected, "logits", expected))
    found = getattr(found, "sample", getattr(found, "logits", found))
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(0))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"the result": (expected, found), "the input": (of_whole.grad, of_parts.grad)}
    gradients = parts.full_gradients()
    pairs |= {f"parameter {name}": (each.grad, gradients[name]) for name, each in whole.named_parameters()}
    state = parts.full_state_dict()
    pairs |= {f"buffer {name}": (each, state[name]) for name, each in whole.named_buffers() if name in state}
    for name, (one, other) in pairs.items():
        if (one is None) != (other is None):
            return f"{name}: one has a gradient, the other has none"
        if one is not None and other is not None:
            one, other = one.detach(), other.detach()  # noqa: PLW2901
            distance = float((one - other).abs().max()) if one.numel() else 0.0
            if one.shape != other.shape or not distance <= tolerance * max(1.0, float(one.abs().max()) if one.numel() else 1.0):
                return f"{name}: {tuple(other.shape)} differs by {distance:.3g}"
    return ""
