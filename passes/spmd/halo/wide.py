"""Fetch a wider halo once and compute the overlap on both sides of a border, instead of a halo before every layer.

Two convolutions, kernel 3, padding 1, of a height of 16 over two ranks; rank 0:

    layer by layer                               once for both
    x_halo = halo_exchange(x)   _1 0:9           x_halo = halo_exchange(x)   _1 0:10     two rows of rank 1
    a = conv2d(x_halo)          0 .. 7           a = conv2d(x_halo)          0 .. 8      row 8 is rank 1's, too
    a_halo = halo_exchange(a)   _1 0:9           a_halo = take_runs(a)       _1 0:9      padding, as the whole model pads
    b = conv2d(a_halo)          0 .. 7           b = conv2d(a_halo)          0 .. 7

The elements that calls need follow backwards from the last calls of a segment (``passes.spmd.halo.demand.demand``), as intervals of the
whole value: nothing outside the image is computed, and every layer pads at the image's ends only. Recomputed rows are not owned: readers
outside the segment, reductions over space and normalizations use each rank's own rows alone. So gradients are right too: only own rows
leave the segment, hence every path from a parameter or an input to a result exists on exactly one rank, and sums over ranks
(``all_reduce`` of parameters, ``halo_add`` of halos) count each path once.

Fused layers by tiles: Alwani et al., "Fused-layer CNN accelerators", MICRO 2016; the wide halo is the ghost zone of Kjolstad and Snir,
"Ghost cell pattern", 2010.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from passes.analysis.axes import Axes
from passes.analysis.axis_names import space_axes
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Shard
from passes.ir.mesh import TILES
from passes.spmd.halo.boxes import Box, Span, TileGrid, united
from passes.spmd.halo.call_tiles import TileCall, tile_call
from passes.spmd.halo.demand import demand
from passes.spmd.propagate.layouts import Cut, Intervals, Layouts


@dataclass(frozen=True)
class Overlaps:
    """The intervals that ranks have of values beyond their own parts, in the form of ``Layouts``.

    Attributes:
        computed: those of the calls of a segment.
        fetched: those of values from outside the segment of which its calls read different intervals: their union.
    """

    computed: Mapping[str, tuple[Intervals | None, ...]]
    fetched: Mapping[str, tuple[Intervals | None, ...]]


@dataclass(frozen=True)
class TileRegions:
    """The calls of a graph that ranks may compute beyond their own parts, in connected regions.

    Attributes:
        layouts: the layouts of its values without overlaps.
        grid: the grid of the tiles.
        indices: the mesh dimension of each grid dimension.
        regions: connected components of calls that read each other, in order of the graph.
        order: position of every node in the graph.
    """

    axes: Axes
    layouts: Layouts
    grid: TileGrid
    indices: tuple[int, ...]
    regions: tuple[tuple[TileCall, ...], ...]
    order: Mapping[fx.Node, int]

    @staticmethod
    def of(graph: ModelGraph, axes: Axes, layouts: Layouts, assigned: Mapping[str, Sequence[int]]) -> TileRegions:
        """Return the regions of a graph; ``assigned``: mesh dimension -> the axes that it shards."""
        indices = tuple(index for index, (name, _) in enumerate(layouts.mesh) if name in TILES)
        counts = tuple(layouts.mesh[index][1] for index in indices)
        space = frozenset(axis for each in space_axes(axes).values() for axis in each)
        grid = TileGrid(counts, tuple(space.intersection(assigned[layouts.mesh[index][0]]) for index in indices))
        empty = TileRegions(axes, layouts, grid, indices, (), {node: place for place, node in enumerate(graph.graph.nodes)})
        nodes = (node for node in graph.computing_nodes() if node.op == "call_function")
        calls = filter(None, (tile_call(node, axes, grid) for node in nodes))
        return replace(empty, regions=_connected({call.node: call for call in calls if empty._may_overlap(call)}, axes))

    def _may_overlap(self, call: TileCall) -> bool:
        """Return whether a rank could compute rows beyond its own part of a call, from a window of each operand.

        The call must reduce nothing over the sharded axes, and each index of a sharded axis must be one element of its dimension.
        """
        name = call.node.name
        if call.kind != "tiles" or any(isinstance(place, Partial) for place in self.layouts.results[name][0]):
            return False
        for index, span, factor in zip(self.indices, call.spans, call.factors, strict=True):
            cut = self.layouts.cuts[name][index]
            if span is None:
                if cut is not None:
                    return False
                continue
            placement = self.layouts.results[name][0][index]
            if factor is None or span.inner != 1 or cut != Cut(factor, span.axis) or placement != Shard(span.axis, span.dimension):
                return False
        return all(read is None or (read.factor is not None and read.span.inner == 1) for reads in call.reads for read in reads)

    def segments(self, ends: Iterable[tuple[str, str]], *, may_lack: bool) -> Iterator[tuple[TileCall, ...]]:
        """Yield the calls of each segment, given by the names of its first and last call.

        Args:
            may_lack: skip segments that these layouts do not have.

        Raises:
            ConfigError: there is no such segment.
        """
        for first, last in ends:
            segment = self._segment(first, last)
            if segment:
                yield segment
            elif not may_lack:
                raise ConfigError(
                    f"the plan names a halo strategy for the calls from {first!r} to {last!r}, and no such calls of this model follow "
                    "each other",
                    remedy="make the plan again: it is for another model, or another version of it",
                )

    def _segment(self, first: str, last: str) -> tuple[TileCall, ...]:
        """Return the calls of a region from one to another; empty if no region has both in this order."""
        for region in self.regions:
            names = [call.node.name for call in region]
            if first in names and last in names and names.index(first) <= names.index(last):
                return region[names.index(first) : names.index(last) + 1]
        return ()

    def overlaps(self, calls: Sequence[TileCall]) -> Overlaps:
        """Return the overlap of a segment: start from each rank's own part of its last calls, and add the windows of all calls before."""
        members = {call.node: call for call in calls}
        ends = [call for call in calls if not call.node.users or any(user not in members for user in call.node.users)]
        boxes = []  # tile (i, i, ...) gives the i-th interval along every grid dimension: they do not depend on each other
        for place in range(max(self.grid.counts)):
            tile = [min(place, count - 1) for count in self.grid.counts]
            boxes.append(demand({call.node: self.grid.owned(call.spans, tile) for call in ends}, members, self.axes, self.order))
        computed = {call.node.name: self._intervals(call.node, [box[call.node] for box in boxes]) for call in calls}
        fetched = {}
        for operand, needs in self._read_from_outside(calls, boxes).items():
            if len(needs) > 1:
                united_needs = [functools.reduce(united, each, None) for each in zip(*needs, strict=True)]
                fetched[operand.name] = self._intervals(operand, united_needs)
        return Overlaps(_not_own(computed), _not_own(fetched))

    def _read_from_outside(self, calls: Sequence[TileCall], boxes: Sequence[Mapping[fx.Node, Box]]) -> dict[fx.Node, list[tuple[Box, ...]]]:
        """Return sharded value from outside the segment -> the intervals that ranks read of it, one entry for each kind of window."""
        needs_of: dict[fx.Node, dict[object, tuple[Box, ...]]] = {}
        members = {call.node for call in calls}
        for call in calls:
            needs = zip(*(call.needs(box[call.node]) for box in boxes), strict=True)
            for operand, reads, need in zip(self.axes.operands[call.node.name], call.reads, needs, strict=True):
                if operand not in members and self._is_sharded(operand):
                    windows = tuple(None if read is None or read.window is None else read.window.reach for read in reads)
                    needs_of.setdefault(operand, {})[windows, need] = need
        return {operand: list(needs.values()) for operand, needs in needs_of.items()}

    def _is_sharded(self, value: fx.Node) -> bool:
        """Return whether a value is sharded as the grid cuts it, each element of a dimension by itself."""
        spans = self.grid.spans(self.axes, self.axes.of(value.name))
        if spans is None or value.name not in self.layouts.results or not any(spans):
            return False
        placements = [self.layouts.results[value.name][0][index] for index in self.indices]
        pairs = [(span, placement) for span, placement in zip(spans, placements, strict=True) if span is not None]
        return all(span.inner == 1 and placement == Shard(span.axis, span.dimension) for span, placement in pairs)

    def own(self, node: fx.Node, index: int) -> Intervals:
        """Return every rank's own interval of a value along a mesh dimension."""
        position = self.indices.index(index)
        span = self._span(node, position)
        assert span is not None
        return tuple(self.grid.part(span, position, [place] * len(self.indices)) for place in range(self.grid.counts[position]))

    def _span(self, node: fx.Node, position: int) -> Span | None:
        spans = self.grid.spans(self.axes, self.axes.of(node.name))
        return None if spans is None else spans[position]

    def _intervals(self, value: fx.Node, boxes: Sequence[Box | None]) -> tuple[Intervals | None, ...]:
        """Return the intervals that ranks have of a value along each mesh dimension; None if these are their own parts."""
        intervals: list[Intervals | None] = [None] * len(self.layouts.mesh)
        for position, (index, count) in enumerate(zip(self.indices, self.grid.counts, strict=True)):
            if self._span(value, position) is not None:
                needed = tuple(filter(None, (box[position] for box in boxes[:count] if box is not None)))
                intervals[index] = needed if needed != self.own(value, index) else None
        return tuple(intervals)


def _not_own(values: Mapping[str, tuple[Intervals | None, ...]]) -> dict[str, tuple[Intervals | None, ...]]:
    """Return the values of which ranks have more than their own part along a mesh dimension."""
    return {name: intervals for name, intervals in values.items() if any(each is not None for each in intervals)}


def _connected(calls: Mapping[fx.Node, TileCall], axes: Axes) -> tuple[tuple[TileCall, ...], ...]:
    """Return the connected components of calls that read each other, each in the order of ``calls``."""
    region_of: dict[fx.Node, list[fx.Node]] = {}
    for node in calls:
        region = [node]
        for operand in axes.operands[node.name]:
            other = region_of.get(operand)
            if other is not None and other is not region:
                region = other + region
                region_of.update(dict.fromkeys(region, region))
        region_of.update(dict.fromkeys(region, region))
    regions = {id(region): region for region in region_of.values()}
    return tuple(tuple(calls[node] for node in calls if node in set(region)) for region in regions.values())


def with_halos(
    graph: ModelGraph,
    axes: Axes,
    layouts: Layouts,
    assigned: Mapping[str, Sequence[int]],
    wide: Iterable[tuple[str, str]],
    overlapped: Iterable[tuple[str, str]] = (),
    *,
    may_lack: bool = False,
) -> Layouts:
    """Return layouts with halo strategies for segments of calls, each given by the names of its first and last call.

    Args:
        layouts: with a halo exchange before each call.
        assigned: mesh dimension -> the axes that it shards.
        wide: segments with one wide halo.
        overlapped: segments that compute during their halo exchanges.
        may_lack: skip segments that these layouts do not have.

    Raises:
        ConfigError: there is no such segment.
    """
    wide, overlapped = tuple(wide), tuple(overlapped)
    if not wide and not overlapped:
        return layouts
    regions = TileRegions.of(graph, axes, layouts, assigned)
    computed: dict[str, tuple[Intervals | None, ...]] = {}
    fetched: dict[str, tuple[Intervals | None, ...]] = {}
    for segment in regions.segments(wide, may_lack=may_lack):
        overlaps = regions.overlaps(segment)
        computed |= overlaps.computed
        fetched |= overlaps.fetched
    in_pieces = frozenset(call.node.name for segment in regions.segments(overlapped, may_lack=may_lack) for call in segment)
    return replace(layouts, wide=computed, fetched=fetched, overlapped=in_pieces)
