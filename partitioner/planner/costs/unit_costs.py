"""What the units of a model cost: frozen tables, which are repeated for repeated blocks and stacked for stages of several widths.

    UnitCosts            one kind of stage a column, whatever the microbatches are
    MicrobatchTimes      the same at one microbatch size: what bounds ask
    MicrobatchCosts      and all that the stage cutter asks: the numbers of a ``StageProblem`` that do not depend on the schedule

Stacked, every kind of stage takes the numbers of its own table:

    kind             0       1       2        two ranks share a stage of kind 0; one computes a stage of kind 1, or 2, another device
    of the table     0       1       1        the costs of a rank's half of the model, and those of the whole model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from cost_models.hardware.clusters import Device
from partitioner.planner.costs.cut_points import Expansion
from partitioner.planner.costs.time_fractions import TimeFractions
from partitioner.planner.solvers.boundaries import Gathered, Parted
from partitioner.planner.solvers.stage_problem import Floats, Integers, Shared, Units, Working
from passes.autograd.recompute import Recompute

__all__ = ["LIMITS", "Amounts", "MicrobatchCosts", "MicrobatchTimes", "UnitCosts", "repeat", "stack"]

LIMITS = ("arithmetic", "memory traffic", "starting kernels")
"""The possible bottlenecks of a call."""


@dataclass(frozen=True, eq=False)
class Amounts:
    """What units hold.

    Attributes:
        items: of a folded model, where blocks repeat.
        expansion: how they repeat; None: as they are.
    """

    items: tuple[Shared, ...]
    expansion: Expansion | None = None

    @cached_property
    def every(self) -> tuple[Shared, ...]:
        """The items of the whole model."""
        return self.items if self.expansion is None else tuple(self.expansion.shared(self.items))

    @cached_property
    def least(self) -> float:
        """Bytes that all stages together hold, what they share once: at least, whatever their kinds are and wherever they are cut.

        Of stacked tables the least amount of an item counts, and nothing of one that some do not have. So it may be less than the least
        that any mixture of kinds holds, but never more.
        """
        copies = (lambda _: 1) if self.expansion is None else self.expansion.n_places
        return float(sum(item.least * copies(item.units) for item in self.items))


@dataclass(frozen=True, eq=False)
class MicrobatchTimes:
    """N units of which D differ, K kinds of stages, one microbatch.

    Attributes:
        distinct: (3, D, K) seconds of the forward, and of the input and weight halves of the backward.
        waiting: (3, D, K) of these, for the other ranks that share a stage.
        source: (N,) for each unit, which of those that differ it is.
        kept: bytes held for each microbatch in flight, whether or not they are received.
    """

    distinct: Floats
    waiting: Floats
    source: Integers
    kept: Amounts

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
    """N units, K kinds of stages, one microbatch.

    Attributes:
        halves: (3, N, K) seconds, as ``MicrobatchTimes`` has them.
        flops: (N,) of the forward; (N, K) where kinds differ.
        units: the same for the stage cutter, with what they hold and send.
    """

    halves: Floats
    flops: Floats
    units: Units

    def flops_of(self, run: range, kind: int) -> float:
        """Return the FLOPs of the forward of a run of units in a stage of one kind."""
        flops = self.flops if self.flops.ndim == 1 else self.flops[:, kind]
        return float(flops[run.start : run.stop].sum())


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """What N units cost in stages of K kinds. What depends on the rows of a microbatch is worked out once for each number of them.

    Attributes:
        kinds: a device with how many ranks share a stage on it.
        recompute: what the backward computes again instead of keeping it.
        users: placeholder -> the units that read it, in order.
        held_bytes: for each kind, parameter -> bytes that a rank holds of it.
        fixed: what stages hold all the time, but for the results.
        results: of a forward alone, which every stage of several receives for the whole batch.
        gradients: what stages hold from their first backward on.
        starting: (N, K) seconds that it takes to start the kernels of each unit, forward and backward, whatever their work.
        times, at: of microbatches of so many rows.
        limits: (3, N, K) of these, the seconds of calls that go into each of ``LIMITS`` most of all.
    """

    kinds: tuple[Device, ...]
    recompute: Recompute
    users: Mapping[str, tuple[int, ...]]
    held_bytes: tuple[Mapping[str, int], ...]
    fixed: Amounts
    results: tuple[Shared, ...]
    gradients: Amounts
    starting: Callable[[], Floats]
    times: Callable[[int], MicrobatchTimes]
    at: Callable[[int], MicrobatchCosts]
    limits: Callable[[int], Floats]

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
        assert isinstance(folded.working, Working)  # blocks repeat in stages of one width
        units = Units(
            time=halves.sum(axis=0),
            values=tuple(expansion.values(folded.values)),
            replicated=tuple((seconds, places) for seconds, users in folded.replicated for places in expansion.places(users)),
            fixed=(*fixed.every, *results),
            kept=tuple(expansion.shared(folded.kept)),
            depth=folded.depth[source],
            gradients=gradients.every,
            summed=folded.summed,
            working=folded.working.repeated(source),
        )
        return MicrobatchCosts(halves, costs.at(rows).flops[source], units)

    return dataclasses.replace(
        costs,
        fixed=fixed,
        results=results,
        gradients=gradients,
        starting=lambda: costs.starting()[source],
        times=cache(times),
        at=cache(at),
        limits=lambda rows: costs.limits(rows)[:, source],
    )


Borders = tuple[tuple[Gathered, ...], tuple[Parted, ...]]


def stack(
    of_kind: Sequence[int], tables: Sequence[UnitCosts], values_of: UnitCosts, borders: Callable[[int], Borders] = lambda _: ((), ())
) -> UnitCosts:
    """Return the costs of units in stages of several kinds, each from the table of its width.

    Args:
        of_kind: (K,) for each kind, which of the tables prices it.
        tables: of the same units in stages of one width each; every table knows the devices of all K kinds.
        values_of: the table whose values hold for all stages: between stages they are whole.
        borders: for the rows of a microbatch, what stages make whole before they send it, or read in parts.
    """

    def columns(each: Sequence[Floats]) -> Floats:
        return np.stack([each[place][..., kind] for kind, place in enumerate(of_kind)], axis=-1)

    fixed = Amounts(_stacked_amounts(of_kind, ((*table.fixed.every, *table.results) for table in tables)))
    gradients = Amounts(_stacked_amounts(of_kind, (table.gradients.every for table in tables)))

    @cache
    def times(rows: int) -> MicrobatchTimes:
        each = [table.times(rows) for table in tables]
        waiting = columns([of_table.waiting[:, of_table.source] for of_table in each])
        kept = Amounts(_stacked_amounts(of_kind, (of_table.kept.every for of_table in each)))
        return MicrobatchTimes(columns([of_table.halves for of_table in each]), waiting, np.arange(waiting.shape[1]), kept)

    def at(rows: int) -> MicrobatchCosts:
        each, whole = [table.at(rows).units for table in tables], values_of.at(rows).units
        replicated = _stacked(of_kind, ([(seconds, (units, -1)) for seconds, units in of_table.replicated] for of_table in each))
        workings, halves = tuple(each[place].workings[0] for place in of_kind), times(rows).halves
        flops, is_mixed = [tables[place].at(rows).flops for place in of_kind], len(set(of_kind)) > 1
        gathered, parted = borders(rows)
        units = Units(
            time=halves.sum(axis=0),
            values=whole.values,
            replicated=tuple((seconds, users) for seconds, (users, _) in replicated),
            fixed=fixed.every,
            kept=_stacked_amounts(of_kind, (of_table.kept for of_table in each)),
            depth=whole.depth,
            gradients=gradients.every,
            summed=max(of_table.summed for of_table in each),
            working=workings if is_mixed else workings[0],
            gathered=gathered,
            parted=parted,
        )
        return MicrobatchCosts(halves, np.stack(flops, axis=1) if is_mixed else flops[0], units)

    return dataclasses.replace(
        tables[0],
        held_bytes=tuple(tables[place].held_bytes[kind] for kind, place in enumerate(of_kind)),
        fixed=fixed,
        results=(),
        gradients=gradients,
        starting=lambda: columns([table.starting() for table in tables]),
        times=times,
        at=cache(at),
        limits=lambda rows: columns([table.limits(rows) for table in tables]),
    )


def _stacked_amounts(of_kind: Sequence[int], of_tables: Iterable[Iterable[Shared]]) -> tuple[Shared, ...]:
    """What stages of every kind need, from the table that prices each kind (``_stacked``).

    An amount that is equal for all kinds is one number again: most are, and the solvers are faster with numbers.
    """
    kinds = range(len(of_kind))
    amounts_of_tables = ([(tuple(map(item.of_kind, kinds)), (item.units, item.producer)) for item in items] for items in of_tables)
    merged = _stacked(of_kind, amounts_of_tables)
    return tuple(Shared(amounts if len(set(amounts)) > 1 else amounts[0], units, producer) for amounts, (units, producer) in merged)


_Shape = tuple[tuple[int, ...], int]
"""The units of something that is shared, and their producer, or -1: what is alike in several tables is one item."""


def _stacked(
    of_kind: Sequence[int], of_tables: Iterable[Iterable[tuple[tuple[float, ...], _Shape]]]
) -> list[tuple[tuple[float, ...], _Shape]]:
    """Amounts by kind, each from the table of the kind: nothing where that has no such item.

    The first item of some units in one table is taken to be the first of them in the others, the second the second, and so on. What a
    stage holds is the sum of its items, so it does not matter which of the same units are taken together.
    """
    merged: dict[tuple[_Shape, int], list[float]] = {}
    for place, items in enumerate(of_tables):
        counts: dict[_Shape, int] = {}
        kinds = [kind for kind, each in enumerate(of_kind) if each == place]
        for amounts, shape in items:
            number = counts[shape] = counts.get(shape, -1) + 1
            found = merged.setdefault((shape, number), [0.0] * len(of_kind))
            for kind in kinds:
                found[kind] = amounts[kind]
    return [(tuple(amounts), shape) for (shape, _), amounts in merged.items()]
