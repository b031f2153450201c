"""What to do when a framework asks a partitioned model for ``hf_device_map``.

accelerate and transformers' Trainer ask every model for it before they prepare anything. ``partitioner.integrations`` adds functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from partitioner.model.session import Session

__all__ = ["WHEN_ASKED_FOR_DEVICE_MAP", "device_map"]

WHEN_ASKED_FOR_DEVICE_MAP: list[Callable[[Session], None]] = []
"""Functions that get the session of the model."""


def device_map(session: Session) -> Mapping[str, torch.device]:
    """Return where the ranks of this process are, if on several devices: accelerate and Trainer do not move or copy such a model.

    Raises:
        AttributeError: they are on one device.
    """
    for prepare in WHEN_ASKED_FOR_DEVICE_MAP:
        prepare(session)
    runtime = session.runtime
    devices = {f"rank {rank}": runtime.devices[rank] for rank in runtime.local_ranks}
    if len(set(devices.values())) == 1:
        raise AttributeError("a partitioned model on one device of this process has no 'hf_device_map'")
    return devices
