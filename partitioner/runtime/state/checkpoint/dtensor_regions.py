"""Compute which part of a tensor a DTensor has on each rank, and which placements describe the blocks of a plan.

weight[6, 4] on {"data": 2, "fsdp": 2}         Submesh((("data", 2), ("fsdp", 2)), ranks (0, 1, 2, 3))
    ranks 0 and 2 hold rows 0 to 2             placements (None, 0), for (Replicate(), Shard(0))
    ranks 1 and 3 hold rows 3 to 5
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from partitioner.runtime.state.sharded_tensor import block_chunks
from passes.ir.mesh import Mesh
from passes.spmd.shards import Block

Placements: TypeAlias = tuple[int | None, ...]
"""For each dimension of a mesh, the dimension of the tensor that it shards; None: it replicates."""

Region: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a contiguous part of a tensor."""


@dataclass(frozen=True)
class Submesh:
    """The ranks that hold a tensor, in a grid.

    Attributes:
        dimensions: name and size of each, outermost first.
        ranks: row by row.
    """

    dimensions: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dimensions)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dimensions)

    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Return rank -> its coordinate."""
        return dict(zip(self.ranks, itertools.product(*map(range, self.sizes)), strict=True))


def submesh_of(mesh: Mesh, holders: Sequence[int]) -> Submesh:
    """Return the ranks ``holders`` as a part of the mesh, without the dimensions along which they do not differ.

    They are a row, in a dimension named ``ranks``, if they form no grid within the mesh.
    """
    rank_at = {tuple(mesh.coordinate(rank).values()): rank for rank in holders}
    values = [sorted(set(along)) for along in zip(*rank_at, strict=True)]
    grid = list(itertools.product(*values))
    if any(coordinate not in rank_at for coordinate in grid):
        return Submesh((("ranks", len(holders)),), tuple(sorted(holders)))
    dimensions = [(name, len(along)) for name, along in zip(mesh.names, values, strict=True) if len(along) > 1]
    return Submesh(tuple(dimensions) or ((mesh.names[0], 1),), tuple(rank_at[coordinate] for coordinate in grid))


def dtensor_region(shape: Sequence[int], placements: Placements, sizes: Sequence[int], coordinate: Sequence[int]) -> Region:
    """Return the part of a tensor that DTensor places at a coordinate: shards have ceil(n / k) elements, until none are left."""
    offsets, lengths = [0] * len(shape), list(shape)
    for dim, size, index in zip(placements, sizes, coordinate, strict=True):
        if dim is not None:
            length = math.ceil(lengths[dim] / size)
            start = min(lengths[dim], length * index)
            offsets[dim], lengths[dim] = offsets[dim] + start, min(length, lengths[dim] - start)
    return tuple(offsets), tuple(lengths)


def find_placements(blocks: Mapping[int, Block], submesh: Submesh) -> Placements | None:
    """Return the placements with which each rank's part of a DTensor is the block that it holds; None if there are none."""
    n_dimensions = len(next(iter(blocks.values())).shape)
    candidates = itertools.product((None, *range(n_dimensions)), repeat=len(submesh.sizes))
    return next((placements for placements in candidates if describes(placements, submesh, blocks)), None)


def describes(placements: Placements, submesh: Submesh, blocks: Mapping[int, Block]) -> bool:
    """Return whether a DTensor with these placements has each rank's block on that rank, and nothing on other ranks."""
    return blocks.keys() == set(submesh.ranks) and all(
        _is_region(blocks[rank], dtensor_region(blocks[rank].shape, placements, submesh.sizes, coordinate))
        for rank, coordinate in submesh.coordinates().items()
    )


def _is_region(block: Block, region: Region) -> bool:
    """Return whether a block consists of the elements of a region."""
    offsets, lengths = region
    if block.part != lengths:
        return False
    chunks = list(itertools.islice(block_chunks(block), 2))
    return not chunks or (len(chunks) == 1 and chunks[0][0] == offsets)
