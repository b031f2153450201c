"""A plan's reasons in words."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.units import format_seconds
from partitioner.planner.candidates import Candidate
from partitioner.planner.pipeline_problem import PipelineProblems
from partitioner.planner.staged_model import StagedModel

__all__ = ["bound_by", "candidate_words", "runner_up"]


def bound_by(problems: PipelineProblems, staged: StagedModel) -> str:
    """What limits the step: the slowest stage, what it spends its time on, and how long the ranks wait."""
    seconds = [times.forward + times.backward_input + times.backward_weight + times.send + times.send_gradient for times in staged.times]
    slowest = max(range(len(seconds)), key=lambda stage: seconds[stage])
    times, rank = staged.times[slowest], staged.schedule.stage_rank[slowest]
    sending = times.send + times.send_gradient
    if sending > seconds[slowest] / 2:
        spent = "sending"
    else:
        spent = problems.prices.limit_of(staged.runs[slowest], problems.cluster.devices[rank], problems.rows(staged.candidate))
    idle = round(100 * staged.step.bubble_fraction)
    waiting = f"; ranks wait {idle} % of the time" if idle else ""
    return f"stage {slowest} on rank {rank} is the slowest: {format_seconds(seconds[slowest])} a microbatch, most of it {spent}{waiting}"


def runner_up(chosen: StagedModel, tried: Sequence[StagedModel]) -> str:
    """The next best choice and its price; empty when there was none."""
    others = [staged for staged in tried if staged is not chosen]
    if not others:
        return ""
    best = min(others, key=lambda staged: staged.step.makespan)
    change = 100 * (best.step.makespan / chosen.step.makespan - 1) if chosen.step.makespan else 0.0
    if abs(change) < 0.05:
        return f"{candidate_words(best.candidate)}: as fast"
    verdict = f"{change:.1f} % slower" if change >= 0 else f"{-change:.1f} % faster, which is less than predictions may be wrong"
    return f"{candidate_words(best.candidate)}: {format_seconds(best.step.makespan)} a step, {verdict}"


def candidate_words(candidate: Candidate) -> str:
    """A candidate for reading.

    >>> candidate_words(Candidate("ZBV", 2, 8))
    'ZBV, 8 microbatches, 2 stages on each device'
    """
    microbatches = "1 microbatch" if candidate.n_microbatches == 1 else f"{candidate.n_microbatches} microbatches"
    stages = "1 stage" if candidate.stages_per_rank == 1 else f"{candidate.stages_per_rank} stages"
    return f"{candidate.schedule}, {microbatches}, {stages} on each device"
