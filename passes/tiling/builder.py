"""Writes calls on tiles: pieces of values that are whole, or of tiles that were computed just before, and the operation on these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes
from passes.graph.aliasing import OWN_MEMORY
from passes.graph.fake_tensors import FakeTensorCache
from passes.graph.schemas import bound_arguments, call_with
from passes.graph.symbolic_sizes import emit_size, size_of
from passes.ir.comm.index_ranges import Run, Runs
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import pytree
from passes.rules.loops import LocalCall, Size
from passes.spmd.decompose.pooling_resize import Along, WindowWriter, write_windows
from passes.spmd.halo.boxes import Box, Interval, Span
from passes.spmd.halo.call_tiles import Read, TileCall
from passes.tiling.steps import FOR_WHOLE, TILE

__all__ = ["Held", "TileWriter"]

aten = torch.ops.aten

Held = Mapping[fx.Node, tuple[fx.Node, Box]]
"""Node of the whole graph -> its tile, and which box of the value that is."""


class TileWriter:
    """The new graph, as far as it is written.

    Args:
        graph: the old one.
        n_dimensions: of the grid.

    Attributes:
        whole: node of the old graph -> the node that has its whole value.
        tile: which tile of which sweep is being written; empty: none.
    """

    def __init__(self, graph: ModelGraph, axes: Axes, n_dimensions: int) -> None:
        self._graph, self._axes, self._n_dimensions = graph, axes, n_dimensions
        self.target = fx.Graph()
        self.whole: dict[fx.Node, fx.Node] = {}
        self._batch: fx.Node | None = None
        self._values = FakeTensorCache(pieces_are_alike=True)
        self.tile = ""

    def placeholder(self, node: fx.Node) -> None:
        copy = self.target.placeholder(node.name)
        copy.meta = dict(node.meta)
        self.whole[node] = copy
        if node.name == "batch":
            self._batch = copy

    def copy(self, node: fx.Node) -> None:
        """Copy a call unchanged, on whole values."""
        of = self.whole.__getitem__
        assert callable(node.target)
        self.whole[node] = self.emit(node.target, fx.map_arg(node.args, of), node.name, node, **fx.map_arg(node.kwargs, of))

    def emit(self, function: Any, args: tuple[Any, ...], name: str, like: fx.Node, /, **kwargs: Any) -> fx.Node:
        """A call with its value on fake tensors. Tiles may lie otherwise in memory than the whole did: views are copies where need be."""
        function = aten.reshape.default if function is aten.view.default else function
        node = self.target.create_node("call_function", function, args, kwargs, name=name)
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", OWN_MEMORY)}
        if self.tile:
            node.meta[TILE] = self.tile
        self._values.describe(node)
        return node

    # -- pieces --------------------------------------------------------------------------------------------------------------------

    def part(self, node: fx.Node, held: Held, reads: Sequence[Read | None], box: Box) -> fx.Node:
        """Return a box of a value, sliced from the whole value or from the tile in ``held``."""
        source, has = self._source(node, held)
        for read, own, need in zip(reads, has, box, strict=True):
            if read is not None and need is not None:
                source = self._interval(source, read.span, own, need, node)
        return source

    def _source(self, node: fx.Node, held: Held) -> tuple[fx.Node, Box]:
        if node in self.whole:
            return self.whole[node], (None,) * self._n_dimensions
        return held[node]

    def _interval(self, source: fx.Node, span: Span, own: Interval | None, need: Interval, like: fx.Node) -> fx.Node:
        start, stop = own or (0, span.size)
        if (start, stop) == need:
            return source
        return self.emit(aten.slice.Tensor, (source, span.dimension, need[0] - start, need[1] - start), f"{source.name}_piece", like)

    def _runs(self, source: fx.Node, dimension: int, runs: Runs, start: int, fill: float, like: fx.Node) -> fx.Node:
        """Emit the index runs of a dimension, padding included; the first element of ``source`` has index ``start``."""
        inner = [run for run in runs if run.step]
        if len(inner) == 1 and inner[0].step == 1:
            piece = self._run(source, dimension, inner[0], start, like)
            before = sum(run.count for run in runs[: runs.index(inner[0])])
            after = sum(run.count for run in runs) - before - inner[0].count
            if not before and not after:
                return piece
            rank = piece.meta["val"].dim()
            amounts = [0] * (2 * (rank - 1 - dimension)) + [before, after]
            return self.emit(aten.constant_pad_nd.default, (piece, amounts, fill), f"{source.name}_padded", like)
        pieces = [
            self._padding(source, dimension, run.count, fill, like) if run.step == 0 else self._run(source, dimension, run, start, like)
            for run in runs
        ]
        return self.emit(aten.cat.default, (pieces, dimension), f"{source.name}_runs", like)

    def _run(self, source: fx.Node, dimension: int, run: Run, start: int, like: fx.Node) -> fx.Node:
        first = run.start - start if run.step == 1 else run.start - run.count + 1 - start
        if first == 0 and run.count == source.meta["val"].shape[dimension]:
            piece = source
        else:
            piece = self.emit(aten.slice.Tensor, (source, dimension, first, first + run.count), f"{source.name}_piece", like)
        return piece if run.step == 1 else self.emit(aten.flip.default, (piece, [dimension]), f"{source.name}_flipped", like)

    def _padding(self, source: fx.Node, dimension: int, count: int, fill: float, like: fx.Node) -> fx.Node:
        """Return ``count`` elements of ``fill`` along a dimension, of the source's shape in the others: (4, 9, 9) -> (4, count, 9)."""
        value: Tensor = source.meta["val"]
        shape = [count if place == dimension else self.size(size_of(size)) for place, size in enumerate(value.shape)]
        return self.emit(aten.full.default, (shape, fill), f"{source.name}_padding", like, dtype=value.dtype, device=value.device)

    def buffer(self, node: fx.Node) -> fx.Node:
        """Memory for a whole value, that its tiles are written in one by one."""
        value: Tensor = node.meta["val"]
        shape = [self.size(size_of(size)) for size in value.shape]
        return self._for_whole(aten.empty.memory_format, (shape,), node.name, node, dtype=value.dtype, device=value.device)

    def put(self, buffer: fx.Node, spans: Sequence[Span | None], box: Box, tile: fx.Node, like: fx.Node) -> None:
        """Write a tile in its place."""
        place = buffer
        for span, own in zip(spans, box, strict=True):
            if span is not None and own is not None:
                place = self._for_whole(aten.slice.Tensor, (place, span.dimension, *own), f"{tile.name}_place", like)
        self._for_whole(aten.copy_.default, (place, tile), f"{tile.name}_put", like)

    def _for_whole(self, function: Any, args: tuple[Any, ...], name: str, like: fx.Node, /, **kwargs: Any) -> fx.Node:
        node = self.emit(function, args, name, like, **kwargs)
        node.meta[FOR_WHOLE] = True
        return node

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def call(self, call: TileCall, box: Box, held: Held, label: str, *, first: bool = True) -> fx.Node:
        """Emit a call for a box of its result.

        Args:
            box: of the result; of the operand, for a reduction.
            held: the tiles that it may read.
            first: whether to add operands such as a bias of a reduction, which only the first tile may add.
        """
        node, loops = call.node, call.loops
        name = f"{node.name}_{label}"
        cut = frozenset(factor for factor, own in zip(call.factors, box, strict=True) if factor is not None and own is not None)
        operands, starts = self._operands(call, box, held, first=first)
        places = iter(operands)
        given = {
            key: fx.map_arg(value, lambda each: next(places) if isinstance(each.meta.get("val"), Tensor) else self.whole[each])
            for key, value in bound_arguments(node).items()
        }
        if any(window.factor in cut and window.reach.written for window in loops.windows):
            return self._written(call, box, given, starts, name)
        if loops.localize is not None:
            local = loops.localize(self._local_call(call, box, operands, cut))
            given.update(pytree.tree_map_only(sympy.Expr, self.size, dict(local)))
        positional, keywords = call_with(node, given)
        result = self.emit(node.target, positional, name, node, **keywords)
        for span, factor, own in zip(call.spans, call.factors, box, strict=True):
            for window in loops.windows:
                if window.factor == factor and factor is not None and own is not None and span is not None and window.reach.skip != 0:
                    skip = window.reach.skipped(own[0])
                    kept = (result, span.dimension, skip, skip + own[1] - own[0])
                    result = self.emit(aten.slice.Tensor, kept, f"{name}_own", node)
        return result

    def _operands(self, call: TileCall, box: Box, held: Held, *, first: bool) -> tuple[list[fx.Node], dict[int, int]]:
        """Return the operands of a call, sliced and padded; and for each dimension under a window the index of its first element."""
        found, starts = [], {}
        needs = call.needs(box)
        for place, operand in enumerate(self._axes.operands[call.node.name]):
            source, has = self._source(operand, held)
            for index, read in enumerate(call.reads[place]):
                if read is None or box[index] is None or read.factor is None:
                    continue
                own, need = has[index], needs[place][index]
                if read.window is None:
                    assert need is not None
                    source = self._interval(source, read.span, own, need, call.node)
                    continue
                runs = read.window.reach.reads(*box[index])  # type: ignore[misc]
                begin = own[0] if own is not None else 0
                source = self._runs(source, read.span.dimension, runs, begin, read.window.reach.fill, call.node)
                starts[read.span.dimension] = runs[0].start
            if place in call.loops.added and not first:
                source = self.emit(aten.zeros_like.default, (source,), f"{source.name}_nothing", call.node)
            found.append(source)
        return found, starts

    def _local_call(self, call: TileCall, box: Box, operands: Sequence[fx.Node], cut: frozenset[int]) -> LocalCall:
        shape: list[Size] = [size_of(size) for size in call.node.meta["val"].shape]
        factors: list[Size] = [factor.size for factor in call.loops.factors]
        for span, factor, own in zip(call.spans, call.factors, box, strict=True):
            if span is not None and own is not None and factor is not None:
                shape[span.dimension] = own[1] - own[0]
                factors[factor] = (own[1] - own[0]) * int(call.loops.factors[factor].size) // span.size
        shapes = tuple(tuple(size_of(size) for size in operand.meta["val"].shape) for operand in operands)
        for sizes, reads in zip(shapes, call.reads, strict=True):
            for read in reads:
                if read is not None and read.window is not None and read.window.part is not None:
                    factors[read.window.part] = sizes[read.span.dimension] // read.span.inner
        return LocalCall(bound_arguments(call.node), shapes, (tuple(shape),), tuple(factors), cut)

    def _written(self, call: TileCall, box: Box, given: Mapping[str, Any], starts: Mapping[int, int], name: str) -> fx.Node:
        rank = len(call.loops.operands[0])
        intervals = {span.dimension: own for span, own in zip(call.spans, box, strict=True) if span is not None}
        space: list[Along] = []
        for window in call.loops.windows:
            steps = 1 if window.factor is None else int(call.loops.factors[window.factor].size)
            start, stop = intervals.get(window.dimension) or (0, steps)
            fetched = window.dimension in starts
            space.append(Along(window.dimension - rank, window.reach, start, stop, steps, starts.get(window.dimension, 0), fetched))

        def emit(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], each: str) -> fx.Node:
            return self.emit(function, args, each, call.node, **kwargs)

        return write_windows(call.node, WindowWriter(emit, given, name, tuple(space)))

    def size(self, size: Size) -> Any:
        """A size as an argument."""
        if isinstance(size, int):
            return size
        assert self._batch is not None
        return emit_size(self.target, size, self._graph.batch, self._batch)
