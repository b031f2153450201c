"""A model with its cuts: what each stage holds and takes, and how long the step is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from partitioner.planner.candidates import Candidate
from partitioner.planner.cut_points import module_path
from partitioner.planner.exchanges import GradientSum
from partitioner.planner.pipeline_problem import PipelineProblems
from partitioner.planner.stage_problem import Floats, held, stage_runs
from partitioner.planner.step_time import StageTimes, simulate_step
from partitioner.planner.unit_prices import Prices, UnitPrices
from partitioner.schedules.clock import Timing
from passes.ir.plan import Stage
from passes.ir.schedule import Schedule

__all__ = ["StageSums", "StagedModel", "describe_stages", "stage_model"]


@dataclass(frozen=True)
class StagedModel:
    """One candidate, worked out.

    Attributes:
        candidate: what was chosen.
        schedule: its schedule.
        proven: whether no better cuts can be there; False only where stages share a rank's memory and their search was cut short.
        runs: the units of each stage.
        times: for each stage, what the clock was told.
        makespan: seconds of a step, what is summed at its end aside.
        kept: for each stage, bytes kept for one microbatch.
        memory: for each rank, peak bytes.
    """

    candidate: Candidate
    schedule: Schedule
    proven: bool
    runs: tuple[range, ...]
    times: tuple[StageTimes, ...]
    makespan: float
    kept: tuple[int, ...]
    memory: tuple[int, ...]

    @cached_property
    def step(self) -> Timing:
        """When every action runs."""
        return simulate_step(self.schedule, self.times)


def stage_model(problems: PipelineProblems, candidate: Candidate, starts: Sequence[int], *, proven: bool = True) -> StagedModel:
    """Work a solution out.

    Args:
        starts: the first unit of each stage.
        proven: whether nothing better can be there.
    """
    n_units, clock = len(problems.points.units), problems.clock(candidate)
    prices, schedule = problems.prices.at(problems.rows(candidate)), clock.schedule
    kept = tuple(int(size) for size in held(prices.kept, starts, n_units))
    fixed = np.bincount(schedule.stage_rank, held(prices.fixed, starts, n_units), schedule.n_ranks)
    memory = tuple(int(stays) + peak for stays, peak in zip(fixed, clock.peak_activation(kept), strict=True))
    times = _times(problems, prices, schedule, starts)
    columns = ([getattr(stage, field.name) for stage in times] for field in fields(StageTimes))
    return StagedModel(candidate, schedule, proven, stage_runs(starts, n_units), times, clock.makespan(*columns), kept, memory)


def describe_stages(problems: PipelineProblems, staged: StagedModel) -> tuple[Stage, ...]:
    """What the plan says of the stages."""
    prices = problems.prices.at(problems.rows(staged.candidate))
    parameters = _parameters(problems, staged.runs)
    leaving, _ = _messages(prices, [run.start for run in staged.runs])
    stages = zip(staged.runs, staged.times, _modules(problems, staged.runs), parameters, leaving, staged.kept, strict=True)
    return tuple(
        Stage(
            rank=staged.schedule.stage_rank[stage],
            first_node=problems.points.units[run.start][0],
            modules=modules,
            parameter_count=count,
            parameter_bytes=size,
            flops=float(prices.flops[run.start : run.stop].sum()),
            forward_time=times.forward,
            backward_time=times.backward_input + times.backward_weight,
            activation_bytes=kept,
            send_bytes=sum(sizes),
        )
        for stage, (run, times, modules, (count, size), sizes, kept) in enumerate(stages)
    )


def _times(problems: PipelineProblems, prices: UnitPrices, schedule: Schedule, starts: Sequence[int]) -> tuple[StageTimes, ...]:
    rank, n_units = schedule.stage_rank, len(problems.points.units)
    leaving, entering = _messages(prices, starts)

    def arrival(sizes: Sequence[int], stage: int, other: int) -> float:
        if not sizes:
            return 0.0
        link = problems.cluster.link(rank[stage], rank[other])
        return sum(problems.cost_model.transfer_time(size, link) for size in sizes)

    times = []
    for stage, run in enumerate(stage_runs(starts, n_units)):
        kind = problems.prices.kinds.index(problems.cluster.devices[rank[stage]])
        forward, backward_input, backward_weight = (float(half) for half in prices.halves[:, run.start : run.stop, kind].sum(axis=1))
        forward += sum(seconds[kind] for seconds, units in prices.replicated if any(unit in run for unit in units))
        send = arrival(leaving[stage], stage, stage + 1)
        times.append(StageTimes(forward, backward_input, backward_weight, send, arrival(entering[stage], stage, stage - 1)))
    return tuple(times)


def _messages(prices: UnitPrices, starts: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """For each stage, the sizes of the values that leave it, and of the gradients of those that enter it."""
    leaving: list[list[int]] = [[] for _ in starts]
    entering: list[list[int]] = [[] for _ in starts]
    for value in prices.values:
        producer = bisect_right(starts, value.producer) - 1
        readers = {bisect_right(starts, reader) - 1 for reader in value.readers} - {producer}
        if readers:
            leaving[producer].append(value.size)
        for reader in readers:
            if value.gradient_size:
                entering[reader].append(value.gradient_size)
    return leaving, entering


def _parameters(problems: PipelineProblems, runs: Sequence[range]) -> list[tuple[int, int]]:
    """For each stage, how many parameters its rank holds, and their bytes."""
    held_by = [(0, 0) for _ in runs]
    for node in problems.graph.graph.nodes:
        if node.name in problems.graph.parameters:
            size = problems.prices.held_bytes(node.name)
            count = size // node.meta["val"].dtype.itemsize
            for stage in _stages_reading(problems, node.name, runs):
                held_by[stage] = (held_by[stage][0] + count, held_by[stage][1] + size)
    return held_by


def _stages_reading(problems: PipelineProblems, parameter: str, runs: Sequence[range]) -> set[int]:
    starts = [run.start for run in runs]
    return {bisect_right(starts, unit) - 1 for unit in problems.prices.users(parameter)}


class StageSums:
    """The gradients that the ranks of stages sum at the end of a step.

    Args:
        prices: of the units.
        sums: each gradient with its mesh dimension.
    """

    def __init__(self, prices: Prices, sums: Iterable[GradientSum]) -> None:
        self._read_once: dict[str, tuple[list[int], list[float]]] = {}
        self._read_often: list[tuple[str, tuple[int, ...], float]] = []
        for each in sums:
            units = prices.users(each.parameter)
            if len(units) == 1:
                places, sizes = self._read_once.setdefault(each.dimension, ([], []))
                places.append(units[0])
                sizes.append(each.size)
            else:
                self._read_often.append((each.dimension, units, each.size))

    def bytes_of_ranks(self, starts: Sequence[int], stage_rank: Sequence[int]) -> dict[str, Floats]:
        """Mesh dimension -> (R,) the bytes that each rank of the pipeline sums over it; what two of its stages read, once."""
        ranks, n_ranks = np.array(stage_rank), max(stage_rank) + 1
        found: dict[str, Floats] = {}
        for dimension, (units, sizes) in self._read_once.items():
            stages = np.searchsorted(starts, units, side="right") - 1
            found[dimension] = np.bincount(ranks[stages], sizes, n_ranks).astype(float)
        for dimension, readers, size in self._read_often:
            total = found.setdefault(dimension, np.zeros(n_ranks))
            total[list({stage_rank[bisect_right(starts, unit) - 1] for unit in readers})] += size
        return found


def _modules(problems: PipelineProblems, runs: Sequence[range]) -> list[tuple[str, ...]]:
    """For each stage, the largest modules that lie in it whole, in order; what computes outside of any goes unnamed."""
    stage_of = {unit: stage for stage, run in enumerate(runs) for unit in run}
    nodes = {node.name: node for node in problems.graph.computing_nodes()}
    paths = [
        (module_path(nodes[name]), stage_of[index])
        for index, unit in enumerate(problems.points.units)
        for name in unit
        if name in nodes  # not what only cut graphs have: masks that are drawn apart
    ]
    stages: dict[str, set[int]] = {}
    for path, stage in paths:
        for prefix in _prefixes(path):
            stages.setdefault(prefix, set()).add(stage)
    covered: list[dict[str, None]] = [{} for _ in runs]
    for path, stage in paths:
        whole = next((prefix for prefix in _prefixes(path) if stages[prefix] == {stage}), path)
        covered[stage][whole] = None
    return [tuple(name for name in names if name or len(names) == 1) for names in covered]


def _prefixes(path: str) -> list[str]:
    """The modules around a node, outermost first, the model itself left out unless it is all there is."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
