"""Partition a model: read the arguments, trace, plan, lower."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.profiling.op_times import MeasuredCosts
from partitioner.model.partitioned_model import PartitionedModel
from partitioner.options.arguments import EXAMPLES, VALUES, positional, read_cluster
from partitioner.options.batch_rows import Inputs, RowParts
from partitioner.options.batch_statistics import check_values_per_channel, warn_of_microbatches
from partitioner.options.checked_costs import checked_costs
from partitioner.options.constraints import Constraints
from partitioner.options.device_mesh import check_plan_on, mode_on, processes_of
from partitioner.options.devices import DevicesArgument, Placement, hardware_of, implied_devices, resolve_devices
from partitioner.options.given_plan import check_fits, check_options, plan_on
from partitioner.options.mode import dimensions_of_one, ranks_of_stages, resolve_mode, sequential_tiles
from partitioner.options.precision import autocast_of, check_scaler, converted_inputs, converted_model, read_reduce_dtype, true_dtype
from partitioner.options.progress import Progress
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest, recompute_fields
from partitioner.planner.search.plan_mesh import stages_mode
from partitioner.planner.sharding.replicated_work import warn_of_replicated_work
from partitioner.reports.explain.step_memory import warn_of_calls
from partitioner.runtime import torchrun
from partitioner.runtime.base import Runtime
from partitioner.runtime.embedded import EmbeddedRuntime
from partitioner.runtime.state.hooks import TensorHooks, side_effect_note, tensor_hooks
from partitioner.schedules.registered import microbatches_of, read_schedule
from partitioner.specialize.make_trace import first_trace, modes_of_trace
from partitioner.specialize.programs import variant_for
from partitioner.specialize.simulate_plan import Traced, simulate_plan
from partitioner.specialize.trace import Assumptions, Tracing
from partitioner.tracing.inputs.batch_dims import BatchDims
from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.outputs import REPEATED_WRITES
from partitioner.tracing.restore import Structure
from partitioner.tracing.traced_model import trace_model
from passes.graph.equivalence import graph_digest
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.arguments.checked import checked_arguments
from passes.ir.errors import PartitionWarning, level_of_caller
from passes.ir.graph import Autocast, ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.schedule import Schedule


@checked_arguments(VALUES, EXAMPLES)
@gc_paused()
def partition(
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
    """Partition a model: ``partitioner.partition``, which imports this module when it is first called."""
    mode = mode_on(devices, mode) if isinstance(devices, DeviceMesh) and plan is None else mode
    target = _resolve_target(devices, mode, cluster, inputs, plan)
    request = None
    if plan is None:
        decisions = PlanRequest(
            mode="auto" if target.mesh is None else stages_mode(target.mesh, n_microbatches),
            devices=tuple(map(str, target.devices)),
            n_microbatches=microbatches_of(schedule, n_microbatches),
            schedule=None if schedule is None else read_schedule(schedule),
            stages_per_rank=stages_per_device,
            **recompute_fields(recompute),
            memory_limit=memory_limit,
            optimizer=optimizer,
            batchnorm=batchnorm,
            reduce_dtype=read_reduce_dtype(reduce_dtype),
            objective=objective,
            time_limit=time_limit,
        )
        request = _of_model(decisions, model, mode, constraints).checked()
    else:
        of_stages = {"n_microbatches": n_microbatches, "schedule": schedule, "stages_per_device": stages_per_device, "recompute": recompute}
        of_values = {"memory_limit": memory_limit, "batchnorm": batchnorm, "reduce_dtype": reduce_dtype, "constraints": constraints}
        check_options(plan, mode, {**of_stages, **of_values, "objective": objective, "time_limit": time_limit})
    cost_model, steps = checked_costs(cost_model), Progress("partition", 2 if request is None else 3, progress)
    source = _convert_source(model, positional(example_inputs), example_kwargs, precision, batch_dims)
    graph = _trace_source(source, training, autocast_of(precision, source.model, target.hardware), steps)
    runtime = _start_runtime(source, graph, target)
    problem = None if request is None else PlanProblem(graph, target.hardware, request, cost_model, target.mesh, target.sequential_tiles)
    plan = _agree_on_plan(_make_plan(problem, source, runtime, steps) if problem is not None else target.plan, graph, runtime, precision)
    with steps.step("lowering"):
        tracing, assumed = _tracing(source, training, graph, target), Assumptions(target.hardware, cost_model, optimizer, problem, progress)
        _warn_of_plan(plan, assumed.limits, source, runtime)
        return PartitionedModel(first_trace(source.model, graph, plan, runtime, assumed, tracing, source.hooks))


@dataclasses.dataclass(frozen=True)
class _Target:
    """Devices of the model.

    Attributes:
        devices: one for each rank.
        world_size: the number of processes of the model; None: this is the only one.
        processes: the number of the process of each rank; None: all processes in order.
        hardware: to plan for.
        mesh: of the ranks; None: the planner chooses it.
        sequential_tiles: number or grid of the tiles that one device computes one after the other; None in any other mode.
        inputs: whether processes pass the whole batch or their own rows.
        plan: the plan that the caller passed, on these devices.
    """

    devices: tuple[torch.device, ...]
    world_size: int | None
    processes: tuple[int, ...] | None
    hardware: Cluster
    mesh: Mesh | None
    sequential_tiles: int | tuple[int, ...] | None
    inputs: Inputs
    plan: Plan | None


@dataclasses.dataclass(frozen=True)
class _Source:
    """The model and the example of a call, in their final precision.

    Attributes:
        model: the caller's, or a converted copy of it.
        hooks: of its parameters.
        dtype: inputs are converted to it; None: nothing is converted.
        args, kwargs: the example of a call; None: taken from the model.
        batch_dims: the batch dimension of inputs and target, by name.
    """

    model: nn.Module
    hooks: TensorHooks
    dtype: torch.dtype | None
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any] | None
    batch_dims: BatchDims | None


def _of_model(
    request: PlanRequest, model: nn.Module, mode: str | Mapping[str, int | Sequence[int]], constraints: Constraints | None
) -> PlanRequest:
    """Return a request with what depends on the model: constraints that concern it and the mode, and the names of its modules."""
    concerning = (constraints or Constraints()).without_dimensions(dimensions_of_one(mode)).without_patterns_of_no_module(model)
    modules = frozenset(name for name, _ in model.named_modules())
    return dataclasses.replace(request, replicas=ranks_of_stages(mode), constraints=concerning, modules=modules)


def _resolve_target(
    devices: DevicesArgument, mode: str | Mapping[str, int | Sequence[int]], cluster: Cluster | str | None, inputs: str, plan: Plan | None
) -> _Target:
    """Find the ranks and their mesh: those of the plan, if the caller passes one."""
    world_size, local_world_size = _join_processes(devices)  # first: a process that dies later is reported
    if devices is None and world_size is None:
        devices = implied_devices(cluster, mode, plan)
    placement = resolve_devices(devices, world_size, local_world_size)
    hardware = _hardware(cluster, placement, plan)
    n_ranks = len(placement.devices)
    if plan is None:
        tiles = sequential_tiles(mode, n_ranks)
        mesh = resolve_mode("model" if tiles is not None else mode, n_ranks)
    else:
        plan = plan_on(plan, placement.devices)
        tiles, mesh = None, plan.grid
        if isinstance(devices, DeviceMesh):
            check_plan_on(devices, plan)
    return _Target(placement.devices, world_size, placement.processes, hardware, mesh, tiles, _passed_inputs(inputs, world_size), plan)


def _join_processes(devices: DevicesArgument) -> tuple[int | None, int | None]:
    """Announce this process to the others of the model; return their number, and that of the processes on this machine.

    ``(None, None)`` if it is the only one.
    """
    if not torchrun.is_launched():
        return None, None
    processes = processes_of(devices) if isinstance(devices, DeviceMesh) else None
    session = torchrun.arrive(processes)
    return (None, None) if session.members.size == 1 else (session.members.size, torchrun.local_world_size())


def _hardware(cluster: Cluster | str | None, placement: Placement, plan: Plan | None) -> Cluster:
    """Return the hardware to plan for. It needs a device for each rank, unless the caller passes a plan."""
    hardware = read_cluster(cluster) or placement.cluster or hardware_of(placement.devices)
    if plan is None:
        hardware.first(len(placement.devices))  # raises ConfigError if there are fewer
    return hardware


def _passed_inputs(inputs: str, world_size: int | None) -> Inputs:
    """Return the rows that processes pass: a single process has the rows of all, so that ``"local"`` is ``"global"`` there."""
    return "global" if world_size is None else cast(Inputs, inputs)


def _convert_source(
    model: nn.Module, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None, precision: str | None, batch_dims: BatchDims | None
) -> _Source:
    """Convert the model and the example of a call, if the precision is a dtype of everything. Hooks are those of the original."""
    dtype, hooks = true_dtype(precision), tensor_hooks(model)
    if dtype is None:
        return _Source(model, hooks, None, args, kwargs, batch_dims)
    model = converted_model(model, dtype)
    example = find_example_inputs(model) if args is None and kwargs is None else (args or (), dict(kwargs or {}))
    args, kwargs = converted_inputs(example, dtype)
    return _Source(model, hooks, dtype, args, kwargs, batch_dims)


def _trace_source(source: _Source, training: bool | None, autocast: Autocast | None, steps: Progress) -> ModelGraph:
    """Trace the model; warn of buffers written under checkpoints, and of side effects of its hooks, also noted in the graph."""
    with steps.step("tracing"):
        graph = trace_model(source.model, source.args, source.kwargs, training, autocast, batch_dims=source.batch_dims).graph
    for each in graph.notes:
        if each.endswith(REPEATED_WRITES):
            warnings.warn(PartitionWarning(each), stacklevel=level_of_caller())
    note = side_effect_note(source.model)
    if note is None:
        return graph
    warnings.warn(note, stacklevel=level_of_caller())
    return dataclasses.replace(graph, notes=(*graph.notes, note))


def _tracing(source: _Source, training: bool | None, graph: ModelGraph, target: _Target) -> Tracing:
    """Return how the model was traced, for traces of other batches and modes."""
    traced = (
        source.args,
        source.kwargs,
        modes_of_trace(source.model, training),
        graph.autocast,
        target.inputs,
        source.dtype,
        Structure(source.model),
    )
    return Tracing(*traced, batch_dims=source.batch_dims or {})


def _start_runtime(source: _Source, graph: ModelGraph, target: _Target) -> Runtime:
    """Start the runtime of the target; raise ConfigError in all processes if their models or batches differ."""
    runtime: Runtime
    if target.world_size is None:
        runtime = EmbeddedRuntime(target.devices)
    else:
        runtime = torchrun.TorchrunRuntime(target.devices, processes=target.processes)
    if len(runtime.local_ranks) < runtime.n_ranks:
        runtime.agree("model", f"{type(source.model).__name__} for {graph.batch_size} rows (graph {graph_digest(graph)})")
    return runtime


def _make_plan(problem: PlanProblem, source: _Source, runtime: Runtime, steps: Progress) -> Plan:
    """Solve the planning problem. By measured times, or by the clock, processes would plan differently: all take the first rank's plan."""
    traced = Traced(source.model, problem.graph, source.args, source.kwargs, source.batch_dims)
    machine = (problem.cluster, problem.cost_model or Roofline(), problem.request.optimizer)
    is_alone = len(runtime.local_ranks) == runtime.n_ranks
    with steps.step("planning"):
        # Only a search that reports progress can be interrupted, and after an interruption the plans of processes would differ.
        tell = steps.tell if steps.is_shown and is_alone else None
        plan = problem.solve(tell, lambda plan: simulate_plan(traced, plan, *machine))
    if is_alone or not (isinstance(problem.cost_model, MeasuredCosts) or problem.request.time_limit is not None):
        return plan
    is_first = 0 in runtime.local_ranks
    text = runtime.agree("plan of the first rank", plan.to_json() if is_first else None)
    return plan if is_first or text is None else Plan.from_json(text)


def _agree_on_plan(plan: Plan | None, graph: ModelGraph, runtime: Runtime, precision: str | None) -> Plan:
    """Return the plan; raise ConfigError in all processes if their plans differ, or if it does not fit this model and precision."""
    assert plan is not None
    runtime.agree("plan", plan.hash)
    check_fits(plan, graph)
    _check_numbers(graph, plan, runtime, precision)
    return plan


def _warn_of_plan(plan: Plan, limits: Sequence[float], source: _Source, runtime: Runtime) -> None:
    """Warn, in the process of rank 0, of work that ranks which share the batch replicate, and of calls that need more memory than steps."""
    if 0 in runtime.local_ranks:
        warn_of_replicated_work(plan)
        warn_of_calls(plan, limits, source.model)


def _check_numbers(graph: ModelGraph, plan: Plan, runtime: Runtime, precision: str | None) -> None:
    """Refuse a GradScaler that would skip steps by process, and BatchNorm over single values; warn if microbatches change numbers."""
    is_alone = len(runtime.local_ranks) == runtime.n_ranks
    check_scaler(precision, plan.grid, None if is_alone else runtime.n_ranks)
    rows = RowParts(plan.grid)
    count, _ = variant_for(graph, plan, rows, plan.batch_size)
    check_values_per_channel(graph, plan, rows, plan.batch_size, count)
    if 0 in runtime.local_ranks:
        warn_of_microbatches(graph, plan)
