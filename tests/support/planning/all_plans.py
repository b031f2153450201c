"""Every plan of a small model, each priced from the definition: what searches are compared with."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from cost_models.collectives.algorithms import GroupLinks, group_links
from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster, Device, Level, Link
from cost_models.memory.optimizer_state import optimizer_states
from partitioner.planner.costs.links import LinkTable
from partitioner.planner.pipeline.candidate import StagedModel, seconds_once, simulate_step
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.pipeline.problem import PipelineProblems
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.sharding.stage_submeshes import submesh_parts
from partitioner.planner.solvers.stage_memory import Floats, TransientMemory
from partitioner.planner.solvers.stage_problem import Units
from partitioner.schedules.catalog import SCHEDULES
from partitioner.tracing.trace import trace
from passes.autograd.recompute import Recompute
from passes.emit.gradient_buckets import FIRST_BUCKET_BYTES
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.schedule import Action, ActionKind, Schedule

SIZES = (2, 2, 3, 4, 4, 6, 8)
"""Numbers of devices."""


class Chain(nn.Module):
    """Layers one after the other; some add what one of the layers before gave."""

    def __init__(self, layers: list[nn.Module], skips: dict[int, int]) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(layers), skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map any number of rows."""
        values = [x]
        for number, layer in enumerate(self.layers):
            value = layer(values[-1])
            values.append(value + values[self.skips[number]] if number in self.skips else value)
        return values[-1]


def some_model(draw: random.Random) -> tuple[Chain, int]:
    """At most ten operations, and the width of the input."""
    width = first = draw.choice((4, 8, 16))
    layers: list[nn.Module] = []
    skips: dict[int, int] = {}
    most = draw.randint(3, 10)
    widths = [width]
    while len(layers) + len(skips) < most:
        kind = draw.choice(("linear", "linear", "linear", "relu", "norm", "skip"))
        if kind == "skip" and layers and len(layers) - 1 not in skips:
            alike = [place for place, size in enumerate(widths[:-1]) if size == width]
            if alike:
                skips[len(layers) - 1] = draw.choice(alike)
            continue
        following = draw.choice((4, 8, 16, 32)) if kind == "linear" else width
        layers.append({"linear": nn.Linear(width, following), "relu": nn.ReLU(), "norm": nn.LayerNorm(width), "skip": nn.Tanh()}[kind])
        width = following
        widths.append(width)
    return Chain(layers, skips), first


def some_cluster(draw: random.Random, n_devices: int) -> Cluster:
    """Return devices so slow that compute, starts and messages all matter; in a third of the clusters, of two kinds."""
    fast = Device("fast", {"float32": 1e9}, 2**30, 1e10, launch_overhead=draw.choice((0.0, 1e-7)))
    slow = replace(fast, name="slow", peak_flops={"float32": draw.choice((3e8, 6e8))}, memory_bandwidth=draw.choice((2e9, 1e10)))
    devices = [fast] * n_devices
    if draw.random() < 1 / 3:
        devices = [draw.choice((fast, slow)) for _ in range(n_devices)]
    quick = Link(draw.choice((0.0, 1e-7)), draw.choice((1e9, 1e10, 1e11)))
    if n_devices % 2 or draw.random() < 1 / 2:
        return Cluster(devices, quick)
    return Cluster(devices, [Level(n_devices // 2, quick), Level(n_devices, Link(1e-6, quick.bandwidth / 10))])


@dataclass(frozen=True)
class Instance:
    """A model, hardware, and what is asked for."""

    graph: ModelGraph
    cluster: Cluster
    request: PlanRequest


def instance(seed: int) -> Instance:
    draw = random.Random(seed)
    model, width = some_model(draw)
    n_devices = draw.choice(SIZES)
    rows = draw.choice((2, 4, 4, 6, 8))
    graph = trace(model, (torch.rand(rows, width),), {}, training=True)
    bytes_of_model = sum(each.numel() for each in model.parameters()) * 4
    limit = draw.choice((None, None, 1.2, 2.0, 4.0))
    return Instance(
        graph,
        some_cluster(draw, n_devices),
        PlanRequest(
            "auto",
            tuple(f"cuda:{rank}" for rank in range(n_devices)),
            recompute=draw.choice((None, "none", "none", "selective", "full")),
            schedule=draw.choice((None, None, "1F1B", "ZB1P", "ZBV", "Interleaved1F1B")),
            n_microbatches=draw.choice((None, None, 1, 2)),
            memory_limit=None if limit is None else int(4 * bytes_of_model * limit / n_devices) + 2048,
        ),
    )


def meshes(given: Instance) -> Iterator[Mesh]:
    """Yield all products of rows, stages and axes of parameters; their order matters where links or devices differ.

    Of several nodes, each may also have all parameters, sharded over its devices.
    """
    n = len(given.request.devices)
    differ = len(set(given.cluster.devices)) > 1 or not isinstance(given.cluster.links, Link)
    found: dict[tuple[tuple[str, int], ...], None] = {}
    for rows, stages in itertools.product(range(1, n + 1), repeat=2):
        if n % (rows * stages) or given.graph.batch_size % rows or (given.request.schedule and stages == 1 and n > 1):
            continue
        for kind in ("data", "zero1", "fsdp") if rows > 1 else ("data",):
            for outer in ((kind, "pipeline"), ("pipeline", kind)) if differ else ((kind, "pipeline"),):
                sizes = {kind: rows, "pipeline": stages, "tensor": n // (rows * stages)}
                found[tuple((name, sizes[name]) for name in (*outer, "tensor") if sizes[name] > 1) or (("pipeline", 1),)] = None
    links = given.cluster.links
    per_node = links[0].size if isinstance(links, tuple) else n
    if 1 < per_node < n <= given.graph.batch_size and not given.request.schedule:
        found[("data", n // per_node), ("fsdp", per_node)] = None
    yield from map(Mesh, found)


def shared(given: Instance, mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Yield all ways to give the positions of a mesh's pipeline to fewer stages."""
    n = mesh.length("pipeline")
    if given.request.schedule in (None, "GPipe", "1F1B", "ZB1P"):
        for n_stages in range(2, n):
            yield from (counts for counts in itertools.product(range(1, n), repeat=n_stages) if sum(counts) == n)


def unlike_widths(given: Instance, mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Yield all ways to give positions to stages of different widths; of more than four, to two, by powers of two."""
    n, in_turn = mesh.length("pipeline"), given.request.schedule in (None, "GPipe", "1F1B", "ZB1P")
    if any(name not in ("data", "pipeline") for name in mesh.names):
        return
    shapes = [(turns, width) for turns in range(1, n) for width in range(1, n) if n <= 4 or {turns, width} <= {1, 2, 4}]
    for n_stages in range(2, n if n <= 4 else 3):
        for stages in itertools.product(shapes, repeat=n_stages):
            widths = tuple(width for turns, width in stages for _ in range(turns))
            if sum(widths) == n and len(set(widths)) > 1 and (in_turn or len(widths) == n_stages):
                sizes = {**dict(mesh.dimensions), "pipeline": len(widths), "tensor": max(widths)}
                turns = tuple(turns for turns, _ in stages)
                yield Mesh(tuple(sizes.items()), widths), turns if max(turns) > 1 else ()


def mesh_problem(given: Instance, model: CuttableModel, mesh: Mesh, *, beside: bool, replicas: tuple[int, ...] = ()) -> MeshProblem | None:
    """Return the mesh with its axes cut, under the limit that the memory of its ranks sets; None where it cannot cut the model.

    Args:
        beside: whether replicas also cut weights, where those are large.
        replicas: how many ranks each stage has, where not all have one.
    """
    stages, held = mesh.length("pipeline"), held_at_most(given, mesh)
    request = replace(given.request, mode="auto" if stages > 1 else "pipeline", replicas=replicas)
    try:
        return None if beside and not model.has_extra_axes(mesh) else problem_of(given, model, mesh, request, extra_axes=beside, limit=held)
    except ConfigError:
        return None


def held_at_most(given: Instance, mesh: Mesh) -> float:
    """Return bytes of parameters for which the ranks of a pipeline have memory, with their gradients and the optimizer's state."""
    memory = given.request.memory_limit
    held = max(float(device.memory_bytes) if memory is None else float(memory) for device in given.cluster.devices)
    held *= mesh.length("pipeline") * math.prod(mesh.length(name) for name in ("zero1", "fsdp"))
    return held / (2 + optimizer_states(given.request.optimizer))


def problem_of(
    given: Instance, model: CuttableModel, mesh: Mesh, request: PlanRequest, *, extra_axes: bool = False, limit: float = math.inf
) -> MeshProblem:
    """Return a mesh with its axes cut, once for each width of its stages."""
    links = LinkTable(given.cluster)
    if mesh.cutting.size == 1:
        return MeshProblem(mesh, model.whole, given.cluster, request, Roofline(), links)
    cut = model.cut(mesh.cutting, extra_axes=extra_axes, limit=limit)
    parts = submesh_parts(cut, mesh, "sync", links) if mesh.widths else None
    return MeshProblem(mesh, cut.part, given.cluster, request, Roofline(), links, parts)


def candidates(given: Instance, problem: MeshProblem) -> Iterator[tuple[Recompute, Candidate]]:
    request, rows = given.request, problem.part.graph.batch_size
    counts = [request.n_microbatches] if request.n_microbatches else [count for count in range(1, rows + 1) if rows % count == 0]
    names = [request.schedule] if request.schedule else list(SCHEDULES)
    policies: tuple[Recompute, ...] = ("none", "selective", "full")
    for policy in policies if request.recompute is None else [each for each in policies if each == request.recompute]:
        for count, name in itertools.product(counts, names):
            one_of_many = problem.n_places == 1 and not request.schedule and name != "1F1B"
            replicas = problem.request.replicas
            cannot_share = bool(replicas) and (count < max(replicas) or SCHEDULES[name].default_stages_per_rank > 1)
            if not one_of_many and not cannot_share:
                yield policy, Candidate(name, SCHEDULES[name].default_stages_per_rank, count, replicas)


def memory(units: Units, schedule: Schedule, runs: tuple[range, ...], kinds: Sequence[int]) -> list[float]:
    """Return each rank's peak memory, at any action of its stages or after the last, when gradients are summed.

    While one action goes on, what the next one waits for comes. Of ranks that share a stage, all gradients of such small models are in one
    message.
    """
    held = [
        [
            sum(item.of_kind(kind) for item in items if set(item.units) & set(run) and item.producer not in run)
            for run, kind in zip(runs, kinds, strict=True)
        ]
        for items in (units.fixed, units.kept, units.gradients)
    ]
    fixed, kept, gradients = held
    workings = units.workings
    computing = [
        needed(workings[kind if len(workings) > 1 else 0], run) + at_borders(units, run, kind)
        for run, kind in zip(runs, kinds, strict=True)
    ]
    peaks = list[float]()
    for actions in schedule.actions:
        stages = {action.stage for action in actions}
        now, made, most = 0.0, dict[int, float](), 0.0
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            now += kept[action.stage] if action.kind is ActionKind.FORWARD else 0.0
            coming = 0.0 if following is None else received(units, runs, following)
            most = max(most, now + sum(made.values()) + computing[action.stage] + coming)
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                now -= kept[action.stage]
                made[action.stage] = gradients[action.stage]
        at_once = math.inf if any(len(ranks) > 1 for ranks in schedule.stage_ranks) else units.summed
        summed = sum(made.values()) + min(sum(made.values()), at_once)
        peaks.append(int(sum(fixed[stage] for stage in stages) + max(most, summed)))
    return peaks


def received(units: Units, runs: tuple[range, ...], action: Action) -> int:
    """Return the bytes of the messages that an action waits for: inputs of a stage, or gradients of its outputs."""
    run = runs[action.stage]
    if action.kind is ActionKind.FORWARD:
        return sum(value.gradient_size for value in units.values if value.producer < run.start and set(value.readers) & set(run))
    if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return sum(value.size for value in units.values if value.producer in run and max(value.readers) >= run.stop)
    return 0


def at_borders(units: Units, run: range, kind: int) -> float:
    """Return the bytes that a stage gathers to send, and that it reads in parts."""
    gathered = (item.size[kind] for item in units.gathered_values if item.producer in run and item.readers[-1] >= run.stop)
    parted = (item.size[kind] for item in units.gathered_gradients if item.producer < run.start and set(item.readers) & set(run))
    return sum(gathered) + sum(parted)


@functools.lru_cache(maxsize=1024)
def needed(working: TransientMemory, run: range) -> float:
    """Return the transient peak of a stage of these units."""
    moments = [0.0]
    mine = slice(run.start, run.stop)
    deferred = float(working.deferred[mine].sum()) if working.is_split else 0.0
    for unit in run:
        made, trained = (sum(column[unit + 1 : run.stop].tolist()) for column in (working.saved, working.gradients))
        moments.append(float(working.forward[unit]) - made - deferred)
        if working.is_split:
            left, still = float(working.weights[unit + 1 : run.stop].sum()), float(working.weights[run.start : unit + 1].sum())
            moments.append(float(working.inputs[unit]) + left - made - deferred)
            moments.append(float(working.gradients[unit]) + trained + still - float(working.saved[mine].sum()) - deferred)
        else:
            moments.append(float(working.backward[unit]) + trained - made)
    return max(moments) + min(float(working.coalesced[run.start : run.stop].sum()), working.coalesced_at_once)


def price(problem: MeshProblem, problems: PipelineProblems, staged: StagedModel) -> float:
    """Return seconds of a step by the definition; inf where a rank holds more than fits."""
    units, stage_ranks = len(problems.points.units), staged.schedule.stage_ranks
    prices = problems.prices.at(problems.rows(staged.candidate))
    runs = [set(run) for run in staged.runs]
    assert sum(map(len, runs)) == units
    kinds = problems.kinds(staged.candidate)
    held = memory(problems.units(staged.candidate), staged.schedule, staged.runs, kinds)
    if any(max(peaks) > problems.limits[rank] for rank, peaks in enumerate(zip(held, staged.memory, strict=True))):
        return math.inf
    sums = []
    for rank in range(problem.n_places):
        mine = set().union(*(run for stage, run in enumerate(runs) if rank in stage_ranks[stage]))
        summed: dict[str, float] = {}
        width = problem.mesh.widths[rank] if problem.submeshes is not None else 0
        part, links = (
            (problem.part, problem.links)
            if problem.submeshes is None
            else (problem.submeshes.by_width[width], problem.submeshes.links[width])
        )
        for each in part.sums:
            if set(problems.prices.users[each.parameter]) & mine:
                summed[each.dimension] = summed.get(each.dimension, 0.0) + each.size
        if problem.n_places == 1:
            sums.append(sum(sum_beside_backward(problem, problems, staged, name, links[name]) for name in summed))
        else:
            sums.append(sum(links[name].seconds("all_reduce", size) + copying(size, problem) for name, size in summed.items()))
    taking_turns = [0.0]
    for ranks, run, kind in zip(stage_ranks, runs, kinds, strict=True):
        if len(ranks) > 1:
            size = sum(item.of_kind(kind) for item in prices.units.gradients if set(item.units) & run)
            taking_turns.append(group_links(ranks, problem.places).seconds("all_reduce", size) + copying(size, problem, ranks))
    makespan = simulate_step(staged.schedule, staged.times).makespan
    return makespan + max(sums) + max(taking_turns) + seconds_once(problems, staged)


def sum_beside_backward(problem: MeshProblem, problems: PipelineProblems, staged: StagedModel, dimension: str, links: GroupLinks) -> float:
    """Return the seconds by which a step is longer for sums over a dimension: a unit's wait for its backward, and for those before them.

    Messages over one dimension follow each other: a value that is sent while gradients are summed comes later by what is left of the sum.
    """
    times = problems.prices.times(problems.rows(staged.candidate))
    halves = times.halves[:, :, 0]
    sizes = [0.0] * halves.shape[1]
    for each in problem.part.sums:
        if each.dimension == dimension:
            sizes[problems.prices.users[each.parameter][0]] += each.size
    whole = links.seconds("all_reduce", sum(sizes))
    if sum(sizes) <= FIRST_BUCKET_BYTES:  # one message, after its last gradient
        last = next(unit for unit, size in enumerate(sizes) if size)
        again = float(halves[0, :last].sum()) if problems.prices.recompute == "full" else 0.0  # before the backward of the region
        until_message = computed_until_message(problem, halves - times.waiting[:, :, 0], dimension, last)
        computed = max(float(halves[1:, :last].sum()) - again, 0.0) if until_message is None else until_message
        late = max(whole - computed, 0.0)
        return late + links.ring.host_share * (whole - late) + copying(sum(sizes), problem)
    now = free = 0.0
    for unit in reversed(range(len(sizes))):
        now += float(halves[1, unit] + halves[2, unit])
        free = max(now, free) + whole * sizes[unit] / max(sum(sizes), 1.0) if sizes[unit] else free
    late = max(free - now, 0.0)
    return late + links.ring.host_share * (whole - late) + copying(sum(sizes), problem)


def computed_until_message(problem: MeshProblem, computing: Floats, dimension: str, last: int) -> float | None:
    """Return the seconds that a backward computes after a unit's gradients until it sends a value over a dimension; None: it sends none.

    Args:
        computing: (3, N) seconds that units compute, in the forward and the halves of the backward.
        last: the unit.
    """
    units, cost = problem.part.points.units, problem.part.cost
    sent = {each.reader: each for each in problem.part.exchanges if each.backward and not each.is_stored and each.dimension == dimension}
    computed = 0.0
    for unit in range(last, -1, -1):
        senders = [name for name in units[unit] if name in sent]
        in_halves = any(cost.nodes[name].first_half == "activation" for name in senders)
        is_beside = in_halves and any(sent[name].is_beside for name in senders)
        if unit < last:
            computed += float(computing[1, unit]) + (0.0 if is_beside else float(computing[2, unit]))
        if senders and (unit < last or (in_halves and not is_beside)):  # one kernel: the value first
            return computed
    return None


def copying(size: float, problem: MeshProblem, places: Sequence[int] | None = None) -> float:
    """Return the seconds in which the slowest of the ranks that sum so many bytes copies them into a message."""
    devices = problem.places.devices if places is None else [problem.places.devices[place] for place in places]
    return 2 * size / min(device.bandwidth for device in devices)
