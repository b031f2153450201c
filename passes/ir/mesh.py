"""A mesh: ranks in a grid whose dimensions have names.

mesh = Mesh((("data", 2), ("tensor", 2)))          outermost dimension first, ranks counted row by row

              tensor
              0   1
    data  0   0   1           mesh.group(3, ("tensor",)) == (2, 3)
          1   2   3           mesh.group(3, ("data",))   == (1, 3)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ROWS", "STAGES", "STORED", "TILE", "TILES", "Mesh", "mesh_words", "pipelines"]

STAGES = ("pipeline", "model")
"""The mesh dimensions along which the graph itself is cut into stages; all others cut axes."""

ROWS = ("data", "fsdp", "zero1", "zero2")
"""The mesh dimensions that cut the batch."""

STORED = ("fsdp", "zero1", "zero2")
"""The mesh dimensions over which parameters are held in parts."""

TILE = "tile"
"""The mesh dimension of tiles whose grid the planner chooses."""

TILES = ("tile0", "tile1", "tile2")
"""The mesh dimensions of a grid of tiles: the outermost dimension of space that it cuts, the next, the last."""


@dataclass(frozen=True)
class Mesh:
    """Named dimensions over ranks.

    Attributes:
        dimensions: name and size of each, outermost first.
    """

    dimensions: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dimensions)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.dimensions)

    def length(self, name: str) -> int:
        """How many ranks stand along a dimension; 1 for one that the mesh has not."""
        return dict(self.dimensions).get(name, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands, by dimension."""
        found: dict[str, int] = {}
        for name, size in reversed(self.dimensions):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Who stands there; dimensions that are left out count as 0."""
        rank = 0
        for name, size in self.dimensions:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def group(self, rank: int, names: Collection[str]) -> tuple[int, ...]:
        """The ranks that differ from one in these dimensions alone, in the order of their coordinates."""
        here = self.coordinate(rank)
        places = itertools.product(*(range(size) if name in names else (here[name],) for name, size in self.dimensions))
        return tuple(self.rank(dict(zip(self.names, place, strict=True))) for place in places)

    @property
    def cutting(self) -> Mesh:
        """The dimensions that cut axes."""
        return Mesh(tuple((name, size) for name, size in self.dimensions if name not in STAGES))


def pipelines(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """For each rank of ``mesh.cutting``, the ranks of the mesh that compute its stages, in the order of these."""
    strides, stride = dict[str, int](), 1
    for name, size in reversed(mesh.dimensions):
        strides[name] = stride
        stride *= size
    firsts = [0]
    for name, size in mesh.cutting.dimensions:
        firsts = [first + index * strides[name] for first in firsts for index in range(size)]
    along = next((name for name in mesh.names if name in STAGES), STAGES[0])
    return tuple(tuple(first + stage * strides.get(along, 0) for stage in range(mesh.length(along))) for first in firsts)


def mesh_words(mesh: Mesh, replicas: Sequence[int] = ()) -> str:
    """A mesh for reading.

    Args:
        mesh: its dimensions.
        replicas: how many ranks each stage has, where these are not one each.

    >>> mesh_words(Mesh((("pipeline", 3), ("tensor", 2))), (2, 1))
    'pipeline 2 + 1 x tensor 2'
    """
    sizes = {name: " + ".join(map(str, replicas)) if replicas and name in STAGES else str(size) for name, size in mesh.dimensions}
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
