"""From a placement to its row: plan it, lower it, run its programs on a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cost_models.hardware import Cluster
from partitioner.constraints import Constraints
from partitioner.experiments.placement import Placement
from partitioner.experiments.row import Row, failed_row
from partitioner.experiments.subject import Subject
from partitioner.meshes import resolve_mode
from partitioner.planner.plan_mesh import plan_mesh
from partitioner.planner.plan_request import PlanRequest
from passes.ir.errors import PartitionError
from passes.ir.mesh import STAGES
from passes.ir.plan import Plan

__all__ = ["Assumptions", "Bench", "evaluate"]


@dataclass(frozen=True)
class Assumptions:
    """What all placements of a sweep have in common.

    Attributes:
        memory_limit: of each device.
        optimizer: whose state the memory counts.
    """

    memory_limit: int | str | None = None
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Bench:
    """Everything that placements are evaluated with.

    Attributes:
        subjects: the models by name.
        broken: the models that cannot be traced, by name, and why.
        clusters: the machines by name.
        assumptions: what all have in common.
    """

    subjects: Mapping[str, Subject]
    broken: Mapping[str, str]
    clusters: Mapping[str, Cluster]
    assumptions: Assumptions

    def key(self, placement: Placement) -> str:
        """Of a placement on this bench: another model, machine or assumption under the same name gives another key."""
        name, cluster = placement.model, self.clusters[placement.cluster]
        model = self.broken[name] if name in self.broken else self.subjects[name].fingerprint
        links = cluster.links if not isinstance(cluster.links, Mapping) else sorted(cluster.links.items())
        return placement.key(model, [str(device) for device in cluster.devices], str(links), str(self.assumptions))


def evaluate(bench: Bench, placement: Placement) -> Row:
    """The row of a placement; whatever goes wrong is its reason."""
    started = time.perf_counter()
    key = bench.key(placement)
    if placement.model in bench.broken:
        return failed_row(key, placement, bench.broken[placement.model])
    try:
        found = _evaluated(bench, placement, key)
    except PartitionError as error:
        return failed_row(key, placement, str(error), time.perf_counter() - started)
    except Exception as error:  # noqa: BLE001  one placement that breaks the compiler must not end the sweep: it is a row that says so
        return failed_row(key, placement, f"{type(error).__name__}: {error}", time.perf_counter() - started)
    return found(time.perf_counter() - started)


def _evaluated(bench: Bench, placement: Placement, key: str) -> Callable[[float], Row]:
    subject, cluster = bench.subjects[placement.model], bench.clusters[placement.cluster]
    plan = plan_placement(subject, cluster, placement, bench.assumptions)
    return lambda seconds: Row(
        key,
        placement.model,
        placement.devices,
        placement.mode,
        placement.cluster,
        plan.schedule,
        plan.n_microbatches,
        plan.recompute,
        plan.batch_size,
        step_time=plan.step_time,
        peak_memory=max(plan.memory),
        planned_step_time=plan.step_time,
        bound_by=plan.bound_by,
        plan_hash=plan.hash,
        plan=plan.to_json(),
        seconds=seconds,
    )


def plan_placement(subject: Subject, cluster: Cluster, placement: Placement, assumptions: Assumptions) -> Plan:
    """The plan that ``partition`` makes for a placement.

    Raises:
        PartitionError: there is none.
    """
    mesh = resolve_mode(placement.mesh, placement.devices)
    request = PlanRequest(
        mode=next((name for name in mesh.names if name in STAGES), "model") if mesh is not None else "auto",
        devices=("cpu",) * placement.devices,
        n_microbatches=placement.n_microbatches,
        schedule=placement.schedule,
        recompute=placement.recompute,
        memory_limit=assumptions.memory_limit,
        optimizer=assumptions.optimizer,
        constraints=Constraints(),
        modules=subject.modules,
    )
    return plan_mesh(subject.graph, cluster, mesh, request)
