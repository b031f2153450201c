"""``pm.cost_formula()``: the step of a partitioned model as formulas."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import sympy
import torch

from cost_models.collectives.algorithms import slowest_link
from cost_models.formulas.model import model_formula
from cost_models.formulas.program import program_work
from cost_models.formulas.step import StepFormula, StepShape, step_formula
from cost_models.hardware.clusters import Cluster, Link
from cost_models.memory.optimizer_state import optimizer_states
from partitioner.planner.pipeline.candidate import StageTimes, simulate_step
from partitioner.reports.sources import Explained
from partitioner.schedules.catalog import make_schedule
from partitioner.schedules.kind import peak_in_flight
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.errors import ConfigError
from passes.ir.mesh import ROWS, Mesh
from passes.ir.schedule import Schedule

__all__ = ["cost_formula"]


def cost_formula(model: Explained, cluster: Cluster, optimizer: str) -> StepFormula:
    """The formulas of a plan.

    Args:
        model: the model, its plan and its programs.
        cluster: whose rates are the defaults of the symbols.
        optimizer: whose state is held.

    Raises:
        ConfigError: a stage is replicated round-robin: how long the step is depends on which microbatches meet, and no formula says it.
    """
    for counts, of in ((model.plan.replicas, ", which share microbatches round-robin"), (model.plan.widths, " of the tensor dimension")):
        if counts:
            raise ConfigError(
                f"there is no formula for stages on {' + '.join(map(str, counts))} ranks{of}",
                remedy="pm.simulate() gives the numbers of this plan",
            )
    plan, mesh = model.plan, model.mesh
    replicas = {name for name in mesh.names if name in ROWS}
    count = Mesh(tuple((name, size) for name, size in mesh.dimensions if name in replicas)).size
    rows = microbatch_sizes(plan.batch_size // count, plan.n_microbatches)[0]
    works = [program_work(program, rows, _trained(model)) for program in model.programs]
    groups = {tuple(sorted(mesh.group(rank, names))): "_".join(names) for names in _subsets(mesh) for rank in range(mesh.size)}
    schedule = model.schedule
    shape = StepShape(
        bubble=_bubble(schedule),
        in_flight=_in_flight(schedule),
        dimension_of=groups,
        replicated=frozenset("_".join(names) for names in _subsets(mesh) if set(names) <= replicas),
        n_replicas=count,
        states=optimizer_states(optimizer),
    )
    whole = model_formula(model.cut.graph, model.cut.axes, differentiate=schedule is not None)
    return step_formula(works, whole, shape, _defaults(model, cluster, count))


def _subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    """Sets of mesh dimensions, larger ones first: of two with the same ranks the smaller one is meant."""
    names = mesh.names
    return [subset for size in range(len(names), 0, -1) for subset in itertools.combinations(names, size)]


def _bubble(schedule: Schedule | None) -> sympy.Rational:
    """How long a rank idles when all stages take equally long, in units of its work on one microbatch."""
    if schedule is None:
        return sympy.Integer(0)
    equal = StageTimes(1.0, 1.0, 1.0, 0.0, 0.0)
    stages_per_rank = schedule.n_stages // schedule.n_ranks
    makespan = simulate_step(schedule, [equal] * schedule.n_stages).makespan
    return sympy.nsimplify(makespan / (3 * stages_per_rank)) - schedule.n_microbatches


def _in_flight(schedule: Schedule | None) -> Mapping[int, int | None]:
    """Stage -> how many microbatches it holds, however many there are; None where it holds them all."""
    if schedule is None:
        return {}
    many = 4 * schedule.n_stages
    longer = make_schedule(schedule.name, schedule.n_ranks, many, schedule.n_stages // schedule.n_ranks)
    return {stage: None if held == many else held for stage, held in enumerate(peak_in_flight(longer))}


def _defaults(model: Explained, cluster: Cluster, n_replicas: int) -> dict[str, float]:
    device, plan, mesh = cluster.devices[0], model.plan, model.mesh
    found: dict[str, float] = {
        "batch": plan.batch_size,
        "microbatches": plan.n_microbatches,
        "replicas": n_replicas,
        "flop_rate": device.flops(_dtype(model)),
        "memory_bandwidth": device.bandwidth,
        "launch_overhead": device.launch_overhead,
    }
    for names in _subsets(mesh):
        link = _link(mesh, names, cluster)
        found |= {f"latency_{'_'.join(names)}": link.latency, f"bandwidth_{'_'.join(names)}": link.bandwidth}
    if "pipeline" not in mesh.names:
        found.setdefault("latency_pipeline", 0.0)
        found.setdefault("bandwidth_pipeline", 1.0)
    return found


def _link(mesh: Mesh, names: tuple[str, ...], cluster: Cluster) -> Link:
    group = mesh.group(0, names)
    others = [mesh.group(rank, names) for rank in range(mesh.size) if rank not in group]
    return slowest_link(group, cluster, list(dict.fromkeys(others))) if len(group) > 1 else cluster.link(0, 0)


def _trained(model: Explained) -> frozenset[str]:
    nodes = {node.name: node for node in model.graph.graph.nodes}
    return frozenset(name for name in model.graph.parameters if nodes[name].meta["val"].requires_grad)


def _dtype(model: Explained) -> torch.dtype:
    """Return the dtype with the most parameter elements: its FLOP rate stands for the device."""
    sizes: dict[torch.dtype, int] = {}
    for node in model.graph.graph.nodes:
        value = node.meta.get("val")
        if node.name in model.graph.parameters and isinstance(value, torch.Tensor):
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
