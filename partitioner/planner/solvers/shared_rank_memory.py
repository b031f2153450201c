"""Several stages on one rank share its memory: branch and bound where the tables, which look at each stage alone, do not fit.

The stages of a rank need not stand beside each other (a V runs stages 0 and 2R-1 on rank 0), so what a late stage may hold depends on
what an early one took. The search fixes the cuts from the first stage on, keeps what each rank has left, and prunes with the tables,
which know the best that the rest can do when every stage has its rank for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts, Runs
from partitioner.planner.solvers.stage_memory import Held
from partitioner.planner.solvers.stage_problem import Floats, Integers, StageProblem, stages_of
from partitioner.planner.solvers.stage_tables import NOTHING, PriceTable

__all__ = ["Search", "fits_together", "split_limits"]

_LARGEST_TABLE = 2_000_000
"""Runs that the search keeps at hand; a problem with more is not searched."""

_MOST_VISITS = 3_000
"""Runs that the search tries before it gives up proving."""


def fits_together(problem: StageProblem, starts: Sequence[int]) -> bool:
    """Whether every rank holds all its stages: those that share one are taken to hold most at the same time, and to compute in turn."""
    fixed, held = _held(problem, starts)
    holds, working = np.zeros((2, len(problem.limit)))
    np.add.at(holds, list(problem.rank), fixed + held.between)
    np.maximum.at(working, list(problem.rank), held.computing)
    return bool((holds + working <= np.array(problem.limit)).all())


def split_limits(problem: StageProblem, starts: Sequence[int]) -> Iterator[Floats]:
    """Ways to give each stage a part of its rank's limit, so that stages that fit alone fit together.

    Equal parts, parts in proportion to the microbatches in flight, and in proportion to what the given cuts would hold.
    """
    rank, limit = np.array(problem.rank), np.array(problem.limit)
    fixed, held = _held(problem, starts)
    for weight in (np.ones(problem.n_stages), np.array(problem.in_flight, dtype=float), fixed + held.most + 1):
        yield limit[rank] * weight / np.bincount(rank, weight, len(limit))[rank]


class Search:
    """Branch and bound over the cuts of a problem whose ranks are nearly full.

    Args:
        bound: no stage of a solution is slower.
    """

    def __init__(self, problem: StageProblem, bound: float) -> None:
        self._problem = problem
        self._costs = RunCosts(problem)
        longest = self._costs.longest(bound)
        self._possible = int(longest.sum()) <= _LARGEST_TABLE
        self._rows = [self._costs.affordable(runs) for runs in self._alone(longest)] if self._possible else []
        self._limit = np.array(problem.limit, dtype=float)
        self._known: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}
        self._visits = 0

    def _alone(self, longest: Integers) -> Iterator[Runs]:
        """The runs of each unit, the first unit first."""
        for block in reversed(list(self._costs.blocks(longest))):
            for unit in block.units:
                yield block.of(unit).first(int(longest[unit]))

    @property
    def proven(self) -> bool:
        """Whether the last search was not cut short."""
        return self._possible and self._visits < _MOST_VISITS

    def fastest(self, table: Floats, known: float) -> float:
        """Seconds of the slowest stage of the best cuts, or what is known if nothing found is faster.

        Args:
            table: of ``bottleneck_table``.
            known: seconds of a solution at hand.
        """
        self._visits = 0
        return self._fastest(self._nothing(), table, -np.inf, known) if self._possible else known

    def cheapest(self, table: PriceTable, bottleneck: float) -> tuple[int, ...] | None:
        """The starts of the cheapest, then earliest cuts with no stage slower than the bottleneck; None when none were found.

        Args:
            table: of ``price_table`` for the same bottleneck.
        """
        self._visits = 0
        nothing = (NOTHING, ())
        best = self._cheapest(self._nothing(), table, bottleneck, 0, nothing) if self._possible else nothing
        return best[1] or None

    def _nothing(self) -> _Partial:
        """No stage yet."""
        return _Partial((), 0, self._limit, np.zeros_like(self._limit))

    def _fastest(self, partial: _Partial, table: Floats, slowest: float, best: float) -> float:
        if len(partial.starts) == self._problem.n_stages:
            return slowest
        cost, memory, working = self._runs(partial, best)
        after = table[len(partial.starts) + 1, partial.end + 1 : partial.end + 1 + len(cost)]
        promise = np.maximum(np.maximum(cost, after), slowest)
        for length in np.argsort(promise, kind="stable"):
            if promise[length] >= best or self._visits >= _MOST_VISITS:
                break
            self._visits += 1
            best = self._fastest(self._extended(partial, length, memory, working), table, max(slowest, cost[length]), best)
        return best

    def _cheapest(
        self, partial: _Partial, table: PriceTable, bottleneck: float, price: int, best: tuple[int, tuple[int, ...]]
    ) -> tuple[int, tuple[int, ...]]:
        if len(partial.starts) == self._problem.n_stages:
            return min(best, (price, partial.starts))
        cost, memory, working = self._runs(partial, bottleneck)
        after = table.price[len(partial.starts) + 1, partial.end + 1 : partial.end + 1 + len(cost)]
        prices = self._costs.price(self._rows[partial.end])[0]
        total = np.where(np.isfinite(cost) & (after < NOTHING), price + prices + after, NOTHING)
        for length in np.argsort(total, kind="stable"):
            longer = self._extended(partial, length, memory, working)
            if total[length] > best[0] or total[length] >= NOTHING or self._visits >= _MOST_VISITS:
                break
            if total[length] == best[0] and longer.starts > best[1][: len(longer.starts)]:
                continue
            self._visits += 1
            best = self._cheapest(longer, table, bottleneck, price + int(prices[length]), best)
        return best

    def _runs(self, partial: _Partial, bound: float) -> tuple[Floats, Floats, Floats]:
        """Cost of every run that the next stage can have, inf where it does not fit, and what it holds between computing, and for it."""
        stage = len(partial.starts)
        if partial.end == self._problem.n_units:
            return np.empty(0), np.empty(0), np.empty(0)
        cost, memory, working = self._row(stage, partial.end)
        rank = self._problem.rank[stage]
        fits = (memory + np.maximum(working, partial.computing[rank]) <= partial.left[rank]) & (cost <= bound)
        return np.where(fits, cost, np.inf), memory, working

    def _row(self, stage: int, unit: int) -> tuple[Floats, Floats, Floats]:
        """The same whatever the stages before it hold, worked out when first asked for: the search comes to a unit on many ways."""
        if (stage, unit) not in self._known:
            row, one = self._rows[unit], slice(stage, stage + 1)
            cost = np.where(self._costs.permitted(row, one)[0, 0], self._costs.cost(row, one)[0, 0], np.inf)
            held = self._costs.held(row, one)
            self._known[stage, unit] = cost, (self._costs.fixed(row, one) + held.between)[0, 0], held.computing[0, 0]
        return self._known[stage, unit]

    def _extended(self, partial: _Partial, length: int, memory: Floats, working: Floats) -> _Partial:
        """The partial solution with one more stage."""
        left, computing = partial.left.copy(), partial.computing.copy()
        rank = self._problem.rank[len(partial.starts)]
        left[rank] -= memory[length]
        computing[rank] = max(computing[rank], working[length])
        return _Partial((*partial.starts, partial.end), partial.end + int(length) + 1, left, computing)


@dataclass(frozen=True)
class _Partial:
    """The first stages: where they start, where the last of them ends, what memory the ranks have left, and what they need to compute."""

    starts: tuple[int, ...]
    end: int
    left: Floats
    computing: Floats


def _held(problem: StageProblem, starts: Sequence[int]) -> tuple[Floats, Held]:
    """(S,) what each stage holds all the time, and what else."""
    units, kinds = problem.units, problem.kind
    stage_of, n_stages = stages_of(starts, len(units)), problem.n_stages
    fixed, kept, gradients = (each.held(stage_of, n_stages, kinds) for each in (units.fixed_uses, units.kept_uses, units.gradient_uses))
    working = units.working_of_stages(starts, kinds)
    in_flight, later = (np.array(held, dtype=float) for held in (problem.in_flight, problem.later))
    entering, leaving = units.entering.held(stage_of, n_stages), units.leaving.left(stage_of, n_stages)
    comes = list(zip(np.array(problem.awaiting, dtype=float), (entering, entering, leaving, leaving), strict=True))
    return fixed, Held(in_flight, later, kept, gradients, working, comes[::2], comes[1::2], units.summed)
