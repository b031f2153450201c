"""A model as it is streamed: its grid of tiles, over the axes of space that it has."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import fx

from passes.axes import Axes, find_axes
from passes.axis_names import space_axes
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.streaming.spans import TileGrid
from passes.streaming.stream import stream

__all__ = ["grid_over", "streamed"]


_KNOWN: WeakKeyDictionary[fx.GraphModule, dict[tuple[tuple[int, ...], int], ModelGraph]] = WeakKeyDictionary()
"""What was streamed already, for as long as somebody has the graph."""


def streamed(graph: ModelGraph, tiles: tuple[int, ...], budget: int) -> ModelGraph:
    """The graph by tiles; the graph itself where there are none.

    Args:
        tiles: along each dimension of space.
        budget: see ``passes.streaming.stream``.
    """
    if not tiles:
        return graph
    known = _KNOWN.setdefault(graph.module, {})
    if (tiles, budget) not in known:
        axes = find_axes(graph.graph)
        known[tiles, budget] = stream(graph, axes, grid_over(axes, tiles), budget)
    return known[tiles, budget]


def grid_over(axes: Axes, counts: Sequence[int]) -> TileGrid:
    """The grid of so many tiles along each dimension of space, outermost first.

    Raises:
        ConfigError: space has fewer dimensions.
    """
    space = list(space_axes(axes).values())
    if len(counts) > len(space):
        raise ConfigError(
            f"a grid of tiles {tuple(counts)} has {len(counts)} dimensions, the space of this model has {len(space)}",
            remedy=f"pass {len(space)} numbers, or one" if space else 'mode "tile" is for models with convolutions or pooling',
        )
    return TileGrid(tuple(counts), tuple(frozenset(each) for each in space[: len(counts)]))
