"""Mixed precision as ``torch.autocast`` has it: which operations compute in a lower precision follows from a list of torch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "without_autocast"]


@dataclass(frozen=True)
class Autocast:
    """One mixed precision.

    Attributes:
        device_type: whose list of operations.
        dtype: the lower precision.
    """

    device_type: str
    dtype: torch.dtype

    def enabled(self) -> torch.autocast:
        """The context. Nothing is cached: a cast is a node of a graph, or is done when it is needed."""
        return torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=False)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Outside of any autocast that the caller is in."""
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
