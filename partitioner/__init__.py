"""A model-partitioning compiler for PyTorch.

from partitioner import partition

pm = partition(model, devices=4, mode="pipeline")
loss = pm.train_step(x, target=y, loss_fn=loss_fn)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from partitioner.integrations.shadowed_packages import check_shadowed_packages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from cost_models.cost_model import CostModel
    from cost_models.hardware.clusters import Cluster, Device, Link
    from partitioner.model.draw import Drawing, WeightDrawing, draw, draw_weight
    from partitioner.model.partitioned_model import PartitionedModel
    from partitioner.options.constraints import Constraints
    from partitioner.options.devices import DevicesArgument
    from partitioner.runtime.state.optimizers.owner_optimizer import OwnerOptimizer
    from partitioner.runtime.state.optimizers.update_check import register_optimizer
    from partitioner.schedules.registered import register_schedule
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
    from passes.ir.schedule import Schedule
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
    "Schedule",
    "TraceError",
    "VerificationError",
    "WeightDrawing",
    "draw",
    "draw_weight",
    "partition",
    "register_optimizer",
    "register_rule",
    "register_schedule",
]

__version__ = "0.1.0"

_NAMES = {
    "cost_models.hardware.clusters": ["Cluster", "Device", "Link"],
    "partitioner.model.draw": ["Drawing", "WeightDrawing", "draw", "draw_weight"],
    "partitioner.model.partitioned_model": ["PartitionedModel"],
    "partitioner.options.constraints": ["Constraints"],
    "partitioner.schedules.registered": ["register_schedule"],
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
    "passes.ir.schedule": ["Schedule"],
    "passes.rules.registry": ["register_rule"],
}
"""Module -> the public names that are imported from it, each when it is first used."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    for module, names in _NAMES.items():
        if name in names:
            return globals().setdefault(name, getattr(importlib.import_module(module), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]


def _implemented_in(module: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: a call imports a module, and calls its function of the same name and signature."""

    def decorate(declared: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(declared)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            implemented: Callable[_P, _R] = getattr(importlib.import_module(module), declared.__name__)
            return implemented(*args, **kwargs)

        return call

    return decorate


@_implemented_in("partitioner.api")
def partition(  # type: ignore[empty-body]
    model: nn.Module,
    devices: DevicesArgument = None,
    mode: str | Mapping[str, int | Sequence[int]] = "auto",
    *,
    example_inputs: tuple[Any, ...] | Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool | None = None,
    n_microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    stages_per_device: int | None = None,
    recompute: str | Mapping[str, str] | None = None,
    cluster: Cluster | str | None = None,
    memory_limit: int | str | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    batchnorm: str = "sync",
    inputs: str = "global",
    constraints: Constraints | None = None,
    plan: Plan | None = None,
    cost_model: CostModel | None = None,
    objective: str = "step_time",
    time_limit: float | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    progress: bool | None = None,
) -> PartitionedModel:
    """Partition a model over devices: trace, plan, lower. The model is not changed.

    Args:
        model: any module that ``torch.export`` traces.
        devices: the number of ranks, or the device of each; None takes as many as the plan, the cluster or the mesh has, else all visible
            accelerators. A ``DeviceMesh`` says which process has which rank, and the names of its dimensions (those of modes, or
            ``"dp"``, ``"pp"``, ``"tp"``, ``"cp"``) are the mode.
        mode: ``"model"`` (layers on devices), ``"pipeline"`` (stages, microbatches, a schedule), ``"data"``, ``"fsdp"``, ``"zero1"``,
            ``"zero2"`` (the batch), ``"tensor"`` (axes of the parameters), ``"sequence"``, ``"tile"`` (height, width, depth); a mesh of
            several, outermost first, ``{"data": 2, "pipeline": 2, "tensor": 2}``, tiles as a number or a grid, ``{"tile": (2, 2)}``, a
            pipeline as a number of ranks or, for each stage, how many share its microbatches round-robin, ``{"pipeline": (2, 1)}``;
            with ``devices=1`` the tiles are computed one after the other, for less memory; or ``"auto"``: the fastest of all, by
            predicted step time.
        example_inputs: positional inputs of one call, the whole batch; a single input needs no tuple. None: the model's own example
            (``example_input_array``, ``dummy_inputs``), or one that its first layer implies.
        example_kwargs: keyword inputs of one call.
        training: trace in training or evaluation mode; None keeps the model's.
        n_microbatches: microbatches a step; None lets the planner choose.
        schedule: ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"ZB1P"``, ``"ZBV"``, ``"DualPipeV"``, a name of
            ``register_schedule``, or a ``Schedule``: the actions of one step, whose microbatches are then its own. None lets the planner
            choose.
        stages_per_device: stages that each device runs; None: the schedule's default.
        recompute: activations that the backward recomputes, to save memory: ``"none"``; ``"selective"``, those that are cheap for their
            bytes; ``"full"``, all but the inputs of each repeated block, or of segments between narrow cuts; or a policy for each pattern
            of modules, ``{"layers.*": "full", "layers.*.attention": "selective"}``: nothing outside of them is recomputed. None: regions
            that the model marks (``torch.utils.checkpoint``); without any, the planner chooses.
        cluster: hardware to plan for when it is not the hardware that runs, ``"h100:8x8"``, the path of a TOML file, or a ``Cluster``.
        memory_limit: per device, bytes or ``"16GiB"``; None: 92 % of the device's memory, as a CUDA context, buffers of NCCL and
            fragmentation take the rest.
        optimizer: the memory model counts its state.
        precision: None: as the model is. ``"bf16-true"``, ``"16-true"``, ``"32-true"``: a copy of the model and all inputs are converted.
            ``"bf16-mixed"``, ``"16-mixed"``: model and loss compute as inside ``torch.autocast``, and parameters stay as they are.
        batchnorm: where a mode cuts the batch, ``"sync"``: statistics of the whole batch, the numbers of one device; ``"local"``: of each
            rank's own rows, as DistributedDataParallel does. Stored statistics then differ by rank, and the first rank's are those of
            ``state_dict()``. Microbatches of a pipeline have statistics of their own: with ``"sync"`` the planner chooses one microbatch;
            ``"local"``, or ``n_microbatches`` above 1, accepts them, with a ``PartitionWarning``.
        inputs: under torchrun, ``"global"``: every rank passes the whole batch; ``"local"``: each data-parallel rank its own rows, as many
            as the others (``DistributedSampler(data, pm.data_parallel_size, pm.data_parallel_rank)``), and gets the results of these.
            Ranks of one replica (tensor, pipeline) pass the same rows. Either way a rank may leave out inputs that its stages do not read.
            A single process passes the rows of all ranks, which is the same for both.
        constraints: decisions that the plan must keep to: ``device_map``, ``split_spec``, ``pin``, ``axes``, ``tp_plan``, ``halo``.
        plan: lower this plan instead of making one. Options of planning beside it, such as ``mode``, must have its values.
        cost_model: prices for the planner; None: an analytic roofline.
        objective: what the best plan is: ``"step_time"``, the shortest step; ``"memory"``, the least memory of the fullest device;
            ``"tokens_per_second_per_device"`` and ``"cost"`` (``Device.price_per_hour``) have the plan of the shortest step, as the number
            of devices is given, and report themselves in ``plan.notes``.
        time_limit: seconds of the search for a plan; what has begun is finished. None: the search ends by limits of work, which are the
            same on every machine. ``plan.prediction.searched`` says how much faster a plan that was left out could be.
        batch_dims: the dimension of the batch of inputs by name, ``{"x": 1, "batch['pos']": None}``, and of the target of ``train_step``,
            ``{"target": 1}``; None: it has no batch. Of all others the batch is found when the model is traced, by its size, and of the
            target from the model's results.
        reduce_dtype: type in which gradients of parameters are summed over ranks, ``"bfloat16"``, ``"float16"`` or ``"float32"``, as in
            FSDP2's ``MixedPrecisionPolicy``; None: that of the parameters, which is float32 in mixed precision.
        progress: show progress, also of lowering later on; None: on a terminal. Ctrl-C then stops the search and keeps the best plan.

    Returns:
        The partitioned model; see ``PartitionedModel``.

    Raises:
        TraceError: the model cannot be made one graph.
        ConfigError: an argument, or a combination, does not fit.
        InfeasiblePlanError: nothing fits the memory; says what would.
    """


check_shadowed_packages()
