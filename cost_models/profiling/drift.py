"""Correct timings for the drift of a machine's clock rate.

    stretch         0      1      2      samples in a row, no call twice, no long pause
    clock rate      1      1.5    1      slowdown, from calls that have samples in several stretches
    a call         10 ms  15 ms  11 ms   10 ms: the median of 10, 15 / 1.5 and 11
    another one     -     30 ms   -      20 ms, though it was timed while the machine was slow

A sample is modelled as the call's own time multiplied by the slowdown of its stretch. Both are found by the median polish of
Tukey 1977, Exploratory Data Analysis, of logarithms.

A new stretch has the usual slowdown until its calls are timed in other stretches too. A stretch of one sample takes the slowdown
at which that sample equals the call's other samples.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from time import monotonic

from passes.rules.call import Call

_LENGTH = 16
"""Samples of a stretch, at most: a second or two of timing."""

_PAUSE = 10.0
"""Seconds without a sample that end a stretch: the machine may have changed meanwhile. Timing one call takes a fifth of a second."""

_SWEEPS = 20
"""Medians of medians settle after a few."""


class Paces:
    """Samples of calls, and how slow the machine was when they were taken.

    Args:
        clock: seconds, to detect pauses.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last = -math.inf
        self._samples: dict[Call, dict[int, float]] = {}
        self._stretches: list[dict[Call, float]] = [{}]
        self._paces = [1.0]

    def shuffled_calls(self) -> Iterator[Call]:
        """Return all calls in an order that depends on the number of stretches, so that repeated timings form other stretches."""
        calls = list(self._samples)
        random.Random(len(self._stretches)).shuffle(calls)
        return iter(calls)

    def add(self, call: Call, seconds: float) -> None:
        """Add a sample after all others. A sample of zero seconds is below the clock's resolution and does not change the slowdown.

        Raises:
            ValueError: it is no time.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{call.operator} was timed: {seconds} is no number of seconds")
        samples = self._samples.setdefault(call, {})
        if seconds == 0:
            return
        now, stretch = self._clock(), self._stretches[-1]
        if stretch and (len(stretch) >= _LENGTH or call in stretch or now - self._last > _PAUSE):
            self._stretches.append({})
            self._paces.append(1.0)
        self._last = now
        self._stretches[-1][call] = samples[len(self._stretches) - 1] = seconds

    def settle(self) -> None:
        """Fit the slowdowns anew; their median is 1, weighted by samples: a stretch with few samples is uncertain."""
        for _ in range(_SWEEPS):
            times = {call: self.time(call) for call in self._samples}
            found = [self._pace(stretch, times) for stretch in self._stretches]
            middle = statistics.median([pace for pace, stretch in zip(found, self._stretches, strict=True) for _ in stretch] or [1.0])
            self._paces = [pace / middle for pace in found]

    def time(self, call: Call) -> float:
        """Return the seconds at the usual clock rate; 0 for a call below the clock's resolution."""
        samples = self._samples[call]
        return statistics.median(seconds / self._paces[number] for number, seconds in samples.items()) if samples else 0.0

    def _pace(self, stretch: dict[Call, float], times: dict[Call, float]) -> float:
        """Return how slow a stretch was: the median of seconds over usual seconds, of calls that have samples in other stretches."""
        ratios = [seconds / times[call] for call, seconds in stretch.items() if len(self._samples[call]) > 1]
        return statistics.median(ratios) if ratios else 1.0
