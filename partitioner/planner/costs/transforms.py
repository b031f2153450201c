"""Prices of a model with its repeated blocks from those of the folded one: rows of numbers, repeated.

    folded      unit   0 1 | 2 3 4 | 5 6 7 | 8          block 2 3 4 stands for three copies, 5 6 7 is the last
    unfolded           0 1 | 2 3 4 | 5 6 7 | 8 9 10 | 11 12 13 | 14

What lies in the block is there once a copy. What lies in the block and the last copy crosses from each copy to the next; what lies in
front, in the block and behind is shared by all copies.

Prices of units whose stages have unlike widths, from the prices of each width: every kind of stage takes its own.

kind            0       1       2          two ranks share a stage of kind 0; one computes a stage of kind 1, or 2, another device
of the list     0       1       1          the prices of a rank's half of the model, and those of the whole model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partitioner.planner.costs.cut_points import CutPoints
from partitioner.planner.costs.time_fractions import TimeFractions
from partitioner.planner.costs.unit_costs import PriceList, Prices, UnitPrices, held_everywhere
from partitioner.planner.solvers.boundaries import Gathered, Parted
from partitioner.planner.solvers.stage_problem import Floats, Integers, Shared, Value, Working
from passes.autograd.recompute import Recompute

__all__ = ["Expansion", "RepeatedPrices", "SubmeshPrices", "expansion_of"]


@dataclass(frozen=True, eq=False)
class Expansion:
    """How the units of a folded model repeat.

    Attributes:
        start, stop: the units of the block.
        count: how many copies it stands for.
        copies: node or placeholder of the block -> its copies, itself the first.
        points: the units of the whole model, by the names of its nodes.
        source: (N,) for each of them the unit of the folded model.
    """

    start: int
    stop: int
    count: int
    copies: Mapping[str, tuple[str, ...]]
    points: CutPoints
    source: Integers

    @cached_property
    def stands_for(self) -> dict[str, tuple[str, int]]:
        """Node or placeholder of a copy -> the one of the block that stands for it, and the number of the copy."""
        return {name: (first, copy) for first, names in self.copies.items() for copy, name in enumerate(names)}

    def places(self, units: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The units that something with these units has in the whole model: one for each copy that there is of it."""
        length, more = self.stop - self.start, (self.count - 1) * (self.stop - self.start)
        before = [unit for unit in units if unit < self.start]
        inside = [unit for unit in units if self.start <= unit < self.stop]
        behind = [unit for unit in units if unit >= self.stop]
        if not inside:
            yield tuple(unit if unit < self.start else unit + more for unit in units)
        elif before and behind:
            repeated = [unit + copy * length for copy in range(self.count) for unit in inside]
            yield (*before, *repeated, *(unit + more for unit in behind))
        elif before:
            yield (*before, *inside)
        else:
            for copy in range(self.count):
                ahead = [unit - self.stop + self.start + (copy + 1) * length for unit in behind]
                yield (*(unit + copy * length for unit in inside), *ahead)

    def n_places(self, units: Sequence[int]) -> int:
        """How many copies there are of something with these units."""
        inside = any(self.start <= unit < self.stop for unit in units)
        return self.count if inside and not any(unit < self.start for unit in units) else 1

    def shared(self, items: Iterable[Shared]) -> Iterator[Shared]:
        """Amounts, each once a copy."""
        for item in items:
            with_producer = item.units if item.producer < 0 else (item.producer, *item.units)
            for units in self._places(with_producer):
                yield Shared(item.amount, units) if item.producer < 0 else Shared(item.amount, units[1:], units[0])

    def values(self, items: Iterable[Value]) -> Iterator[Value]:
        """What crosses, each once a copy."""
        for item in items:
            for units in self._places((item.producer, *item.readers)):
                yield Value(units[0], units[1:], item.size, item.gradient_size)

    def _places(self, units: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if units not in self._known:
            self._known[units] = tuple(self.places(units))
        return self._known[units]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """The places of what has been asked for: the same units share something at every microbatch size and on every mesh."""
        return {}


def expansion_of(points: CutPoints, copies: Mapping[str, tuple[str, ...]], following: Mapping[str, str]) -> Expansion | None:
    """How units repeat; None where a copy does not begin with a unit of its own.

    Args:
        points: of the folded model.
        copies, following: see ``passes.graph.repeated_subgraphs``.
    """
    first, last = next(iter(copies), None), next(iter(following), None)
    starts = {unit[0]: index for index, unit in enumerate(points.units)}
    if first not in starts or last not in starts:
        return None
    start, stop, count = starts[first], starts[last], len(copies[first])
    length = stop - start
    counterparts = [following.get(unit[0]) for unit in points.units[stop : stop + length]]
    if counterparts != [unit[0] for unit in points.units[start:stop]]:
        return None
    source = np.array([*range(stop), *(list(range(start, stop)) * (count - 1)), *range(stop, len(points.units))], dtype=np.int64)
    numbers = [0] * start + [copy for copy in range(count) for _ in range(length)] + [0] * (len(points.units) - stop)
    units = tuple(
        tuple(copies[name][copy] if name in copies else name for name in points.units[index])
        for index, copy in zip(source, numbers, strict=True)
    )
    whole = CutPoints(units, (), {}, tuple(points.depth[index] for index in source))
    return Expansion(start, stop, count, copies, whole, source)


class RepeatedPrices:
    """The prices of the whole model (``PriceList``), from those of the folded one.

    Args:
        folded: prices of what stays.
        unfolding: how its units repeat.
    """

    def __init__(self, folded: PriceList, unfolding: Expansion) -> None:
        self._folded, self._unfolding = folded, unfolding
        self.recompute: Recompute = folded.recompute
        self.kinds = folded.kinds
        self._known: dict[int, UnitPrices] = {}
        self._least_kept: dict[int, float] = {}
        self._users: dict[str, tuple[tuple[int, ...], ...]] = {}

    def at(self, microbatch_size: int) -> UnitPrices:
        """The prices for microbatches of so many rows."""
        if microbatch_size not in self._known:
            prices, unfolding = self._folded.at(microbatch_size), self._unfolding
            assert isinstance(prices.working, Working)  # a list prices stages of one width
            self._known[microbatch_size] = UnitPrices(
                halves=self.halves(microbatch_size),
                replicated=tuple((seconds, places) for seconds, units in prices.replicated for places in unfolding.places(units)),
                values=tuple(unfolding.values(prices.values)),
                fixed=self.fixed,
                kept=tuple(unfolding.shared(prices.kept)),
                flops=prices.flops[unfolding.source],
                depth=prices.depth[unfolding.source],
                gradients=self.gradients,
                summed=prices.summed,
                working=prices.working.repeated(unfolding.source),
            )
        return self._known[microbatch_size]

    def halves(self, microbatch_size: int) -> Floats:
        """(3, N, K) seconds of each unit, for microbatches of so many rows."""
        return self._folded.halves(microbatch_size)[:, self._unfolding.source]

    def times(self, microbatch_size: int) -> Floats:
        """(N, K) seconds of each unit, forward and backward, for microbatches of so many rows."""
        return self._folded.times(microbatch_size)[self._unfolding.source]

    def least_shares(self, microbatch_size: int) -> TimeFractions:
        """What parts forward and backward have of the time of the units that take time."""
        shares, of_folded = self._folded.least_shares(microbatch_size), self._folded.times(microbatch_size).min(axis=1)
        numbers = np.bincount(self._unfolding.source, minlength=len(of_folded))
        part = float(of_folded.sum()) / max(float((of_folded * numbers).sum()), 1e-300)
        return dataclasses.replace(shares, halves=shares.halves * numbers[:, None] * part)

    def least_kept(self, microbatch_size: int) -> float:
        """Bytes that all stages together keep for a microbatch of so many rows, wherever they are cut."""
        if microbatch_size not in self._least_kept:
            items = self._folded.kept_alone(microbatch_size)
            self._least_kept[microbatch_size] = float(sum(item.least * self._unfolding.n_places(item.units) for item in items))
        return self._least_kept[microbatch_size]

    def kept_alone(self, microbatch_size: int) -> tuple[Shared, ...]:
        """What is kept for a microbatch of so many rows, whether or not it is received."""
        return tuple(self._unfolding.shared(self._folded.kept_alone(microbatch_size)))

    @cached_property
    def fixed(self) -> tuple[Shared, ...]:
        """What stages hold all the time."""
        everywhere = held_everywhere(self._folded.results_bytes, len(self._unfolding.source))
        return (*self._unfolding.shared(self._folded.fixed_apart), *everywhere)

    @cached_property
    def gradients(self) -> tuple[Shared, ...]:
        """What stages hold from their first backward on."""
        return tuple(self._unfolding.shared(self._folded.gradients))

    @cached_property
    def fixed_bytes(self) -> float:
        """Bytes that all stages together hold all the time, what they share once."""
        apart = sum(item.least * self._unfolding.n_places(item.units) for item in self._folded.fixed_apart)
        return float(apart) + self._folded.results_bytes

    @cached_property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients that all stages together hold at the end of a step, what they share once."""
        return float(sum(item.least * self._unfolding.n_places(item.units) for item in self._folded.gradients))

    def starting(self) -> Floats:
        """(N, K) seconds that it takes to start the kernels of each unit."""
        return self._folded.starting()[self._unfolding.source]

    def users(self, placeholder: str) -> tuple[int, ...]:
        """The units that read a placeholder, in order."""
        first, copy = self._unfolding.stands_for.get(placeholder, (placeholder, 0))
        if first not in self._users:
            self._users[first] = tuple(self._unfolding.places(self._folded.users(first)))
        return self._users[first][copy]

    def held_bytes(self, placeholder: str, kind: int = 0) -> int:
        """Bytes that a rank holds of a parameter, buffer or constant."""
        return self._folded.held_bytes(self._unfolding.stands_for.get(placeholder, (placeholder, 0))[0], kind)

    def limit_of(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> str:
        """What most of the time of some units goes into."""
        return self._folded.limit_of(self._unfolding.source[list(units)].tolist(), microbatch_size, kind)

    def exchanging(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> float:
        """Seconds that some units wait for the other ranks of their stage."""
        return self._folded.exchanging(self._unfolding.source[list(units)].tolist(), microbatch_size, kind)


# -- prices of units whose stages have unlike widths, from the prices of each width ------------------------------------------------


Shape = tuple[tuple[int, ...], int]
"""The units of something that is shared, and their producer, or -1: what is alike in several lists is one item."""


class SubmeshPrices:
    """The prices of units in stages of several kinds (``Prices``).

    Args:
        of_kind: (K,) for each kind, which of the lists prices it.
        lists: prices of the same units in stages of one width each; every list knows the devices of all K kinds.
        values_of: the list whose values hold for all stages: between stages they are whole.
        borders: for the rows of a microbatch, what stages make whole before they send it, or read in parts.
    """

    def __init__(
        self,
        of_kind: Sequence[int],
        lists: Sequence[Prices],
        values_of: Prices,
        borders: Callable[[int], tuple[tuple[Gathered, ...], tuple[Parted, ...]]] = lambda _: ((), ()),
    ) -> None:
        self._of_kind, self._lists = tuple(of_kind), tuple(lists)
        self._values_of, self._borders = values_of, borders
        self.recompute: Recompute = lists[0].recompute
        self.kinds = lists[0].kinds
        self._known: dict[int, UnitPrices] = {}
        self._known_kept: dict[int, tuple[Shared, ...]] = {}

    def at(self, microbatch_size: int) -> UnitPrices:
        """The prices for microbatches of so many rows."""
        if microbatch_size not in self._known:
            self._known[microbatch_size] = self._priced(microbatch_size)
        return self._known[microbatch_size]

    def _priced(self, microbatch_size: int) -> UnitPrices:
        each, whole = [prices.at(microbatch_size) for prices in self._lists], self._values_of.at(microbatch_size)
        replicated = self._merged([(seconds, (units, -1)) for seconds, units in prices.replicated] for prices in each)
        workings = tuple(each[place].units.workings[0] for place in self._of_kind)
        gathered, parted = self._borders(microbatch_size)
        flops = [each[place].flops for place in self._of_kind]
        return UnitPrices(
            halves=self.halves(microbatch_size),
            replicated=tuple((seconds, units) for seconds, (units, _) in replicated),
            values=whole.values,
            fixed=self.fixed,
            kept=self._shared(prices.kept for prices in each),
            flops=np.stack(flops, axis=1) if len(set(self._of_kind)) > 1 else flops[0],
            depth=whole.depth,
            gradients=self.gradients,
            summed=max(prices.summed for prices in each),
            working=workings if len(set(self._of_kind)) > 1 else workings[0],
            gathered=gathered,
            parted=parted,
        )

    def halves(self, microbatch_size: int) -> Floats:
        """(3, N, K) seconds of each unit, for microbatches of so many rows."""
        return self._columns([prices.halves(microbatch_size) for prices in self._lists])

    def _columns(self, each: Sequence[Floats]) -> Floats:
        """(..., K) of each kind, from (..., K) of each list."""
        return np.stack([each[place][..., kind] for kind, place in enumerate(self._of_kind)], axis=-1)

    def times(self, microbatch_size: int) -> Floats:
        """(N, K) seconds of each unit, forward and backward, for microbatches of so many rows."""
        return self._columns([prices.times(microbatch_size) for prices in self._lists])

    def least_shares(self, microbatch_size: int) -> TimeFractions:
        """What parts forward and backward have of the time of the units that take time, in a stage of any kind."""
        return TimeFractions.of(self.halves(microbatch_size))

    def least_kept(self, microbatch_size: int) -> float:
        """Bytes that all stages together keep for a microbatch of so many rows at least, wherever they are cut and of whatever kinds.

        Of what all lists keep of the same units, the least counts; nothing counts of what only some of them keep. So it may be less than
        the least that any mixture of kinds keeps, but never more.
        """
        return float(sum(item.least for item in self.kept_alone(microbatch_size)))

    def kept_alone(self, microbatch_size: int) -> tuple[Shared, ...]:
        """What is kept for a microbatch of so many rows, whether or not it is received."""
        if microbatch_size not in self._known_kept:
            self._known_kept[microbatch_size] = self._shared(prices.kept_alone(microbatch_size) for prices in self._lists)
        return self._known_kept[microbatch_size]

    @cached_property
    def fixed(self) -> tuple[Shared, ...]:
        """What stages hold all the time."""
        return self._shared(prices.fixed for prices in self._lists)

    @cached_property
    def fixed_bytes(self) -> float:
        """Bytes that all stages together hold all the time, what they share once: at least, as ``least_kept``."""
        return float(sum(item.least for item in self.fixed))

    @cached_property
    def gradients(self) -> tuple[Shared, ...]:
        """What stages hold from their first backward on."""
        return self._shared(prices.gradients for prices in self._lists)

    @cached_property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients that all stages together hold at the end of a step: at least, as ``least_kept``."""
        return float(sum(item.least for item in self.gradients))

    def _shared(self, of_lists: Iterable[Iterable[Shared]]) -> tuple[Shared, ...]:
        """The items of all lists as items of all kinds; those of one amount for all kinds with one number, so that tables stay small."""
        n_kinds = len(self._of_kind)
        by_kind = ([(tuple(map(item.of_kind, range(n_kinds))), (item.units, item.producer)) for item in items] for items in of_lists)
        merged = self._merged(by_kind)
        return tuple(Shared(amounts if len(set(amounts)) > 1 else amounts[0], units, producer) for amounts, (units, producer) in merged)

    def _merged(self, of_lists: Iterable[Iterable[tuple[tuple[float, ...], Shape]]]) -> list[tuple[tuple[float, ...], Shape]]:
        """Amounts by kind, each from the list of the kind: nothing where that has no such item.

        The first item of some units in one list is taken to be the first of them in the others, the second the second, and so on. What a
        stage holds is the sum of its items, so it does not matter which of the same units are taken together.
        """
        merged: dict[tuple[Shape, int], list[float]] = {}
        for place, items in enumerate(of_lists):
            counts: dict[Shape, int] = {}
            kinds = [kind for kind, each in enumerate(self._of_kind) if each == place]
            for amounts, shape in items:
                number = counts[shape] = counts.get(shape, -1) + 1
                found = merged.setdefault((shape, number), [0.0] * len(self._of_kind))
                for kind in kinds:
                    found[kind] = amounts[kind]
        return [(tuple(amounts), shape) for (shape, _), amounts in merged.items()]

    def starting(self) -> Floats:
        """(N, K) seconds that it takes to start the kernels of each unit."""
        return self._columns([prices.starting() for prices in self._lists])

    def users(self, placeholder: str) -> tuple[int, ...]:
        """The units that read a placeholder, in order."""
        return self._lists[0].users(placeholder)

    def held_bytes(self, placeholder: str, kind: int = 0) -> int:
        """Bytes that a rank of a stage holds of a parameter, buffer or constant."""
        return self._list_of(kind).held_bytes(placeholder, kind)

    def limit_of(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> str:
        """What most of the time of some units goes into."""
        return self._list_of(kind).limit_of(units, microbatch_size, kind)

    def exchanging(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> float:
        """Seconds that some units wait for the other ranks of their stage."""
        return self._list_of(kind).exchanging(units, microbatch_size, kind)

    def _list_of(self, kind: int) -> Prices:
        return self._lists[self._of_kind[kind]]
