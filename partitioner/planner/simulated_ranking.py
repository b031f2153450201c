"""Rank the best plans of a search by their simulated steps.

    plan                 by prices of layers    simulated
    fsdp 8                        0.903 s         0.843 s      taken
    pipeline 8, ZBV               0.752 s         0.889 s
    data 2 x fsdp 4               0.801 s         0.811 s      0.2 % above the limit of memory: planned again within 0.2 % less

Prices of a search leave out what only programs show: which messages share a link, what is gathered ahead of its use, which sums overlap the
backward. Plans of different meshes that are nearly as fast by these prices are therefore lowered, and compared by the simulation of their
programs. The step time of the plan is then the simulated one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from cost_models.simulator.result import Simulation
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.search.describe import compared
from passes.ir.errors import PartitionError
from passes.ir.plan import Contender, Plan

Simulated: TypeAlias = Callable[[Plan], Simulation]
"""Simulates the step of a plan; raises PartitionError if it cannot be lowered."""

Smaller: TypeAlias = Callable[[Plan, float], Plan]
"""Plans the mesh of a plan again within a fraction of the memory; raises PartitionError if nothing fits."""

MOST_SIMULATED = 6
"""How many plans of a search are simulated."""

_CLOSE = 1.05
"""A simulated peak, as a fraction of its limit, up to which the mesh is planned again within less memory."""

_MOST_AGAIN = 3
"""How many times a mesh is planned again: each plan may differ from its simulation by more than the one before."""


def fastest_simulated(
    plans: Sequence[Plan],
    simulated: Simulated,
    limits: Sequence[float],
    deadline: Deadline,
    *,
    interruptible: bool = False,
    smaller: Smaller | None = None,
) -> Plan:
    """Return the plan with the shortest simulated step, of those whose simulated memory fits, if any does.

    Args:
        plans: of different meshes, the first of the search's choice. One that cannot be lowered is left out, and named in the notes.
        limits: the memory limit of each rank in bytes.
        deadline: of the search; once it is over, no plan is simulated, and the step time is that of the search.
        interruptible: whether Ctrl-C ends the ranking with the best plan so far; otherwise it is raised.
        smaller: plans again what exceeds its limit by little, and is faster than all that fits; None: that is taken only if nothing fits.
    """
    steps: list[tuple[Plan, Simulation]] = []
    notes: list[str] = []
    end = ""
    for plan in plans:
        if deadline.is_over:
            end = " within the time limit"
            break
        try:
            steps.append((plan, dataclasses.replace(simulated(plan), limits=limits)))
        except PartitionError as refusal:
            notes.append(f"Left out, as it cannot be lowered: {plan.prediction.contenders[0].words}: {refusal.problem}.")
        except KeyboardInterrupt:
            if not interruptible:
                raise
            end = " before the search was interrupted"
            break
    if not steps:
        searched = plans[0].prediction.searched + (f"; none was simulated{end}" if end else "")
        return plans[0].predicted(notes=(*plans[0].notes, *notes), searched=searched)
    if smaller is not None:
        steps = _within_limits(steps, simulated, limits, deadline, smaller, notes)
    ranked = sorted(steps, key=lambda step: (bool(step[1].over_limit), step[1].step_time))
    plan, simulation = ranked[0]
    if simulation.over_limit:
        words = simulation.over_limit_words
        notes.append(f"{words[0].upper()}{words[1:]}: a lower memory_limit= has the planner leave more room.")
    reported = _reported(plan, simulation, [_contender(*step) for step in ranked], plans[0].prediction.contenders, end)
    return reported.predicted(notes=(*plan.notes, *notes))


def _within_limits(
    steps: Sequence[tuple[Plan, Simulation]],
    simulated: Simulated,
    limits: Sequence[float],
    deadline: Deadline,
    smaller: Smaller,
    notes: list[str],
) -> list[tuple[Plan, Simulation]]:
    """Return the steps, of which those that exceed a limit by little are planned again if they are faster than all that fit.

    Args:
        notes: what cannot be planned again, or lowered, is appended, and stays as it is.
    """
    fastest = min((simulation.step_time for _, simulation in steps if not simulation.over_limit), default=float("inf"))
    found: list[tuple[Plan, Simulation]] = []
    for first in steps:
        tried = [first]
        while _is_worth_planning_again(tried, fastest) and not deadline.is_over:
            try:
                plan = _of_search(smaller(tried[0][0], _fraction(*tried[-1])), tried[0][0])
                tried.append((plan, dataclasses.replace(simulated(plan), limits=limits)))
            except PartitionError as refusal:
                excess, words = _excess(tried[0][1]) - 1, tried[0][0].prediction.contenders[0].words
                notes.append(
                    f"Exceeds its memory by {excess:.1%} in simulation, and was not planned within less: {words}: {refusal.problem}."
                )
                break
        found.append(min(tried, key=lambda step: _excess(step[1])))
    return found


def _is_worth_planning_again(tried: Sequence[tuple[Plan, Simulation]], fastest: float) -> bool:
    """Tell whether the last plan of a mesh exceeds its memory by little, and is faster than all that fit."""
    _, simulation = tried[-1]
    return len(tried) <= _MOST_AGAIN and 1 < _excess(simulation) <= _CLOSE and simulation.step_time < fastest


def _excess(simulation: Simulation) -> float:
    """Return the simulated peak of the device that exceeds its limit by most, as a fraction of that limit; 1 if none does."""
    return max((1 + over / simulation.limits[rank] for rank, over in simulation.over_limit.items()), default=1.0)


def _fraction(plan: Plan, simulation: Simulation) -> float:
    """Return the part of its memory within which a plan is to be found whose simulated peak fits: as planned peaks are to simulated ones.

    A planned peak of 64 GiB whose simulation has 66 of 65 GiB is replaced by a plan within 64 / 66 of 65 GiB, which is 63.
    """
    return min(min(plan.memory[rank] / simulation.peak_memory[rank], 1 / _excess(simulation)) for rank in simulation.over_limit)


def _of_search(again: Plan, plan: Plan) -> Plan:
    """Return a plan of the same mesh with the words of the search that found ``plan``, and its gap, which grows as its step does."""
    found = plan.prediction
    gap = None if found.gap is None else 1 - (1 - found.gap) * found.step_time / max(again.step_time, found.step_time)
    contenders = (again.prediction.contenders[0], *found.contenders[1:])
    return again.predicted(gap=gap, axes_gap=found.axes_gap, searched=found.searched, front=found.front, contenders=contenders)


def _contender(plan: Plan, simulation: Simulation) -> Contender:
    """Return a plan as an entry of the list of alternatives, with its simulated step."""
    chosen = plan.prediction.contenders[0]
    words = chosen.words + (", more than its memory in simulation" if simulation.over_limit else "")
    return dataclasses.replace(chosen, words=words, step_time=simulation.step_time)


def _mesh_words(contender: Contender) -> str:
    """Return the mesh of a plan in words, with what it shards besides; a search over meshes reports one plan of each."""
    return contender.words.partition(",")[0]


def _reported(plan: Plan, simulation: Simulation, ranked: Sequence[Contender], searched: Sequence[Contender], end: str) -> Plan:
    """Return a plan with its simulated step, beside the other simulated plans and then those of the search that were not.

    Args:
        end: what ended the ranking early, in words; empty: nothing.
    """
    meshes = {_mesh_words(contender) for contender in ranked}
    others = [each for each in searched if _mesh_words(each) not in meshes]
    contenders = (*ranked, *others)[: max(len(searched), len(ranked))]
    prediction = plan.prediction
    runner_up = prediction.runner_up
    if len(contenders) > 1:
        runner_up = compared(contenders[1].words, contenders[1].step_time, simulation.step_time, contenders[1].spent_on)
    count = f"; the best {len(ranked)} were simulated{end}" if len(ranked) > 1 else f"; the best was simulated{end}"
    return plan.predicted(
        step_time=simulation.step_time,
        runner_up=runner_up,
        contenders=contenders,
        searched=prediction.searched + count,
    )
