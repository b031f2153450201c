"""Sums over runs of units, for all runs that start in a block of units at a time.

Some quantities of a run are plain sums over its units (time). Others are *shared*: a parameter that two units of the run use is held
once, a value that two units of the run read is received once. With the users of item x in order ``u1 < u2 < ...`` and the use before
each, ``w`` (-1 before the first), item x counts in run i..j exactly once: at the use with ``w < i <= u <= j``. So every quantity is a sum
of what units add to the runs that reach them from some starts:

    a unit that takes t seconds        t at u           from 0 <= i <= u
    an item, at each of its uses       its amount at u  from w < i <= u
    a value, made at p, last read at q its size at p, and less by it at q, where it has not left     from 0 <= i <= p
    what makes it whole to be sent     its seconds, likewise
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from partitioner.planner.stage_problem import Floats, Integers, Units, Uses

__all__ = ["RunTable", "Runs", "run_table"]

_BLOCK = 128
"""Starts that are looked at together."""

_MOST_KEPT_RUNS = 1_000_000
"""Runs that a table keeps, about nine numbers each; of more, blocks are worked out again each time."""


@dataclass(frozen=True)
class Runs:
    """Every run that starts in a block of C units: entry [c, k] is about the run ``start + c .. start + c + k``; of none beyond the end.

    Attributes:
        start: the first unit of the block.
        time: (K, C, width) seconds of a stage of each kind.
        leaving: (2, C, width) messages and bytes that leave forward.
        entering: (2, C, width) messages and bytes of the gradients of what enters.
        fixed: (K, C, width) bytes; (1, C, width) where all kinds are alike, here and below.
        kept: (K, C, width) bytes for each microbatch in flight.
        gradients: (K, C, width) bytes from the first backward on.
        working: (K, C, width) bytes while the run computes.
        parted: (K, C, width) seconds of ``time`` until the gradients of what is read in parts are whole.
        behind: (C, width) the unit behind each run; the number of units where a run would go beyond the last.
    """

    start: int
    time: Floats
    leaving: Floats
    entering: Floats
    fixed: Floats
    kept: Floats
    gradients: Floats
    working: Floats
    parted: Floats
    behind: Integers

    @property
    def width(self) -> int:
        return int(self.behind.shape[1])

    @property
    def starts(self) -> slice:
        """The units of the block."""
        return slice(self.start, self.start + self.behind.shape[0])

    def first(self, width: int) -> Runs:
        """The same of the shortest so many runs from each unit."""
        return self._part(slice(None), slice(width))

    def of(self, unit: int) -> Runs:
        """The runs that start at one unit of the block: a block of its own."""
        return self._part(slice(unit - self.start, unit - self.start + 1), slice(None))

    def _part(self, starts: slice, lengths: slice) -> Runs:
        time, leaving, entering = (each[:, starts, lengths] for each in (self.time, self.leaving, self.entering))
        fixed, kept, gradients, working = (each[:, starts, lengths] for each in (self.fixed, self.kept, self.gradients, self.working))
        start, behind = self.start + (starts.start or 0), self.behind[starts, lengths]
        return Runs(start, time, leaving, entering, fixed, kept, gradients, working, self.parted[:, starts, lengths], behind)


class RunTable:
    """The runs of some units, worked out once for all problems about them.

    Args:
        units: the units.
    """

    def __init__(self, units: Units) -> None:
        self._n_units = len(units)
        of_borders = _together(_of_values(units.gathered_uses), _of_uses(units.parted_uses))
        self._of_time = _together(_at_each(units.time), _of_uses(units.replicated_uses), of_borders)
        self._of_leaving = _of_values(_counted(units.leaving))
        self._of_entering = _of_uses(_counted(units.entering))
        self._of_memory = [_of_uses(each) for each in (units.fixed_uses, units.kept_uses, units.gradient_uses)]
        self._workings, self._has_borders = units.workings, bool(units.gathered or units.parted)
        self._of_parted = _of_uses(units.parted_uses)
        self._of_border_memory = _together(_of_values(units.gathered_sizes), _of_uses(units.parted_sizes))
        self._known: dict[int, Runs] = {}

    def blocks(self, longest: Integers) -> Iterator[Runs]:
        """All runs, block by block, the last first.

        Args:
            longest: (N,) how many units the longest run that matters has, from each unit.
        """
        for start in reversed(range(0, self._n_units, _BLOCK)):
            stop = min(start + _BLOCK, self._n_units)
            width = int(longest[start:stop].max())
            if start not in self._known or self._known[start].width < width:
                wider = min(2 * width, self._n_units - start)
                if wider * self._n_units > _MOST_KEPT_RUNS:
                    yield self._worked_out(start, stop, width)
                    continue
                self._known[start] = self._worked_out(start, stop, wider)
            yield self._known[start].first(width)

    def _worked_out(self, start: int, stop: int, width: int) -> Runs:
        time, leaving, entering = (each.sums(start, stop, width) for each in (self._of_time, self._of_leaving, self._of_entering))
        fixed, kept, gradients = (each.sums(start, stop, width) for each in self._of_memory)
        peaks = [working.of_block(start, stop, width) for working in self._workings]
        working = np.stack(peaks) if len(peaks) > 1 else peaks[0][None]
        parted = np.zeros((1, *working.shape[1:]))
        if self._has_borders:
            working = working + self._of_border_memory.sums(start, stop, width)
            parted = self._of_parted.sums(start, stop, width)
        behind = np.minimum(np.arange(start + 1, stop + 1)[:, None] + np.arange(width), self._n_units)
        return Runs(start, time, leaving, entering, fixed, kept, gradients, working, parted, behind)


@lru_cache(maxsize=32)
def run_table(units: Units) -> RunTable:
    """The table of some units; those asked for last are kept."""
    return RunTable(units)


class _Additions(NamedTuple):
    """What units add to the runs that reach them from ``first <= i <= last``.

    Attributes:
        unit, first, last: (E,).
        amount: (E, A).
    """

    unit: Integers
    first: Integers
    last: Integers
    amount: Floats

    def sums(self, start: int, stop: int, width: int) -> Floats:
        """(A, stop - start, width) for every run that starts there."""
        n_starts, n_units = stop - start, stop - start + width - 1
        first = np.maximum(np.maximum(self.first, self.unit - width + 1), start) - start
        last = np.minimum(self.last, stop - 1) - start
        counts = (self.unit >= start) & (self.unit < start + n_units) & (first <= last)
        places = (self.unit[counts] - start) * (n_starts + 1)
        place = np.concatenate([places + first[counts], places + last[counts] + 1])
        differences = np.empty((self.amount.shape[1], n_units, n_starts + 1))
        for number, amounts in enumerate(self.amount[counts].T):
            signed = np.concatenate([amounts, -amounts])
            differences[number] = np.bincount(place, signed, n_units * (n_starts + 1)).reshape(n_units, n_starts + 1)
        added = np.cumsum(differences, axis=2)
        run = np.arange(n_starts)[:, None]
        found: Floats = np.cumsum(added[:, run + np.arange(width), run], axis=2)
        return found


def _at_each(amount: Floats) -> _Additions:
    unit = np.arange(len(amount))
    return _Additions(unit, np.zeros_like(unit), unit, amount)


def _of_uses(uses: Uses) -> _Additions:
    amount = uses.amount if uses.amount.ndim == 2 else uses.amount[:, None]
    return _Additions(uses.unit, uses.before + 1, uses.unit, amount)


def _of_values(leaving: Uses) -> _Additions:
    producer, reader, amount = leaving
    nothing = np.zeros_like(producer)
    here, there = _Additions(producer, nothing, producer, amount), _Additions(reader, nothing, producer, -amount)
    return _together(here, there)


def _counted(uses: Uses) -> Uses:
    """Bytes as messages and bytes."""
    return uses._replace(amount=np.stack([np.ones_like(uses.amount), uses.amount], axis=1))


def _together(*additions: _Additions) -> _Additions:
    return _Additions(*map(np.concatenate, zip(*additions, strict=True)))
