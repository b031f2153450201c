"""``pm.replan(devices=...)``: another plan for the same model, where devices, their memory or the hardware changed, and what moves for it.

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
from partitioner.lowering.shard_holders import PlanCuts
from partitioner.lowering.variants import first_variant
from partitioner.model.session import Session
from partitioner.options.arguments import read_cluster
from partitioner.options.constraints import Constraints
from partitioner.options.devices import hardware_of, resolve_devices
from partitioner.options.mode import dimensions_of_one, ranks_of_stages, resolve_mode
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.describe import words_of
from partitioner.reports.tables.moved import moved_text
from partitioner.runtime.state.resharding_moves import Moves, TensorBytes, moves_between
from passes.ir.errors import ConfigError
from passes.ir.mesh import STAGES
from passes.ir.plan import Plan
from passes.normalize.specialize_batch import fixed_for

__all__ = ["Replanned", "replan"]


@dataclass(frozen=True)
class Replanned:
    """Another plan, and what moves for it. Printed, a table of the ranks.

    Attributes:
        before: the old plan.
        plan: the new one: ``partition(model, devices, plan=replanned.plan)`` lowers it.
        moves: what ranks are to hold and do not.
    """

    before: Plan
    plan: Plan
    moves: Moves

    def __str__(self) -> str:
        return moved_text(words_of(self.before), words_of(self.plan), self.plan, self.moves)


def replan(
    session: Session,
    devices: int | Sequence[str | torch.device] | Cluster | None,
    mode: str | Mapping[str, int | Sequence[int]],
    *,
    cluster: Cluster | str | None,
    memory_limit: int | str | None,
    survivors: Sequence[int | None] | None,
    constraints: Constraints | None,
) -> Replanned:
    """Another plan, and what moves for it; see ``PartitionedModel.replan``."""
    graph = session.graph
    places, hardware = _places(session, devices, cluster)
    mesh = resolve_mode(mode, len(places))
    request = PlanRequest(
        mode=next((name for name in mesh.names if name in STAGES), "model") if mesh is not None else "auto",
        devices=tuple(map(str, places)),
        replicas=ranks_of_stages(mode),
        memory_limit=memory_limit,
        optimizer=session.assumed.optimizer,
        constraints=(constraints or Constraints()).without_dimensions(dimensions_of_one(mode)),
        modules=frozenset(name for name, _ in session.original.named_modules()),
        batchnorm=session.plan.batchnorm,
    )
    plan = PlanProblem(graph, hardware, request, session.assumed.cost_model, mesh).solve()
    fixed = fixed_for(graph, plan)
    variant = dataclasses.replace(first_variant(fixed, plan), batch_size=None)  # stages read the same at every size
    after = PlanCuts(fixed, plan, lambda _rows: fixed).holdings(variant, places)
    names = {**graph.parameters, **graph.buffers}
    sizes = {node.name: _sizes(node.meta["val"], session.assumed.optimizer) for node in graph.graph.nodes if node.name in names}
    left = _survivors(survivors, session.plan.n_ranks, len(places))
    moves = moves_between(session.state.blocks, {name: after[name] for name in sizes}, sizes, left, len(places))
    told = tuple(dataclasses.replace(move, name=names[move.name]) for move in moves.moves)
    return Replanned(session.plan, plan, dataclasses.replace(moves, moves=told))


def _places(
    session: Session, devices: int | Sequence[str | torch.device] | Cluster | None, cluster: Cluster | str | None
) -> tuple[tuple[torch.device, ...], Cluster]:
    """Where the ranks would run, and the hardware."""
    now = tuple(session.state.devices)
    if devices is None:
        places = now
    elif isinstance(devices, int) and not isinstance(devices, bool) and devices > 0 and len(set(now)) == 1:
        places = now[:1] * devices
    else:
        places = resolve_devices(devices, None).devices
    cluster = read_cluster(cluster)
    described = cluster or (devices if isinstance(devices, Cluster) else None) or session.assumed.cluster
    if len(described.devices) < len(places):
        if cluster is not None or isinstance(devices, Cluster):
            raise ConfigError(
                f"{len(places)} devices were asked for and the cluster has {len(described.devices)}", remedy="pass a cluster with as many"
            )
        described = hardware_of(places)
    return places, described.first(len(places))


def _survivors(given: Sequence[int | None] | None, before: int, after: int) -> tuple[int | None, ...]:
    if given is None:
        return tuple(rank if rank < before else None for rank in range(after))
    old = [rank for rank in given if rank is not None]
    if len(given) != after or len(set(old)) < len(old) or not set(old) <= set(range(before)):
        raise ConfigError(
            f"survivors={list(given)!r} does not name, for each of {after} new ranks, another of the old ranks 0 to {before - 1}, or None",
            remedy=f"survivors=[{', '.join(str(rank) if rank < before else 'None' for rank in range(after))}] keeps the numbers",
        )
    return tuple(given)


def _sizes(value: Tensor, optimizer: str) -> TensorBytes:
    size = value.element_size()
    return TensorBytes(size, training_bytes(size, value.dtype, optimizer) if value.requires_grad else 0)
