"""``pm.replan(devices=...)``: another plan for the same model, where devices, their memory or the hardware changed, and what moves for it.

old plan, 4 devices  ──>  new plan, 2 devices  ──>  moves: parameters, buffers, optimizer state, by rank
        │                        │
    checkpoint  ────────────>  partition(model, 2, plan=replanned.plan)        the checkpoint is the same for all plans
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster
from cost_models.memory.optimizer_state import training_bytes
from partitioner.lowering.shard_holders import PlanCuts
from partitioner.lowering.variants import first_variant
from partitioner.model.simulate import Assumptions
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.options.constraints import Constraints
from partitioner.options.devices import hardware_of, resolve_devices
from partitioner.options.mode import dimensions_of_one, ranks_of_stages, resolve_mode
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.describe import words_of
from partitioner.reports.tables.moved import moved_text
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.resharding_moves import Moves, TensorBytes, moves_between
from passes.ir.checked_arguments import checked_arguments
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
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


class _Planned(Protocol):
    """A partitioned model, as far as another plan is made for it."""

    _graph: ModelGraph
    _plan: Plan
    _state: State
    _assumed: Assumptions
    _original: tuple[nn.Module]


@checked_arguments(VALUES, EXAMPLES)
def replan(
    self: _Planned,
    devices: int | Sequence[str | torch.device] | Cluster | None = None,
    mode: str | Mapping[str, int | Sequence[int]] = "auto",
    *,
    cluster: Cluster | str | None = None,
    memory_limit: int | str | None = None,
    survivors: Sequence[int | None] | None = None,
    constraints: Constraints | None = None,
) -> Replanned:
    """Plan anew where the number of devices, their memory or the hardware changed, and tell what moves. Nothing is moved, and nothing runs.

    Checkpoints are the same for all plans. In one process ``new.load_state_dict(pm.full_state_dict())`` and
    ``new.load_optimizer_state_dict(optimizer, pm.full_optimizer_state_dict(old_optimizer))`` take the training over; where processes are
    started anew, what ``torch.distributed.checkpoint`` saved of ``pm.sharded_state_dict()`` and ``pm.sharded_optimizer_state_dict(...)``.

    Args:
        devices: as ``partition`` takes them; None: as many as now.
        mode: what the new plan is to be; ``"auto"``: the fastest of all.
        cluster: the hardware, if it is not what was planned for. More devices than that had are taken to be those of this machine.
        memory_limit: per device; None: what the devices have.
        survivors: for each new rank, the rank of now whose memory it has, or None for an empty one; an old rank that is not named is
            gone, and what it alone held comes from a checkpoint. None: ranks keep their numbers, and those beyond are new.
        constraints: what is decided already.

    Raises:
        ConfigError: an argument does not fit.
        InfeasiblePlanError: nothing fits the memory; says what would.
    """
    places, hardware = _places(self, devices, cluster)
    mesh = resolve_mode(mode, len(places))
    request = PlanRequest(
        mode=next((name for name in mesh.names if name in STAGES), "model") if mesh is not None else "auto",
        devices=tuple(map(str, places)),
        replicas=ranks_of_stages(mode),
        memory_limit=memory_limit,
        optimizer=self._assumed.optimizer,
        constraints=(constraints or Constraints()).without_dimensions(dimensions_of_one(mode)),
        modules=frozenset(name for name, _ in self._original[0].named_modules()),
        batchnorm=self._plan.batchnorm,
    )
    plan = PlanProblem(self._graph, hardware, request, self._assumed.cost_model, mesh).solve()
    graph = fixed_for(self._graph, plan)
    variant = dataclasses.replace(first_variant(graph, plan), batch_size=None)  # stages read the same at every size
    after = PlanCuts(graph, plan, lambda _rows: graph).holdings(variant, places)
    stored = {*self._graph.parameters, *self._graph.buffers}
    sizes = {name: _sizes(value, self._assumed.optimizer) for name, value in _values(self).items() if name in stored}
    left = _survivors(survivors, self._plan.n_ranks, len(places))
    moves = moves_between(self._state.blocks, {name: after[name] for name in sizes}, sizes, left, len(places))
    names = {**self._graph.parameters, **self._graph.buffers}
    told = tuple(dataclasses.replace(move, name=names[move.name]) for move in moves.moves)
    return Replanned(self._plan, plan, dataclasses.replace(moves, moves=told))


def _places(
    self: _Planned, devices: int | Sequence[str | torch.device] | Cluster | None, cluster: Cluster | str | None
) -> tuple[tuple[torch.device, ...], Cluster]:
    """Where the ranks would run, and the hardware."""
    now = tuple(self._state.devices)
    if devices is None:
        places = now
    elif isinstance(devices, int) and not isinstance(devices, bool) and devices > 0 and len(set(now)) == 1:
        places = now[:1] * devices
    else:
        places = resolve_devices(devices, None).devices
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster)
    described = cluster or (devices if isinstance(devices, Cluster) else None) or self._assumed.cluster
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


def _values(self: _Planned) -> Mapping[str, Tensor]:
    """Placeholder -> what the graph says of it."""
    return {node.name: node.meta["val"] for node in self._graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)}


def _sizes(value: Tensor, optimizer: str) -> TensorBytes:
    size = value.element_size()
    return TensorBytes(size, training_bytes(size, value.dtype, optimizer) if value.requires_grad else 0)
