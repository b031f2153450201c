"""A model-partitioning compiler for PyTorch.

from partitioner import partition

pm = partition(model, devices=4, mode="pipeline")
loss = pm.train_step(x, target=y, loss_fn=loss_fn)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cost_models.hardware.clusters import Cluster, Device, Link
    from partitioner.api import partition
    from partitioner.model.draw import Drawing, WeightDrawing, diff, draw, draw_weight
    from partitioner.model.partitioned_model import PartitionedModel
    from partitioner.options.constraints import Constraints
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

_MODULES = {
    "Cluster": "cost_models.hardware.clusters",
    "CommunicationError": "passes.ir.errors",
    "ConfigError": "passes.ir.errors",
    "Constraints": "partitioner.options.constraints",
    "Device": "cost_models.hardware.clusters",
    "Drawing": "partitioner.model.draw",
    "InfeasiblePlanError": "passes.ir.errors",
    "Link": "cost_models.hardware.clusters",
    "PartitionError": "passes.ir.errors",
    "PartitionWarning": "passes.ir.errors",
    "PartitionedModel": "partitioner.model.partitioned_model",
    "Plan": "passes.ir.plan",
    "TraceError": "passes.ir.errors",
    "VerificationError": "passes.ir.errors",
    "WeightDrawing": "partitioner.model.draw",
    "diff": "partitioner.model.draw",
    "draw": "partitioner.model.draw",
    "draw_weight": "partitioner.model.draw",
    "partition": "partitioner.api",
    "register_optimizer": "partitioner.runtime.state.optimizers.update_check",
    "register_rule": "passes.rules.registry",
}
"""Public name -> the module that has it, imported when the name is first used: the command line answers without PyTorch."""


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__]
