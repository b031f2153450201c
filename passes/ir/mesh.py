"""A mesh: ranks in a grid whose dimensions have names.

mesh = Mesh((("data", 2), ("tensor", 2)))          outermost dimension first, ranks counted row by row

              tensor
              0   1
    data  0   0   1           mesh.group(3, ("tensor",)) == (2, 3)
          1   2   3           mesh.group(3, ("data",))   == (1, 3)

Stages may have tensor-parallel degrees of their own: ``Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1))``

                 tensor
                 0   1
    pipeline  0  0   1        mesh.group(0, ("tensor",)) == (0, 1)
              1  2            mesh.group(2, ("tensor",)) == (2,)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "DIMENSIONS",
    "ROWS",
    "STAGES",
    "STORED",
    "TILE",
    "TILES",
    "WIDTH",
    "Mesh",
    "homes",
    "mesh_words",
    "pipelines",
    "ranks_at_places",
    "receivers",
    "widths_of_stages",
]

STAGES = ("pipeline", "model")
"""The mesh dimensions along which the graph itself is cut into stages; all others cut axes."""

ROWS = ("data", "fsdp", "zero1", "zero2")
"""The mesh dimensions that cut the batch."""

STORED = ("fsdp", "zero1", "zero2")
"""The mesh dimensions over which parameters are held in parts."""

WIDTH = "tensor"
"""The mesh dimension along which stages may have unlike numbers of ranks."""

TILE = "tile"
"""The mesh dimension of tiles whose grid the planner chooses."""

DIMENSIONS = ("model", "pipeline", "tensor", "sequence", TILE, *ROWS)
"""Every mesh dimension that a user may name."""

TILES = ("tile0", "tile1", "tile2")
"""The mesh dimensions of a grid of tiles: the outermost dimension of space that it cuts, the next, the last."""


@dataclass(frozen=True)
class Mesh:
    """Named dimensions over ranks.

    Attributes:
        dimensions: name and size of each, outermost first; for per-stage submeshes, the size of the largest.
        widths: for each pipeline position, the number of ranks along ``WIDTH``; empty if all have the same.
    """

    dimensions: tuple[tuple[str, int], ...]
    widths: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dimensions)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._places) if self.widths else math.prod(size for _, size in self.dimensions)

    def length(self, name: str) -> int:
        """Return the size of a dimension; 1 if the mesh does not have it."""
        return dict(self.dimensions).get(name, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank along each dimension."""
        if self.widths:
            return dict(zip(self.names, self._places[rank], strict=True))
        found: dict[str, int] = {}
        for name, size in reversed(self.dimensions):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at a coordinate; dimensions left out are 0."""
        if self.widths:
            return self._ranks[tuple(coordinate.get(name, 0) for name in self.names)]
        rank = 0
        for name, size in self.dimensions:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def group(self, rank: int, names: Collection[str]) -> tuple[int, ...]:
        """Return the ranks with the same coordinate as ``rank`` in all other dimensions, in order of coordinates."""
        here = self.coordinate(rank)
        fixed = tuple(None if name in names else here[name] for name in self.names)
        if fixed not in self._groups:
            places = itertools.product(
                *(range(size) if at is None else (at,) for at, (_, size) in zip(fixed, self.dimensions, strict=True))
            )
            if self.widths:
                self._groups[fixed] = tuple(self._ranks[place] for place in places if place in self._ranks)
            else:
                self._groups[fixed] = tuple(self.rank(dict(zip(self.names, place, strict=True))) for place in places)
        return self._groups[fixed]

    @property
    def cutting(self) -> Mesh:
        """Return the dimensions that shard axes; for per-stage submeshes, those of the largest."""
        return Mesh(tuple((name, size) for name, size in self.dimensions if name not in STAGES))

    def cutting_at(self, place: int) -> Mesh:
        """Return the dimensions that shard axes of the stage at a pipeline position."""
        if not self.widths:
            return self.cutting
        sizes = {**dict(self.cutting.dimensions), WIDTH: self.widths[place]}
        return Mesh(tuple((name, size) for name, size in sizes.items() if name != WIDTH or size > 1))

    @cached_property
    def _groups(self) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Cache groups by the coordinates that their ranks share."""
        return {}

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], ...]:
        """Return the coordinates of all ranks of per-stage submeshes, row by row."""
        every = itertools.product(*(range(size) for _, size in self.dimensions))
        stages, width = (next(self.names.index(name) for name in self.names if name in names) for names in (STAGES, (WIDTH,)))
        return tuple(place for place in every if place[width] < self.widths[place[stages]])

    @cached_property
    def _ranks(self) -> Mapping[tuple[int, ...], int]:
        return {place: rank for rank, place in enumerate(self._places)}


def pipelines(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return the pipelines of a mesh: for each rank of ``mesh.cutting``, the ranks of its stages, in their order.

    A rank of a stage with a smaller submesh is in several pipelines:

    >>> pipelines(Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1)))
    ((0, 2), (1, 2))
    """
    if mesh.widths:
        return tuple(_pipeline(mesh, mesh.cutting.coordinate(rank)) for rank in range(mesh.cutting.size))
    strides, stride = dict[str, int](), 1
    for name, size in reversed(mesh.dimensions):
        strides[name] = stride
        stride *= size
    firsts = [0]
    for name, size in mesh.cutting.dimensions:
        firsts = [first + index * strides[name] for first in firsts for index in range(size)]
    along = next((name for name in mesh.names if name in STAGES), STAGES[0])
    return tuple(tuple(first + stage * strides.get(along, 0) for stage in range(mesh.length(along))) for first in firsts)


def ranks_at_places(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return the ranks at each pipeline position, ascending."""
    return tuple(tuple(sorted(set(ranks))) for ranks in zip(*pipelines(mesh), strict=True))


def homes(mesh: Mesh) -> Mapping[int, int]:
    """Return for each rank its owning pipeline: the first that it is in, and from whose ranks it receives."""
    found: dict[int, int] = {}
    for number, ranks in enumerate(pipelines(mesh)):
        for rank in ranks:
            found.setdefault(rank, number)
    return found


def receivers(mesh: Mesh, rank: int, place: int, destination: int) -> tuple[int, ...]:
    """Return the ranks at one pipeline position that receive the messages of a rank at another.

    >>> mesh = Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1))
    >>> receivers(mesh, 0, 0, 1), receivers(mesh, 1, 0, 1), receivers(mesh, 2, 1, 0)
    ((2,), (), (0, 1))
    """
    home = homes(mesh)
    through = [(number, ranks) for number, ranks in enumerate(pipelines(mesh)) if ranks[place] == rank]
    return tuple(ranks[destination] for number, ranks in through if home[ranks[destination]] == number)


def _pipeline(mesh: Mesh, beside: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ranks of one pipeline through per-stage submeshes: neighbours in the largest share a rank of a smaller one."""
    along, widest = next(name for name in mesh.names if name in STAGES), mesh.length(WIDTH)
    coordinates = ({**beside, along: place, WIDTH: beside[WIDTH] * width // widest} for place, width in enumerate(mesh.widths))
    return tuple(map(mesh.rank, coordinates))


def widths_of_stages(mesh: Mesh, replicas: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the tensor-parallel degree of each stage.

    Args:
        mesh: with per-stage submeshes.
        replicas: the number of round-robin ranks of each stage; empty: one each.
    """
    return tuple(mesh.widths[place] for place in itertools.accumulate(replicas[:-1], initial=0)) if replicas else mesh.widths


def mesh_words(mesh: Mesh, replicas: Sequence[int] = ()) -> str:
    """Return a mesh in words.

    Args:
        mesh: the mesh.
        replicas: the number of round-robin ranks of each stage; empty: one each.

    >>> mesh_words(Mesh((("pipeline", 3), ("tensor", 2))), (2, 1))
    'pipeline 2 + 1 x tensor 2'
    >>> mesh_words(Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1)))
    'pipeline 2 x tensor 2 + 1'
    """
    sizes = {name: " + ".join(map(str, replicas)) if replicas and name in STAGES else str(size) for name, size in mesh.dimensions}
    if mesh.widths:
        sizes[WIDTH] = " + ".join(map(str, widths_of_stages(mesh, replicas)))
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
