"""A model with its cuts: what each stage holds and takes, and how long the step is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.planner.candidates import Candidate
from partitioner.planner.cut_points import module_path
from partitioner.planner.exchanges import GradientSum
from partitioner.planner.pipeline_problem import PipelineProblems
from partitioner.planner.stage_cuts import StageCuts
from partitioner.planner.stage_problem import held, stage_runs
from partitioner.planner.step_time import StageTimes, simulate_step
from partitioner.planner.unit_prices import UnitPrices
from partitioner.schedules.clock import Timing
from partitioner.schedules.in_flight import peak_activation
from passes.ir.plan import Stage
from passes.ir.schedule import Schedule

__all__ = ["StagedModel", "describe_stages", "stage_model", "summed_bytes"]


@dataclass(frozen=True)
class StagedModel:
    """One candidate, worked out.

    Attributes:
        candidate: what was chosen.
        schedule: its schedule.
        cuts: where it is cut.
        runs: the units of each stage.
        times: for each stage, what the clock was told.
        step: what the clock said.
        kept: for each stage, bytes kept for one microbatch.
        memory: for each rank, peak bytes.
    """

    candidate: Candidate
    schedule: Schedule
    cuts: StageCuts
    runs: tuple[range, ...]
    times: tuple[StageTimes, ...]
    step: Timing
    kept: tuple[int, ...]
    memory: tuple[int, ...]


def stage_model(problems: PipelineProblems, candidate: Candidate, schedule: Schedule, cuts: StageCuts) -> StagedModel:
    """Work a solution out."""
    n_units = len(problems.points.units)
    prices = problems.prices.at(problems.rows(candidate))
    kept = tuple(int(size) for size in held(prices.kept, cuts.starts, n_units))
    fixed = np.bincount(schedule.stage_rank, held(prices.fixed, cuts.starts, n_units), schedule.n_ranks)
    memory = tuple(int(stays) + peak for stays, peak in zip(fixed, peak_activation(schedule, kept), strict=True))
    times = _times(problems, prices, schedule, cuts.starts)
    step = simulate_step(schedule, times)
    return StagedModel(candidate, schedule, cuts, stage_runs(cuts.starts, n_units), times, step, kept, memory)


def describe_stages(problems: PipelineProblems, staged: StagedModel) -> tuple[Stage, ...]:
    """What the plan says of the stages."""
    prices = problems.prices.at(problems.rows(staged.candidate))
    parameters = _parameters(problems, staged.runs)
    leaving, _ = _messages(prices, staged.cuts.starts)
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


def summed_bytes(problems: PipelineProblems, staged: StagedModel, sums: Iterable[GradientSum]) -> list[dict[str, float]]:
    """For each rank of the pipeline, the bytes of gradients that it sums over each mesh dimension once a step."""
    ranks: list[dict[str, float]] = [{} for _ in range(staged.schedule.n_ranks)]
    for each in sums:
        for rank in {staged.schedule.stage_rank[stage] for stage in _stages_reading(problems, each.parameter, staged.runs)}:
            ranks[rank][each.dimension] = ranks[rank].get(each.dimension, 0.0) + each.size
    return ranks


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
