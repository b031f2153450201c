"""Numbers about graphs: hardware, operations, collectives, memory. Rewrites nothing, runs no processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cost_models.hardware.clusters import Cluster, Device, Link

if TYPE_CHECKING:
    from cost_models.cost_model import CostModel, Roofline

__all__ = ["Cluster", "CostModel", "Device", "Link", "Roofline"]


def __getattr__(name: str) -> Any:
    """Import a cost model when it is first used (PEP 562): descriptions of hardware need no formulas, and no SymPy."""
    if name in ("CostModel", "Roofline"):
        return getattr(importlib.import_module("cost_models.cost_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
