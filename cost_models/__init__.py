"""Numbers about graphs: hardware, operations, collectives, memory. Rewrites nothing, runs no processes."""

from __future__ import annotations

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware.clusters import Cluster, Device, Link

__all__ = ["Cluster", "CostModel", "Device", "Link", "Roofline"]
