"""``pm.replan(devices=...)``: another plan for the same model on other devices or hardware, and the tensors that move for it.

old plan, 4 devices  ──>  new plan, 2 devices  ──>  moves: parameters, buffers, optimizer state, by rank
        │                        │
    checkpoint  ────────────>  partition(model, 2, plan=replanned.plan)        the checkpoint is the same for all plans
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_models.hardware.clusters import Cluster
from cost_models.memory.optimizer_state import training_bytes
from partitioner.options.arguments import read_cluster
from partitioner.options.constraints import Constraints
from partitioner.options.devices import hardware_of, resolve_devices
from partitioner.options.mode import dimensions_of_one, ranks_of_stages, resolve_mode
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.describe import words_of
from partitioner.reports.tables.moved import moved_text
from partitioner.runtime.state.resharding_moves import Moves, TensorBytes, moves_between
from partitioner.specialize.programs import first_variant
from partitioner.specialize.shard_holders import PlanCuts
from partitioner.specialize.trace import Trace
from passes.ir.errors import ConfigError
from passes.ir.mesh import STAGES
from passes.ir.plan import Plan
from passes.normalize.specialize_batch import fixed_for

__all__ = ["Replanned", "replan"]


@dataclass(frozen=True)
class Replanned:
    """A new plan, and the tensors that move for it. Printed, a table of the ranks.

    Attributes:
        before: the old plan.
        plan: the new one: ``partition(model, devices, plan=replanned.plan)`` lowers it.
        moves: the elements that each rank needs and does not have.
    """

    before: Plan
    plan: Plan
    moves: Moves

    def __str__(self) -> str:
        return moved_text(words_of(self.before), words_of(self.plan), self.plan, self.moves)


def replan(
    trace: Trace,
    devices: int | Sequence[str | torch.device] | Cluster | None,
    mode: str | Mapping[str, int | Sequence[int]],
    *,
    cluster: Cluster | str | None,
    memory_limit: int | str | None,
    survivors: Sequence[int | None] | None,
    constraints: Constraints | None,
) -> Replanned:
    """Make the new plan, and list the moves; see ``PartitionedModel.replan``."""
    graph = trace.graph
    new_devices, hardware = _new_devices(trace, devices, cluster)
    mesh = resolve_mode(mode, len(new_devices))
    given = trace.assumed.problem.request if trace.assumed.problem is not None else None
    request = PlanRequest(
        mode=next((name for name in mesh.names if name in STAGES), "model") if mesh is not None else "auto",
        devices=tuple(map(str, new_devices)),
        replicas=ranks_of_stages(mode),
        recompute=given.recompute if given is not None else None,
        patterns=given.patterns if given is not None else (),
        memory_limit=memory_limit,
        optimizer=trace.assumed.optimizer,
        constraints=(constraints or Constraints()).without_dimensions(dimensions_of_one(mode)),
        modules=frozenset(name for name, _ in trace.original.named_modules()),
        batchnorm=trace.plan.batchnorm,
        reduce_dtype=trace.plan.reduce_dtype,
    )
    plan = PlanProblem(graph, hardware, request, trace.assumed.cost_model, mesh).solve()
    fixed = fixed_for(graph, plan)
    variant = dataclasses.replace(first_variant(fixed, plan), batch_size=None)  # ranks hold the same tensors for every batch size
    after = PlanCuts(fixed, plan, lambda _rows: fixed).holdings(variant, new_devices)
    names = {**graph.parameters, **graph.buffers}
    sizes = {node.name: _element_bytes(node.meta["val"], trace.assumed.optimizer) for node in graph.graph.nodes if node.name in names}
    old_ranks = _old_ranks(survivors, trace.plan.n_ranks, len(new_devices))
    moves = moves_between(trace.state.blocks, {name: after[name] for name in sizes}, sizes, old_ranks, len(new_devices))
    renamed = tuple(dataclasses.replace(move, name=names[move.name]) for move in moves.moves)
    return Replanned(trace.plan, plan, dataclasses.replace(moves, moves=renamed))


def _new_devices(
    trace: Trace, devices: int | Sequence[str | torch.device] | Cluster | None, cluster: Cluster | str | None
) -> tuple[tuple[torch.device, ...], Cluster]:
    """Return the device of each new rank, and the hardware to plan for."""
    present = tuple(trace.state.devices)
    if devices is None:
        new_devices = present
    elif isinstance(devices, int) and not isinstance(devices, bool) and devices > 0 and len(set(present)) == 1:
        new_devices = present[:1] * devices
    else:
        new_devices = resolve_devices(devices, None).devices
    cluster = read_cluster(cluster)
    hardware = cluster or (devices if isinstance(devices, Cluster) else None) or trace.assumed.cluster
    count = len(new_devices)
    if len(hardware.devices) < count:
        if cluster is not None or isinstance(devices, Cluster):
            problem = f"{count} devices were asked for and the cluster has {len(hardware.devices)}"
            raise ConfigError(problem, remedy="pass a cluster with as many")
        hardware = hardware_of(new_devices)
    return new_devices, hardware.first(count)


def _old_ranks(survivors: Sequence[int | None] | None, n_old: int, n_new: int) -> tuple[int | None, ...]:
    """Return, for each new rank, the old rank whose memory it has, or None; without ``survivors`` ranks keep their numbers."""
    if survivors is None:
        return tuple(rank if rank < n_old else None for rank in range(n_new))
    old = [rank for rank in survivors if rank is not None]
    if len(survivors) != n_new or len(set(old)) < len(old) or not set(old) <= set(range(n_old)):
        raise ConfigError(
            f"survivors={list(survivors)!r} does not name, for each of {n_new} new ranks, "
            f"another of the old ranks 0 to {n_old - 1}, or None",
            remedy=f"survivors=[{', '.join(str(rank) if rank < n_old else 'None' for rank in range(n_new))}] keeps the numbers",
        )
    return tuple(survivors)


def _element_bytes(value: Tensor, optimizer: str) -> TensorBytes:
    """Return the bytes of one element of a tensor, and of the optimizer state for it."""
    size = value.element_size()
    return TensorBytes(size, training_bytes(size, value.dtype, optimizer) if value.requires_grad else 0)
