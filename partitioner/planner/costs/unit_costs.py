"""Costs of the units of a model: frozen tables, repeated for repeated blocks and stacked for stages of several widths.

    UnitCosts            for all microbatch sizes; a column for each kind of stage
    MicrobatchTimes      for one size: seconds and saved activations, for bounds
    MicrobatchCosts      for one size: all numbers of a ``StageProblem`` that do not depend on the schedule

Stacked, every kind of stage takes the column of its own table:

    kind      0       1       2        two ranks share a stage of kind 0; one rank computes a stage of kind 1, or of 2, another device
    table     0       1       1        0: costs of half the model on each rank; 1: of the whole model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from cost_models.formulas.symbols import Numbers
from cost_models.hardware.clusters import Device
from cost_models.ops.cost import OperationCost
from partitioner.planner.costs.cut_points import Expansion
from partitioner.planner.costs.time_fractions import TimeFractions
from partitioner.planner.solvers.stage_memory import Floats, Integers, TransientMemory
from partitioner.planner.solvers.stage_problem import Gathered, Shared, Units
from passes.autograd.recompute import Recompute

LIMITS = ("arithmetic", "memory traffic", "starting kernels")
"""The possible bottlenecks of a call."""


def seconds_by_limit(cost: OperationCost, device: Device, numbers: Numbers, share: float) -> Floats:
    """Return (3,) seconds of a call by the bottleneck of each kernel: that which takes longest alone; ``share``: factor of formulas."""
    seconds = np.zeros(len(LIMITS))
    for work in (work for half in (cost.forward, cost.backward_input, cost.backward_weight) for work in (half, *half.then)):
        arithmetic, traffic = numbers[work.flops] * share / device.flops(cost.dtype), numbers[work.bytes] * share / device.bandwidth
        by_limit = (arithmetic, traffic, work.launches * device.launch_overhead)
        seconds[by_limit.index(max(by_limit))] += max(by_limit)
    return seconds


@dataclass(frozen=True, eq=False)
class Amounts:
    """Memory of units, as shared items.

    Attributes:
        items: of the folded model.
        expansion: how its blocks repeat; None: the model is not folded.
    """

    items: tuple[Shared, ...]
    expansion: Expansion | None = None

    @cached_property
    def every(self) -> tuple[Shared, ...]:
        """The items of the whole model."""
        return self.items if self.expansion is None else tuple(self.expansion.shared(self.items))

    @cached_property
    def least(self) -> float:
        """Lower bound of the bytes of all stages together, for all cuts and kinds of stages: each item once, at its least amount.

        After ``stack``, an item that is missing from one of the tables has a least amount of 0.
        """
        copies = (lambda _: 1) if self.expansion is None else self.expansion.n_copies
        return float(sum(item.least * copies(item.units) for item in self.items))


@dataclass(frozen=True, eq=False)
class MicrobatchTimes:
    """Times of N units, D of them distinct, on K kinds of stages, for one microbatch.

    Attributes:
        distinct: (3, D, K) seconds of the forward, and of the input and weight halves of the backward.
        waiting: (3, D, K) the part of these that is spent in collectives with the ranks that share the stage.
        once: (2, D, K) seconds of collectives before the first microbatch, and after the last, of all microbatches together; of parameters
            that are gathered once with their casts.
        casts: (D, K) the part of the forwards that casts parameters to smaller types.
        source: (N,) the number of each unit among the distinct ones.
        kept: saved activations for each microbatch in flight, without received values.
    """

    distinct: Floats
    waiting: Floats
    once: Floats
    casts: Floats
    source: Integers
    kept: Amounts

    @property
    def without_casts(self) -> MicrobatchTimes:
        """The times of microbatches whose parameters were cast before: a lower bound where they are gathered once."""
        casts = np.stack([self.casts, *np.zeros((2, *self.casts.shape))])
        return dataclasses.replace(self, distinct=self.distinct - casts, casts=np.zeros_like(self.casts))

    @cached_property
    def halves(self) -> Floats:
        """(3, N, K) seconds."""
        return self.distinct[:, self.source]

    @cached_property
    def seconds(self) -> Floats:
        """(N, K) forward and backward together."""
        seconds: Floats = self.distinct.sum(axis=0)[self.source]
        return seconds

    @cached_property
    def least(self) -> Floats:
        """(N,) seconds in a stage of the fastest kind, forward and backward together."""
        least: Floats = self.seconds.min(axis=1)
        return least

    @cached_property
    def fractions(self) -> TimeFractions:
        """Forward and backward fractions of unit time, over all kinds of stages."""
        return TimeFractions.of(self.distinct, np.bincount(self.source, minlength=self.distinct.shape[1]))

    def waiting_of(self, units: Iterable[int], kind: int = 0) -> float:
        """Return the seconds that units wait for collectives with the other ranks of their stage, forward and backward."""
        return float(self.waiting[:, self.source[list(units)], kind].sum())


@dataclass(frozen=True, eq=False)
class MicrobatchCosts:
    """Costs of N units on K kinds of stages, for one microbatch.

    Attributes:
        halves: (3, N, K) seconds (``MicrobatchTimes.halves``).
        flops: (N,) of the forward; (N, K) if kinds differ.
        units: times, memory and messages for the stage cutter.
        apart: (2, N, K) seconds by which input halves and weight halves of backwards wait longer if they do not follow each other.
    """

    halves: Floats
    flops: Floats
    units: Units
    apart: Floats

    @cached_property
    def split(self) -> MicrobatchCosts:
        """The costs where backwards run in two halves."""
        halves = self.halves + np.pad(self.apart, ((1, 0), (0, 0), (0, 0)))
        return dataclasses.replace(self, halves=halves, units=dataclasses.replace(self.units.split, time=halves.sum(axis=0)))

    def flops_of(self, run: range, kind: int) -> float:
        """Return the FLOPs of the forward of a run of units in a stage of one kind."""
        flops = self.flops if self.flops.ndim == 1 else self.flops[:, kind]
        return float(flops[run.start : run.stop].sum())


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """Costs of N units in stages of K kinds; functions of the rows of a microbatch are cached.

    Attributes:
        kinds: the devices; if stages have a width each, it is part of a device's name.
        recompute: the recomputation policy.
        users: placeholder -> the units that read it, in order.
        held_bytes: for each kind, parameter -> bytes of one rank's shard.
        recomputed: for each kind, the nodes that the backward recomputes where the policy is ``"selective"``.
        fixed: permanent memory, without the results.
        results: of a forward without backward; each of several stages receives them for the whole batch.
        gradients: memory from the first backward on.
        starting: (N, K) seconds of launching the kernels of each unit, forward and backward.
        times, at: rows of a microbatch -> its times, and all its costs.
        limits: rows -> (3, N, K) seconds of calls by their bottleneck in ``LIMITS``.
        summing: rows of the only microbatch -> (N, K) seconds by which units wait longer while gradients are summed beside its backward.
    """

    kinds: tuple[Device, ...]
    recompute: Recompute
    users: Mapping[str, tuple[int, ...]]
    held_bytes: tuple[Mapping[str, int], ...]
    recomputed: tuple[frozenset[str], ...]
    fixed: Amounts
    results: tuple[Shared, ...]
    gradients: Amounts
    starting: Callable[[], Floats]
    times: Callable[[int], MicrobatchTimes]
    at: Callable[[int], MicrobatchCosts]
    limits: Callable[[int], Floats]
    summing: Callable[[int], Floats]

    @property
    def fixed_bytes(self) -> float:
        """Lower bound of the bytes that all stages together store permanently."""
        return self.fixed.least + sum(item.least for item in self.results)

    def limit_of(self, units: Iterable[int], rows: int, kind: int = 0) -> str:
        """Return the bottleneck that takes most of the time of a run of units."""
        return LIMITS[int(self.limits(rows)[:, list(units), kind].sum(axis=1).argmax())]


def repeat(costs: UnitCosts, expansion: Expansion) -> UnitCosts:
    """Return the costs of the whole model from those of the folded one; users and parameters are those of the whole model already."""
    source = expansion.source
    fixed, gradients = Amounts(costs.fixed.items, expansion), Amounts(costs.gradients.items, expansion)
    results = tuple(item._replace(units=tuple(range(len(source)))) for item in costs.results)

    def times(rows: int) -> MicrobatchTimes:
        folded = costs.times(rows)
        return dataclasses.replace(folded, source=folded.source[source], kept=Amounts(folded.kept.items, expansion))

    def at(rows: int) -> MicrobatchCosts:
        halves, folded = costs.at(rows).halves[:, source], costs.at(rows).units
        assert isinstance(folded.working, TransientMemory)  # blocks repeat in stages of one width
        units = Units(
            time=halves.sum(axis=0),
            values=tuple(expansion.values(folded.values)),
            replicated=tuple((seconds, places) for seconds, users in folded.replicated for places in expansion.places(users)),
            fixed=(*expansion.shared(folded.fixed[: len(folded.fixed) - len(results)]), *results),
            kept=tuple(expansion.shared(folded.kept)),
            depth=folded.depth[source],
            gradients=tuple(expansion.shared(folded.gradients)),
            summed=folded.summed,
            working=folded.working.repeated(source),
        )
        return MicrobatchCosts(halves, costs.at(rows).flops[source], units, costs.at(rows).apart[:, source])

    return dataclasses.replace(
        costs,
        fixed=fixed,
        results=results,
        gradients=gradients,
        starting=lambda: costs.starting()[source],
        times=cache(times),
        at=cache(at),
        limits=lambda rows: costs.limits(rows)[:, source],
        summing=lambda rows: costs.summing(rows)[source],
    )


Gathers = tuple[tuple[Gathered, ...], tuple[Gathered, ...]]


def stack(
    table_of_kind: Sequence[int], tables: Sequence[UnitCosts], values_of: UnitCosts, gathers: Callable[[int], Gathers] = lambda _: ((), ())
) -> UnitCosts:
    """Return the costs of units in stages of several kinds, each from the table of its width.

    Args:
        table_of_kind: (K,) for each kind, the number of its table.
        tables: of the same units in stages of one width each; every table has the devices of all K kinds.
        values_of: the table with the sizes of messages: values between stages are whole.
        gathers: rows of a microbatch -> the values, and the gradients, that stages gather before sending.
    """

    def columns(of_tables: Sequence[Floats]) -> Floats:
        """Return (..., K) the column of each kind, from its table's array."""
        return np.stack([of_tables[table][..., kind] for kind, table in enumerate(table_of_kind)], axis=-1)

    fixed = Amounts(_stack_amounts(table_of_kind, ((*table.fixed.every, *table.results) for table in tables)))
    gradients = Amounts(_stack_amounts(table_of_kind, (table.gradients.every for table in tables)))

    @cache
    def times(rows: int) -> MicrobatchTimes:
        of_tables = [table.times(rows) for table in tables]
        waiting, once = (columns([getattr(table, name)[:, table.source] for table in of_tables]) for name in ("waiting", "once"))
        kept = Amounts(_stack_amounts(table_of_kind, (table.kept.every for table in of_tables)))
        casts = columns([table.casts[table.source] for table in of_tables])
        return MicrobatchTimes(columns([table.halves for table in of_tables]), waiting, once, casts, np.arange(waiting.shape[1]), kept)

    def at(rows: int) -> MicrobatchCosts:
        of_tables, whole = [table.at(rows).units for table in tables], values_of.at(rows).units
        replicated = _stack_items(table_of_kind, ([(seconds, (users, -1)) for seconds, users in table.replicated] for table in of_tables))
        workings, halves = tuple(of_tables[table].workings[0] for table in table_of_kind), times(rows).halves
        flops, is_mixed = [tables[table].at(rows).flops for table in table_of_kind], len(set(table_of_kind)) > 1
        gathered_values, gathered_gradients = gathers(rows)
        units = Units(
            time=halves.sum(axis=0),
            values=whole.values,
            replicated=tuple((seconds, users) for seconds, (users, _) in replicated),
            fixed=_stack_amounts(table_of_kind, (table.fixed for table in of_tables)),
            kept=_stack_amounts(table_of_kind, (table.kept for table in of_tables)),
            depth=whole.depth,
            gradients=_stack_amounts(table_of_kind, (table.gradients for table in of_tables)),
            summed=max(table.summed for table in of_tables),
            working=workings if is_mixed else workings[0],
            gathered_values=gathered_values,
            gathered_gradients=gathered_gradients,
        )
        apart = columns([tables[table].at(rows).apart for table in range(len(tables))])
        return MicrobatchCosts(halves, np.stack(flops, axis=1) if is_mixed else flops[0], units, apart)

    return dataclasses.replace(
        tables[0],
        held_bytes=tuple(tables[table].held_bytes[kind] for kind, table in enumerate(table_of_kind)),
        recomputed=tuple(tables[table].recomputed[kind] for kind, table in enumerate(table_of_kind)),
        fixed=fixed,
        results=(),
        gradients=gradients,
        starting=lambda: columns([table.starting() for table in tables]),
        times=times,
        at=cache(at),
        limits=lambda rows: columns([table.limits(rows) for table in tables]),
    )


def _stack_amounts(table_of_kind: Sequence[int], of_tables: Iterable[Iterable[Shared]]) -> tuple[Shared, ...]:
    """Merge the shared items of all tables, with the amounts of each kind from its table (``_stack_items``).

    An amount that is equal for all kinds becomes one number: most are, and the solvers are faster with numbers.
    """
    kinds = range(len(table_of_kind))
    amounts_of_tables = ([(tuple(map(item.of_kind, kinds)), (item.units, item.producer)) for item in items] for items in of_tables)
    merged = _stack_items(table_of_kind, amounts_of_tables)
    return tuple(Shared(amounts if len(set(amounts)) > 1 else amounts[0], units, producer) for amounts, (units, producer) in merged)


_Users = tuple[tuple[int, ...], int]
"""The units of a shared item, and their producer or -1: items with equal users are matched between tables."""


def _stack_items(
    table_of_kind: Sequence[int], of_tables: Iterable[Iterable[tuple[tuple[float, ...], _Users]]]
) -> list[tuple[tuple[float, ...], _Users]]:
    """Merge the items (amounts by kind, users) of tables: the amount of each kind is that of its table, or 0 if it has no such item.

    Of several items with the same users, the first of each table are merged, then the second, and so on: stages need the sum of all items,
    so the matching does not matter.
    """
    merged: dict[tuple[_Users, int], list[float]] = {}
    for table, items in enumerate(of_tables):
        counts: dict[_Users, int] = {}
        kinds = [kind for kind, each in enumerate(table_of_kind) if each == table]
        for amounts, users in items:
            number = counts[users] = counts.get(users, -1) + 1
            by_kind = merged.setdefault((users, number), [0.0] * len(table_of_kind))
            for kind in kinds:
                by_kind[kind] = amounts[kind]
    return [(tuple(amounts), users) for (users, _), amounts in merged.items()]
