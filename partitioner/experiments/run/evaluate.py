"""Evaluate a placement: plan it, lower it, simulate its programs, and return a row of results."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from partitioner.experiments.models.rates import model_flops, tokens_of_sample, utilization
from partitioner.experiments.models.subject import ModelSource, Subject, trace_subject
from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import Row, failed_row
from partitioner.experiments.run.sweep_options import OF_TRACE, option_names, read_options
from partitioner.options.constraints import Constraints
from partitioner.options.mode import dimensions_of_one, mode_text, ranks_of_stages, resolve_mode, sequential_tiles
from partitioner.options.precision import MIXED, read_reduce_dtype
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest, recompute_fields
from partitioner.planner.sharding.shared_models import SharedModels
from partitioner.specialize.simulate_plan import Timed, is_uniform, simulate_plan, simulate_timed, timed_programs
from passes.ir.errors import PartitionError
from passes.ir.mesh import STAGES, TILE, TILES, WIDTH
from passes.ir.plan import Plan

READ_BY_REQUEST = ("stages_per_device", "constraints", "reduce_dtype")
"""Options of a plan whose values a request has in another form."""

SAME_IN_REQUEST = tuple({field.name for field in dataclasses.fields(PlanRequest)}.intersection(option_names()).difference(READ_BY_REQUEST))
"""Options of a plan that are fields of a request."""

_CACHE_SIZE = 8
"""How many plans' programs are cached; the oldest is dropped first."""


@dataclass(frozen=True)
class TraceKey:
    """Everything that the graph of a placement depends on.

    Attributes:
        model: the name of the model in the sweep.
        options: of the trace, as JSON: precision, training, batch dimensions.
        planned_for: ``"cuda"`` or ``"cpu"``: the casts of mixed precision on the meta device; empty: without mixed precision.
    """

    model: str
    options: str = "{}"
    planned_for: str = ""


@dataclass(frozen=True)
class Bench:
    """The models and machines of a sweep.

    Attributes:
        subjects: traced model by everything that its graph depends on.
        broken: of a model that cannot be traced -> reason.
        clusters: name -> machine.
    """

    subjects: Mapping[TraceKey, Subject]
    broken: Mapping[TraceKey, str]
    clusters: Mapping[str, Cluster]

    def key(self, placement: Placement) -> str:
        """Return the key of a placement: a digest that also depends on its model and machine, not only on their names."""
        trace, cluster = trace_key(placement, self.clusters), self.clusters[placement.cluster]
        model = self.broken[trace] if trace in self.broken else self.subjects[trace].fingerprint
        links = cluster.links if not isinstance(cluster.links, Mapping) else sorted(cluster.links.items())
        return placement.key(model, [str(device) for device in cluster.devices], str(links))


def trace_key(placement: Placement, clusters: Mapping[str, Cluster]) -> TraceKey:
    """Return the key of the trace of a placement."""
    options = {name: value for name, value in json.loads(placement.options or "{}").items() if name in OF_TRACE}
    planned_for = ("cuda" if clusters[placement.cluster].has_accelerators else "cpu") if options.get("precision") in MIXED else ""
    return TraceKey(placement.model, json.dumps(options, sort_keys=True), planned_for)


def trace_models(
    sources: Mapping[str, ModelSource], grid: Sequence[Placement], machines: Mapping[str, Cluster], say: Callable[[str], object] = str
) -> Bench:
    """Trace every model, once for each precision, mode and batch dimensions.

    The placements of a model that cannot be traced fail; if no model can be traced, raise its error.

    Args:
        say: is called with the name of each model that is traced.
    """
    subjects: dict[TraceKey, Subject] = {}
    broken: dict[TraceKey, PartitionError] = {}
    for placement in grid:
        key = trace_key(placement, machines)
        if key in subjects or key in broken:
            continue
        say(key.model)
        options = {"training": None, **json.loads(key.options)}
        try:
            subjects[key] = trace_subject(key.model, sources[key.model], **options, hardware=machines[placement.cluster])
        except PartitionError as error:
            broken[key] = error
    if not subjects:
        raise next(iter(broken.values()))
    return Bench(subjects, {key: str(error) for key, error in broken.items()}, machines)


class Evaluator:
    """Evaluates placements. It caches the last programs and models, as the next placement may differ in its machine or schedule alone."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._lowered: dict[Hashable, Timed] = {}
        self._models = SharedModels()
        self._flops: dict[TraceKey, Mapping[torch.dtype, float]] = {}

    def __call__(self, placement: Placement) -> Row:
        """Return the row of a placement; if it fails, a row with the reason."""
        started = time.perf_counter()
        key = self.bench.key(placement)
        trace = trace_key(placement, self.bench.clusters)
        if trace in self.bench.broken:
            return failed_row(key, placement, self.bench.broken[trace])
        try:
            row = self._plan_and_simulate(placement, key, trace)
        except PartitionError as error:
            row = failed_row(key, placement, str(error))
        except Exception as error:  # noqa: BLE001  one placement that breaks the compiler must not end the sweep: it is a row that says so
            row = failed_row(key, placement, f"{type(error).__name__}: {error}")
        return replace(row, seconds=time.perf_counter() - started)

    def _plan_and_simulate(self, placement: Placement, key: str, trace: TraceKey) -> Row:
        """Return the row of a placement; raise PartitionError if it cannot be planned or lowered."""
        subject, cluster = self.bench.subjects[trace], self.bench.clusters[placement.cluster]
        options = read_options(placement.options)
        problem = _problem(subject, cluster, placement, options, self._models)
        plan = problem.solve(simulated=lambda plan: simulate_plan(subject.traced, plan, cluster, Roofline(), problem.request.optimizer))
        timed = self._lower(trace, plan, cluster)
        simulation = simulate_timed(timed, plan, cluster, Roofline(), problem.request.optimizer)
        simulation = replace(simulation, limits=problem.limits)
        recompute = placement.recompute if isinstance(placement.policies, Mapping) else plan.recompute
        schedule = plan.schedule if len(plan.stages) > 1 else "none"
        planned = replace(placement, schedule=schedule, n_microbatches=plan.n_microbatches, recompute=recompute)
        if trace not in self._flops:
            self._flops[trace] = model_flops(subject.graph)
        rows_per_second, tokens = plan.batch_size / simulation.step_time, tokens_of_sample(subject.made)
        return Row(
            key,
            **asdict(planned),
            batch_size=plan.batch_size,
            step_time=simulation.step_time,
            bubble_fraction=simulation.bubble_fraction,
            peak_memory=max(simulation.peak_memory),
            over_limit=round(max(simulation.over_limit.values(), default=0)) or None,
            communication=sum(simulation.communication.values()),
            planned_step_time=plan.step_time,
            bound_by=plan.prediction.bound_by,
            runner_up=plan.prediction.runner_up,
            mesh=_mesh_text(plan),
            rows_per_second=rows_per_second,
            tokens_per_second=None if tokens is None else tokens * rows_per_second,
            step_cost=_step_cost(cluster.first(placement.devices), simulation.step_time),
            mfu=utilization(self._flops[trace], cluster, placement.devices, simulation.step_time),
            plan_hash=plan.hash,
            plan=plan.to_json(),
        )

    def _lower(self, trace: TraceKey, plan: Plan, cluster: Cluster) -> Timed:
        """Return the programs of a plan, from the cache if a plan with the same decisions was lowered before."""
        uniform = is_uniform(plan.grid, cluster)
        key = (trace, uniform, cluster.has_accelerators, plan.hash)
        if key not in self._lowered:
            while len(self._lowered) >= _CACHE_SIZE:
                del self._lowered[next(iter(self._lowered))]
            self._lowered[key] = timed_programs(
                self.bench.subjects[trace].traced, plan, each_rank=not uniform, fused_attention=cluster.has_accelerators
            )
        return self._lowered[key]


def _problem(subject: Subject, cluster: Cluster, placement: Placement, options: Mapping[str, Any], models: SharedModels) -> PlanProblem:
    """Return the problem that ``partition`` solves for a placement; raise PartitionError if its request is none."""
    tiles = sequential_tiles(placement.mesh, placement.devices)
    mesh = resolve_mode("model" if tiles is not None else placement.mesh, placement.devices)
    request = PlanRequest(
        mode=next((name for name in mesh.names if name in STAGES), "model") if mesh is not None else "auto",
        devices=("cpu",) * placement.devices,
        replicas=ranks_of_stages(placement.mesh),
        n_microbatches=placement.n_microbatches,
        schedule=placement.schedule,
        **recompute_fields(placement.policies),
        stages_per_rank=options.get("stages_per_device"),
        constraints=options.get("constraints", Constraints()).without_dimensions(dimensions_of_one(placement.mesh)),
        reduce_dtype=read_reduce_dtype(options.get("reduce_dtype")),
        **{name: value for name, value in options.items() if name in SAME_IN_REQUEST},
        modules=subject.modules,
    ).checked()
    return PlanProblem(subject.graph, cluster, request, None, mesh, tiles, models)


def _step_cost(cluster: Cluster, step_time: float) -> float | None:
    """Return the price of a step on all devices; None if that of a device is not known."""
    prices = [device.price_per_hour for device in cluster.devices]
    known = [price for price in prices if price is not None]
    return sum(known) * step_time / 3600 if len(known) == len(prices) else None


def _mesh_text(plan: Plan) -> str:
    """Return the mesh of a plan as text that ``parse_mode`` reads: ``"data=2,tile=2x2"``."""
    sizes: dict[str, Any] = {TILE: plan.tiles} if plan.tiles else {}
    for name, size in plan.mesh if not plan.tiles else ():
        if name in TILES:
            sizes[TILE] = (*sizes.get(TILE, ()), size)
        else:
            sizes[name] = plan.widths if name == WIDTH and plan.widths else size
    return mode_text(sizes)
