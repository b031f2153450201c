"""Moves between two plans, compared with sets of elements."""

from __future__ import annotations

import math
import random

import pytest
import torch

from partitioner.runtime.state.resharding_moves import Moves, TensorBytes, moves_between
from passes.spmd.shards import Block, whole_block

SHAPE = (12, 5)
UNFOLDED = ((12, 5), (3, 4, 5), (2, 6, 5))
"""The same tensor under several ways to write its rows as axes."""


def block(unfolded: tuple[int, ...], intervals: tuple[tuple[int, int], ...]) -> Block:
    lengths = [stop - start for start, stop in intervals]
    return Block(SHAPE, unfolded, tuple((each,) for each in intervals), (math.prod(lengths[:-1]), lengths[-1]))


def elements(held: Block) -> set[int]:
    return set(held.take(torch.arange(60).reshape(SHAPE)).flatten().tolist())


def drawn(draw: random.Random, n_ranks: int) -> dict[int, Block]:
    """Return the blocks of ranks: along one axis, or the whole; some ranks have none."""
    unfolded = draw.choice(UNFOLDED)
    cut = draw.randrange(len(unfolded))
    held = {}
    for rank in range(n_ranks):
        if draw.random() < 0.2 and rank:
            continue
        edges = sorted(draw.sample(range(unfolded[cut] + 1), 2))
        intervals = tuple((edges[0], edges[1]) if axis == cut else (0, size) for axis, size in enumerate(unfolded))
        held[rank] = whole_block(SHAPE) if draw.random() < 0.2 else block(unfolded, intervals)
    return held


@pytest.mark.parametrize("seed", range(60))
def test_ranks_get_what_they_lack_and_no_more(seed: int) -> None:
    draw = random.Random(seed)
    n_before, n_after = draw.randint(1, 4), draw.randint(1, 4)
    before, after = drawn(draw, n_before), drawn(draw, n_after)
    old = draw.sample(range(n_before), draw.randint(0, min(n_before, n_after)))
    survivors: list[int | None] = [*old, *([None] * (n_after - len(old)))]
    draw.shuffle(survivors)
    found = moves_between({"w": before}, {"w": after}, {"w": TensorBytes(4, 8)}, survivors, n_after)
    left = {rank for rank in survivors if rank is not None} & set(before)
    anywhere = set[int]().union(*(elements(before[rank]) for rank in left))
    for rank, held in after.items():
        wanted = elements(held)
        mine = survivors[rank]
        own = elements(before[mine]) if mine in before else set()
        assert found.kept[rank] == 12 * len(wanted & own)
        assert found.received(rank) == 12 * len((wanted & anywhere) - own)
        assert found.loaded(rank) == 12 * len(wanted - anywhere)
    for move in found.moves:
        if move.source is not None:
            assert move.source in left
            given = elements(before[move.source])
            asked = elements(after[move.destination])
            assert 0 < move.own <= 4 * len(given & asked)
        assert move.state == 2 * move.own
    assert found.between_ranks == sum(found.sent(rank) for rank in range(n_before))


def test_rows_over_four_ranks_then_over_two() -> None:
    """The drawing of the module: ranks 0 and 1 keep theirs if they are to hold them."""
    quarters = {rank: block((12, 5), ((3 * rank, 3 * rank + 3), (0, 5))) for rank in range(4)}
    halves = {rank: block((12, 5), ((6 * rank, 6 * rank + 6), (0, 5))) for rank in range(2)}
    found = moves_between({"w": quarters}, {"w": halves}, {"w": TensorBytes(4, 0)}, (0, 1), 2)
    assert [(move.source, move.destination, move.own) for move in found.moves] == [(1, 0, 60), (None, 1, 120)]
    everyone = moves_between({"w": quarters}, {"w": halves}, {"w": TensorBytes(4, 0)}, (0, 3), 2)
    assert everyone.kept == (60, 60)
    assert (everyone.between_ranks, everyone.from_checkpoint) == (0, 120)


def test_those_who_have_the_same_take_turns() -> None:
    whole = {rank: whole_block(SHAPE) for rank in range(2)}
    names = [f"w{index}" for index in range(6)]
    every = dict.fromkeys(names, whole)
    more = {name: {rank: whole_block(SHAPE) for rank in range(4)} for name in names}
    found: Moves = moves_between(every, more, dict.fromkeys(names, TensorBytes(1, 0)), (0, 1, None, None), 4)
    assert found.sent(0) == found.sent(1) == 6 * 60
    assert {move.destination for move in found.moves} == {2, 3}
