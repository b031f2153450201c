"""The allowed values of the options of ``partition``, beside the types of its signature, for every call that takes them.

``read_by`` names the function that later reads the value: a value that passes the check can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import parse_bytes
from cost_models.memory.optimizer_state import optimizer_states
from partitioner.options.precision import read_reduce_dtype, true_dtype
from partitioner.schedules.registered import read_schedule
from passes.ir.arguments.checked import Rule, at_least, each_of, one_of, positive, read_by
from passes.ir.plan import BATCHNORM, OBJECTIVES, RECOMPUTE


def read_cluster(cluster: Cluster | str | None) -> Cluster | None:
    """Return the hardware of ``cluster=``, from its name if it is one."""
    return Cluster.parse(cluster) if isinstance(cluster, str) else cluster


VALUES: Mapping[str, Rule] = MappingProxyType(
    {
        "n_microbatches": at_least(1),
        "schedule": read_by(read_schedule),
        "stages_per_device": at_least(1),
        "recompute": each_of(one_of(RECOMPUTE)),
        "cluster": read_by(read_cluster),
        "memory_limit": read_by(parse_bytes),
        "optimizer": read_by(optimizer_states),
        "precision": read_by(true_dtype),
        "reduce_dtype": read_by(read_reduce_dtype),
        "batchnorm": one_of(BATCHNORM),
        "inputs": one_of(("global", "local")),
        "objective": one_of(OBJECTIVES),
        "time_limit": positive,
    }
)
"""Option -> check of its value."""

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "model": "net, a torch.nn.Module",
        "devices": "4",
        "mode": '"pipeline", or a mesh: mode={"data": 2, "tensor": 2}',
        "example_inputs": "(x,), or x where it is the only one",
        "example_kwargs": '{"mask": mask}',
        "training": "True or False, or leave it out to keep the model's mode",
        "n_microbatches": "4, or leave it out to let the planner choose",
        "schedule": '"1F1B" or a Schedule, or leave it out to let the planner choose',
        "stages_per_device": "2, or leave it out",
        "recompute": '"none", "selective", "full" or {"layers.*": "full"}, or leave it out to let the planner choose',
        "cluster": '"h100:8x8" or a Cluster, or leave it out',
        "memory_limit": '"16GiB", or leave it out',
        "optimizer": '"adamw"',
        "precision": '"bf16-mixed", or leave it out',
        "reduce_dtype": '"bfloat16", or leave it out',
        "batchnorm": '"sync" or "local"',
        "inputs": '"global" or "local"',
        "constraints": 'Constraints(axes={"heads": "tensor"}), or leave it out',
        "plan": "Plan.from_json(text), or leave it out",
        "cost_model": "MeasuredCosts(), or leave it out",
        "objective": '"step_time" or "memory"',
        "time_limit": "60, or leave it out",
        "batch_dims": '{"x": 1, "positions": None}, or leave it out',
        "progress": "True or False, or leave it out",
    }
)
"""Option -> an example of its value, for error messages."""


def positional(example_inputs: tuple[Any, ...] | Tensor | None) -> tuple[Any, ...] | None:
    """Return the positional inputs of a call as a tuple; a tensor is the only input."""
    return (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
