"""How long work and messages take. Bring your own by implementing ``CostModel``: measured tables, a simulator, anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cost_models.communication import send_receive
from cost_models.hardware import Device, Link
from cost_models.work import Work

__all__ = ["CostModel", "Roofline"]


class CostModel(Protocol):
    """What the planner asks. Times are in seconds."""

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Time of one operation's work (all numbers, no symbols) on a device."""

    def transfer_time(self, size: float, link: Link) -> float:
        """Time until a message of so many bytes has arrived."""


@dataclass(frozen=True)
class Roofline:
    """An operation takes what limits it, arithmetic or memory, and what each of its kernels costs to start.

    Williams, Waterman, Patterson, "Roofline", CACM 2009.
    """

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """``max(FLOPs / rate, bytes / bandwidth) + launches * overhead``."""
        limit: float = max(work.flops / device.flops(dtype), work.bytes / device.bandwidth)
        return limit + work.launches * device.launch_overhead

    def transfer_time(self, size: float, link: Link) -> float:
        """``latency + bytes / bandwidth``."""
        return float(send_receive(size, link))
