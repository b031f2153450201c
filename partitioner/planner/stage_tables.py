"""The dynamic programmes over (stage, first unit), each a pass over all runs from the last unit back.

    T(s, i) = min over j of  combine(value of run i..j in stage s, T(s + 1, j + 1))        T(S, N) = 0

where units ``i..N-1`` are divided among stages ``s..S-1``. The stages of one unit are computed at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from partitioner.planner.run_costs import RunCosts
from partitioner.planner.stage_problem import Floats, Integers, Shared, uses

__all__ = ["NOTHING", "PriceTable", "best_bottleneck", "bottleneck_table", "could_fit", "price_table", "shortfall_table"]

_Number = TypeVar("_Number", np.float64, np.int64)

NOTHING = np.iinfo(np.int64).max // 4
"""The price where there is no solution."""


class PriceTable(NamedTuple):
    """The least price of dividing the units from each one on, and the last unit of the run that does it: both (S + 1, N + 1)."""

    price: Integers
    end: Integers


def bottleneck_table(costs: RunCosts, bound: float) -> Floats:
    """(S + 1, N + 1) seconds of the slowest stage; exact where it is at most the bound."""
    table = _table(costs)
    for row in costs.rows(costs.longest(bound)):
        stages = costs.stages(row.start, bound)
        affordable = costs.affordable(row)
        if affordable.width and stages.start < stages.stop:
            cost = np.where(costs.fits(affordable, stages), costs.cost(affordable, stages), np.inf)
            table[stages, row.start] = np.maximum(cost, _after(table, row.start, stages, affordable.width)).min(axis=1)
    return table


def best_bottleneck(costs: RunCosts, at_least: float = 0.0) -> float:
    """Seconds of the slowest stage of the best cuts; inf when there are none.

    Runs that compute for longer than a bound are left out, so the first bound under which a solution lies has the best one.

    Args:
        costs: the problem.
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
    fixed = _uses_of_units(problem.units.fixed, n)
    kept = _uses_of_units((item for item in problem.units.kept if item.producer < 0), n)
    for stage in range(problem.n_stages):
        start, holds = end, 0.0
        while end < n and not (end in problem.forced and end > start):
            holds += sum(amount for before, amount in fixed[end] if before < start)
            holds += problem.in_flight[stage] * sum(amount for before, amount in kept[end] if before < start)
            if holds > costs.stage_limit[stage]:
                break
            end += 1
    return end == n


def _uses_of_units(items: Iterable[Shared], n_units: int) -> list[list[tuple[int, float]]]:
    """For each unit, what it needs, and which unit needed it last."""
    needs: list[list[tuple[int, float]]] = [[] for _ in range(n_units)]
    found = uses((item.amount, item.units, item.producer) for item in items)
    for before, unit, amount in zip(*(column.tolist() for column in found), strict=True):
        needs[unit].append((before, amount))
    return needs


def price_table(costs: RunCosts, bottleneck: float) -> PriceTable:
    """The least bytes and cut modules with no stage slower than the bottleneck; of equal prices, the one that cuts earliest."""
    n, n_stages = costs.problem.n_units, costs.problem.n_stages
    price = np.full((n_stages + 1, n + 1), NOTHING, dtype=np.int64)
    price[n_stages, n] = 0
    end = np.full((n_stages + 1, n + 1), -1, dtype=np.int64)
    for row in costs.rows(costs.longest(bottleneck)):
        stages = costs.stages(row.start, bottleneck)
        affordable = costs.affordable(row)
        if affordable.width and stages.start < stages.stop:
            fits = costs.fits(affordable, stages) & (costs.cost(affordable, stages) <= bottleneck)
            after = _after(price, row.start, stages, affordable.width)
            total = np.where(fits & (after < NOTHING), costs.price(affordable) + after, NOTHING)
            shortest = total.argmin(axis=1)
            price[stages, row.start] = total[np.arange(len(shortest)), shortest]
            end[stages, row.start] = row.start + shortest
    return PriceTable(price, end)


def shortfall_table(costs: RunCosts, excess: float) -> Floats:
    """(S + 1, N + 1) bytes that the worst-off stage lacks; exact where it is at most ``excess``."""
    table = _table(costs)
    everything = np.full(costs.problem.n_units, costs.problem.n_units)
    for row in costs.rows(everything):
        stages = costs.stages(row.start, np.inf)
        affordable = costs.affordable(row, excess)
        if affordable.width and stages.start < stages.stop:
            lacking = costs.memory(affordable, stages) - costs.stage_limit[stages, None]
            lacking = np.where(costs.permitted(affordable, stages), lacking, np.inf)
            after = _after(table, row.start, stages, affordable.width)
            table[stages, row.start] = np.maximum(lacking, after).min(axis=1)
    return table


def _table(costs: RunCosts) -> Floats:
    n, n_stages = costs.problem.n_units, costs.problem.n_stages
    table = np.full((n_stages + 1, n + 1), np.inf)
    table[n_stages, n] = -np.inf
    return table


def _after(table: NDArray[_Number], start: int, stages: slice, width: int) -> NDArray[_Number]:
    """What comes after each run: the entry of the next stage, behind the run's end."""
    return table[stages.start + 1 : stages.stop + 1, start + 1 : start + 1 + width]
