"""Shards of stored tensors: the block of a parameter that a rank stores.

A block is not contiguous if the sharded axis is not the outermost of its dimension. In weight[(3 heads head), hidden], sharded by heads
over two ranks, rank 0 stores the first half of the heads of each of q, k and v:

    q q k k v v      rank 0:  q . k . v .
                     rank 1:  . q . k . v

So is one of unequal numbers of heads (``Axes.segments``): a dimension of segments is one axis with several intervals.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from passes.analysis.axes import TensorAxes
from passes.ir.layout import Layout, shards_of
from passes.spmd.local_shapes import Extents

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""Intervals (start, stop) of one axis, in order."""


@dataclass(frozen=True)
class Block:
    """A block of a tensor.

    Attributes:
        shape: of the whole tensor.
        unfolded: its shape with every dimension unfolded into its axes, (3, heads, head, hidden) in the example. A dimension of segments is
            one axis.
        intervals: for each of these axes the intervals (start, stop) of the block: one, but for a dimension of segments.
        part: the shape of the block.
    """

    shape: tuple[int, ...]
    unfolded: tuple[int, ...]
    intervals: tuple[Intervals, ...]
    part: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether the block is the whole tensor."""
        return self.part == self.shape

    def take(self, whole: Tensor) -> Tensor:
        """Return the block of a tensor as a copy; the tensor itself if the block is the whole."""
        if self.is_whole:
            return whole
        if whole.is_meta:
            return torch.empty(self.part, dtype=whole.dtype, device=whole.device)
        part = whole.reshape(self.unfolded)
        for axis, intervals in enumerate(self.intervals):
            pieces = [part.narrow(axis, start, stop - start) for start, stop in intervals]
            part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return part.reshape(self.part).clone(memory_format=torch.contiguous_format)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Copy ``part``, which has the shape of the block, into the block of a tensor."""
        for target, source in zip(self.within(whole), self.unfold(part), strict=True):
            target.copy_(source)

    def within(self, whole: Tensor) -> list[Tensor]:
        """Return the block as views of a tensor, one for each combination of intervals, every dimension unfolded into its axes."""
        unfolded = whole.view(self.unfolded)
        return [unfolded[tuple(slice(*each) for each in index)] for index in itertools.product(*self.intervals)]

    def unfold(self, part: Tensor) -> list[Tensor]:
        """Return the pieces of a tensor of the block's shape that belong to the views of ``within``, unfolded like these."""
        own = [list(itertools.accumulate((stop - start for start, stop in each), initial=0)) for each in self.intervals]
        unfolded = part.reshape([ends[-1] for ends in own])
        return [unfolded[tuple(slice(*each) for each in index)] for index in itertools.product(*map(itertools.pairwise, own))]


def whole_block(shape: tuple[int, ...]) -> Block:
    """Return the block that is all of a tensor."""
    return Block(shape, shape, tuple(((0, size),) for size in shape), shape)


def block_of(axes: TensorAxes, layout: Layout, extents: Extents) -> Block:
    """Return the block of a tensor with a layout that the rank of ``extents`` stores."""
    sizes = [[int(extents.sizes[axis]) for axis in of_dimension] for of_dimension in axes]
    intervals: list[list[Intervals]] = []
    for dim, of_dimension in enumerate(axes):
        intervals.append([(extents.interval(axis, shards_of(layout, dim)),) for axis in of_dimension])
        if of_dimension and (segments := extents.segments.get(of_dimension[-1])):
            intervals[-1] = [_intervals_of_segments(sizes[dim][:-1], [each for (each,) in intervals[-1][:-1]], segments)]
            sizes[dim] = [math.prod(sizes[dim])]
    return Block(
        shape=tuple(math.prod(of_dimension) for of_dimension in sizes),
        unfolded=tuple(itertools.chain(*sizes)),
        intervals=tuple(itertools.chain(*intervals)),
        part=tuple(math.prod(sum(stop - start for start, stop in each) for each in of_dimension) for of_dimension in intervals),
    )


def _intervals_of_segments(sizes: Sequence[int], intervals: Sequence[tuple[int, int]], segments: Sequence[int]) -> Intervals:
    """Return the intervals of a dimension of segments.

    Args:
        sizes: of the axes outside of the segments.
        intervals: of the block on each of these.
        segments: the size of each segment in one step of these axes.

    Sizes (8,), intervals ((0, 4),), segments (3, 1, 1): (0, 12), (24, 28), (32, 36).
    """
    strides = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]
    places = (sum(map(operator.mul, index, strides)) for index in itertools.product(*(range(*each) for each in intervals)))
    steps: list[list[int]] = []
    for place in places:
        if steps and steps[-1][1] == place:
            steps[-1][1] += 1
        else:
            steps.append([place, place + 1])
    starts = itertools.accumulate((size * math.prod(sizes) for size in segments), initial=0)
    pieces = zip(starts, segments, strict=False)
    return tuple((at + start * size, at + stop * size) for at, size in pieces for start, stop in steps) or ((0, 0),)
