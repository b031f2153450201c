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

STAGES = ("pipeline", "model")
"""The mesh dimensions that cut the graph into stages; all others shard axes."""

ROWS = ("data", "fsdp", "zero1", "zero2")
"""The mesh dimensions that shard the batch."""

STORED = ("fsdp", "zero1", "zero2")
"""The mesh dimensions of FSDP and ZeRO, over which parameters are stored in parts."""

GATHERED_AGAIN = ("fsdp",)
"""Those over which the backward gathers parameters a second time, so that no rank keeps them whole in between."""

GATHERED_ONCE = tuple(name for name in STORED if name not in GATHERED_AGAIN)
"""Those over which parameters are gathered once a step, and kept whole until the last backward, whatever is recomputed."""

SCATTERED_ONCE = ("zero1",)
"""Those over which gradients are summed whole over the microbatches of a step, and then scattered; over the others after each backward."""

WIDTH = "tensor"
"""The mesh dimension whose size may differ between stages (``Mesh.widths``)."""

SEQUENCE = "sequence"
"""The mesh dimension that shards the sequence; the name of its axes."""

TILE = "tile"
"""The mesh dimension of tiles whose grid the planner chooses."""

DIMENSIONS = ("model", "pipeline", "tensor", SEQUENCE, TILE, *ROWS)
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
        return len(self._coordinates) if self.widths else math.prod(size for _, size in self.dimensions)

    @property
    def n_row_parts(self) -> int:
        """Return the number of parts into which the mesh shards the batch."""
        return math.prod(size for name, size in self.dimensions if name in ROWS)

    def length(self, name: str) -> int:
        """Return the size of a dimension; 1 if the mesh does not have it."""
        return dict(self.dimensions).get(name, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank along each dimension."""
        if self.widths:
            return dict(zip(self.names, self._coordinates[rank], strict=True))
        coordinate: dict[str, int] = {}
        for name, size in reversed(self.dimensions):
            rank, coordinate[name] = divmod(rank, size)
        return {name: coordinate[name] for name in self.names}

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
        own = self.coordinate(rank)
        fixed = tuple(None if name in names else own[name] for name in self.names)
        if fixed not in self._groups:
            ranges = [range(size) if at is None else (at,) for at, (_, size) in zip(fixed, self.dimensions, strict=True)]
            coordinates = itertools.product(*ranges)
            if self.widths:
                self._groups[fixed] = tuple(self._ranks[each] for each in coordinates if each in self._ranks)
            else:
                self._groups[fixed] = tuple(self.rank(dict(zip(self.names, each, strict=True))) for each in coordinates)
        return self._groups[fixed]

    def shifted(self, rank: int, source: int, target: int) -> int:
        """Return the rank that is to ``target`` as ``rank`` is to ``source``: as far from it along every dimension, around the end."""
        at, start, end = (self.coordinate(each) for each in (rank, source, target))
        return self.rank({name: (at[name] + end[name] - start[name]) % size for name, size in self.dimensions})

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
    def _coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Return the coordinates of all ranks of per-stage submeshes, row by row; a smaller submesh has no rank at the last ones."""
        stage_index = next(index for index, name in enumerate(self.names) if name in STAGES)
        width_index = self.names.index(WIDTH)
        every = itertools.product(*(range(size) for _, size in self.dimensions))
        return tuple(each for each in every if each[width_index] < self.widths[each[stage_index]])

    @cached_property
    def _ranks(self) -> Mapping[tuple[int, ...], int]:
        """Return the inverse of ``_coordinates``."""
        return {coordinate: rank for rank, coordinate in enumerate(self._coordinates)}


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
    stage_dimension = next((name for name in mesh.names if name in STAGES), STAGES[0])
    offsets = [stage * strides.get(stage_dimension, 0) for stage in range(mesh.length(stage_dimension))]
    return tuple(tuple(first + offset for offset in offsets) for first in firsts)


def ranks_at_places(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return the ranks at each pipeline position, ascending."""
    return tuple(tuple(sorted(set(ranks))) for ranks in zip(*pipelines(mesh), strict=True))


def owning_pipelines(mesh: Mesh) -> Mapping[int, int]:
    """Return for each rank the index of its owning pipeline: the first that it is in, and from whose ranks it receives."""
    owning: dict[int, int] = {}
    for index, ranks in enumerate(pipelines(mesh)):
        for rank in ranks:
            owning.setdefault(rank, index)
    return owning


def receivers(mesh: Mesh, rank: int, place: int, destination: int) -> tuple[int, ...]:
    """Return the ranks at pipeline position ``destination`` that receive the messages of a rank at position ``place``.

    >>> mesh = Mesh((("pipeline", 2), ("tensor", 2)), widths=(2, 1))
    >>> receivers(mesh, 0, 0, 1), receivers(mesh, 1, 0, 1), receivers(mesh, 2, 1, 0)
    ((2,), (), (0, 1))
    """
    owning = owning_pipelines(mesh)
    with_rank = [(index, ranks) for index, ranks in enumerate(pipelines(mesh)) if ranks[place] == rank]
    return tuple(ranks[destination] for index, ranks in with_rank if owning[ranks[destination]] == index)


def _pipeline(mesh: Mesh, cutting: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ranks of the pipeline at a coordinate of ``mesh.cutting``: ranks of the largest submesh share a rank of a smaller one."""
    stage_dimension, widest = next(name for name in mesh.names if name in STAGES), mesh.length(WIDTH)
    return tuple(
        mesh.rank({**cutting, stage_dimension: place, WIDTH: cutting[WIDTH] * width // widest}) for place, width in enumerate(mesh.widths)
    )


def widths_of_stages(mesh: Mesh, replicas: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the tensor-parallel degree of each stage.

    Args:
        mesh: with per-stage submeshes.
        replicas: the number of round-robin ranks of each stage; empty: one each.
    """
    if not replicas:
        return mesh.widths
    return tuple(mesh.widths[place] for place in itertools.accumulate(replicas[:-1], initial=0))


def mesh_words(mesh: Mesh, replicas: Sequence[int] = ()) -> str:
    """Return a mesh in words, for reports.

    Args:
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


def rank_list(ranks: Collection[int]) -> str:
    """Return ranks as text for a sentence.

    >>> rank_list([3]), rank_list([0, 2]), rank_list(range(4)), rank_list(range(0, 64, 8))
    ('rank 3', 'ranks 0 and 2', 'ranks 0 to 3', 'ranks 0, 8 ... 56')
    """
    *others, last = sorted(ranks)
    if not others:
        return f"rank {last}"
    if len(others) > 1 and last - others[0] == len(others):
        return f"ranks {others[0]} to {last}"
    if len(others) < _MOST_RUNS:
        return f"ranks {', '.join(map(str, others))} and {last}"
    return f"ranks {rank_numbers(ranks)}"


def rank_numbers(ranks: Collection[int]) -> str:
    """Return ranks as short text for a table; of many runs, the first two and the last, with the number of ranks if that is not clear.

    >>> rank_numbers([0, 2]), rank_numbers(range(4)), rank_numbers(range(0, 64, 8))
    ('0, 2', '0-3', '0, 8 ... 56')
    >>> rank_numbers([0, 1, 4, 5, 16, 17, 20, 21, 32, 33])
    '0-1, 4-5 ... 32-33 (10 ranks)'
    """
    numbers = sorted(ranks)
    if len(numbers) <= 2:
        return ", ".join(map(str, numbers))
    starts = [place for place, rank in enumerate(numbers) if not place or rank != numbers[place - 1] + 1]
    runs = [(numbers[start], numbers[end - 1]) for start, end in itertools.pairwise([*starts, len(numbers)])]
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(runs) <= _MOST_RUNS:
        return ", ".join(words)
    steps = {(second[0] - first[0], second[1] - first[1]) for first, second in itertools.pairwise(runs)}
    return f"{words[0]}, {words[1]} ... {words[-1]}" + ("" if len(steps) == 1 else f" ({len(numbers)} ranks)")


_MOST_RUNS = 4
"""Runs of successive ranks that are all shown."""
