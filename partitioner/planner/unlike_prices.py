"""Prices of units whose stages have unlike widths, from the prices of each width: every kind of stage takes its own.

kind            0       1       2          two ranks share a stage of kind 0; one computes a stage of kind 1, or 2, another device
of the list     0       1       1          the prices of a rank's half of the model, and those of the whole model
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np

from partitioner.planner.borders import Gathered, Parted
from partitioner.planner.stage_problem import Floats, Shared
from partitioner.planner.time_shares import Shares
from partitioner.planner.unit_prices import Prices, UnitPrices
from passes.recompute import Recompute

__all__ = ["UnlikePrices"]

Shape = tuple[tuple[int, ...], int]
"""The units of something that is shared, and their producer, or -1: what is alike in several lists is one item."""


class UnlikePrices:
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

    def least_shares(self, microbatch_size: int) -> Shares:
        """What parts forward and backward have of the time of the units that take time, in a stage of any kind."""
        return Shares.of(self.halves(microbatch_size))

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
