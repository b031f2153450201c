"""Numbers about graphs: hardware, operations, collectives, memory. Rewrites nothing, runs no processes."""

from __future__ import annotations

import sys

try:
    from cost_models.cost_model import CostModel, Roofline
    from cost_models.hardware.clusters import Cluster, Device, Link
except ImportError as error:  # of a package of the script, perhaps; ``partitioner`` looks before it imports anything
    if (error.name or "").partition(".")[0] != "passes":
        raise
    found = getattr(sys.modules.get("passes"), "__file__", None)
    raise ImportError(f"{found} shadows the package 'passes' of cost_models\n  remedy: rename it", name="passes", path=found) from error

__all__ = ["Cluster", "CostModel", "Device", "Link", "Roofline"]
