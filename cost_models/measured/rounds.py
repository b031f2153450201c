"""Times that were taken in rounds, on a machine that is not equally fast in all of them.

    round         0      1      2
    pace          1      1.5    1        how slow the machine was, found from what was timed in several rounds
    a call       10 ms  15 ms  11 ms     10 ms: the median of 10, 15 / 1.5 and 11
    another one   -     30 ms   -        20 ms, though it was timed in the slow round alone

A sample is taken to be the call's own time multiplied by the pace of its round. Both are medians of what is left when the other is divided
away, in turn: the median polish of Tukey 1977, Exploratory Data Analysis, of logarithms.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from cost_models.calls import Call

__all__ = ["Rounds"]

_SWEEPS = 20
"""Medians of medians settle after a few."""


class Rounds:
    """Samples of calls, round after round."""

    def __init__(self) -> None:
        self._samples: dict[Call, dict[int, float]] = {}
        self._paces = [1.0]

    def __iter__(self) -> Iterator[Call]:
        return iter(self._samples)

    def next(self) -> None:
        """What is added from now on belongs to another round."""
        self._paces.append(1.0)

    def add(self, call: Call, seconds: float) -> None:
        """A sample of the round that goes on."""
        self._samples.setdefault(call, {})[len(self._paces) - 1] = seconds

    def settle(self) -> None:
        """Find the paces anew; the median of them is 1."""
        for _ in range(_SWEEPS):
            times = {call: self.time(call) for call in self._samples}
            found = [self._pace(number, times) for number in range(len(self._paces))]
            middle = statistics.median(found)
            self._paces = [pace / middle for pace in found]

    def time(self, call: Call) -> float:
        """Seconds at the pace of a usual round."""
        return statistics.median(seconds / self._paces[number] for number, seconds in self._samples[call].items())

    def _pace(self, number: int, times: dict[Call, float]) -> float:
        """How slow a round is, told by calls that have samples of others, too."""
        several = {call: samples[number] for call, samples in self._samples.items() if number in samples and len(samples) > 1}
        compared = [seconds / times[call] for call, seconds in several.items() if times[call]]
        return statistics.median(compared) if compared else 1.0
