"""Branch and bound over cuts when several stages on one rank share its memory.

The stages of a rank need not be neighbours (a V runs stages 0 and 2R-1 on rank 0), so the memory left for a late stage depends on an early
one. The search fixes the cuts from the first stage on and tracks the memory left on each rank. It prunes with the tables of
``stage_tables``, which bound the remaining stages as if each had its rank for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts, Runs
from partitioner.planner.solvers.stage_memory import DynamicMemory, Floats, Integers
from partitioner.planner.solvers.stage_problem import Shared, StageProblem, stages_of
from partitioner.planner.solvers.stage_tables import NOTHING, PriceTable

_LARGEST_TABLE = 2_000_000
"""Runs that the search holds in memory; a problem with more is not searched."""

_MOST_STAGES = 300
"""Stages that the search places, each in a call inside of that of the one before."""

_MOST_VISITS = 3_000
"""Runs that the search tries before it ends without a proof."""


def fits_together(problem: StageProblem, starts: Sequence[int]) -> bool:
    """Return whether every rank has the memory for its stages: all at their idle peak, and one of them computing."""
    fixed, dynamic = _memory(problem, starts)
    idle, computing = np.zeros((2, len(problem.limit)))
    np.add.at(idle, list(problem.rank), fixed + dynamic.idle_peak)
    np.maximum.at(computing, list(problem.rank), dynamic.computing)
    return bool((idle + computing <= np.array(problem.limit)).all())


def counted_again(items: Iterable[Shared], stage_of: Integers, ranks: Sequence[Hashable], kinds: Sequence[int]) -> Floats:
    """Return (S,) bytes of items that each stage shares with an earlier stage of its ranks, which hold them once.

    A weight of the first and of the last stage of a V, which one rank computes, counts in the first, and so does a value of a microbatch
    that both save: the first holds it longer. Each stage has its own sum of a weight's gradients over microbatches: these count in both.

    Args:
        stage_of: (N + 1,) the stage of each unit (``stages_of``).
        ranks: (S,) the ranks of each stage, or a number of these.
        kinds: (S,) the kind of each stage.
    """
    again = np.zeros(len(ranks))
    if len(set(ranks)) == len(ranks):
        return again
    stages = stage_of.tolist()
    for item in items:
        holders = sorted({stages[unit + 1] for unit in item.units}) if len(item.units) > 1 else []
        if item.producer >= 0:
            holders = [stage for stage in holders if stage != stages[item.producer + 1]]
        held: dict[Hashable, float] = {}
        for stage in holders:
            amount, already = item.of_kind(kinds[stage]), held.get(ranks[stage], 0.0)
            again[stage] += min(amount, already)
            held[ranks[stage]] = max(amount, already)
    return again


def split_limits(problem: StageProblem, starts: Sequence[int]) -> Iterator[Floats]:
    """Yield (S,) limits of stages that sum to the limit of each rank, so that stages that fit alone fit together.

    Equal limits, limits in proportion to the microbatches in flight, and in proportion to the memory of the given cuts.
    """
    rank, limit = np.array(problem.rank), np.array(problem.limit)
    fixed, dynamic = _memory(problem, starts)
    for weight in (np.ones(problem.n_stages), np.array(problem.in_flight, dtype=float), fixed + dynamic.peak + 1):
        yield limit[rank] * weight / np.bincount(rank, weight, len(limit))[rank]


class Search:
    """Branch and bound over the cuts of a problem whose ranks are nearly full, with stages of at most ``bound`` seconds."""

    def __init__(self, problem: StageProblem, bound: float) -> None:
        self._problem = problem
        self._costs = RunCosts(problem)
        longest = self._costs.longest(bound)
        self._is_searchable = problem.n_stages <= _MOST_STAGES and int(longest.sum()) <= _LARGEST_TABLE
        self._runs_from = [self._costs.affordable(runs) for runs in self._runs_by_unit(longest)] if self._is_searchable else []
        self._limit = np.array(problem.limit, dtype=float)
        self._of_several_units = [item for item in problem.units.fixed if len(item.units) > 1]
        self._known: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}
        self._visits = 0

    def _runs_by_unit(self, longest: Integers) -> Iterator[Runs]:
        """Yield the runs that start at each unit, the first unit first."""
        for block in reversed(list(self._costs.blocks(longest))):
            for unit in block.units:
                yield block.from_unit(unit).up_to(int(longest[unit]))

    @property
    def proven(self) -> bool:
        """Whether the last search was complete."""
        return self._is_searchable and self._visits < _MOST_VISITS

    def fastest(self, table: Floats, known: float) -> float:
        """Return the seconds of the slowest stage of the best cuts; ``known`` if none are faster.

        Args:
            table: of ``bottleneck_table``.
            known: seconds of the slowest stage of a known solution.
        """
        self._visits = 0
        return self._fastest(self._no_stage(), table, -np.inf, known) if self._is_searchable else known

    def cheapest(self, table: PriceTable, bottleneck: float) -> tuple[int, ...] | None:
        """Return the first units of the cheapest, then earliest cuts within the bottleneck, or None; ``table``: its ``price_table``."""
        self._visits = 0
        none_found = (NOTHING, ())
        best = self._cheapest(self._no_stage(), table, bottleneck, 0, none_found) if self._is_searchable else none_found
        return best[1] or None

    def _no_stage(self) -> _PartialCuts:
        return _PartialCuts((), 0, self._limit, np.zeros_like(self._limit))

    def _fastest(self, partial: _PartialCuts, table: Floats, slowest: float, best: float) -> float:
        """Extend partial cuts with the bottleneck ``slowest`` in all ways; return the least bottleneck, ``best`` if none is less."""
        if len(partial.starts) == self._problem.n_stages:
            return slowest
        cost, idle, computing = self._next_stages(partial, best)
        after = table[len(partial.starts) + 1, partial.end + 1 : partial.end + 1 + len(cost)]
        bound = np.maximum(np.maximum(cost, after), slowest)
        for length in np.argsort(bound, kind="stable"):
            if bound[length] >= best or self._visits >= _MOST_VISITS:
                break
            self._visits += 1
            best = self._fastest(self._extend(partial, length, idle, computing), table, max(slowest, cost[length]), best)
        return best

    def _cheapest(
        self, partial: _PartialCuts, table: PriceTable, bottleneck: float, price: int, best: tuple[int, tuple[int, ...]]
    ) -> tuple[int, tuple[int, ...]]:
        """Extend partial cuts of a price in all ways; return the (price, starts) of the cheapest, or ``best`` if none are cheaper."""
        if len(partial.starts) == self._problem.n_stages:
            return min(best, (price, partial.starts))
        cost, idle, computing = self._next_stages(partial, bottleneck)
        after = table.price[len(partial.starts) + 1, partial.end + 1 : partial.end + 1 + len(cost)]
        prices = self._costs.price(self._runs_from[partial.end])[0]
        total = np.where(np.isfinite(cost) & (after < NOTHING), price + prices + after, NOTHING)
        for length in np.argsort(total, kind="stable"):
            longer = self._extend(partial, length, idle, computing)
            if total[length] > best[0] or total[length] >= NOTHING or self._visits >= _MOST_VISITS:
                break
            if total[length] == best[0] and longer.starts > best[1][: len(longer.starts)]:
                continue
            self._visits += 1
            best = self._cheapest(longer, table, bottleneck, price + int(prices[length]), best)
        return best

    def _next_stages(self, partial: _PartialCuts, bound: float) -> tuple[Floats, Floats, Floats]:
        """Return by length the next stage's seconds (inf if above ``bound`` or it does not fit), idle bytes, and more to compute."""
        stage = len(partial.starts)
        if partial.end == self._problem.n_units:
            return np.empty(0), np.empty(0), np.empty(0)
        cost, idle, computing = self._stages_from(stage, partial.end)
        rank = self._problem.rank[stage]
        idle = idle - self._held_already(partial, len(idle))
        fits = (idle + np.maximum(computing, partial.computing[rank]) <= partial.left[rank]) & (cost <= bound)
        return np.where(fits, cost, np.inf), idle, computing

    def _held_already(self, partial: _PartialCuts, longest: int) -> Floats:
        """Return by length the permanent bytes of the next stage that earlier stages of its rank hold (``counted_again``)."""
        stage, already = len(partial.starts), np.zeros(longest)
        kinds, rank = self._problem.kind, self._problem.rank[stage]
        runs = zip(itertools.pairwise((*partial.starts, partial.end)), self._problem.rank, kinds, strict=False)
        earlier = [(start, end, kind) for (start, end), of, kind in runs if of == rank]
        for item in self._of_several_units if earlier else ():
            first = next((unit for unit in item.units if unit >= partial.end), None)
            if first is not None:
                holders = (kind for start, end, kind in earlier if any(start <= unit < end for unit in item.units))
                held = max(map(item.of_kind, holders), default=0.0)
                already[first - partial.end :] += min(item.of_kind(kinds[stage]), held)
        return already

    def _stages_from(self, stage: int, unit: int) -> tuple[Floats, Floats, Floats]:
        """Return the same of a stage that starts at a unit, whatever the earlier stages are; cached."""
        if (stage, unit) not in self._known:
            runs, one = self._runs_from[unit], slice(stage, stage + 1)
            cost = np.where(self._costs.permitted(runs, one)[0, 0], self._costs.cost(runs, one)[0, 0], np.inf)
            dynamic = self._costs.dynamic_memory(runs, one)
            self._known[stage, unit] = cost, (self._costs.fixed(runs, one) + dynamic.idle_peak)[0, 0], dynamic.computing[0, 0]
        return self._known[stage, unit]

    def _extend(self, partial: _PartialCuts, length: int, idle: Floats, computing: Floats) -> _PartialCuts:
        """Return the partial cuts with one more stage, of ``length + 1`` units."""
        left, most_computing = partial.left.copy(), partial.computing.copy()
        rank = self._problem.rank[len(partial.starts)]
        left[rank] -= idle[length]
        most_computing[rank] = max(most_computing[rank], computing[length])
        return _PartialCuts((*partial.starts, partial.end), partial.end + int(length) + 1, left, most_computing)


@dataclass(frozen=True)
class _PartialCuts:
    """The cuts of the first stages: ``starts`` are their first units, ``end`` is the first unit of the next stage.

    Attributes:
        left: (R,) bytes of each rank that these stages leave when idle.
        computing: (R,) the most bytes that one of these stages needs beyond that while it computes.
    """

    starts: tuple[int, ...]
    end: int
    left: Floats
    computing: Floats


def _memory(problem: StageProblem, starts: Sequence[int]) -> tuple[Floats, DynamicMemory]:
    """Return (S,) the permanent bytes of each stage, and its other memory."""
    units, kinds = problem.units, problem.kind
    stage_of, n_stages = stages_of(starts, len(units)), problem.n_stages
    fixed, kept, gradients = (
        uses.per_stage(stage_of, n_stages, kinds) for uses in (units.fixed_uses, units.kept_uses, units.gradient_uses)
    )
    fixed -= counted_again(units.fixed, stage_of, problem.rank, kinds)
    working = units.working_of_stages(starts, kinds)
    in_flight, later = np.array(problem.in_flight, dtype=float), np.array(problem.later, dtype=float)
    entering, leaving = units.entering.per_stage(stage_of, n_stages), units.leaving.sent_per_stage(stage_of, n_stages)
    arriving = list(zip(np.array(problem.awaiting, dtype=float), (entering, entering, leaving, leaving), strict=True))
    return fixed, DynamicMemory(in_flight, later, kept, gradients, working, arriving[::2], arriving[1::2], units.summed)
