"""Segments of recomputation against brute force: every way to cut, summed from the definition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from partitioner.planner.solvers.segments import Crossing, cut_into_segments


def some_chain(draw: random.Random) -> tuple[list[int], list[Crossing], int]:
    n_units = draw.randint(1, 9)
    inside = [draw.choice((0, 1, 3, 10, 40)) for _ in range(n_units)]
    ends = [sorted(draw.sample(range(n_units), 2)) for _ in range(draw.randint(0, 12)) if n_units > 1]
    return inside, [Crossing(draw.randint(1, 12), *pair) for pair in ends], draw.choice((0, 0, 5, 30))


def bytes_needed(inside: Sequence[int], values: Sequence[Crossing], least: int, starts: Sequence[int]) -> int:
    crossing = sum(value.size for value in values if any(value.producer < start <= value.last for start in starts[1:]))
    segments = [sum(inside[start:end]) for start, end in zip(starts, (*starts[1:], len(inside)), strict=True)]
    return crossing + max(least, *segments)


@pytest.mark.parametrize("seed", range(150))
def test_no_other_cut_needs_less(seed: int) -> None:
    inside, values, least = some_chain(random.Random(seed))
    inner = range(1, len(inside))
    cuts = [(0, *chosen) for count in range(len(inside)) for chosen in itertools.combinations(inner, count)]
    best = min(bytes_needed(inside, values, least, starts) for starts in cuts)
    assert bytes_needed(inside, values, least, cut_into_segments(inside, values, least)) == best


def test_a_chain_of_equal_units_has_about_the_square_root_of_segments() -> None:
    starts = cut_into_segments([16] * 64, [Crossing(16, unit, unit + 1) for unit in range(63)])
    assert bytes_needed([16] * 64, [Crossing(16, unit, unit + 1) for unit in range(63)], 0, starts) == 16 * (8 + 7)
