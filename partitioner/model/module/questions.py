"""What to do when a framework asks a partitioned model for ``hf_device_map``.

accelerate and transformers' Trainer ask every model for it before they prepare anything. ``partitioner.integrations`` adds functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.model.session import Session

__all__ = ["WHEN_ASKED_FOR_DEVICE_MAP"]

WHEN_ASKED_FOR_DEVICE_MAP: list[Callable[[Session], None]] = []
"""Functions that get the session of the model."""
