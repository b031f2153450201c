"""A model-partitioning compiler for PyTorch.

from partitioner import partition

pm = partition(model, devices=4, mode="pipeline")
loss = pm.train_step(x, target=y, loss_fn=loss_fn)
"""

from __future__ import annotations

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
