"""Which part of a parameter a rank holds: a block of it, in runs where the cut axis is not the outermost of its dimension.

weight[(3 heads head), hidden] cut by heads over two ranks: rank 0 holds, of each of q, k and v, the first half of the heads

    q q k k v v      rank 0:  q . k . v .
                     rank 1:  . q . k . v
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.analysis.axes import TensorAxes
from passes.ir.layout import Layout, shards_of
from passes.spmd.local_shapes import Extents

__all__ = ["Block", "block_of", "whole_block"]


@dataclass(frozen=True)
class Block:
    """A block of a tensor.

    Attributes:
        shape: of the whole tensor.
        unfolded: its shape with every dimension written as its axes.
        intervals: for each of these the first index and the one behind the last.
        part: the shape of the block.
    """

    shape: tuple[int, ...]
    unfolded: tuple[int, ...]
    intervals: tuple[tuple[int, int], ...]
    part: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.part == self.shape

    def take(self, whole: Tensor) -> Tensor:
        """The block of a tensor; new memory unless it is the whole."""
        if self.is_whole:
            return whole
        if whole.is_meta:
            return torch.empty(self.part, dtype=whole.dtype, device=whole.device)
        return whole.reshape(self.unfolded)[self._index()].reshape(self.part).clone(memory_format=torch.contiguous_format)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write the block into a tensor."""
        self.within(whole).copy_(self.unfold(part))

    def within(self, whole: Tensor) -> Tensor:
        """The block as a view of a tensor, every dimension written as its axes."""
        return whole.view(self.unfolded)[self._index()]

    def unfold(self, part: Tensor) -> Tensor:
        """A tensor of the block's shape, every dimension written as its axes, as ``within`` gives it."""
        return part.reshape([stop - start for start, stop in self.intervals])

    def _index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.intervals)


def whole_block(shape: tuple[int, ...]) -> Block:
    """All of a tensor."""
    return Block(shape, shape, tuple((0, size) for size in shape), shape)


def block_of(axes: TensorAxes, layout: Layout, extents: Extents) -> Block:
    """The block that lies at a coordinate."""
    unfolded: list[int] = []
    intervals: list[tuple[int, int]] = []
    part: list[int] = []
    for dimension, each in enumerate(axes):
        found = [extents.interval(axis, shards_of(layout, dimension)) for axis in each]
        unfolded += [int(extents.sizes[axis]) for axis in each]
        intervals += found
        part.append(math.prod(stop - start for start, stop in found))
    shape = tuple(math.prod(int(extents.sizes[axis]) for axis in each) for each in axes)
    return Block(shape, tuple(unfolded), tuple(intervals), tuple(part))
