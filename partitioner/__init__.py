"""A model-partitioning compiler for PyTorch.

from partitioner import partition

pm = partition(model, devices=4, mode="pipeline")
loss = pm.train_step(x, target=y, loss_fn=loss_fn)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from partitioner.integrations.shadowed_packages import check_shadowed_packages

if TYPE_CHECKING:
    from cost_models.hardware.clusters import Cluster, Device, Link
    from partitioner.api import partition
    from partitioner.model.draw import Drawing, WeightDrawing, diff, draw, draw_weight
    from partitioner.model.partitioned_model import PartitionedModel
    from partitioner.options.constraints import Constraints
    from partitioner.runtime.state.optimizers.owner_optimizer import OwnerOptimizer
    from partitioner.runtime.state.optimizers.update_check import register_optimizer
    from passes.ir.errors import (
        CommunicationError,
        ConfigError,
        InfeasiblePlanError,
        PartitionError,
        PartitionWarning,
        TraceError,
        VerificationError,
    )
    from passes.ir.plan import Plan
    from passes.rules.registry import register_rule

__all__ = [
    "Cluster",
    "CommunicationError",
    "ConfigError",
    "Constraints",
    "Device",
    "Drawing",
    "InfeasiblePlanError",
    "Link",
    "OwnerOptimizer",
    "PartitionError",
    "PartitionWarning",
    "PartitionedModel",
    "Plan",
    "TraceError",
    "VerificationError",
    "WeightDrawing",
    "diff",
    "draw",
    "draw_weight",
    "partition",
    "register_optimizer",
    "register_rule",
]

_NAMES = {
    "cost_models.hardware.clusters": ["Cluster", "Device", "Link"],
    "partitioner.api": ["partition"],
    "partitioner.model.draw": ["Drawing", "WeightDrawing", "diff", "draw", "draw_weight"],
    "partitioner.model.partitioned_model": ["PartitionedModel"],
    "partitioner.options.constraints": ["Constraints"],
    "partitioner.runtime.state.optimizers.owner_optimizer": ["OwnerOptimizer"],
    "partitioner.runtime.state.optimizers.update_check": ["register_optimizer"],
    "passes.ir.errors": [
        "CommunicationError",
        "ConfigError",
        "InfeasiblePlanError",
        "PartitionError",
        "PartitionWarning",
        "TraceError",
        "VerificationError",
    ],
    "passes.ir.plan": ["Plan"],
    "passes.rules.registry": ["register_rule"],
}
"""Module -> the public names that are imported from it, each when it is first used."""


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    for module, names in _NAMES.items():
        if name in names:
            return globals().setdefault(name, getattr(importlib.import_module(module), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]


check_shadowed_packages()
