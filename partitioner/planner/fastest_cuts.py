"""Which cuts make a step shortest on the clock: exactly, by branch and bound.

    minimise    seconds(cuts)        what the clock says, with what ranks sum at the end; inf where the cuts do not fit
    over        0 = c(0) < c(1) < ... < c(S) = N

No step is shorter than the longest path through the schedule that one of its runs is sure of (``path_costs``). The dynamic programme over
these says how short a step can be that begins with some cuts, and which cuts promise most. Those are tried first; all others are tried in
their order, from the first stage on, unless their runs promise no less than the best that is known. A search that would take too long
ends, and tells what it has proved: the programme's own bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partitioner.planner.path_costs import PathCosts
from partitioner.planner.run_sums import Row
from partitioner.planner.stage_problem import Floats
from partitioner.planner.stage_tables import NOTHING, bottleneck_table, price_table

__all__ = ["FastestCuts", "fastest_cuts", "promising_cuts"]

Starts = tuple[int, ...]
"""The first unit of each stage."""

_ROUNDING = 1e-9
"""Relative differences that are rounding."""


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
    table, starts, unit = price_table(costs, bound * (1 + _ROUNDING)), list[int](), 0
    for stage in range(costs.problem.n_stages):
        assert table.price[stage, unit] < NOTHING
        starts.append(unit)
        unit = int(table.end[stage, unit]) + 1
    return tuple(starts)


def fastest_cuts(costs: PathCosts, least: float, more: float, seconds: Callable[[Starts], float], tried: Starts, most: int) -> FastestCuts:
    """Search.

    Args:
        costs: the problem and its paths.
        least: ``best_bottleneck`` of them.
        more: what all cuts take besides, at least.
        seconds: of cuts, with what they take besides; inf where they do not fit.
        tried: cuts to begin with.
        most: how many more cuts are tried at most.
    """
    search = _Search(costs, more, seconds, tried, most)
    if search.best > (least + more) * (1 + _ROUNDING):
        search.run()
    proved = search.best if search.is_complete else min(search.best, least + more)
    return FastestCuts(search.found if np.isfinite(search.best) else None, search.best, proved)


class _Search:
    """Descents from the first stage on."""

    def __init__(self, costs: PathCosts, more: float, seconds: Callable[[Starts], float], tried: Starts, most: int) -> None:
        self._costs, self._more, self._seconds, self._left = costs, more, seconds, most
        self.best, self.found = seconds(tried), tried
        self.is_complete = True

    def run(self) -> None:
        """Try all cuts that may be better."""
        if self._left <= 0:
            self.is_complete = False
            return
        self._table = bottleneck_table(self._costs, self._below)
        self._rows: list[Row] = list(self._costs.rows(self._costs.longest(self._below)))[::-1]
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
        promise, more, messages = self._promise(stage, unit)
        promise = np.maximum(promise + longer, self._costs.through(stage, sent + messages))
        for length in np.argsort(promise, kind="stable").tolist():
            if promise[length] >= self._below:
                return
            if self._left <= 0:
                self.is_complete = False
                return
            self._descend((*starts, unit), unit + 1 + length, longer + float(more[length]), sent + float(messages[length]))

    def _promise(self, stage: int, unit: int) -> tuple[Floats, Floats, Floats]:
        """(width,) each, for the runs of the next stage: how short the longest path could be, seconds longer, seconds of messages."""
        row, one = self._costs.affordable(self._rows[unit]), slice(stage, stage + 1)
        cost = np.where(self._costs.fits(row, one), self._costs.cost(row, one), np.inf)[0]
        after = self._table[stage + 1, unit + 1 : unit + 1 + row.width]
        return np.maximum(cost, after), self._costs.sends_longer(row, stage), self._costs.messages(row, stage)
