"""Cut a chain of units into segments of recomputation, so that kept values and the largest segment need least memory.

N units in order; unit u holds ``inside(u)`` bytes while its segment is recomputed. A value v of ``size(v)`` bytes is computed by unit
``producer(v)`` and last read by unit ``last(v)``. Choose starts ``0 = s(0) < s(1) < ... < s(S-1) < N`` that

    minimise    sum of size(v) over the values that cross a start:  producer(v) < s(k) <= last(v) for some k > 0
                + max(least, max over segments of the sum of ``inside`` over their units)

Recomputation by segments is that of Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; here values may skip segments.

Method: for a limit L of the largest segment, dynamic programming over starts, ``F(j) = min over i of F(i) + kept(i, j)``, with
``kept(i, j)`` the values that units ``i .. j-1`` compute and unit j or a later one reads: every kept value is counted at the first start
after it. L begins as the whole chain and falls below the largest segment found, until the kept values alone need more than the best sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partitioner.planner.solvers.stage_memory import Integers


class Crossing(NamedTuple):
    """A value that later units read: its bytes, the unit that computes it, and the last one that reads it."""

    size: int
    producer: int
    last: int


def cut_into_segments(inside: Sequence[int], values: Sequence[Crossing], least: int = 0) -> tuple[int, ...]:
    """Return the first unit of each segment; see the module's text.

    Args:
        inside: (N,) bytes of each unit, N > 0.
        values: those that cross between units.
        least: bytes that are needed at some other time, so that a smaller segment saves nothing.
    """
    kept, before = _kept(len(inside), values), np.concatenate([[0], np.cumsum(inside, dtype=np.int64)])
    best: tuple[int, ...] = (0,)
    best_sum, limit = max(least, int(before[-1])), int(before[-1])
    while limit > least:
        found = _least_kept(kept, before, limit - 1)
        if found is None or found[0] + least >= best_sum:
            break
        bytes_kept, starts = found
        largest = max(int(before[end] - before[start]) for start, end in zip(starts, (*starts[1:], len(inside)), strict=True))
        if bytes_kept + max(largest, least) < best_sum:
            best, best_sum = starts, bytes_kept + max(largest, least)
        limit = largest
    return best


def _kept(n_units: int, values: Sequence[Crossing]) -> Integers:
    """Return (N + 1, N + 1) bytes of the values that units ``i .. j-1`` compute and unit j or a later one reads; 0 for j = N."""
    kept = np.zeros((n_units + 1, n_units + 1), np.int64)
    for size, producer, last in values:
        kept[: producer + 1, producer + 1 : last + 1] += size
    return kept


def _least_kept(kept: Integers, before: Integers, limit: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the least bytes kept, and the starts, of segments of at most ``limit`` bytes; None if a unit alone has more.

    Args:
        kept: as ``_kept`` returns it.
        before: (N + 1,) bytes of all units before each.
    """
    n_units = len(before) - 1
    least, source = np.zeros((2, n_units + 1), np.int64)
    first = np.searchsorted(before, before - limit)  # the first unit from which a segment up to each fits the limit
    for end in range(1, n_units + 1):
        if first[end] >= end:
            return None
        sums = least[first[end] : end] + kept[first[end] : end, end]
        choice = int(sums.argmin())
        least[end], source[end] = sums[choice], first[end] + choice
    starts, end = list[int](), n_units
    while end > 0:
        end = int(source[end])
        starts.insert(0, end)
    return int(least[n_units]), tuple(starts)
