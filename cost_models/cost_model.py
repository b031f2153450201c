"""How long work and messages take. Bring your own by implementing ``CostModel``: measured tables, a simulator, anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cost_models.collectives.alpha_beta import send_receive
from cost_models.hardware.clusters import Device, Link
from cost_models.ops.tile_efficiency import product_time
from cost_models.ops.work import Work

__all__ = ["CostModel", "Roofline"]


class CostModel(Protocol):
    """What the planner and the simulator ask. Times are in seconds."""

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Time of one operation's work (all numbers, no symbols) on a device."""

    def transfer_time(self, size: float, link: Link) -> float:
        """Time until a message of so many bytes has arrived."""


@dataclass(frozen=True)
class Roofline:
    """An operation takes what limits it, arithmetic or memory, and what each of its kernels costs to start.

    Williams, Waterman, Patterson, "Roofline", CACM 2009; arithmetic of products by ``cost_models.ops.tile_efficiency``.
    """

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """The longer of arithmetic and memory traffic, and the starts of kernels.

        On a device that runs behind the host, a start costs ``kernel_latency``, and only operations shorter than ``launch_overhead``
        wait for the host; on any other each start takes the host's time too.
        """
        busy = max(self.arithmetic_time(work, device, dtype), work.bytes / device.bandwidth) + work.launches * device.kernel_latency
        launching = work.launches * device.launch_overhead
        return float(max(busy, launching) if device.asynchronous else busy + launching)

    def arithmetic_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Of the products by their sizes, or of all FLOPs at the peak where the sizes are not known."""
        if work.products:
            return sum(product_time(product, device, dtype) for product in work.products)
        return float(work.flops / device.flops(dtype))

    def transfer_time(self, size: float, link: Link) -> float:
        """``latency + bytes / bandwidth``."""
        return float(send_receive(size, link))
