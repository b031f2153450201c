"""The one call: ``partition(model, devices=4, mode="pipeline")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cost_models.cost_model import CostModel
from cost_models.hardware import Cluster
from partitioner.constraints import Constraints
from partitioner.devices import DevicesArgument, Placement, hardware_of, resolve_devices
from partitioner.lowering import Lowering
from partitioner.model import PartitionedModel
from partitioner.planner.make_plan import make_plan
from partitioner.planner.plan_request import PlanRequest
from partitioner.progress import Progress
from partitioner.runtime import torchrun
from partitioner.runtime.embedded import EmbeddedRuntime
from partitioner.runtime.runtime import Runtime
from partitioner.state import materialize
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.loss_totals import with_totals
from passes.stages import split_stages

__all__ = ["partition"]

LATER_MODES = ("data", "fsdp", "zero1", "zero2", "tensor", "sequence", "tile")
"""Modes that are named already and come in a later version."""

_SHORT_NAMES = {"dp": "data", "pp": "pipeline", "tp": "tensor", "sp": "sequence"}


def partition(
    model: nn.Module,
    devices: DevicesArgument = None,
    mode: str | Mapping[str, int] = "auto",
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool | None = None,
    n_microbatches: int | None = None,
    schedule: str | None = None,
    stages_per_device: int | None = None,
    recompute: str | None = None,
    cluster: Cluster | str | None = None,
    memory_limit: int | str | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    batchnorm: str = "sync",
    inputs: str = "global",
    constraints: Constraints | None = None,
    plan: Plan | None = None,
    cost_model: CostModel | None = None,
    progress: bool | None = None,
) -> PartitionedModel:
    """Partition a model over devices: trace, plan, lower. The model is not changed.

    Args:
        model: any module that ``torch.export`` traces.
        devices: how many ranks, or where each runs; None takes all visible accelerators.
        mode: ``"model"`` (layers on devices), ``"pipeline"`` (stages, microbatches, a schedule), ``"auto"`` (the better of the two),
            or a mesh ``{"pipeline": 4}``.
        example_inputs: positional inputs of one call, the whole batch. None: taken from the model where it tells them.
        example_kwargs: keyword inputs of one call.
        training: trace in training or evaluation mode; None keeps the model's.
        n_microbatches: microbatches a step; None lets the planner choose.
        schedule: ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"ZB1P"``, ``"ZBV"``, ``"DualPipeV"``; None lets the planner choose.
        stages_per_device: stages that each device runs; None: as the schedule wants.
        recompute: ``"none"``, ``"selective"`` or ``"full"``: what the backward computes again to save memory. None: the planner chooses.
        cluster: hardware to plan for when it is not the hardware that runs, ``"h100:8x8"`` or a ``Cluster``.
        memory_limit: per device, bytes or ``"16GiB"``.
        optimizer: whose state the memory model counts.
        precision: None, as the model is; other precisions come in a later version.
        batchnorm: how BatchNorm under a cut batch counts; modes that cut the batch come in a later version.
        inputs: ``"global"``: every rank passes the whole batch.
        constraints: what is decided already: ``device_map``, ``split_spec``, ``pin``.
        plan: lower this plan instead of making one.
        cost_model: prices for the planner; None: an analytic roofline.
        progress: show progress; None: on a terminal.

    Returns:
        The partitioned model; see ``PartitionedModel``.

    Raises:
        TraceError: the model cannot be made one graph.
        ConfigError: an argument, or a combination, does not fit.
        InfeasiblePlanError: nothing fits the memory; says what would.
    """
    world_size = torchrun.world_size() if torchrun.is_launched() else None
    placement = resolve_devices(devices, world_size)
    mode = _pipeline_mode(mode, len(placement.devices))
    _check_later(precision, batchnorm, inputs)
    steps = Progress("partition", 3 if plan is None else 2, progress)
    with steps.step("tracing"):
        graph = trace(model, example_inputs, example_kwargs, training)
    if plan is None:
        request = PlanRequest(
            mode=mode,
            devices=tuple(str(device) for device in placement.devices),
            n_microbatches=n_microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_device,
            recompute=recompute,
            memory_limit=memory_limit,
            optimizer=optimizer,
            constraints=constraints or Constraints(),
            modules=frozenset(name for name, _ in model.named_modules()),
        )
        with steps.step("planning"):
            plan = make_plan(graph, _hardware(cluster, placement), request, cost_model)
    elif plan.n_ranks != len(placement.devices):
        raise ConfigError(
            f"the plan is for {plan.n_ranks} devices and {len(placement.devices)} were given", remedy=f"pass devices={plan.n_ranks}"
        )
    runtime: Runtime
    runtime = EmbeddedRuntime(placement.devices) if world_size is None else torchrun.TorchrunRuntime(placement.devices)
    runtime.agree("plan", plan.hash)
    with steps.step("lowering"):
        return _lower(model, graph, plan, runtime, example_inputs, example_kwargs)


def _lower(
    model: nn.Module,
    graph: ModelGraph,
    plan: Plan,
    runtime: Runtime,
    example_inputs: tuple[Any, ...] | None,
    example_kwargs: Mapping[str, Any] | None,
) -> PartitionedModel:
    of_stages = [runtime.devices[stage.rank] for stage in plan.stages]
    stages = split_stages(graph, [stage.first_node for stage in plan.stages], of_stages)
    state = materialize(model, graph, stages, plan.stage_rank, runtime.devices, runtime.local_ranks)
    trainable = frozenset(placeholder for placeholder, name in graph.parameters.items() if model.get_parameter(name).requires_grad)

    def lowering_at(batch_size: int | None, in_parts: bool) -> Lowering:
        fixed = batch_size is not None and batch_size != graph.batch_size
        traced = trace(model, example_inputs, example_kwargs, graph.training, batch_size) if fixed else graph
        if in_parts:
            traced = with_totals(traced)
        return Lowering(traced, plan, runtime.devices, runtime.local_ranks, state.by_rank, trainable)

    return PartitionedModel(model, graph, plan, runtime, state, lowering_at)


def _hardware(cluster: Cluster | str | None, placement: Placement) -> Cluster:
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster)
    return cluster or placement.cluster or hardware_of(placement.devices)


def _pipeline_mode(mode: str | Mapping[str, int], n_devices: int) -> str:
    """The mode's name; a mesh of one dimension is that mode over all devices."""
    if isinstance(mode, str):
        names = [_SHORT_NAMES.get(mode, mode)]
    else:
        names = [_SHORT_NAMES.get(name, name) for name, size in mode.items() if size != 1] or ["pipeline"]
        size = 1
        for length in mode.values():
            size *= length
        if size != n_devices:
            raise ConfigError(f"the mesh {dict(mode)} has {size} devices and {n_devices} were given", remedy=f"pass devices={size}")
    for name in names:
        if name in LATER_MODES:
            raise ConfigError(f'mode "{name}" is not in this version', remedy='choose "pipeline", "model" or "auto"')
        if name not in ("model", "pipeline", "auto"):
            raise ConfigError(f"there is no mode {name!r}", remedy='choose "pipeline", "model" or "auto"')
    if len(names) > 1:
        raise ConfigError(f"the mesh {dict(mode)} names a dimension twice", remedy='name each once: {"pipeline": 4}')  # type: ignore[arg-type]
    return names[0]


def _check_later(precision: str | None, batchnorm: str, inputs: str) -> None:
    if precision is not None:
        raise ConfigError(
            f"precision={precision!r} is not in this version", remedy="convert the model first: partition(model.bfloat16(), ...)"
        )
    for name, value, now, later in (("batchnorm", batchnorm, "sync", "local"), ("inputs", inputs, "global", "local")):
        if value == later:
            raise ConfigError(
                f'{name}="{later}" is for modes that cut the batch over devices, which are not in this version',
                remedy=f'leave {name}="{now}"',
            )
        if value != now:
            raise ConfigError(f"there is no {name}={value!r}", remedy=f'choose "{now}"')
