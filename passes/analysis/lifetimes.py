"""What is held at each place of an order: a value from the place that makes it to the last that reads it.

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

__all__ = ["Lifetime", "held_at", "lifetimes"]

Key = TypeVar("Key")


class Lifetime(NamedTuple):
    """The first and the last place that touch a value."""

    first: int
    last: int


def lifetimes(touched: Iterable[Iterable[Key]]) -> dict[Key, Lifetime]:
    """The lifetime of everything that an order touches, makers and readers alike.

    Args:
        touched: for each place, what it makes and reads.
    """
    found: dict[Key, Lifetime] = {}
    for place, keys in enumerate(touched):
        for key in keys:
            found[key] = Lifetime(found[key].first if key in found else place, place)
    return found


def held_at(n_places: int, held: Iterable[tuple[Lifetime, int]]) -> Sequence[int]:
    """How much is held at each place: the sum of the sizes of what lives there.

    Args:
        held: (lifetime, size) of each value.
    """
    changes = [0] * (n_places + 1)
    for (first, last), size in held:
        changes[first] += size
        changes[last + 1] -= size
    return [*itertools.accumulate(changes)][:-1]
