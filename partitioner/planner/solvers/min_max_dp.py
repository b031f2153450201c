"""Cut a row of units into stages so that the slowest stage is as fast as possible.

Given a ``StageProblem``, find cuts ``0 = c(0) < c(1) < ... < c(S) = N`` that

    minimise    max over s of   time(c(s), c(s+1), s) + sends(c(s), c(s+1), s)
    subject to  sum over the stages s of rank r of   fixed(run s) + in_flight(s) * kept(run s)   <=   limit(r)
                units in stages that allow them, every forced boundary among the cuts

with ``sends``: for every value that leaves the run forward, and every gradient of a value that enters it, latency plus bytes over
bandwidth of the link to the next (previous) stage. Among the cuts whose slowest stage is within ``slack`` of the best, the fewest bytes
are sent; among those, cuts run through the fewest modules; among those, the first cut comes earliest, then the second, and so on.

Method: dynamic programming over (stage, unit) from the last stage back, ``F(s, i) = min over j of max(cost(i, j, s), F(s+1, j))``, all
stages of one unit at once. A run's compute time grows with its length, so under a bound on the slowest stage only short runs matter; the
bound is guessed low and raised until a solution is below it, which is then optimal. A second pass under the optimum minimises what is
sent. The tables treat the limit of a rank as that of each of its stages alone. That is exact with one stage on each rank; otherwise
``shared_rank_memory`` searches if their sums do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts
from partitioner.planner.solvers.shared_rank_memory import Search, fits_together, split_limits
from partitioner.planner.solvers.stage_problem import StageProblem
from partitioner.planner.solvers.stage_tables import best_bottleneck, bottleneck_table, price_table, shortfall_table


@dataclass(frozen=True)
class StageCuts:
    """A solution.

    Attributes:
        starts: (S,) the first unit of each stage.
        bottleneck: seconds of the slowest stage of the fastest cuts; that of these cuts is within the slack.
        proven: whether no cuts are better; False only if stages share a rank's memory and the search was cut short.
    """

    starts: tuple[int, ...]
    bottleneck: float
    proven: bool


def solve(problem: StageProblem, slack: float = 0.0) -> StageCuts | None:
    """Return the best cuts; None if there are none, or if the search among several stages on nearly full ranks found none.

    Args:
        slack: relative increase of the bottleneck that is accepted to send fewer bytes and to cut through fewer modules.
    """
    if problem.n_units < problem.n_stages:
        return None
    alone = _solve_alone(RunCosts(problem), slack)
    if alone is None or fits_together(problem, alone.starts):
        return alone
    parts = (_solve_alone(RunCosts(problem, limits), slack, alone.bottleneck) for limits in split_limits(problem, alone.starts))
    known = min((cuts for cuts in parts if cuts is not None), key=lambda cuts: cuts.bottleneck, default=None)
    return _solve_together(problem, slack, known)


def fits(problem: StageProblem) -> bool:
    """Return whether there are cuts that fit the limits, or, among several stages on nearly full ranks, whether the search found some."""
    if problem.n_units < problem.n_stages:
        return False
    if len(set(problem.rank)) < problem.n_stages:
        return solve(problem) is not None
    return float(shortfall_table(RunCosts(problem), 0.0)[0, 0]) <= 0


def shortfall(problem: StageProblem) -> float:
    """Return the bytes by which the worst stage exceeds its rank's limit under the best cuts for that; inf if constraints allow no cuts.

    Each stage counts as if alone on its rank. If the result is not positive, all stages fit.
    """
    if problem.n_units < problem.n_stages:
        return np.inf
    costs = RunCosts(problem)
    units = problem.units
    whole_model = sum(item.most for item in (*units.fixed, *units.gradients, *units.gradients))
    whole_model += max(problem.in_flight) * sum(item.most for item in units.kept)
    whole_model += max(float(working.of_stages((0,))[0]) for working in units.workings)
    excess = max(problem.limit) / 8
    while True:
        missing = float(shortfall_table(costs, excess)[0, 0])
        if missing <= excess or not np.isfinite(excess):
            return missing
        excess = excess * 2 if excess < whole_model else np.inf


def _solve_alone(costs: RunCosts, slack: float, at_least: float = 0.0) -> StageCuts | None:
    """Return the best cuts if every stage has a limit of its own, or None; ``at_least``: a known lower bound of the bottleneck."""
    bottleneck = best_bottleneck(costs, at_least)
    if not np.isfinite(bottleneck):
        return None
    return StageCuts(price_table(costs, bottleneck * (1 + slack)).starts(), bottleneck, proven=True)


def _solve_together(problem: StageProblem, slack: float, known: StageCuts | None) -> StageCuts | None:
    """Search for the best cuts if the stages of a rank share its limit; return the best found, at worst the known ones."""
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
