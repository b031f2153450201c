"""How long work and messages take, and calls on local shapes. Bring your own ``CostModel``: measured tables, a simulator, anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cost_models.collectives.alpha_beta import send_receive
from cost_models.hardware.clusters import Device, Link
from cost_models.ops.cost import OperationCost
from cost_models.ops.tile_efficiency import product_time
from cost_models.ops.work import Values, Work


class CostModel(Protocol):
    """Prices of operations and messages for the planner and the simulator. Times are in seconds."""

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Time of one operation's work (all numbers, no symbols) on a device."""

    def transfer_time(self, size: float, link: Link) -> float:
        """Time until a message of so many bytes has arrived."""


@dataclass(frozen=True)
class Roofline:
    """Price an operation by its limit, arithmetic or memory, and the start of each kernel.

    Williams, Waterman, Patterson, "Roofline", CACM 2009; arithmetic of products by ``cost_models.ops.tile_efficiency``.
    """

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Return the longer of arithmetic and memory traffic, plus the starts of kernels.

        On an asynchronous device, a start costs ``kernel_latency``, and only operations shorter than ``launch_overhead``
        wait for the host; on any other each start takes the host's time too.
        """
        moving, beside = work.bytes / device.bandwidth, work.beside / device.bandwidth
        busy = max(self.arithmetic_time(work, device, dtype), moving) + beside + work.launches * device.kernel_latency
        launching = work.launches * device.launch_overhead
        return float(max(busy, launching) if device.asynchronous else busy + launching)

    def arithmetic_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Return the seconds of arithmetic: of products by their sizes, or of all FLOPs at the peak if the sizes are not given."""
        if work.products:
            return sum(product_time(product, device, dtype) for product in work.products)
        return float(work.flops / device.flops(dtype))

    def transfer_time(self, size: float, link: Link) -> float:
        """Return ``latency + bytes / bandwidth``."""
        return float(send_receive(size, link))


def call_seconds(
    cost: OperationCost, device: Device, cost_model: CostModel, sizes: Values, share: float = 1.0, *, measured: bool = True
) -> tuple[float, float, float]:
    """Price a call on the shapes that a layout leaves a rank: its forward, and the input and weight halves of its backward.

    Args:
        cost: formulas of the call, on the shapes of a rank or of the whole model.
        sizes: gives the formulas their numbers.
        share: how much of this work a rank does; 0: what it costs to start the kernels.
        measured: whether a time that was measured for these shapes may stand for the formulas.
    """

    def seconds(work: Work) -> float:
        if not work.launches:
            return 0.0
        local = work.at(sizes, share)
        own = cost_model.operation_time(local if measured else replace(local, call=None), device, cost.dtype)
        return own + sum(map(seconds, work.then))

    return seconds(cost.forward), seconds(cost.backward_input), seconds(cost.backward_weight)
