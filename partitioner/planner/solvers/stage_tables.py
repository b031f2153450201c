"""The dynamic programmes over (stage, first unit), each a pass over all runs from the last unit back.

    T(s, i) = min over j of  combine(value of run i..j in stage s, T(s + 1, j + 1))        T(S, N) = 0

where units ``i..N-1`` are divided among stages ``s..S-1``. The values of all stages are worked out for a block of units at once; then
the block's entries, stage by stage from the last one back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts, Runs
from partitioner.planner.solvers.stage_problem import Floats, Integers, Uses, shared_uses

__all__ = ["NOTHING", "PriceTable", "affordable_blocks", "best_bottleneck", "bottleneck_table", "price_table", "shortfall_table"]

NOTHING = np.iinfo(np.int64).max // 4
"""The price where there is no solution."""


class PriceTable(NamedTuple):
    """The least price of dividing the units from each one on, and the last unit of the run that does it: both (S + 1, N + 1)."""

    price: Integers
    end: Integers

    def starts(self) -> tuple[int, ...]:
        """The first unit of each stage of the cuts that the table chose."""
        starts, unit = list[int](), 0
        for stage in range(len(self.price) - 1):
            assert self.price[stage, unit] < NOTHING
            starts.append(unit)
            unit = int(self.end[stage, unit]) + 1
        return tuple(starts)


def bottleneck_table(costs: RunCosts, bound: float) -> Floats:
    """(S + 1, N + 1) seconds of the slowest stage; exact where it is at most the bound."""
    table = _table(costs)
    for runs, stages in affordable_blocks(costs, bound):
        cost = np.where(costs.fits(runs, stages), costs.cost(runs, stages), np.inf)
        _fill(table, runs, stages, cost)
    return table


def affordable_blocks(costs: RunCosts, bound: float) -> Iterator[tuple[Runs, slice]]:
    """The runs that matter under a bound, the last block first, and the stages that they could be."""
    for block in costs.blocks(costs.longest(bound)):
        runs, stages = costs.affordable(block), costs.stages(block, bound)
        if runs.width and stages.start < stages.stop:
            yield runs, stages


def _fill(table: Floats, runs: Runs, stages: slice, values: Floats) -> None:
    """The entries of a block of a table: the least that the larger of a run's value and of what comes behind it can be."""
    for stage in reversed(range(stages.start, stages.stop)):
        table[stage, runs.starts] = np.maximum(values[stage - stages.start], table[stage + 1][runs.behind]).min(axis=1)


def best_bottleneck(costs: RunCosts, at_least: float = 0.0) -> float:
    """Seconds of the slowest stage of the best cuts; inf when there are none.

    Runs that compute for longer than a bound are left out, so the first bound under which a solution lies has the best one.

    Args:
        at_least: the answer is known to be no less.
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
    """Whether some cuts give every stage a run that fits its limit; True too where only the tables can tell.

    Received values aside, a run that is part of another one needs no more of what is shared. So each stage may take as much as fits;
    where even that does not reach the end, nothing does. Stages that differ in which units they may have are left to the tables.
    """
    problem, end = costs.problem, 0
    if problem.allowed is not None:
        return True
    n = problem.n_units
    fixed_uses = problem.units.fixed_uses
    kept_uses = shared_uses([item for item in problem.units.kept if item.producer < 0], problem.units.n_kinds)
    is_alike = fixed_uses.amount.ndim == kept_uses.amount.ndim == 1
    kinds = (0,) * problem.n_stages if is_alike else problem.kind
    needs = {kind: (_uses_of_units(fixed_uses, kind, n), _uses_of_units(kept_uses, kind, n)) for kind in set(kinds)}
    for stage, kind in enumerate(kinds):
        start, holds, (fixed, kept) = end, 0.0, needs[kind]
        while end < n and not (end in problem.forced and end > start):
            holds += sum(amount for before, amount in fixed[end] if before < start)
            holds += problem.in_flight[stage] * sum(amount for before, amount in kept[end] if before < start)
            if holds > costs.stage_limit[stage]:
                break
            end += 1
    return end == n


def _uses_of_units(found: Uses, kind: int, n_units: int) -> list[list[tuple[int, float]]]:
    """For each unit, what it needs in a stage of a kind, and which unit needed it last."""
    needs: list[list[tuple[int, float]]] = [[] for _ in range(n_units)]
    for before, unit, amount in zip(found.before.tolist(), found.unit.tolist(), found.of_kind(kind).tolist(), strict=True):
        needs[unit].append((before, amount))
    return needs


def price_table(costs: RunCosts, bottleneck: float) -> PriceTable:
    """The least bytes and cut modules with no stage slower than the bottleneck; of equal prices, the one that cuts earliest."""
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
    """(S + 1, N + 1) bytes that the worst-off stage lacks; exact where it is at most ``excess``."""
    table = _table(costs)
    everything = np.full(costs.problem.n_units, costs.problem.n_units)
    for block in costs.blocks(everything):
        runs, stages = costs.affordable(block, excess), costs.stages(block, np.inf)
        if runs.width and stages.start < stages.stop:
            lacking = costs.memory(runs, stages) - costs.stage_limit[stages, None, None]
            _fill(table, runs, stages, np.where(costs.permitted(runs, stages), lacking, np.inf))
    return table


def _table(costs: RunCosts) -> Floats:
    n, n_stages = costs.problem.n_units, costs.problem.n_stages
    table = np.full((n_stages + 1, n + 1), np.inf)
    table[n_stages, n] = -np.inf
    return table
