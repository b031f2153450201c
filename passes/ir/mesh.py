"""A mesh: ranks in a grid whose dimensions have names.

mesh = Mesh((("data", 2), ("tensor", 2)))          outermost dimension first, ranks counted row by row

              tensor
              0   1
    data  0   0   1           mesh.group(3, ("tensor",)) == (2, 3)
          1   2   3           mesh.group(3, ("data",))   == (1, 3)

Stages may be of unlike width: ``Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1))``

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
        dimensions: name and size of each, outermost first; where stages are of unlike width, the size of the widest.
        widths: for each place along the pipeline, how many ranks stand along ``WIDTH``; empty where all have as many.
    """

    dimensions: tuple[tuple[str, int], ...]
    widths: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dimensions)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._places) if self.widths else math.prod(size for _, size in self.dimensions)

    def length(self, name: str) -> int:
        """How many ranks stand along a dimension; 1 for one that the mesh has not."""
        return dict(self.dimensions).get(name, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands, by dimension."""
        if self.widths:
            return dict(zip(self.names, self._places[rank], strict=True))
        found: dict[str, int] = {}
        for name, size in reversed(self.dimensions):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Who stands there; dimensions that are left out count as 0."""
        if self.widths:
            return self._ranks[tuple(coordinate.get(name, 0) for name in self.names)]
        rank = 0
        for name, size in self.dimensions:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def group(self, rank: int, names: Collection[str]) -> tuple[int, ...]:
        """The ranks that differ from one in these dimensions alone, in the order of their coordinates."""
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
        """The dimensions that cut axes; where stages are of unlike width, those of the widest."""
        return Mesh(tuple((name, size) for name, size in self.dimensions if name not in STAGES))

    def cutting_at(self, place: int) -> Mesh:
        """The dimensions that cut axes of the stage at a place along the pipeline."""
        if not self.widths:
            return self.cutting
        sizes = {**dict(self.cutting.dimensions), WIDTH: self.widths[place]}
        return Mesh(tuple((name, size) for name, size in sizes.items() if name != WIDTH or size > 1))

    @cached_property
    def _groups(self) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Groups asked for: by the coordinates that their ranks share. Each is made once, not for each of its ranks."""
        return {}

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], ...]:
        """Where each rank stands, of stages of unlike width: row by row, without the places that nobody has."""
        every = itertools.product(*(range(size) for _, size in self.dimensions))
        stages, width = (next(self.names.index(name) for name in self.names if name in names) for names in (STAGES, (WIDTH,)))
        return tuple(place for place in every if place[width] < self.widths[place[stages]])

    @cached_property
    def _ranks(self) -> Mapping[tuple[int, ...], int]:
        return {place: rank for rank, place in enumerate(self._places)}


def pipelines(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """For each rank of ``mesh.cutting``, the ranks of the mesh that compute its stages, in the order of these.

    A rank of a stage that is narrower than others is in several:

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
    """For each place along the pipeline the ranks that stand there, ascending."""
    return tuple(tuple(sorted(set(ranks))) for ranks in zip(*pipelines(mesh), strict=True))


def homes(mesh: Mesh) -> Mapping[int, int]:
    """For each rank the first pipeline that it is in: that it receives from the ranks of."""
    found: dict[int, int] = {}
    for number, ranks in enumerate(pipelines(mesh)):
        for rank in ranks:
            found.setdefault(rank, number)
    return found


def receivers(mesh: Mesh, rank: int, place: int, destination: int) -> tuple[int, ...]:
    """Who receives what a rank, at a place along the pipeline, sends to another place.

    >>> mesh = Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1))
    >>> receivers(mesh, 0, 0, 1), receivers(mesh, 1, 0, 1), receivers(mesh, 2, 1, 0)
    ((2,), (), (0, 1))
    """
    home = homes(mesh)
    through = [(number, ranks) for number, ranks in enumerate(pipelines(mesh)) if ranks[place] == rank]
    return tuple(ranks[destination] for number, ranks in through if home[ranks[destination]] == number)


def _pipeline(mesh: Mesh, beside: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks of one pipeline through stages of unlike width: neighbours along the widest share a rank of a narrower one."""
    along, widest = next(name for name in mesh.names if name in STAGES), mesh.length(WIDTH)
    coordinates = ({**beside, along: place, WIDTH: beside[WIDTH] * width // widest} for place, width in enumerate(mesh.widths))
    return tuple(map(mesh.rank, coordinates))


def widths_of_stages(mesh: Mesh, replicas: Sequence[int] = ()) -> tuple[int, ...]:
    """The widths of a mesh, one for each stage.

    Args:
        mesh: whose stages are of unlike width.
        replicas: how many ranks microbatches of each stage are dealt to, where these are not one each.
    """
    return tuple(mesh.widths[place] for place in itertools.accumulate(replicas[:-1], initial=0)) if replicas else mesh.widths


def mesh_words(mesh: Mesh, replicas: Sequence[int] = ()) -> str:
    """A mesh for reading.

    Args:
        mesh: its dimensions.
        replicas: how many ranks each stage has, where these are not one each.

    >>> mesh_words(Mesh((("pipeline", 3), ("tensor", 2))), (2, 1))
    'pipeline 2 + 1 x tensor 2'
    >>> mesh_words(Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1)))
    'pipeline 2 x tensor 2 + 1'
    """
    sizes = {name: " + ".join(map(str, replicas)) if replicas and name in STAGES else str(size) for name, size in mesh.dimensions}
    if mesh.widths:
        sizes[WIDTH] = " + ".join(map(str, widths_of_stages(mesh, replicas)))
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
