"""Masks of dropout as operators: drawn, drawn with the generator's state beside them, and drawn again from that state.

    forward     mask, state = dropout_mask_with_state(shape, p)      draws as dropout_mask does
    backward    mask = dropout_mask_again(state, shape, p)           the same mask; the generator stays as it is

A mask is where ``aten.dropout`` of ones of that shape is not zero: the very numbers of one device for the same seed. (Fused attention
kernels of accelerators draw in an order of their own, which nothing else reproduces.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["dropout_mask", "dropout_mask_again", "dropout_mask_with_state", "state_bytes"]

_MASK = "SymInt[] size, float p, ScalarType dtype, Device device"
_DRAWS = (torch.Tag.nondeterministic_seeded,)

torch.library.define("partitioner::dropout_mask", f"({_MASK}) -> Tensor", tags=_DRAWS)
torch.library.define("partitioner::dropout_mask_with_state", f"({_MASK}) -> (Tensor, Tensor)", tags=_DRAWS)
torch.library.define("partitioner::dropout_mask_again", f"(Tensor state, {_MASK}) -> Tensor")

dropout_mask = torch.ops.partitioner.dropout_mask.default
"""Which elements dropout keeps."""

dropout_mask_with_state = torch.ops.partitioner.dropout_mask_with_state.default
"""The same, and the state that the generator had before."""

dropout_mask_again = torch.ops.partitioner.dropout_mask_again.default
"""The mask that was drawn from a state."""

_STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Of PyTorch's generators: a Mersenne twister; a seed and an offset (Philox)."""


def state_bytes(device: torch.device) -> int:
    """How large the state of a device's generator is."""
    return _STATE_BYTES.get(device.type, _STATE_BYTES["cpu"])


def _draw(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.dropout(torch.ones(size, dtype=dtype, device=device), p, train=True) != 0


def _draw_with_state(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return _draw(size, p, dtype, device), state


def _draw_again(state: Tensor, size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state.cpu(), device)
        else:
            torch.set_rng_state(state.cpu())
        return _draw(size, p, dtype, device)


def _shape(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG001  the operator's own names
    return torch.empty(size, dtype=torch.bool, device=device)


def _shapes(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return _shape(size, p, dtype, device), torch.empty(state_bytes(device), dtype=torch.uint8)


def _shape_again(state: Tensor, size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG001
    return _shape(size, p, dtype, device)


for _operator, _run, _fake in (
    (dropout_mask, _draw, _shape),
    (dropout_mask_with_state, _draw_with_state, _shapes),
    (dropout_mask_again, _draw_again, _shape_again),
):
    torch.library.impl(_operator.name(), "CompositeExplicitAutograd", _run)
    torch.library.register_fake(_operator.name(), _fake)
