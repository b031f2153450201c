"""Boxes of tiles: the dimensions of a tensor that hold an axis of space, and the intervals of them that a tile owns.

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

Interval: TypeAlias = tuple[int, int]
"""Start and stop."""

Box: TypeAlias = tuple[Interval | None, ...]
"""An interval for each grid dimension; None if the value has no dimension along it."""


@dataclass(frozen=True)
class Span:
    """A dimension of a tensor that a grid dimension cuts.

    Attributes:
        dimension: the dimension.
        axis: its outermost axis, which is cut.
        inner: number of elements of the dimension for each index of the axis.
        size: size of the dimension.
    """

    dimension: int
    axis: int
    inner: int
    size: int


@dataclass(frozen=True)
class TileGrid:
    """A grid of tiles over the axes of space.

    Attributes:
        counts: number of tiles along each grid dimension.
        axes: the axes that each grid dimension cuts.
    """

    counts: tuple[int, ...]
    axes: tuple[frozenset[int], ...]

    def spans(self, axes: Axes, tensor: TensorAxes) -> tuple[Span | None, ...] | None:
        """Return for each grid dimension the tensor dimension that it cuts; None for a tensor whose tiles are not boxes.

        Tiles are no boxes if a spatial axis is not the outermost of its dimension, or two grid dimensions cut the same dimension.
        """
        spans: list[Span | None] = []
        for count, cut in zip(self.counts, self.axes, strict=True):
            candidates = [(dimension, axes_of) for dimension, axes_of in enumerate(tensor) if cut & set(axes_of)]
            if len(candidates) > 1 or any(axes_of[0] not in cut or len(cut & set(axes_of)) > 1 for _, axes_of in candidates):
                return None
            span = None
            for dimension, axes_of in candidates:
                outermost, *inner_sizes = (axes.sizes[axis] for axis in axes_of)
                if isinstance(outermost, int) and outermost >= count:
                    if not all(isinstance(size, int) for size in inner_sizes):
                        return None  # rows of the batch are inside the axis: where a tile starts depends on their number
                    inner = math.prod(map(int, inner_sizes))
                    span = Span(dimension, axes_of[0], inner, inner * outermost)
            spans.append(span)
        dimensions = [span.dimension for span in spans if span is not None]
        return tuple(spans) if len(set(dimensions)) == len(dimensions) else None

    def owned(self, spans: Sequence[Span | None], tile: Sequence[int]) -> Box:
        """Return the box of a value that the tile at a grid coordinate owns."""
        return tuple(None if span is None else self.part(span, index, tile) for index, span in enumerate(spans))

    def part(self, span: Span, index: int, tile: Sequence[int]) -> Interval:
        """Return the interval of a span, that of grid dimension ``index``, that the tile at a grid coordinate owns."""
        parts = microbatch_sizes(span.size // span.inner, self.counts[index])
        start = sum(parts[: tile[index]])
        return start * span.inner, (start + parts[tile[index]]) * span.inner


def united(first: Box | None, second: Box) -> Box:
    """Return the smallest box that contains both; None is an empty box."""
    if first is None:
        return second
    return tuple(_hull(left, right) for left, right in zip(first, second, strict=True))


def _hull(left: Interval | None, right: Interval | None) -> Interval | None:
    """Return the smallest interval that contains both."""
    if left is None or right is None:
        return left or right
    return min(left[0], right[0]), max(left[1], right[1])


def aligned(box: Box, spans: Sequence[Span | None]) -> Box:
    """Extend a box to multiples of ``inner`` of its spans: a tile contains all elements of an index of a cut axis, or none."""
    return tuple(
        None if span is None or interval is None else (interval[0] // span.inner * span.inner, -(-interval[1] // span.inner) * span.inner)
        for interval, span in zip(box, spans, strict=True)
    )


def fraction(box: Box, spans: Sequence[Span | None]) -> float:
    """Return the fraction of a value's elements that a box contains."""
    pairs = [(interval, span) for interval, span in zip(box, spans, strict=True) if interval is not None and span is not None]
    return math.prod(((stop - start) / span.size for (start, stop), span in pairs), start=1.0)
