"""Blocks of tensors: what a rank takes of a whole, and puts back."""

from __future__ import annotations

import itertools

import pytest
import torch

from partitioner.runtime.state.sharded_tensor import block_chunks
from passes.ir.layout import Replicate, Shard
from passes.spmd.local_shapes import Extents
from passes.spmd.shards import Block, block_of

GROUPS, HEADS, HIDDEN = 0, 1, 2


def blocks(groups: int, segments: tuple[int, ...], ranks: int) -> list[Block]:
    """Return the blocks of weight[(groups heads), hidden] with these segments, sharded by groups."""
    sizes = (groups, sum(segments), 3)
    mesh = (("tensor", ranks),)
    return [
        block_of(((GROUPS, HEADS), (HIDDEN,)), (Shard(GROUPS, 0),), Extents(sizes, mesh, (rank,), None, 1, {HEADS: segments}))
        for rank in range(ranks)
    ]


def test_intervals_of_segments() -> None:
    first, second = blocks(8, (3, 1, 1), 2)
    assert first.intervals == (((0, 12), (24, 28), (32, 36)), ((0, 3),))
    assert second.intervals == (((12, 24), (28, 32), (36, 40)), ((0, 3),))
    assert (first.shape, first.unfolded, first.part) == ((40, 3), (40, 3), (20, 3))


@pytest.mark.parametrize(("groups", "ranks"), [(8, 2), (8, 4), (3, 2)])
@pytest.mark.parametrize("segments", [(3, 1, 1), (6, 2, 2), (1, 4)])
def test_blocks_of_segments_make_up_the_whole(groups: int, ranks: int, segments: tuple[int, ...]) -> None:
    whole = torch.arange(groups * sum(segments) * 3.0).view(-1, 3)
    again = torch.full_like(whole, -1)
    by_chunks = torch.full_like(whole, -1)
    covered = torch.zeros(len(whole), dtype=torch.int64)
    for block in blocks(groups, segments, ranks):
        part = block.take(whole)
        assert tuple(part.shape) == block.part
        block.put(again, part)
        for offsets, own in block_chunks(block):
            piece = part[own]
            by_chunks[tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))] = piece
        covered += torch.cat([torch.arange(len(whole))[start:stop] for start, stop in block.intervals[0]]).bincount(minlength=len(whole))
    assert again.equal(whole)
    assert by_chunks.equal(whole)
    assert covered.eq(1).all()


def test_each_segment_is_divided_by_groups() -> None:
    whole = torch.arange(40).view(40, 1).expand(40, 3)
    for rank, block in enumerate(blocks(8, (3, 1, 1), 4)):
        queries, keys, values = block.take(whole)[:, 0].split([6, 2, 2])
        heads = [range(start + size * 2 * rank, start + size * 2 * (rank + 1)) for start, size in ((0, 3), (24, 1), (32, 1))]
        assert [*queries, *keys, *values] == list(itertools.chain(*heads))


def test_block_without_a_shard_is_whole() -> None:
    extents = Extents((8, 5, 3), (("tensor", 2),), (1,), None, 1, {HEADS: (3, 1, 1)})
    assert block_of(((GROUPS, HEADS), (HIDDEN,)), (Replicate(),), extents).is_whole
