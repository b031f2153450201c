"""A plan's reasons in words."""

from __future__ import annotations

from collections.abc import Iterable

from cost_models.hardware.units import format_seconds
from partitioner.planner.pipeline.candidate import StagedModel
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.pipeline.problem import PipelineProblems
from partitioner.planner.search.mesh_problem import Solution
from passes.ir.layout import BATCH, SPACE
from passes.ir.mesh import STAGES, TILES, Mesh, mesh_words
from passes.ir.plan import ATTENTION, BY_REGION, Contender, Plan


def bound_by(problems: PipelineProblems, staged: StagedModel, sums: float = 0.0) -> str:
    """Name the bottleneck of the step: the sum of gradients, or the slowest stage and the largest part of its time."""
    if sums > staged.makespan:
        return f"the sum of gradients over replicas takes most of the step: {format_seconds(sums)}, if compute hides none of it"
    slowest, seconds = _slowest(staged)
    ranks, spent = staged.schedule.stage_ranks[slowest], _spent_on(problems, staged)
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' and '.join(map(str, ranks))} round-robin"
    return f"stage {slowest} on {where} is the slowest: {format_seconds(seconds)} a microbatch, most of it {spent}"


def _slowest(staged: StagedModel) -> tuple[int, float]:
    """Return the slowest stage, its time divided by its replicas, and its undivided seconds for one microbatch."""
    seconds = [times.forward + times.backward_input + times.backward_weight + times.send + times.send_gradient for times in staged.times]
    slowest = max(range(len(seconds)), key=lambda stage: seconds[stage] / len(staged.schedule.stage_ranks[stage]))
    return slowest, seconds[slowest]


def _spent_on(problems: PipelineProblems, staged: StagedModel) -> str:
    """Name the largest part of the slowest stage's time."""
    slowest, seconds = _slowest(staged)
    times, run, rows = staged.times[slowest], staged.runs[slowest], problems.rows(staged.candidate)
    kind = problems.kinds(staged.candidate)[slowest]
    if times.send + times.send_gradient > seconds / 2:
        return "sending"
    if problems.prices.times(rows).waiting_of(run, kind) > seconds / 2:
        return "communication between the ranks that cut axes"
    return problems.prices.limit_of(run, rows, kind)


def contender(words: str, solution: Solution) -> Contender:
    """Return a solution as an entry of a plan's list of alternatives."""
    staged = solution.staged
    if solution.sums > staged.makespan:
        spent = "the sum of gradients over replicas"
    else:
        spent = "waiting for other ranks" if staged.idle > 1 / 2 else _spent_on(staged.problems, staged)
    return Contender(words, solution.step_time, max(staged.memory), spent)


def pareto_front(solutions: Iterable[tuple[str, Solution]]) -> tuple[Contender, ...]:
    """Return the plans that no other beats in both step time and memory, the fastest first; of many, the ends and some between.

    Args:
        solutions: plans in words, with their solutions.
    """
    least, front = float("inf"), list[tuple[str, Solution]]()
    for words, solution in sorted(solutions, key=lambda pair: (pair[1].step_time, max(pair[1].staged.memory))):
        if max(solution.staged.memory) < least:
            least = max(solution.staged.memory)
            front.append((words, solution))
    step = max(1.0, (len(front) - 1) / (_MOST_OF_FRONT - 1))
    indices = dict.fromkeys(min(round(number * step), len(front) - 1) for number in range(min(_MOST_OF_FRONT, len(front))))
    return tuple(contender(*front[index]) for index in indices)


_MOST_OF_FRONT = 5
"""Limit of the reported plans of a Pareto front."""


def searched_words(
    n_plans: int,
    n_meshes: int,
    n_all_meshes: int,
    gap: float,
    *,
    interrupted: bool = False,
    n_choices: int = 1,
    n_left_out: int = 0,
    faster: str = "",
) -> str:
    """Say how many plans a search tried, and the bound that it proved.

    Args:
        n_meshes: number of meshes with a solved plan.
        n_all_meshes: number of candidate meshes; 1: the user named the mesh.
        interrupted: whether the user ended the search.
        n_choices: number of choices of axes that were priced as whole plans on a mesh that the user named.
        n_left_out: number of such choices that were not priced, since the model has many operations.
        faster: in words, a faster plan with other axes that does not fit the requested mode.

    >>> searched_words(12, 4, 11, 0.0)
    '12 plans on 4 of 11 meshes were worked out; it is proved that no other is faster, by the same prices'
    >>> searched_words(80, 40, 90, 0.42)
    '80 plans on 40 of 90 meshes were worked out; not proved: another could take up to 42 % less time'
    >>> searched_words(1, 1, 1, 0.0)
    '1 plan of this mesh was worked out; it is proved that no other is faster, by the same prices'
    >>> searched_words(2, 1, 1, 0.0, n_choices=9)
    '2 plans of this mesh with 9 choices of axes were worked out; it is proved that no other with these axes is faster, by the same prices'
    >>> searched_words(2, 1, 1, 0.3, n_choices=4, n_left_out=8)
    '2 plans of this mesh with 4 of 12 choices of axes were worked out; not proved: another could take up to 30 % less time'
    >>> searched_words(3, 20, 90, 0.08, interrupted=True)
    '3 plans on 20 of 90 meshes were worked out before the search was interrupted; not proved: another could take up to 8 % less time'
    """
    of_all = f" of {n_choices + n_left_out}" if n_left_out else ""
    with_axes = f" with {n_choices}{of_all} choices of axes" if n_choices > 1 or n_left_out else ""
    where = f"of this mesh{with_axes}" if n_all_meshes == 1 else f"on {n_meshes} of {n_all_meshes} meshes"
    done = f"{n_plans} plan{'s' if n_plans != 1 else ''} {where} {'were' if n_plans != 1 else 'was'} worked out"
    done += " before the search was interrupted" if interrupted else ""
    if faster:
        return f"{done}; other axes than the mode means take less time: {faster}"
    if gap == 0.0:
        return f"{done}; it is proved that no other {'with these axes ' if with_axes else ''}is faster, by the same prices"
    return f"{done}; not proved: another could take up to {100 * gap:.2g} % less time"


def compared(words: str, seconds: float, chosen: float, spent_on: str = "") -> str:
    """Compare another choice with the chosen one, in words, and name the largest part of its time.

    >>> compared("data 8", 0.012, 0.010, "arithmetic")
    'data 8: 12.0 ms a step, 20.0 % slower, most of it arithmetic'
    """
    change = 100 * (seconds / chosen - 1) if chosen else 0.0
    if abs(change) < 0.05:
        return f"{words}: as fast"
    verdict = f"{change:.1f} % slower" if change >= 0 else f"{-change:.1f} % faster, which is less than predictions may be wrong"
    return f"{words}: {format_seconds(seconds)} a step, {verdict}" + (f", most of it {spent_on}" if spent_on else "")


def plan_words(mesh: Mesh, candidate: Candidate, policy: str, *, extra_axes: bool = False, attention: str = ATTENTION[0]) -> str:
    """Describe a mesh, a candidate and a recomputation policy in words.

    >>> plan_words(Mesh((("data", 2), ("tensor", 4))), Candidate("1F1B", 1, 1), "full", extra_axes=True)
    'data 2 x tensor 4 with the sequence, recompute full'

    Args:
        policy: of recomputation.
        extra_axes: whether more than the usual axes is cut: another than space by tiles, the sequence by ``tensor``, or large weights.
        attention: how the ranks of a sequence dimension share attention (``Plan.attention``).
    """
    where = mesh_words(mesh, candidate.replicas)
    if extra_axes and any(name in TILES for name in mesh.names):
        where += " with other axes than space"
    elif extra_axes:
        where += " with the sequence" if "tensor" in mesh.names else " with large weights cut"
    if attention != ATTENTION[0]:
        where += f" with {attention} attention"
    words = [where]
    if any(name in STAGES for name in mesh.names) and mesh.size > 1:
        words.append(candidate_words(candidate))
    elif candidate.n_microbatches > 1:
        words.append(f"{candidate.n_microbatches} microbatches")
    if policy != "none":
        words.append(f"recompute {policy}")
    return ", ".join(words)


def words_of(plan: Plan) -> str:
    """Describe the choices of a plan in words, as ``plan_words`` does."""
    places = next((size for name, size in plan.mesh if name in STAGES), 1)
    with_sequence = any(axis.startswith("sequence") and dimension == "tensor" for axis, dimension in plan.axes)
    with_weights = any(dimension == "data" and not axis.startswith((BATCH, "experts")) for axis, dimension in plan.axes)
    switched = any(dimension in TILES and not axis.startswith((*SPACE, "length")) for axis, dimension in plan.axes)
    extra_axes = with_sequence or with_weights or switched
    candidate = Candidate(plan.schedule, len(plan.stages) // places, plan.n_microbatches, plan.replicas)
    policy = recomputed_regions(plan) or plan.recompute
    return plan_words(plan.grid, candidate, policy, extra_axes=extra_axes, attention=plan.attention)


def recomputed_regions(plan: Plan) -> str:
    """Return ``"7 of 12 regions"`` for a plan whose regions have policies of their own; an empty string for one policy.

    With selective regions, ``"5 full and 2 selective of 12 regions"``.
    """
    if plan.recompute != BY_REGION:
        return ""
    full, selective = (sum(region.recompute == policy for region in plan.regions) for policy in ("full", "selective"))
    counts = " and ".join(f"{count} {policy}" for count, policy in ((full, "full"), (selective, "selective")) if count)
    return f"{counts if selective else full} of {len(plan.regions)} regions"


def candidate_words(candidate: Candidate) -> str:
    """Describe a candidate in words.

    >>> candidate_words(Candidate("ZBV", 2, 8))
    'ZBV, 8 microbatches, 2 stages on each device'
    >>> candidate_words(Candidate("1F1B", 1, 8, (2, 1)))  # the mesh tells the ranks of each stage
    '1F1B, 8 microbatches'
    """
    microbatches = "1 microbatch" if candidate.n_microbatches == 1 else f"{candidate.n_microbatches} microbatches"
    if candidate.replicas:
        return f"{candidate.schedule}, {microbatches}"
    stages = "1 stage" if candidate.stages_per_rank == 1 else f"{candidate.stages_per_rank} stages"
    return f"{candidate.schedule}, {microbatches}, {stages} on each device"
