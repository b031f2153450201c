"""Where to cut a row of units into stages, so that the slowest stage is as fast as can be.

Given a ``StageProblem``, find cuts ``0 = c(0) < c(1) < ... < c(S) = N`` that

    minimise    max over s of   time(c(s), c(s+1), s) + sends(c(s), c(s+1), s)
    subject to  sum over the stages s of rank r of   fixed(run s) + in_flight(s) * kept(run s)   <=   limit(r)
                units in stages that allow them, every forced boundary among the cuts

with ``sends``: for every value that leaves the run forward, and every gradient of a value that enters it, latency plus bytes over
bandwidth of the link to the next (previous) stage. Among the cuts whose slowest stage is within ``slack`` of the best, the fewest bytes
are sent; among those, cuts run through the fewest modules; among those, the first cut comes earliest, then the second, and so on.

Method: dynamic programming over (stage, unit) from the last stage back, ``F(s, i) = min over j of max(cost(i, j, s), F(s+1, j))``, all
stages of one unit at once. A run's compute time grows with its length, so under a bound on the slowest stage only short runs matter; the
bound is guessed low and raised until a solution lies under it, which is then optimal. A second pass under the optimum minimises what is
sent. The tables treat the limit of a rank as that of each of its stages alone. That is exact with one stage on each rank; otherwise
``shared_memory`` takes over where the sums do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts
from partitioner.planner.solvers.shared_rank_memory import Search, fits_together, split_limits
from partitioner.planner.solvers.stage_problem import StageProblem
from partitioner.planner.solvers.stage_tables import best_bottleneck, bottleneck_table, price_table, shortfall_table

__all__ = ["StageCuts", "shortfall", "solve"]


@dataclass(frozen=True)
class StageCuts:
    """A solution.

    Attributes:
        starts: (S,) the first unit of each stage.
        bottleneck: seconds of the slowest stage of the fastest cuts; that of these cuts is within the slack.
        proven: whether no cuts are better; False only where stages share a rank's memory and the search was cut short.
    """

    starts: tuple[int, ...]
    bottleneck: float
    proven: bool


def solve(problem: StageProblem, slack: float = 0.0) -> StageCuts | None:
    """The best cuts; None when there are none, or, with several stages on a rank that is nearly full, none were found.

    Args:
        slack: how much slower than the best, relatively, a stage may be for the sake of fewer bytes and plainer cuts.
    """
    if problem.n_units < problem.n_stages:
        return None
    alone = _solve_alone(RunCosts(problem), slack)
    if alone is None or fits_together(problem, alone.starts):
        return alone
    parts = (_solve_alone(RunCosts(problem, limits), slack, alone.bottleneck) for limits in split_limits(problem, alone.starts))
    known = min((cuts for cuts in parts if cuts is not None), key=lambda cuts: cuts.bottleneck, default=None)
    return _solve_together(problem, slack, known)


def shortfall(problem: StageProblem) -> float:
    """The bytes that the worst-off stage lacks under the cuts that let it lack least; inf when there are no cuts at all.

    Each stage is taken to have its rank for itself. Not positive: all stages fit.
    """
    if problem.n_units < problem.n_stages:
        return np.inf
    costs = RunCosts(problem)
    units = problem.units
    everything = sum(item.most for item in (*units.fixed, *units.gradients, *units.gradients))
    everything += max(problem.in_flight) * sum(item.most for item in units.kept)
    everything += max(float(working.of_stages((0,))[0]) for working in units.workings)
    excess = max(problem.limit) / 8
    while True:
        found = float(shortfall_table(costs, excess)[0, 0])
        if found <= excess or not np.isfinite(excess):
            return found
        excess = excess * 2 if excess < everything else np.inf


def _solve_alone(costs: RunCosts, slack: float, at_least: float = 0.0) -> StageCuts | None:
    """The best cuts when every stage has its own limit, if no bottleneck is known to be less than ``at_least``."""
    bottleneck = best_bottleneck(costs, at_least)
    if not np.isfinite(bottleneck):
        return None
    return StageCuts(price_table(costs, bottleneck * (1 + slack)).starts(), bottleneck, proven=True)


def _solve_together(problem: StageProblem, slack: float, known: StageCuts | None) -> StageCuts | None:
    """The best cuts when the stages of a rank share its limit, as far as the search gets; at least what is known."""
    bound = np.inf if known is None else known.bottleneck
    search, costs = Search(problem, bound), RunCosts(problem)
    bottleneck = search.fastest(bottleneck_table(costs, bound), np.nextafter(bound, np.inf))
    proven = search.proven
    bottleneck = min(bottleneck, bound)
    if not np.isfinite(bottleneck):
        return known
    widened = bottleneck * (1 + slack)
    starts = search.cheapest(price_table(costs, widened), widened)
    if starts is None:
        return None if known is None else StageCuts(known.starts, known.bottleneck, proven=False)
    return StageCuts(starts, bottleneck, proven and search.proven)
