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
    """While active, make ``torch.autocast`` for the meta device, or for the planned device, that of the CPU, where traced values are.

    PyTorch has no autocast for the meta device; even ``autocast(enabled=False)`` fails, which models write around rotary embeddings.
    """
    renamed = ("meta",) if autocast is None or autocast.planned_for is None else ("meta", autocast.planned_for)
    original = torch.autocast.__init__

    def initialize(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type in renamed else device_type, *args, **kwargs)

    torch.autocast.__init__ = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def meta_as_cpu(autocast: Autocast | None) -> Iterator[None]:
    """While active, trace tensors on the meta device as fake tensors on the CPU, which autocast casts and which need no memory either."""
    if autocast is None or autocast.planned_for is None:
        yield
        return
    original = FakeTensorMode.from_tensor
    on_cpu: dict[int, tuple[Tensor, Tensor]] = {}  # id of a fake meta tensor -> this tensor, kept alive, and the one on the CPU

    def from_tensor(self: FakeTensorMode, tensor: Tensor, **kwargs: Any) -> Tensor:
        fake = original(self, tensor, **kwargs)
        if fake.device.type != "meta":
            return fake
        if id(fake) not in on_cpu:
            with self, torch.no_grad():
                moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
            moved = nn.Parameter(moved, fake.requires_grad) if isinstance(fake, nn.Parameter) else moved
            on_cpu[id(fake)] = fake, moved.requires_grad_(fake.requires_grad)
        return on_cpu[id(fake)][1]

    FakeTensorMode.from_tensor = from_tensor  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        FakeTensorMode.from_tensor = original  # type: ignore[method-assign]
