"""Costs of units that are recomputed by different policies, from the tables of each policy.

policy     none   none   full   full          of each unit, the row of its policy's table
time       none   none   full   full
saved      items of a table, with the units that have its policy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import numpy as np

from partitioner.planner.costs.unit_costs import Amounts, MicrobatchCosts, MicrobatchTimes, UnitCosts
from partitioner.planner.solvers.stage_memory import Floats, Integers, RecomputedValues, TransientMemory
from partitioner.planner.solvers.stage_problem import Shared

_ByUnit: TypeAlias = Callable[[Sequence[Floats], int], Floats]
"""(an array of each table, the axis of units) -> one array, with the entries of each unit from that of its table."""


def mixed(tables: Sequence[UnitCosts], choice: Integers) -> UnitCosts:
    """Return the costs of N units of which unit u has those of ``tables[choice[u]]``.

    A value that units of several policies save is counted for each of these policies.
    """
    units = np.arange(len(choice))

    def by_unit(arrays: Sequence[Floats], axis: int) -> Floats:
        stacked = np.moveaxis(np.stack(arrays), axis + 1, 1)
        result: Floats = np.moveaxis(stacked[choice, units], 0, axis)
        return result

    @cache
    def times(rows: int) -> MicrobatchTimes:
        found = [table.times(rows) for table in tables]
        names = ("distinct", "waiting", "once")
        halves, waiting, once = (by_unit([getattr(each, name)[:, each.source] for each in found], 1) for name in names)
        casts = by_unit([each.casts[each.source] for each in found], 0)
        kept = Amounts(tuple(_of_policies([each.kept.every for each in found], choice)))
        return MicrobatchTimes(halves, waiting, once, casts, units, kept)

    @cache
    def at(rows: int) -> MicrobatchCosts:
        found = [table.at(rows) for table in tables]
        halves = by_unit([each.halves for each in found], 1)
        kept = tuple(_of_policies([each.units.kept for each in found], choice))
        working = _mixed_working([each.units.workings[0] for each in found], kept, choice, by_unit)
        units_of_policies = replace(found[0].units, time=halves.sum(axis=0), kept=kept, working=working)
        return MicrobatchCosts(halves, found[0].flops, units_of_policies, by_unit([each.apart for each in found], 1))

    return replace(
        tables[0],
        recompute="by region",
        starting=cache(lambda: by_unit([table.starting() for table in tables], 0)),
        times=times,
        at=at,
        limits=cache(lambda rows: by_unit([table.limits(rows) for table in tables], 1)),
    )


def _of_policies(items_of_tables: Sequence[Sequence[Shared]], choice: Integers) -> Iterator[Shared]:
    """Yield the saved items of each table that units of its policy need, for these."""
    for policy, items in enumerate(items_of_tables):
        for item in items:
            users = tuple(unit for unit in item.units if choice[unit] == policy)
            if users:
                yield item._replace(units=users)


def _mixed_working(tables: Sequence[TransientMemory], kept: Sequence[Shared], choice: Integers, by_unit: _ByUnit) -> TransientMemory:
    saved = np.zeros(len(tables[0].saved))
    for item in kept:
        if item.producer < 0:
            saved[item.units[0]] += item.most
    names = ("forward", "backward", "inputs", "coalesced", "weights")
    forward, backward, inputs, coalesced, weights = (by_unit([getattr(table, name) for table in tables], 0) for name in names)
    at_once = max(table.coalesced_at_once for table in tables)
    return TransientMemory(
        forward,
        backward,
        inputs,
        saved,
        tables[0].gradients,
        coalesced,
        at_once,
        weights,
        summed=tables[0].summed,
        recomputed=_mixed_recomputed(tables, choice),
    )


def _mixed_recomputed(tables: Sequence[TransientMemory], choice: Integers) -> RecomputedValues:
    """Return the values of each table that units of its policy make."""
    found = [(each, choice[each.made] == policy) for policy, each in enumerate(table.recomputed for table in tables) if each is not None]
    columns = ([column[mask] for column, mask in zip(each, (mask,) * 3, strict=True)] for each, mask in found)
    made, needed, size = (np.concatenate(column) for column in zip(*columns, strict=True))
    return RecomputedValues(made, needed, size)
