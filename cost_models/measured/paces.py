"""Times that were taken one after the other, on a machine that is not equally fast all the time.

    stretch         0      1      2      so many samples in a row, no call twice
    pace            1      1.5    1      how slow the machine was meanwhile, told by the calls that have samples in several
    a call         10 ms  15 ms  11 ms   10 ms: the median of 10, 15 / 1.5 and 11
    another one     -     30 ms   -      20 ms, though it was timed when the machine was slow

A sample is taken to be the call's own time multiplied by the pace of its stretch. Both are medians of what is left when the other is
divided away, in turn: the median polish of Tukey 1977, Exploratory Data Analysis, of logarithms.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

from cost_models.calls import Call

__all__ = ["Paces"]

_LENGTH = 16
"""Samples of a stretch, at most: a second or two of timing."""

_SWEEPS = 20
"""Medians of medians settle after a few."""


class Paces:
    """Samples of calls, and how slow the machine was when they were taken."""

    def __init__(self) -> None:
        self._samples: dict[Call, dict[int, float]] = {}
        self._stretches: list[dict[Call, float]] = [{}]
        self._paces = [1.0]

    def in_another_order(self) -> Iterator[Call]:
        """All calls; in which order depends on how many samples there are, so that stretches are not of the same calls again."""
        calls = list(self._samples)
        random.Random(len(self._stretches)).shuffle(calls)
        return iter(calls)

    def add(self, call: Call, seconds: float) -> None:
        """A sample, taken behind all others."""
        if len(self._stretches[-1]) >= _LENGTH or call in self._stretches[-1]:
            self._stretches.append({})
            self._paces.append(1.0)
        self._stretches[-1][call] = seconds
        self._samples.setdefault(call, {})[len(self._stretches) - 1] = seconds

    def settle(self) -> None:
        """Find the paces anew; the median of them is 1."""
        for _ in range(_SWEEPS):
            times = {call: self.time(call) for call in self._samples}
            found = [self._pace(stretch, times) for stretch in self._stretches]
            middle = statistics.median(found)
            self._paces = [pace / middle for pace in found]

    def time(self, call: Call) -> float:
        """Seconds at the usual pace."""
        return statistics.median(seconds / self._paces[number] for number, seconds in self._samples[call].items())

    def _pace(self, stretch: dict[Call, float], times: dict[Call, float]) -> float:
        compared = [seconds / times[call] for call, seconds in stretch.items() if len(self._samples[call]) > 1 and times[call]]
        return statistics.median(compared) if compared else 1.0
