"""Find the stage cuts with the shortest simulated step, exactly, by branch and bound.

    minimise    seconds(cuts)        of the simulated step, with the reduction of gradients; inf if the cuts do not fit in memory
    over        0 = c(0) < c(1) < ... < c(S) = N

Each stage gives a lower bound of the step: the longest path through the schedule that contains it (``critical_paths``). The dynamic
programme over these bounds all steps whose first stages are given, and finds the cuts of the lowest bound. These are simulated first, then
all others whose bound is below the best step so far, from the first stage on. If the search reaches its limit, the bound of the dynamic
programme is returned with the best cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.critical_paths import PathCosts
from partitioner.planner.solvers.stage_memory import Floats
from partitioner.planner.solvers.stage_tables import affordable_blocks, bottleneck_table, price_table

Starts = tuple[int, ...]
"""The first unit of each stage."""

_ROUNDING = 1e-9
"""Relative differences that are rounding."""

_PREFIXES = 20_000
"""Limit of partial cuts that are extended: message times can rule out all completions of millions of them."""


@dataclass(frozen=True)
class FastestCuts:
    """The result of the search.

    Attributes:
        starts: the first unit of each stage of the fastest cuts; None: no cuts that were tried fit.
        seconds: of their step.
        bound: lower bound of the seconds over all cuts: ``seconds`` itself if the search is complete, inf if no cuts fit.
    """

    starts: Starts | None
    seconds: float
    bound: float


def promising_cuts(costs: PathCosts, bound: float) -> Starts:
    """Return the cuts whose longest path is the shortest, ``bound`` seconds (``best_bottleneck``).

    Of equal ones, those that send fewest bytes, then cut through fewest modules.
    """
    return price_table(costs, bound * (1 + _ROUNDING)).starts()


def fastest_cuts(
    costs: PathCosts, least: float, more: float, seconds: Callable[[Starts], float], tried: Starts, most: int, within: float = math.inf
) -> FastestCuts:
    """Search for the cuts of the shortest step.

    Args:
        least: the shortest longest path over all cuts (``best_bottleneck``).
        more: lower bound of the seconds beyond paths, the same for all cuts: the reduction of gradients.
        seconds: simulates a step with some cuts, that reduction included; inf if they do not fit.
        tried: the cuts to simulate first.
        most: limit of the cuts that are simulated after these.
        within: simulate no others if the first cuts are slower than these seconds.
    """
    search = _Search(costs, more, seconds, tried, most, within)
    if search.best > (least + more) * (1 + _ROUNDING):
        search.run()
    bound = search.best if search.is_complete else min(search.best, least + more)
    return FastestCuts(search.best_starts if np.isfinite(search.best) else None, search.best, bound)


class _Search:
    """Depth-first search that decides the stages in order; the arguments are those of ``fastest_cuts``."""

    def __init__(self, costs: PathCosts, more: float, seconds: Callable[[Starts], float], tried: Starts, most: int, within: float) -> None:
        self._costs, self._more, self._seconds = costs, more, seconds
        self.best, self.best_starts = seconds(tried), tried
        self._simulations_left = most if self.best <= within else 0
        self._prefixes_left = _PREFIXES
        self.is_complete = True

    def run(self) -> None:
        """Simulate all cuts that may be better than the best, or as many as the limits allow."""
        if self._simulations_left <= 0:
            self.is_complete = False
            return
        self._table = bottleneck_table(self._costs, self._path_limit)
        self._stage_costs = _StageCosts(self._costs, self._path_limit)
        self._descend((), 0, 0.0, 0.0)

    @property
    def _path_limit(self) -> float:
        """Seconds that all paths of better cuts are below."""
        return (self.best - self._more) * (1 - _ROUNDING)

    def _descend(self, starts: Starts, unit: int, longer: float, sent: float) -> None:
        """Try all cuts with these first stages.

        Args:
            starts: the first unit of each of these stages.
            unit: the first unit of the next stage.
            longer: seconds by which their messages lengthen the paths of later stages (``PathCosts.sends_longer``).
            sent: seconds of their messages, forward and back.
        """
        problem, stage = self._costs.problem, len(starts)
        if stage == problem.n_stages:
            self._simulations_left -= 1
            seconds = self._seconds(starts)
            if seconds < self.best * (1 - _ROUNDING):
                self.best, self.best_starts = seconds, starts
            return
        if unit == problem.n_units:
            return
        cost, more, messages = self._stage_costs.of(stage, unit)
        after = self._table[stage + 1, unit + 1 : unit + 1 + len(cost)]
        bound = np.maximum(np.maximum(cost, after) + longer, self._costs.through(stage, sent + messages))
        for length in np.argsort(bound, kind="stable").tolist():
            if bound[length] >= self._path_limit:
                return
            if self._simulations_left <= 0 or self._prefixes_left <= 0:
                self.is_complete = False
                return
            self._prefixes_left -= 1
            self._descend((*starts, unit), unit + 1 + length, longer + float(more[length]), sent + float(messages[length]))


class _StageCosts:
    """Costs of all stages with paths up to ``bound`` seconds, whatever the others are, computed in blocks when first needed."""

    def __init__(self, costs: PathCosts, bound: float) -> None:
        self._costs = costs
        self._blocks = {unit: (runs, stages) for runs, stages in affordable_blocks(costs, bound) for unit in runs.units}
        self._known: dict[int, tuple[Floats, Floats, Floats]] = {}

    def of(self, stage: int, unit: int) -> tuple[Floats, Floats, Floats]:
        """Return (width,) by length of a stage from a unit on: the longest path, ``PathCosts.sends_longer`` and ``PathCosts.messages``."""
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
