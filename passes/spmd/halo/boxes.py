"""Where tiles cut values: which dimensions of a tensor hold an axis of space, and which intervals of them a tile owns.

A grid of (2, 2) over a value [batch, channels, height 10, width 8]:

    span of the first grid dimension     dimension 2, 10 elements: tiles own 0..4 and 5..9
    span of the second                   dimension 3, 8 elements: tiles own 0..3 and 4..7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from passes.analysis.axes import Axes, TensorAxes
from passes.ir.comm.microbatch import microbatch_sizes

__all__ = ["Box", "Interval", "Span", "TileGrid", "aligned", "fraction", "united"]

Interval: TypeAlias = tuple[int, int]
"""The first element and the one behind the last."""

Box: TypeAlias = tuple[Interval | None, ...]
"""An interval for each grid dimension; None where a value does not span it."""


@dataclass(frozen=True)
class Span:
    """A dimension of a tensor that a grid dimension cuts.

    Attributes:
        dimension: of the tensor.
        axis: the outermost axis in it.
        inner: how many elements of the dimension one step of the axis holds.
        size: of the dimension.
    """

    dimension: int
    axis: int
    inner: int
    size: int


@dataclass(frozen=True)
class TileGrid:
    """A grid of tiles over the axes of space.

    Attributes:
        counts: tiles along each grid dimension.
        axes: for each, the axes that it cuts.
    """

    counts: tuple[int, ...]
    axes: tuple[frozenset[int], ...]

    def spans(self, axes: Axes, tensor: TensorAxes) -> tuple[Span | None, ...] | None:
        """Return for each grid dimension the tensor dimension that it cuts; None for a tensor whose tiles are not boxes.

        Tiles are no boxes if a spatial axis is not the outermost of its dimension, or two grid dimensions cut the same dimension.
        """
        found: list[Span | None] = []
        for count, cut in zip(self.counts, self.axes, strict=True):
            places = [(dimension, each) for dimension, each in enumerate(tensor) if cut & set(each)]
            if len(places) > 1 or any(each[0] not in cut or len(cut & set(each)) > 1 for _, each in places):
                return None
            span = None
            for dimension, each in places:
                steps, *within = (axes.sizes[axis] for axis in each)
                if isinstance(steps, int) and steps >= count:
                    if not all(isinstance(size, int) for size in within):
                        return None  # rows of the batch lie within the axis: where a tile starts depends on how many there are
                    inner = math.prod(map(int, within))
                    span = Span(dimension, each[0], inner, inner * steps)
            found.append(span)
        dimensions = [span.dimension for span in found if span is not None]
        return tuple(found) if len(set(dimensions)) == len(dimensions) else None

    def owned(self, spans: Sequence[Span | None], tile: Sequence[int]) -> Box:
        """Return the box of a value that the tile at a grid coordinate owns."""
        return tuple(None if span is None else self.part(span, index, tile) for index, span in enumerate(spans))

    def part(self, span: Span, index: int, tile: Sequence[int]) -> Interval:
        """The interval of one dimension that a tile owns."""
        parts = microbatch_sizes(span.size // span.inner, self.counts[index])
        start = sum(parts[: tile[index]])
        return start * span.inner, (start + parts[tile[index]]) * span.inner


def united(one: Box | None, other: Box) -> Box:
    """The smallest box that holds both."""
    if one is None:
        return other
    return tuple(
        right if left is None else left if right is None else (min(left[0], right[0]), max(left[1], right[1]))
        for left, right in zip(one, other, strict=True)
    )


def aligned(box: Box, spans: Sequence[Span | None]) -> Box:
    """The smallest box of whole steps that holds a box."""
    return tuple(
        None if span is None or each is None else (each[0] // span.inner * span.inner, -(-each[1] // span.inner) * span.inner)
        for each, span in zip(box, spans, strict=True)
    )


def fraction(box: Box, spans: Sequence[Span | None]) -> float:
    """The fraction of a value's elements that a box holds."""
    held = ((each[1] - each[0]) / span.size for each, span in zip(box, spans, strict=True) if each is not None and span is not None)
    return math.prod(held, start=1.0)
