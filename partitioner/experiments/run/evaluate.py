"""Evaluate a placement: plan it, lower it, simulate its programs, and return a row of results."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.simulate import simulate_programs
from partitioner.experiments.models.subject import Subject
from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import Row, failed_row
from partitioner.experiments.run.lower_for_timing import Timed, is_uniform, lower_for_timing
from partitioner.options.constraints import Constraints
from partitioner.options.mode import ranks_of_stages, resolve_mode
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.shared_models import SharedModels
from passes.ir.errors import PartitionError
from passes.ir.mesh import STAGES
from passes.ir.plan import Plan

__all__ = ["Assumptions", "Bench", "Evaluator"]

_CACHE_SIZE = 8
"""How many plans' programs are cached; the oldest is dropped first."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that all placements of a sweep share.

    Attributes:
        memory_limit: the memory limit of each device, bytes or ``"16GiB"``; None: the memory of the device.
        optimizer: the optimizer whose state counts as memory.
    """

    memory_limit: int | str | None = None
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Bench:
    """The models, machines and assumptions of a sweep.

    Attributes:
        subjects: name -> traced model.
        broken: name of a model that cannot be traced -> reason.
        clusters: name -> machine.
        assumptions: the assumptions of all placements.
    """

    subjects: Mapping[str, Subject]
    broken: Mapping[str, str]
    clusters: Mapping[str, Cluster]
    assumptions: Assumptions

    def key(self, placement: Placement) -> str:
        """Return the key of a placement: a digest that also depends on its model, machine and assumptions, not only on their names."""
        name, cluster = placement.model, self.clusters[placement.cluster]
        model = self.broken[name] if name in self.broken else self.subjects[name].fingerprint
        links = cluster.links if not isinstance(cluster.links, Mapping) else sorted(cluster.links.items())
        return placement.key(model, [str(device) for device in cluster.devices], str(links), str(self.assumptions))


class Evaluator:
    """Evaluates placements. It caches the last programs and models, as the next placement may differ in its machine or schedule alone."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._lowered: dict[Hashable, Timed] = {}
        self._models = SharedModels()

    def __call__(self, placement: Placement) -> Row:
        """Return the row of a placement; if it fails, a row with the reason."""
        started = time.perf_counter()
        key = self.bench.key(placement)
        if placement.model in self.bench.broken:
            return failed_row(key, placement, self.bench.broken[placement.model])
        try:
            row = self._plan_and_simulate(placement, key)
        except PartitionError as error:
            row = failed_row(key, placement, str(error))
        except Exception as error:  # noqa: BLE001  one placement that breaks the compiler must not end the sweep: it is a row that says so
            row = failed_row(key, placement, f"{type(error).__name__}: {error}")
        return replace(row, seconds=time.perf_counter() - started)

    def _plan_and_simulate(self, placement: Placement, key: str) -> Row:
        """Return the row of a placement; raise PartitionError if it cannot be planned or lowered."""
        bench = self.bench
        subject, cluster = bench.subjects[placement.model], bench.clusters[placement.cluster]
        plan = _make_plan(subject, cluster, placement, bench.assumptions, self._models)
        timed = self._lower(subject, plan, cluster)
        simulation = simulate_programs(
            timed.programs,
            cluster,
            Roofline(),
            plan.batch_size,
            optimizer=bench.assumptions.optimizer,
            n_row_parts=timed.n_row_parts,
            representatives=timed.representatives,
        )
        planned = replace(placement, schedule=plan.schedule, n_microbatches=plan.n_microbatches, recompute=plan.recompute)
        return Row(
            key,
            **asdict(planned),
            batch_size=plan.batch_size,
            step_time=simulation.step_time,
            bubble_fraction=simulation.bubble_fraction,
            peak_memory=max(simulation.peak_memory),
            communication=sum(simulation.communication.values()),
            planned_step_time=plan.step_time,
            bound_by=plan.prediction.bound_by,
            plan_hash=plan.hash,
            plan=plan.to_json(),
        )

    def _lower(self, subject: Subject, plan: Plan, cluster: Cluster) -> Timed:
        """Return the programs of a plan, from the cache if a plan with the same decisions was lowered before."""
        uniform = is_uniform(plan.grid, cluster)
        stages = tuple((stage.ranks, stage.first_node) for stage in plan.stages)
        in_space = (plan.grid, plan.axes, plan.halos, plan.attention, stages, plan.batchnorm)
        in_time = (plan.schedule, plan.n_microbatches, plan.recompute)
        key = (subject.name, uniform, in_space, in_time, plan.batch_size)
        if key not in self._lowered:
            while len(self._lowered) >= _CACHE_SIZE:
                del self._lowered[next(iter(self._lowered))]
            self._lowered[key] = lower_for_timing(subject, plan, each_rank=not uniform)
        return self._lowered[key]


def _make_plan(subject: Subject, cluster: Cluster, placement: Placement, assumptions: Assumptions, models: SharedModels) -> Plan:
    """Return the plan that ``partition`` makes for a placement.

    Raises:
        PartitionError: there is no such plan.
    """
    mesh = resolve_mode(placement.mesh, placement.devices)
    request = PlanRequest(
        mode=next((name for name in mesh.names if name in STAGES), "model") if mesh is not None else "auto",
        devices=("cpu",) * placement.devices,
        replicas=ranks_of_stages(placement.mesh),
        n_microbatches=placement.n_microbatches,
        schedule=placement.schedule,
        recompute=placement.recompute,
        memory_limit=assumptions.memory_limit,
        optimizer=assumptions.optimizer,
        constraints=Constraints(),
        modules=subject.modules,
    )
    return PlanProblem(subject.graph, cluster, request, None, mesh, models=models).solve()
