"""``pm.cost_formula()``: the step of a partitioned model as formulas."""

from __future__ import annotations

import itertools
import math
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
from passes.ir.plan import Plan
from passes.ir.schedule import Schedule


def cost_formula(model: Explained, cluster: Cluster, optimizer: str) -> StepFormula:
    """Return the formulas of a plan.

    Args:
        model: the model, its plan and its programs.
        cluster: its rates are the defaults of the symbols.
        optimizer: its state counts as memory.

    Raises:
        ConfigError: stages are replicated round-robin or have unequal tensor-parallel degrees: the step time has no closed form.
    """
    _check_stages(model.plan)
    plan, mesh = model.plan, model.mesh
    batch_dimensions = {name for name in mesh.names if name in ROWS}
    n_replicas = math.prod(mesh.length(name) for name in batch_dimensions)
    rows = microbatch_sizes(plan.batch_size // n_replicas, plan.n_microbatches)[0]
    works = [program_work(model.values(each.program), rows, _trained(model)) for each in model.classes]
    ranks = [of_class.program.rank for of_class in model.classes]
    groups = {tuple(sorted(mesh.group(rank, names))): "_".join(names) for names in _subsets(mesh) for rank in ranks}
    schedule = model.schedule
    shape = StepShape(
        bubble=_bubble(schedule),
        in_flight=_in_flight(schedule),
        dimension_of=groups,
        replicated=frozenset("_".join(names) for names in _subsets(mesh) if set(names) <= batch_dimensions),
        n_replicas=n_replicas,
        states=optimizer_states(optimizer),
    )
    whole_model = model_formula(model.cut.graph, model.cut.axes, differentiate=schedule is not None)
    return step_formula(works, whole_model, shape, _defaults(model, cluster, n_replicas))


def _check_stages(plan: Plan) -> None:
    """Raise ConfigError for stages whose step time no formula gives."""
    for counts, kind in ((plan.replicas, ", which share microbatches round-robin"), (plan.widths, " of the tensor dimension")):
        if counts:
            problem = f"there is no formula for stages on {' + '.join(map(str, counts))} ranks{kind}"
            raise ConfigError(problem, remedy="pm.simulate() gives the numbers of this plan")


def _subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    """Return all sets of mesh dimensions, larger ones first: a group of ranks is named by the smallest set that spans it."""
    return [subset for size in range(len(mesh.names), 0, -1) for subset in itertools.combinations(mesh.names, size)]


def _bubble(schedule: Schedule | None) -> sympy.Rational:
    """Return how long a rank idles when all stages take equally long, in units of its work on one microbatch."""
    if schedule is None:
        return sympy.Integer(0)
    equal = StageTimes(1.0, 1.0, 1.0, 0.0, 0.0)
    stages_per_rank = schedule.n_stages // schedule.n_ranks
    makespan = simulate_step(schedule, [equal] * schedule.n_stages).makespan
    return sympy.nsimplify(makespan / (3 * stages_per_rank)) - schedule.n_microbatches


def _in_flight(schedule: Schedule | None) -> Mapping[int, int | None]:
    """Return stage -> the most microbatches in flight, from a long step; None: all microbatches of a step, however many."""
    if schedule is None:
        return {}
    many = 4 * schedule.n_stages
    longer = make_schedule(schedule.name, schedule.n_ranks, many, schedule.n_stages // schedule.n_ranks)
    return {stage: None if count == many else count for stage, count in enumerate(peak_in_flight(longer))}


def _defaults(model: Explained, cluster: Cluster, n_replicas: int) -> dict[str, float]:
    """Return the value of each symbol in this plan, on this cluster."""
    device, plan, mesh = cluster.devices[0], model.plan, model.mesh
    values: dict[str, float] = {
        "batch": plan.batch_size,
        "microbatches": plan.n_microbatches,
        "replicas": n_replicas,
        "flop_rate": device.flops(_dtype(model)),
        "memory_bandwidth": device.bandwidth,
        "launch_overhead": device.launch_overhead,
    }
    for names in _subsets(mesh):
        link = _link(mesh, names, cluster)
        values |= {f"latency_{'_'.join(names)}": link.latency, f"bandwidth_{'_'.join(names)}": link.bandwidth}
    if "pipeline" not in mesh.names:
        values.setdefault("latency_pipeline", 0.0)
        values.setdefault("bandwidth_pipeline", 1.0)
    return values


def _link(mesh: Mesh, names: tuple[str, ...], cluster: Cluster) -> Link:
    """Return the slowest link within a group along these dimensions, while all other groups communicate, too."""
    group = mesh.group(0, names)
    others = [mesh.group(rank, names) for rank in range(mesh.size) if rank not in group]
    return slowest_link(group, cluster, list(dict.fromkeys(others))) if len(group) > 1 else cluster.link(0, 0)


def _trained(model: Explained) -> frozenset[str]:
    """Return the placeholders of the parameters that get gradients."""
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
