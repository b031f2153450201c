"""The dynamic programmes over (stage, first unit), each a pass over all runs from the last unit back.

    T(s, i) = min over j of  combine(value of run i..j in stage s, T(s + 1, j + 1))        T(S, N) = 0

where units ``i..N-1`` are divided among stages ``s..S-1``. The values of all stages are computed for a block of first units at once, then
the block's entries, from the last stage back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts, Runs
from partitioner.planner.solvers.stage_memory import Floats, Integers
from partitioner.planner.solvers.stage_problem import Uses, shared_uses

NOTHING = np.iinfo(np.int64).max // 4
"""The price of an entry without a solution."""


class PriceTable(NamedTuple):
    """(S + 1, N + 1) the least price of dividing units ``i..N-1`` among stages ``s..S-1``, and the last unit of stage s that gives it."""

    price: Integers
    end: Integers

    def starts(self) -> tuple[int, ...]:
        """Return the first unit of each stage of the cheapest cuts."""
        starts, unit = list[int](), 0
        for stage in range(len(self.price) - 1):
            assert self.price[stage, unit] < NOTHING
            starts.append(unit)
            unit = int(self.end[stage, unit]) + 1
        return tuple(starts)


def bottleneck_table(costs: RunCosts, bound: float) -> Floats:
    """Return (S + 1, N + 1) seconds of the slowest stage; exact where it is at most the bound."""
    table = _table(costs)
    for runs, stages in affordable_blocks(costs, bound):
        cost = np.where(costs.fits(runs, stages), costs.cost(runs, stages), np.inf)
        _fill(table, runs, stages, cost)
    return table


def affordable_blocks(costs: RunCosts, bound: float) -> Iterator[tuple[Runs, slice]]:
    """Yield (block of runs, the stages that they could be), for stages of at most ``bound`` seconds, the last block first."""
    for block in costs.blocks(np.minimum(costs.longest(bound), costs.longest_within(0.0))):
        runs, stages = costs.affordable(block), costs.stages(block, bound)
        if runs.width and stages.start < stages.stop:
            yield runs, stages


def _fill(table: Floats, runs: Runs, stages: slice, values: Floats) -> None:
    """Set a block's entries of a min-max table: the least over its runs of ``max(value of the run, entry after the run)``."""
    for stage in reversed(range(stages.start, stages.stop)):
        table[stage, runs.starts] = np.maximum(values[stage - stages.start], table[stage + 1][runs.behind]).min(axis=1)


def best_bottleneck(costs: RunCosts, at_least: float = 0.0) -> float:
    """Return the seconds of the slowest stage of the best cuts, inf if there are none; ``at_least``: a known lower bound of it.

    Runs longer than a bound are left out, and the bound is raised until a solution is within it: that one is the best.
    """
    if not could_fit(costs):
        return np.inf
    bound = max(costs.least_bottleneck * 1.1, at_least * 1.02)
    while True:
        best = float(bottleneck_table(costs, bound)[0, 0])
        if best <= bound or not np.isfinite(bound):
            return best
        wider = bound * 1.4 if 0 < bound <= costs.most else np.inf
        bound = best if np.isfinite(best) else wider


def could_fit(costs: RunCosts) -> bool:
    """Return False if no cuts fit the limits of all stages; True if some do, or only the tables can decide.

    Without received values, a part of a run needs no more memory than the run. So it suffices to give each stage in order as many units as
    fit: if that does not reach the last unit, no cuts do. Problems with ``allowed`` are left to the tables.
    """
    problem, end = costs.problem, 0
    if problem.allowed is not None:
        return True
    n = problem.n_units
    fixed_uses = problem.units.fixed_uses
    kept_uses = shared_uses([item for item in problem.units.kept if item.producer < 0], problem.units.n_kinds)
    is_alike = fixed_uses.amount.ndim == kept_uses.amount.ndim == 1
    kinds = (0,) * problem.n_stages if is_alike else problem.kind
    uses_by_kind = {kind: (_uses_of_units(fixed_uses, kind, n), _uses_of_units(kept_uses, kind, n)) for kind in set(kinds)}
    for stage, kind in enumerate(kinds):
        start, size, (fixed, kept) = end, 0.0, uses_by_kind[kind]
        while end < n and not (end in problem.forced and end > start):
            size += sum(amount for before, amount in fixed[end] if before < start)
            size += problem.in_flight[stage] * sum(amount for before, amount in kept[end] if before < start)
            if size > costs.stage_limit[stage]:
                break
            end += 1
    return end == n


def _uses_of_units(uses: Uses, kind: int, n_units: int) -> list[list[tuple[int, float]]]:
    """Return for each unit the (item's previous user, amount) of all items that it uses, in a stage of a kind."""
    of_units: list[list[tuple[int, float]]] = [[] for _ in range(n_units)]
    for before, unit, amount in zip(uses.before.tolist(), uses.unit.tolist(), uses.of_kind(kind).tolist(), strict=True):
        of_units[unit].append((before, amount))
    return of_units


def price_table(costs: RunCosts, bottleneck: float) -> PriceTable:
    """Tabulate the cheapest cuts (``RunCosts.price``) with no stage slower than the bottleneck; of equal ones, the earliest."""
    n, n_stages = costs.problem.n_units, costs.problem.n_stages
    price = np.full((n_stages + 1, n + 1), NOTHING, dtype=np.int64)
    price[n_stages, n] = 0
    end = np.full((n_stages + 1, n + 1), -1, dtype=np.int64)
    for runs, stages in affordable_blocks(costs, bottleneck):
        fits = costs.fits(runs, stages) & (costs.cost(runs, stages) <= bottleneck)
        own, units = costs.price(runs), np.array(runs.units, dtype=np.int64)
        for stage in reversed(range(stages.start, stages.stop)):
            after = price[stage + 1][runs.behind]
            total = np.where(fits[stage - stages.start] & (after < NOTHING), own + after, NOTHING)
            shortest = total.argmin(axis=1)
            price[stage, runs.starts] = total[np.arange(len(shortest)), shortest]
            end[stage, runs.starts] = units + shortest
    return PriceTable(price, end)


def shortfall_table(costs: RunCosts, excess: float) -> Floats:
    """Return (S + 1, N + 1) the largest number of bytes by which a stage exceeds its limit; exact where it is at most ``excess``."""
    table = _table(costs)
    for block in costs.blocks(costs.longest_within(excess)):
        runs, stages = costs.affordable(block, excess), costs.stages(block, np.inf)
        if runs.width and stages.start < stages.stop:
            lacking = costs.memory(runs, stages) - costs.stage_limit[stages, None, None]
            _fill(table, runs, stages, np.where(costs.permitted(runs, stages), lacking, np.inf))
    return table


def _table(costs: RunCosts) -> Floats:
    """Return a min-max table with its last row alone: no stages are left, so no units may be."""
    n, n_stages = costs.problem.n_units, costs.problem.n_stages
    table = np.full((n_stages + 1, n + 1), np.inf)
    table[n_stages, n] = -np.inf
    return table
