"""Choose the grid of tiles for a number of ranks, and the axes that its dimensions shard.

4 tiles of an image of 512 x 512

(4, 1)   ____   3 borders of 512 elements        (2, 2)   __ __   2 borders of 512 elements: this one
         ____                                             __|__
         ____                                               |
         ____
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from passes.analysis.axes import Axes
from passes.analysis.axis_names import space_axes
from passes.ir.errors import ConfigError
from passes.ir.mesh import TILE, TILES, Mesh


def with_grid(axes: Axes, mesh: Mesh) -> Mesh:
    """Return the mesh with its tile dimension replaced by those of the best grid; raise as ``best_grid`` does."""
    grid = best_grid(axes, mesh.length(TILE))
    dimensions: list[tuple[str, int]] = []
    for name, length in mesh.dimensions:
        tiles = [(tile, count) for tile, count in zip(TILES, grid, strict=False) if count > 1]
        dimensions += tiles if name == TILE else [(name, length)]
    return Mesh(tuple(dimensions), mesh.widths)


def best_grid(axes: Axes, count: int) -> tuple[int, ...]:
    """Return the grid of ``count`` tiles with the shortest borders: one number for each dimension of space.

    Raises:
        ConfigError: there is no space to cut, or it is too small.
    """
    sizes = [max(_size(axes, axis) for axis in each) for each in _space(axes).values()]
    fitting = [grid for grid in factorizations(count, len(sizes)) if all(length <= size for length, size in zip(grid, sizes, strict=True))]
    if not fitting:
        raise ConfigError(
            f"space of {' x '.join(map(str, sizes))} cannot be cut into {count} tiles", remedy="use fewer tiles, or larger example inputs"
        )
    return min(fitting, key=lambda grid: (_borders(grid, sizes), grid[::-1]))


def tile_axes(axes: Axes, mesh: Mesh, dimension: str) -> tuple[int, ...]:
    """Return the axes that one dimension of a grid shards.

    Raises:
        ConfigError: space has fewer dimensions than the grid.
    """
    space = list(_space(axes).values())
    place = TILES.index(dimension)
    if place >= len(space):
        grid = tuple(mesh.length(name) for name in TILES if name in mesh.names)
        raise ConfigError(
            f"a grid of tiles {grid} has {len(grid)} dimensions, the space of this model has {len(space)}",
            remedy=f"pass {len(space)} numbers, or one",
        )
    return space[place]


def fits(axes: Axes, axis: int, count: int) -> bool:
    """Return whether an axis is long enough for so many parts; one of symbolic size is not."""
    size = axes.sizes[axis]
    return isinstance(size, int) and size >= count


def _space(axes: Axes) -> dict[str, tuple[int, ...]]:
    space = space_axes(axes)
    if not space:
        raise ConfigError("the model has no space that tiles could cut", remedy='mode "tile" is for models with convolutions or pooling')
    return space


def _size(axes: Axes, axis: int) -> int:
    size = axes.sizes[axis]
    return size if isinstance(size, int) else 1


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of so many factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in (each for each in range(1, number + 1) if number % each == 0):
        yield from ((first, *rest) for rest in factorizations(number // first, count - 1))


def _borders(grid: tuple[int, ...], sizes: list[int]) -> int:
    """Return the total length of the borders between tiles, in elements."""
    return sum((length - 1) * math.prod(size for other, size in enumerate(sizes) if other != index) for index, length in enumerate(grid))
