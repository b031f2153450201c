"""Sums over runs of units, for all runs that start at one unit at a time.

Some quantities of a run are plain sums over its units (time). Others are *shared*: a parameter that two units of the run use is held
once, a value that two units of the run read is received once. With the users of item x in order ``u1 < u2 < ...`` and the use before
each, ``w`` (-1 before the first), item x counts in run i..j exactly once: at the use with ``w < i <= u <= j``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from partitioner.planner.stage_problem import Floats, Integers, Units, Value

__all__ = ["Row", "RowTable", "row_table"]

_MOST_KEPT_RUNS = 1_000_000
"""Runs that a table keeps, about seven numbers each; longer rows are worked out again each time."""


@dataclass(frozen=True)
class Row:
    """Every run that starts at one unit: entry k is about the run ``start .. start + k``.

    Attributes:
        start: the first unit.
        time: (K, width) seconds on each kind of device.
        leaving: (2, width) messages and bytes that leave forward.
        entering: (2, width) messages and bytes of the gradients of what enters.
        fixed: (width,) bytes.
        kept: (width,) bytes for each microbatch in flight.
    """

    start: int
    time: Floats
    leaving: Floats
    entering: Floats
    fixed: Floats
    kept: Floats

    @property
    def width(self) -> int:
        return int(self.fixed.shape[0])

    def first(self, width: int) -> Row:
        """The row of the shortest so many runs."""
        return Row(
            self.start,
            self.time[:, :width],
            self.leaving[:, :width],
            self.entering[:, :width],
            self.fixed[:width],
            self.kept[:width],
        )


class RowTable:
    """The rows of some units, worked out once for all problems about them.

    Args:
        units: the units.
    """

    def __init__(self, units: Units) -> None:
        self._units = units
        self._longest = np.zeros(len(units), dtype=np.int64)
        self._rows: list[Row] = []

    def rows(self, longest: Integers) -> Iterator[Row]:
        """The rows of all units, last unit first.

        Args:
            longest: (N,) how many units the longest run that matters has, from each unit.
        """
        if not self._rows or (longest > self._longest).any():
            wider = np.minimum(2 * longest, len(self._units) - np.arange(len(self._units)))
            if wider.sum() > _MOST_KEPT_RUNS:
                yield from _rows(self._units, longest)
                return
            self._longest = wider
            self._rows = list(_rows(self._units, wider))
        for row in self._rows:
            yield row.first(int(longest[row.start]))


@lru_cache(maxsize=1)
def row_table(units: Units) -> RowTable:
    """The table of some units; that of the last units asked for is kept."""
    return RowTable(units)


def _rows(units: Units, longest: Integers) -> Iterator[Row]:
    n = len(units)
    n_kinds = units.time.shape[1]
    fixed = _SharedSums(n, [((item.amount,), item.units, item.producer) for item in units.fixed], 1)
    kept = _SharedSums(n, [((item.amount,), item.units, item.producer) for item in units.kept], 1)
    again = _SharedSums(n, [(seconds, users, -1) for seconds, users in units.replicated], n_kinds)
    entering = _SharedSums(
        n, [((1, value.gradient_size), value.readers, value.producer) for value in units.values if value.gradient_size], 2
    )
    leaving = _Crossing(n, units.values)
    for start in range(n - 1, -1, -1):
        for sums in (fixed, kept, again, entering):
            sums.step(start)
        leaving.step(start)
        end = min(n, start + int(longest[start]))
        time = np.cumsum(units.time[start:end].T + again.at[:, start:end], axis=1)
        yield Row(
            start,
            time,
            np.cumsum(leaving.at[:, start:end], axis=1),
            np.cumsum(entering.at[:, start:end], axis=1),
            np.cumsum(fixed.at[0, start:end]),
            np.cumsum(kept.at[0, start:end]),
        )


class _SharedSums:
    """``at[:, u]``: what unit u adds to a run that starts at the current unit and reaches it. The start moves down one by one."""

    def __init__(self, n_units: int, items: Iterable[tuple[Sequence[float], tuple[int, ...], int]], n_amounts: int) -> None:
        self.at = np.zeros((n_amounts, n_units))
        self._added: list[list[Sequence[float]]] = [[] for _ in range(n_units)]
        self._hidden: list[list[tuple[int, Sequence[float]]]] = [[] for _ in range(n_units)]
        for amounts, units, before in items:
            previous = before
            for unit in units:
                self._added[unit].append(amounts)
                if previous >= 0:
                    self._hidden[previous].append((unit, amounts))
                previous = unit

    def step(self, start: int) -> None:
        """Move the start to this unit: its own uses count, and hide those that come after them."""
        for amounts in self._added[start]:
            self.at[:, start] += amounts
        for unit, amounts in self._hidden[start]:
            self.at[:, unit] -= amounts


class _Crossing:
    """``at``: differences of what leaves a run, as its end moves: a value leaves from its producer up to before its last reader."""

    def __init__(self, n_units: int, values: Iterable[Value]) -> None:
        self.at = np.zeros((2, n_units + 1))
        self._produced: list[list[Value]] = [[] for _ in range(n_units)]
        for value in values:
            self._produced[value.producer].append(value)

    def step(self, start: int) -> None:
        """Move the start to this unit."""
        for value in self._produced[start]:
            self.at[:, start] += (1, value.size)
            self.at[:, value.readers[-1]] -= (1, value.size)
