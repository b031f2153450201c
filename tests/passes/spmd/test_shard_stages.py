"""Ranks that store a part of a dimension have the same elements of it in every graph, whatever its axes are, or the graph does not fit."""

from __future__ import annotations

import itertools
import math

import pytest

from passes.spmd.shard_stages import StoredShard

FACTORS = [(32,), (2, 16), (4, 8), (8, 4), (2, 2, 8), (2, 8, 2), (16, 2)]


def elements(sizes: tuple[int, ...], index: int, rank: int, ranks: int) -> list[int]:
    """Return the elements of a dimension on a rank that shards one of its axes."""
    part = math.ceil(sizes[index] / ranks)
    steps = [range(size) for size in sizes]
    steps[index] = range(min(rank * part, sizes[index]), min((rank + 1) * part, sizes[index]))
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return [sum(step * stride for step, stride in zip(each, strides, strict=True)) for each in itertools.product(*steps)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stored", FACTORS)
def test_an_axis_is_found_where_ranks_have_the_same_elements(stored: tuple[int, ...], ranks: int) -> None:
    for index, other in itertools.product(range(len(stored)), FACTORS):
        found = StoredShard.of(stored, 0, index, ranks).index_in(other)
        alike = [
            each
            for each in range(len(other))
            if all(elements(stored, index, rank, ranks) == elements(other, each, rank, ranks) for rank in range(ranks))
        ]
        assert found is None or found in alike
        assert found is not None or not alike or stored[index] % ranks
