"""Shards of stored tensors: the block of a parameter that a rank stores.

A block is not contiguous if the sharded axis is not the outermost of its dimension. In weight[(3 heads head), hidden], sharded by heads
over two ranks, rank 0 stores the first half of the heads of each of q, k and v:

    q q k k v v      rank 0:  q . k . v .
                     rank 1:  . q . k . v
"""

from __future__ import annotations

import itertools
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
        unfolded: its shape with every dimension unfolded into its axes, (3, heads, head, hidden) in the example.
        intervals: for each of these axes the interval (start, stop) of the block.
        part: the shape of the block.
    """

    shape: tuple[int, ...]
    unfolded: tuple[int, ...]
    intervals: tuple[tuple[int, int], ...]
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
        return whole.reshape(self.unfolded)[self._index()].reshape(self.part).clone(memory_format=torch.contiguous_format)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Copy ``part``, which has the shape of the block, into the block of a tensor."""
        self.within(whole).copy_(self.unfold(part))

    def within(self, whole: Tensor) -> Tensor:
        """Return the block as a view of a tensor, every dimension unfolded into its axes."""
        return whole.view(self.unfolded)[self._index()]

    def unfold(self, part: Tensor) -> Tensor:
        """Return a tensor of the block's shape with every dimension unfolded into its axes, like the view of ``within``."""
        return part.reshape([stop - start for start, stop in self.intervals])

    def _index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.intervals)


def whole_block(shape: tuple[int, ...]) -> Block:
    """Return the block that is all of a tensor."""
    return Block(shape, shape, tuple((0, size) for size in shape), shape)


def block_of(axes: TensorAxes, layout: Layout, extents: Extents) -> Block:
    """Return the block of a tensor with a layout that the rank of ``extents`` stores."""
    sizes = [[int(extents.sizes[axis]) for axis in of_dimension] for of_dimension in axes]
    intervals = [[extents.interval(axis, shards_of(layout, dim)) for axis in of_dimension] for dim, of_dimension in enumerate(axes)]
    return Block(
        shape=tuple(math.prod(of_dimension) for of_dimension in sizes),
        unfolded=tuple(itertools.chain(*sizes)),
        intervals=tuple(itertools.chain(*intervals)),
        part=tuple(math.prod(stop - start for start, stop in of_dimension) for of_dimension in intervals),
    )
