"""Trace a model on the meta device, which ``torch.autocast`` does not know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.graph import Autocast
from passes.ir.torch_private import FakeTensorMode

__all__ = ["autocast_as_cpu", "meta_as_cpu"]


@contextlib.contextmanager
def autocast_as_cpu(autocast: Autocast | None) -> Iterator[None]:
    """Take ``torch.autocast`` for the meta device, and for the device that is planned for, as that of the CPU, where traced values are.

    PyTorch knows no autocast for the meta device, not even one that is disabled, as models write around their rotary embeddings.
    """
    planned = ("meta",) if autocast is None or autocast.planned_for is None else ("meta", autocast.planned_for)
    original = torch.autocast.__init__

    def initialize(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type in planned else device_type, *args, **kwargs)

    torch.autocast.__init__ = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def meta_as_cpu(autocast: Autocast | None) -> Iterator[None]:
    """Trace tensors on the meta device as fake tensors on the CPU, which autocast casts and which take no memory either."""
    if autocast is None or autocast.planned_for is None:
        yield
        return
    original = FakeTensorMode.from_tensor
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def from_tensor(self: FakeTensorMode, tensor: Tensor, **kwargs: Any) -> Tensor:
        fake = original(self, tensor, **kwargs)
        if fake.device.type != "meta":
            return fake
        if id(fake) not in made:  # a tensor that is met twice stays one
            with self, torch.no_grad():
                moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
            made[id(fake)] = fake, nn.Parameter(moved, fake.requires_grad) if isinstance(fake, nn.Parameter) else moved
            made[id(fake)][1].requires_grad_(fake.requires_grad)
        return made[id(fake)][1]

    FakeTensorMode.from_tensor = from_tensor  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        FakeTensorMode.from_tensor = original  # type: ignore[method-assign]
