"""Liveness of values in an order of calls: a value is held from the place that computes it to the last that reads it.

place      0    1    2    3
image      ==============
x               =========      8 bytes
y                    =====     4 bytes
held            8    12   4    of x and y
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")


class Lifetime(NamedTuple):
    """The first and the last place that compute or read a value, both inclusive."""

    first: int
    last: int


def lifetimes(touched: Iterable[Iterable[Key]]) -> dict[Key, Lifetime]:
    """Return the lifetime of each value.

    Args:
        touched: for each place, the values that it computes or reads.
    """
    lives: dict[Key, Lifetime] = {}
    for place, keys in enumerate(touched):
        for key in keys:
            lives[key] = Lifetime(lives[key].first if key in lives else place, place)
    return lives


def held_at(n_places: int, held: Iterable[tuple[Lifetime, int]]) -> Sequence[int]:
    """Return for each place the sum of the sizes of the values that live there.

    Args:
        held: (lifetime, size) of each value.
    """
    changes = [0] * (n_places + 1)
    for (first, last), size in held:
        changes[first] += size
        changes[last + 1] -= size
    return [*itertools.accumulate(changes)][:-1]
