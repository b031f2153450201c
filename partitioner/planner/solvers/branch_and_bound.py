"""Which cuts make a step shortest on the clock: exactly, by branch and bound.

    minimise    seconds(cuts)        what the clock says, with what ranks sum at the end; inf where the cuts do not fit
    over        0 = c(0) < c(1) < ... < c(S) = N

No step is shorter than the longest path through the schedule that one of its runs is sure of (``path_costs``). The dynamic programme over
these says how short a step can be that begins with some cuts, and which cuts promise most. Those are tried first; all others are tried in
their order, from the first stage on, unless their runs promise no less than the best that is known. A search that would take too long
ends, and tells what it has proved: the programme's own bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.critical_paths import PathCosts
from partitioner.planner.solvers.stage_problem import Floats
from partitioner.planner.solvers.stage_tables import affordable_blocks, bottleneck_table, price_table

__all__ = ["FastestCuts", "fastest_cuts", "promising_cuts"]

Starts = tuple[int, ...]
"""The first unit of each stage."""

_ROUNDING = 1e-9
"""Relative differences that are rounding."""

_PREFIXES = 20_000
"""How many first stages are followed at most: what messages take can rule out every end of them, millions of times."""


@dataclass(frozen=True)
class FastestCuts:
    """What the search found.

    Attributes:
        starts: the first unit of each stage of the fastest cuts; None: no cuts that were tried fit.
        seconds: what they take.
        bound: seconds that no cuts can beat; ``seconds`` itself where the search is complete, inf where no cuts fit.
    """

    starts: Starts | None
    seconds: float
    bound: float


def promising_cuts(costs: PathCosts, bound: float) -> Starts:
    """The cuts whose longest path is the shortest; of equal ones those that send fewest bytes, then cut through fewest modules.

    Args:
        bound: seconds of that path, as ``best_bottleneck`` has them.
    """
    return price_table(costs, bound * (1 + _ROUNDING)).starts()


def fastest_cuts(
    costs: PathCosts,
    least: float,
    more: float,
    seconds: Callable[[Starts], float],
    tried: Starts,
    most: int,
    within: float = math.inf,
) -> FastestCuts:
    """Search.

    Args:
        least: ``best_bottleneck`` of them.
        more: what all cuts take besides, at least.
        seconds: of cuts, with what they take besides; inf where they do not fit.
        tried: cuts to begin with.
        most: how many more cuts are tried at most.
        within: seconds beyond which the first ones are so slow that no others are tried.
    """
    search = _Search(costs, more, seconds, tried, most, within)
    if search.best > (least + more) * (1 + _ROUNDING):
        search.run()
    proved = search.best if search.is_complete else min(search.best, least + more)
    return FastestCuts(search.found if np.isfinite(search.best) else None, search.best, proved)


class _Search:
    """Descents from the first stage on."""

    def __init__(self, costs: PathCosts, more: float, seconds: Callable[[Starts], float], tried: Starts, most: int, within: float) -> None:
        self._costs, self._more, self._seconds = costs, more, seconds
        self.best, self.found = seconds(tried), tried
        self._left = most if self.best <= within else 0
        self._prefixes = _PREFIXES
        self.is_complete = True

    def run(self) -> None:
        """Try all cuts that may be better."""
        if self._left <= 0:
            self.is_complete = False
            return
        self._table = bottleneck_table(self._costs, self._below)
        self._choices = _Choices(self._costs, self._below)
        self._descend((), 0, 0.0, 0.0)

    @property
    def _below(self) -> float:
        """What a path must be shorter than."""
        return (self.best - self._more) * (1 - _ROUNDING)

    def _descend(self, starts: Starts, unit: int, longer: float, sent: float) -> None:
        """Try all cuts that begin with these.

        Args:
            longer: seconds that their stages send for beyond what paths know.
            sent: seconds that their messages take, there and back.
        """
        problem, stage = self._costs.problem, len(starts)
        if stage == problem.n_stages:
            self._left -= 1
            taken = self._seconds(starts)
            if taken < self.best * (1 - _ROUNDING):
                self.best, self.found = taken, starts
            return
        if unit == problem.n_units:
            return
        cost, more, messages = self._choices.of(stage, unit)
        after = self._table[stage + 1, unit + 1 : unit + 1 + len(cost)]
        promise = np.maximum(np.maximum(cost, after) + longer, self._costs.through(stage, sent + messages))
        for length in np.argsort(promise, kind="stable").tolist():
            if promise[length] >= self._below:
                return
            if self._left <= 0 or self._prefixes <= 0:
                self.is_complete = False
                return
            self._prefixes -= 1
            self._descend((*starts, unit), unit + 1 + length, longer + float(more[length]), sent + float(messages[length]))


class _Choices:
    """What each stage could be, whatever the others are: worked out for a block of units and all stages when first asked for.

    Args:
        bound: seconds that no path is longer than.
    """

    def __init__(self, costs: PathCosts, bound: float) -> None:
        self._costs = costs
        self._blocks = {unit: (runs, stages) for runs, stages in affordable_blocks(costs, bound) for unit in runs.units}
        self._known: dict[int, tuple[Floats, Floats, Floats]] = {}

    def of(self, stage: int, unit: int) -> tuple[Floats, Floats, Floats]:
        """(width,) each, for the runs of a stage from a unit on: seconds of the longest path, seconds longer, seconds of messages."""
        if unit not in self._blocks:
            return np.empty(0), np.empty(0), np.empty(0)
        runs, stages = self._blocks[unit]
        if runs.start not in self._known:
            costs = self._costs
            cost = np.where(costs.fits(runs, stages), costs.cost(runs, stages), np.inf)
            self._known[runs.start] = cost, costs.sends_longer(runs, stages), costs.messages(runs, stages)
        if not stages.start <= stage < stages.stop:
            return np.empty(0), np.empty(0), np.empty(0)
        width = min(runs.width, self._costs.problem.n_units - unit)
        cost, longer, messages = (each[stage - stages.start, unit - runs.start, :width] for each in self._known[runs.start])
        return cost, longer, messages
