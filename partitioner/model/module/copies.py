"""Copies of a partitioned model: by ``copy.deepcopy``, ``pickle`` and ``torch.save``.

deepcopy    the same traces and plan; values are copied, gradients not, as by ``nn.Parameter``; programs are lowered again when used
pickle      the model with the present values, the example, modes and plan; the model is traced again when it is loaded
            with one rank a process: each process writes its own part, for the same rank to load
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from partitioner.options.devices import resolve_devices
from partitioner.options.given_plan import check_fits, plan_on
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.runtime import torchrun
from partitioner.runtime.base import Runtime
from partitioner.runtime.embedded import EmbeddedRuntime
from partitioner.runtime.state.gather import GatheredState
from partitioner.runtime.state.parameters import State
from partitioner.specialize.make_trace import first_trace, traced
from partitioner.specialize.trace import Assumptions, Trace, Tracing
from partitioner.tracing.restore import Structure
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.normalize.specialize_batch import fixed_for


def copied_trace(trace: Trace) -> Trace:
    """Return the same trace and plan with tensors of its own, which have the values of the model. Every rank must call it."""
    runtime = _new_runtime(trace.runtime.devices, _processes(trace.runtime))
    with trace.tracing.structure.restored():
        return first_trace(trace.original, trace.graph, trace.plan, runtime, trace.assumed, trace.tracing, {})


def _new_runtime(devices: Sequence[torch.device], processes: Sequence[int] | None) -> Runtime:
    """Return a runtime of all ranks in this process, ``processes`` is None, or of one of them."""
    return EmbeddedRuntime(devices) if processes is None else torchrun.TorchrunRuntime(devices, processes=processes)


def _processes(runtime: Runtime) -> tuple[int, ...] | None:
    """Return the number of the process of each rank; None if all ranks are in this one."""
    return None if runtime.members is None else runtime.members.processes


def copy_tensors(source: State, target: State) -> None:
    """Copy values and ``requires_grad`` of the tensors of this process into those of a model of the same plan."""
    for old, new in _pairs(source, target):
        target.copy_into(new, old)
    for one, other in zip(source.stored_parameters(), target.stored_parameters(), strict=True):
        other.parameter.requires_grad_(one.parameter.requires_grad)
    for old, new in zip(source.stand_in, target.stand_in, strict=True):
        new.requires_grad_(old.requires_grad)


def _pairs(source: State, target: State) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter and buffer of this process, with the one in the same place of another model."""
    for one, other in zip(source.stored_parameters(), target.stored_parameters(), strict=True):
        yield one.parameter, other.parameter
    for placeholder in source.graph.buffers:
        for rank, tensors in source.copies.items():
            if placeholder in tensors:
                yield tensors[placeholder], target.copies[rank][placeholder]


# -- pickles -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pickled:
    """Contents of a pickle of a partitioned model.

    Attributes:
        model: of one process: with the present values; else as it was partitioned.
        tracing: how it is traced.
        plan: by which it is lowered.
        cluster, cost_model, optimizer: what it was planned for; see ``Assumptions``.
        request: to the planner, with the mesh and sequential tiles; None: the caller passed the plan.
        ranks: of the process.
        processes: the number of the process of each rank, if they are not all processes in order; else None.
        tensors: parameters and buffers of the process in order, if the model does not have their values.
        frozen: for each parameter of the process, in order, whether it is frozen; last the stand-in.
    """

    model: nn.Module
    tracing: Tracing
    plan: Plan
    cluster: Cluster
    cost_model: CostModel | None
    optimizer: str
    request: tuple[PlanRequest, Mesh | None, int | tuple[int, ...] | None] | None
    ranks: tuple[int, ...]
    processes: tuple[int, ...] | None
    tensors: tuple[Tensor, ...] | None
    frozen: tuple[bool, ...]


def pickled(trace: Trace) -> Pickled:
    """Return the contents of a pickle of a trace."""
    state, assumed, problem = trace.state, trace.assumed, trace.assumed.problem
    has_values = not any(tensor.is_meta for tensor in _tensors(trace.original))
    is_one_process = len(trace.runtime.local_ranks) == trace.runtime.n_ranks
    puts_into_model, processes = is_one_process and has_values, _processes(trace.runtime)
    shared = {id(tensor): tensor for tensor in _tensors(trace.original)}
    with trace.tracing.structure.restored():
        model = _with_values(trace) if puts_into_model else copy.deepcopy(trace.original, shared)
    return Pickled(
        model=model,
        tracing=replace(trace.tracing, structure=Structure(model)),
        plan=trace.plan,
        cluster=assumed.cluster,
        cost_model=assumed.cost_model,
        optimizer=assumed.optimizer,
        request=None if problem is None else (problem.request, problem.mesh, problem.sequential_tiles),
        ranks=tuple(trace.runtime.local_ranks),
        processes=processes if processes is not None and processes != tuple(range(torchrun.world_size())) else None,
        tensors=None if puts_into_model else tuple(old.detach() for old, _ in _pairs(state, state)),
        frozen=tuple(not parameter.requires_grad for parameter in _with_stand_in(state)),
    )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _with_values(trace: Trace) -> nn.Module:
    """Return a copy of the model, on its device, with the values of the partitioned model."""
    model, state = trace.original, trace.state
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [name for name in named if state.knows(name)]
    values = GatheredState(state, trace.runtime).whole(dict.fromkeys(map(state.first_name, names)))
    memo: dict[int, Any] = {}
    for name in names:
        tensor, value = named[name], values[state.first_name(name)].to(named[name].device)
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    return copy.deepcopy(model, memo)


def restored_trace(saved: Pickled) -> Trace:
    """Trace the model of a pickle, and lower it by its plan. With one rank a process, every rank must call it.

    Raises:
        ConfigError: the devices are not those of the plan, or the pickle is that of another rank.
    """
    members = torchrun.arrive(saved.processes).members if torchrun.is_launched() else None
    devices = resolve_devices(list(saved.plan.devices), None if members is None else members.size).devices
    plan = plan_on(saved.plan, devices)
    runtime = _new_runtime(devices, None if members is None else members.processes)
    if saved.tensors is not None and tuple(runtime.local_ranks) != saved.ranks:
        raise ConfigError(
            f"this is the pickle of rank {', '.join(map(str, saved.ranks))} of {plan.n_ranks}, which has its own part of the model, and "
            f"this process has rank {', '.join(map(str, runtime.local_ranks))}",
            remedy="let every rank load the file that it saved; for any number of processes, save pm.full_state_dict(), or "
            "pm.sharded_state_dict() with torch.distributed.checkpoint",
        )
    graph = traced(saved.model, saved.tracing)
    check_fits(plan, graph)
    problem = None if saved.request is None else PlanProblem(graph, saved.cluster, saved.request[0], saved.cost_model, *saved.request[1:])
    assumed = Assumptions(saved.cluster, saved.cost_model, saved.optimizer, problem)
    return first_trace(saved.model, fixed_for(graph, plan), plan, runtime, assumed, saved.tracing, {})


def fill(trace: Trace, saved: Pickled) -> None:
    """Give the tensors of a restored trace the values and flags of the pickle."""
    state = trace.state
    if saved.tensors is not None:
        for (_, held), value in zip(_pairs(state, state), saved.tensors, strict=True):
            state.copy_into(held, value)
    for parameter, is_frozen in zip(_with_stand_in(state), saved.frozen, strict=True):
        parameter.requires_grad_(not is_frozen)


def _with_stand_in(state: State) -> list[nn.Parameter]:
    """Return the parameters of this process, and the one for an optimizer that has none."""
    return [*(stored.parameter for stored in state.stored_parameters()), *state.stand_in]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return every parameter and buffer of a module in this process."""
    return [*module.parameters(), *module.buffers()]
