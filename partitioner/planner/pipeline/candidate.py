"""A model cut into stages: memory and times of each stage, and the simulated step."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partitioner.planner.costs.collectives import GradientSum, shares_of_bucket
from partitioner.planner.costs.unit_costs import UnitCosts
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.pipeline.problem import PipelineProblems
from partitioner.planner.solvers.shared_rank_memory import counted_again
from partitioner.planner.solvers.stage_memory import Floats, Integers
from partitioner.planner.solvers.stage_problem import Units, stage_runs, stages_of
from partitioner.schedules.clocks.clock import Timing, run_on_clock
from partitioner.schedules.clocks.step_clock import StepClock
from partitioner.schedules.forwards_first import in_sweeps
from passes.graph.provenance import module_path, prefixes
from passes.ir.plan import Stage
from passes.ir.schedule import ActionKind, Schedule


@dataclass(frozen=True, eq=False)
class StagedModel:
    """A candidate with its stage cuts. Memory is computed lazily: of many cuts, few are fast enough.

    Attributes:
        problems: the model that was cut.
        runs: the units of each stage.
        times: the simulated seconds of each stage.
        ends: for each stage, seconds until its last action has ended.
    """

    problems: PipelineProblems
    candidate: Candidate
    schedule: Schedule
    runs: tuple[range, ...]
    times: tuple[StageTimes, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds of a step, without the sum of gradients at its end."""
        return max(self.ends)

    @property
    def idle(self) -> float:
        """The bubble fraction of all ranks' time."""
        busy = sum(each.forward + each.backward_input + each.backward_weight for each in self.times) * self.schedule.n_microbatches
        return 1 - busy / (self.schedule.n_ranks * self.makespan) if self.makespan else 0.0

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Bytes of each stage's saved activations for one microbatch."""
        return tuple(map(int, self._kept(self.problems.units(self.candidate, in_sweeps=True)).tolist()))

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Peak bytes of each rank."""
        return self._peaks(self.problems.clock(self.candidate))

    @cached_property
    def memory_of_sweeps(self) -> tuple[int, ...]:
        """Peak bytes of each rank in a step whose forwards all precede its backwards."""
        return self.memory if self.schedule.n_microbatches == 1 else self._peaks(StepClock(in_sweeps(self.schedule)))

    def _kept(self, units: Units) -> Floats:
        return units.kept_uses.per_stage(self._stage_of, self.schedule.n_stages, self._kinds)

    def _peaks(self, clock: StepClock) -> tuple[int, ...]:
        """Return the peak bytes of each rank in a step by the schedule of a clock, which tells halves of backwards apart."""
        units = self.problems.units(self.candidate, in_sweeps=True)
        schedule, stage_of, kinds = self.schedule, self._stage_of, self._kinds
        of_stages, gradients = (uses.per_stage(stage_of, schedule.n_stages, kinds) for uses in (units.fixed_uses, units.gradient_uses))
        of_stages -= counted_again(units.fixed, stage_of, schedule.stage_ranks, kinds)
        fixed = np.zeros(schedule.n_ranks)
        for ranks, size in zip(schedule.stage_ranks, of_stages, strict=True):
            fixed[list(ranks)] += size
        starts = [run.start for run in self.runs]
        transient = units.transient_of_stages(starts, kinds).tolist()
        between = units.between_of_stages(starts, kinds)
        crossing = units.crossing(stage_of, schedule.stage_ranks)
        kept = self._kept(units) - counted_again(units.kept, stage_of, schedule.stage_ranks, kinds)
        sizes = (kept.tolist(), gradients.tolist(), transient, units.summed, crossing.forward, crossing.backward)
        peaks = clock.peak_memory(*sizes, between.tolist(), crossing.waiting, *units.messages_of_stages(starts, kinds).tolist())
        return tuple(int(permanent + peak) for permanent, peak in zip(fixed.tolist(), peaks, strict=True))

    @property
    def _kinds(self) -> tuple[int, ...]:
        return self.problems.kinds(self.candidate)

    @property
    def _stage_of(self) -> Integers:
        return stages_of([run.start for run in self.runs], len(self.problems.points.units))


def stage_model(problems: PipelineProblems, candidate: Candidate, starts: Sequence[int]) -> StagedModel:
    """Cut a candidate into stages with these first units, and simulate its schedule."""
    n_units, clock = len(problems.points.units), problems.clock(candidate)
    columns = _times(problems, candidate, starts, stages_of(starts, n_units))
    times = tuple(itertools.starmap(StageTimes, zip(*columns, strict=True)))
    return StagedModel(problems, candidate, clock.schedule, stage_runs(starts, n_units), times, clock.stage_ends(*columns))


def seconds_once(problems: PipelineProblems, staged: StagedModel) -> float:
    """Return the seconds by which collectives before the first microbatch, and after the last, make a step longer.

    A rank gathers the parameters of its stages from the start, in their order; it scatters the gradients of a stage after its last
    backward, which is earlier in a later stage, unless weight halves are left for the end:

        stage 0   gather ░░░░                              scatter ▒▒▒▒     both are waited for
                         forward ████        backward ██████
        stage 1   gather ░░░░                      scatter ▒▒▒▒             hidden by the first forward and the last backward of stage 0
                              forward ████ backward ██████
    """
    times = problems.prices.times(problems.rows(staged.candidate))
    if not times.once.any():
        return 0.0
    starts, kinds = [run.start for run in staged.runs], problems.kinds(staged.candidate)
    gathers, scatters = np.add.reduceat(times.once[:, times.source], starts, axis=1)[:, np.arange(len(starts)), kinds].tolist()
    arrives = itertools.accumulate((each.forward + each.send for each in staged.times), initial=0.0)
    gathered, late = dict[tuple[int, ...], float](), 0.0
    for ranks, seconds, arrival in zip(staged.schedule.stage_ranks, gathers, arrives, strict=False):
        gathered[ranks] = gathered.get(ranks, 0.0) + seconds
        late = max(late, gathered[ranks] - arrival)
    scattered = dict[tuple[int, ...], float]()
    for end, ranks, seconds in sorted(zip(staged.ends, staged.schedule.stage_ranks, scatters, strict=True)):
        scattered[ranks] = max(scattered.get(ranks, 0.0), end) + seconds
    return late + max(max(scattered.values()) - staged.makespan, 0.0)


def describe_stages(problems: PipelineProblems, staged: StagedModel) -> tuple[Stage, ...]:
    """Return the stages as a plan describes them."""
    prices = problems.prices.at(problems.rows(staged.candidate))
    kinds = problems.kinds(staged.candidate)
    parameters = _parameters(problems, staged.runs, kinds)
    stage_of = stages_of([run.start for run in staged.runs], len(prices.units))
    leaving = [int(sent) for sent in prices.units.leaving.sent_per_stage(stage_of, len(staged.runs)).tolist()]
    stages = zip(staged.runs, staged.times, _modules(problems, staged.runs), parameters, leaving, staged.kept, strict=True)
    return tuple(
        Stage(
            ranks=staged.schedule.stage_ranks[stage],
            first_node=problems.points.starts[run.start],
            modules=modules,
            parameter_count=count,
            parameter_bytes=size,
            flops=prices.flops_of(run, kinds[stage]),
            forward_time=times.forward,
            backward_time=times.backward_input + times.backward_weight,
            activation_bytes=kept,
            send_bytes=sent,
        )
        for stage, (run, times, modules, (count, size), sent, kept) in enumerate(stages)
    )


def _times(problems: PipelineProblems, candidate: Candidate, starts: Sequence[int], stage_of: Integers) -> tuple[list[float], ...]:
    """Return the columns of ``StageTimes``, each with an entry for each stage."""
    prices, kinds, n_stages = problems.costs(candidate), problems.kinds(candidate), len(starts)
    forward, backward_input, backward_weight = np.add.reduceat(prices.halves, starts, axis=1)[:, np.arange(n_stages), kinds]
    units = prices.units
    if len(units.replicated_uses.unit):
        forward += units.replicated_uses.per_stage(stage_of, n_stages, kinds)
    if units.gathered_values:
        forward += units.gathered_value_seconds.sent_per_stage(stage_of, n_stages, kinds)
    if units.gathered_gradients:
        backward_input += units.gathered_gradient_seconds.per_stage(stage_of, n_stages, kinds)
    messages = problems.messages(candidate)
    return tuple(column.tolist() for column in (forward, backward_input, backward_weight, *messages.of(stage_of), messages.shares))


def _parameters(problems: PipelineProblems, runs: Sequence[range], kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each stage (number of parameters, bytes) of one rank."""
    of_stages, starts = [(0, 0) for _ in runs], [run.start for run in runs]
    for node in problems.graph.graph.nodes:
        if node.name in problems.graph.parameters:
            for stage in {bisect_right(starts, unit) - 1 for unit in problems.prices.users[node.name]}:
                size = problems.prices.held_bytes[kinds[stage]][node.name]
                count = size // node.meta["val"].dtype.itemsize
                of_stages[stage] = (of_stages[stage][0] + count, of_stages[stage][1] + size)
    return of_stages


class StageSums:
    """The gradients that the ranks of stages sum at the end of a step, each over a mesh dimension."""

    def __init__(self, prices: UnitCosts, sums: Iterable[GradientSum]) -> None:
        # Of parameters with one reader: mesh dimension -> (readers, (N, 2) amounts). Of others: (mesh dimension, readers, (2,) amounts).
        self._read_once: dict[str, tuple[list[int], Floats]] = {}
        self._read_often: list[tuple[str, tuple[int, ...], Floats]] = []
        once: dict[str, list[tuple[int, GradientSum]]] = {}
        for each in sums:
            units = prices.users[each.parameter]
            if len(units) == 1:
                once.setdefault(each.dimension, []).append((units[0], each))
            else:
                self._read_often.append((each.dimension, units, _bytes_and_buckets([each])[0]))
        for dimension, gradients in once.items():
            self._read_once[dimension] = [unit for unit, _ in gradients], _bytes_and_buckets([each for _, each in gradients])

    def of_ranks(self, starts: Sequence[int], stage_ranks: Sequence[tuple[int, ...]]) -> dict[str, Floats]:
        """Return mesh dimension -> (R, 2) the bytes that each rank of the pipeline sums over it, and the number of buckets they fill.

        A parameter that two stages of a rank read counts once. Only the first rank of a replicated stage has an entry: all sum as much.

        Args:
            starts: the first unit of each stage.
            stage_ranks: the ranks of each stage.
        """
        first_rank = [ranks[0] for ranks in stage_ranks]
        rank_of_stage, n_ranks = np.array(first_rank), max(first_rank) + 1
        by_dimension: dict[str, Floats] = {}
        for dimension, (units, amounts) in self._read_once.items():
            stages = np.searchsorted(starts, units, side="right") - 1
            by_dimension[dimension] = np.stack([np.bincount(rank_of_stage[stages], column, n_ranks) for column in amounts.T], axis=1)
        for dimension, readers, amount in self._read_often:
            total = by_dimension.setdefault(dimension, np.zeros((n_ranks, 2)))
            total[list({first_rank[bisect_right(starts, unit) - 1] for unit in readers})] += amount
        return by_dimension


def _bytes_and_buckets(sums: Sequence[GradientSum]) -> Floats:
    """Return (N, 2) bytes of gradients where they are summed, and the fraction of a bucket that each fills."""
    sizes, held = (np.array(column, dtype=float) for column in zip(*((each.size, each.held) for each in sums), strict=True))
    return np.stack([sizes, shares_of_bucket(held)], axis=1)


def _modules(problems: PipelineProblems, runs: Sequence[range]) -> list[tuple[str, ...]]:
    """Return for each stage the largest modules that it contains whole, in order; nodes outside of any module have no name."""
    stage_of = {unit: stage for stage, run in enumerate(runs) for unit in run}
    nodes = {node.name: node for node in problems.graph.computing_nodes()}
    paths = [
        (module_path(nodes[name]), stage_of[index])
        for index, unit in enumerate(problems.points.units)
        for name in unit
        if name in nodes  # dropout masks are nodes of sharded graphs only
    ]
    stages_of_module: dict[str, set[int]] = {}
    for path, stage in paths:
        for prefix in prefixes(path):
            stages_of_module.setdefault(prefix, set()).add(stage)
    of_stages: list[dict[str, None]] = [{} for _ in runs]
    for path, stage in paths:
        largest = next((prefix for prefix in prefixes(path) if stages_of_module[prefix] == {stage}), path)
        of_stages[stage][largest] = None
    return [tuple(name for name in names if name or len(names) == 1) for names in of_stages]


# -- seconds of a step -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one microbatch.

    Attributes:
        forward: compute.
        backward_input: compute of the input half.
        backward_weight: compute of the weight half.
        send: transfer of its messages to later stages.
        send_gradient: transfer of the gradients that it sends back.
        share: fraction of the transfer time between it and the next stage in which the receiver cannot compute.
    """

    forward: float
    backward_input: float
    backward_weight: float
    send: float
    send_gradient: float
    share: float = 0.0

    def of(self, kind: ActionKind) -> float:
        """Return the seconds of an action."""
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward_input + self.backward_weight,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


def simulate_step(schedule: Schedule, stages: Sequence[StageTimes]) -> Timing:
    """Simulate a step; raise VerificationError if the schedule deadlocks."""

    def transfer_seconds(stage: int, kind: ActionKind) -> float:
        return stages[stage].send if kind is ActionKind.FORWARD else stages[stage].send_gradient

    def share(stage: int, kind: ActionKind) -> float:
        return stages[stage if kind is ActionKind.FORWARD else stage - 1].share

    seconds = {kind: [times.of(kind) for times in stages] for kind in ActionKind}
    return run_on_clock(schedule, lambda action: seconds[action.kind][action.stage], transfer_seconds, share)
