"""Write calls on tiles: slice and pad their operands, from whole values or from other tiles, and call the op on these."""

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

aten = torch.ops.aten

Tiles = Mapping[fx.Node, tuple[fx.Node, Box]]
"""Node of the old graph -> the node of its tile, and the box of the value that the tile holds."""


class TileWriter:
    """Writes the tiled graph.

    Args:
        graph: the old graph.
        n_dimensions: of the grid.

    Attributes:
        target: the tiled graph so far.
        whole: node of the old graph -> the node that has its whole value.
        tile: name of the tile that is being written; empty: none.
    """

    def __init__(self, graph: ModelGraph, axes: Axes, n_dimensions: int) -> None:
        self._graph, self._axes, self._n_dimensions = graph, axes, n_dimensions
        self.target = fx.Graph()
        self.whole: dict[fx.Node, fx.Node] = {}
        self._batch: fx.Node | None = None
        self._values = FakeTensorCache(pieces_are_alike=True)
        self.tile = ""

    def placeholder(self, node: fx.Node) -> None:
        """Copy a placeholder, and remember the one of the batch size."""
        copy = self.target.placeholder(node.name)
        copy.meta = dict(node.meta)
        self.whole[node] = copy
        if node.name == "batch":
            self._batch = copy

    def copy(self, node: fx.Node) -> None:
        """Copy a call unchanged, on whole values."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.whole.__getitem__)
        assert callable(node.target)
        self.whole[node] = self.emit(node.target, args, node.name, node, **kwargs)

    def emit(self, function: Any, args: tuple[Any, ...], name: str, like: fx.Node, /, **kwargs: Any) -> fx.Node:
        """Write a call with its fake tensor and the ``meta`` of ``like``. Views become reshapes: strides of tiles may differ."""
        function = aten.reshape.default if function is aten.view.default else function
        node = self.target.create_node("call_function", function, args, kwargs, name=name)
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", OWN_MEMORY)}
        if self.tile:
            node.meta[TILE] = self.tile
        self._values.describe(node)
        return node

    def part(self, node: fx.Node, tiles: Tiles, reads: Sequence[Read | None], box: Box) -> fx.Node:
        """Return a box of a value, sliced from the whole value or from the tile in ``tiles``."""
        source, source_box = self._source(node, tiles)
        for read, available, need in zip(reads, source_box, box, strict=True):
            if read is not None and need is not None:
                source = self._slice(source, read.span, available, need, node)
        return source

    def _source(self, node: fx.Node, tiles: Tiles) -> tuple[fx.Node, Box]:
        """Return the node that has a value, and the box that it has of it: of a whole value, None along each grid dimension."""
        if node in self.whole:
            return self.whole[node], (None,) * self._n_dimensions
        return tiles[node]

    def _slice(self, source: fx.Node, span: Span, available: Interval | None, need: Interval, like: fx.Node) -> fx.Node:
        """Slice the interval ``need`` from a source that has the interval ``available`` (None: all) of the dimension."""
        start, stop = available or (0, span.size)
        if (start, stop) == need:
            return source
        return self.emit(aten.slice.Tensor, (source, span.dimension, need[0] - start, need[1] - start), f"{source.name}_piece", like)

    def _take_runs(self, source: fx.Node, dimension: int, runs: Runs, start: int, fill: float, like: fx.Node) -> fx.Node:
        """Emit the index runs of a dimension, padding included; the first element of ``source`` has index ``start``.

        One ascending run between padding is a slice and a pad; anything else (reflections) is a ``cat`` of its runs.
        """
        elements = [run for run in runs if run.step]
        if len(elements) == 1 and elements[0].step == 1:
            piece = self._take_run(source, dimension, elements[0], start, like)
            before = sum(run.count for run in runs[: runs.index(elements[0])])
            after = sum(run.count for run in runs) - before - elements[0].count
            if not before and not after:
                return piece
            rank = piece.meta["val"].dim()
            amounts = [0] * (2 * (rank - 1 - dimension)) + [before, after]
            return self.emit(aten.constant_pad_nd.default, (piece, amounts, fill), f"{source.name}_padded", like)
        pieces = [
            self._take_run(source, dimension, run, start, like) if run.step else self._padding(source, dimension, run.count, fill, like)
            for run in runs
        ]
        return self.emit(aten.cat.default, (pieces, dimension), f"{source.name}_runs", like)

    def _take_run(self, source: fx.Node, dimension: int, run: Run, start: int, like: fx.Node) -> fx.Node:
        """Emit the elements of a run: a slice, which is flipped if the run goes backwards."""
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
        """Allocate the memory of a whole value, which ``put`` fills tile by tile."""
        value: Tensor = node.meta["val"]
        shape = [self.size(size_of(size)) for size in value.shape]
        return self._emit_for_whole(aten.empty.memory_format, (shape,), node.name, node, dtype=value.dtype, device=value.device)

    def put(self, buffer: fx.Node, spans: Sequence[Span | None], box: Box, tile: fx.Node, like: fx.Node) -> None:
        """Copy a tile into its box of the buffer of a whole value."""
        part = buffer
        for span, interval in zip(spans, box, strict=True):
            if span is not None and interval is not None:
                part = self._emit_for_whole(aten.slice.Tensor, (part, span.dimension, *interval), f"{tile.name}_place", like)
        self._emit_for_whole(aten.copy_.default, (part, tile), f"{tile.name}_put", like)

    def _emit_for_whole(self, function: Any, args: tuple[Any, ...], name: str, like: fx.Node, /, **kwargs: Any) -> fx.Node:
        node = self.emit(function, args, name, like, **kwargs)
        node.meta[FOR_WHOLE] = True
        return node

    def call(self, call: TileCall, box: Box, tiles: Tiles, label: str, *, first: bool = True) -> fx.Node:
        """Emit a call for a box of its result.

        Args:
            box: of the result; of the operand, for a reduction.
            tiles: the tiles that it may read.
            label: suffix of its name.
            first: whether to add operands such as a bias of a reduction, which only the first tile may add.
        """
        node, loops = call.node, call.loops
        name = f"{node.name}_{label}"
        cut = frozenset(factor for factor, interval in zip(call.factors, box, strict=True) if factor is not None and interval is not None)
        operands, starts = self._operands(call, box, tiles, first=first)
        next_operand = iter(operands)
        arguments = {
            key: fx.map_arg(value, lambda arg: next(next_operand) if isinstance(arg.meta.get("val"), Tensor) else self.whole[arg])
            for key, value in bound_arguments(node).items()
        }
        if any(window.factor in cut and window.reach.written for window in loops.windows):
            return self._decomposed(call, box, arguments, starts, name)
        if loops.localize is not None:
            local = loops.localize(self._local_call(call, box, operands, cut))
            arguments.update(pytree.tree_map_only(sympy.Expr, self.size, dict(local)))
        positional, keywords = call_with(node, arguments)
        result = self.emit(node.target, positional, name, node, **keywords)
        for span, factor, interval in zip(call.spans, call.factors, box, strict=True):
            if span is None or factor is None or interval is None:
                continue
            for window in loops.windows:
                if window.factor == factor and window.reach.skip != 0:
                    skip = window.reach.skipped(interval[0])
                    own = (result, span.dimension, skip, skip + interval[1] - interval[0])
                    result = self.emit(aten.slice.Tensor, own, f"{name}_own", node)
        return result

    def _operands(self, call: TileCall, box: Box, tiles: Tiles, *, first: bool) -> tuple[list[fx.Node], dict[int, int]]:
        """Return the operands of a call, sliced and padded; and for each dimension under a window the index of its first element."""
        operands, starts = [], {}
        needs = call.needs(box)
        for place, operand in enumerate(self._axes.operands[call.node.name]):
            source, source_box = self._source(operand, tiles)
            for index, read in enumerate(call.reads[place]):
                if read is None or box[index] is None or read.factor is None:
                    continue
                available, need = source_box[index], needs[place][index]
                if read.window is None:
                    assert need is not None
                    source = self._slice(source, read.span, available, need, call.node)
                    continue
                runs = read.window.reach.reads(*box[index])  # type: ignore[misc]
                begin = available[0] if available is not None else 0
                source = self._take_runs(source, read.span.dimension, runs, begin, read.window.reach.fill, call.node)
                starts[read.span.dimension] = runs[0].start
            if place in call.loops.added and not first:
                source = self.emit(aten.zeros_like.default, (source,), f"{source.name}_nothing", call.node)
            operands.append(source)
        return operands, starts

    def _local_call(self, call: TileCall, box: Box, operands: Sequence[fx.Node], cut: frozenset[int]) -> LocalCall:
        """Return the shapes and loop sizes of one tile, from which the op's rule adjusts arguments that are sizes."""
        shape: list[Size] = [size_of(size) for size in call.node.meta["val"].shape]
        factors: list[Size] = [factor.size for factor in call.loops.factors]
        for span, factor, interval in zip(call.spans, call.factors, box, strict=True):
            if span is not None and interval is not None and factor is not None:
                shape[span.dimension] = interval[1] - interval[0]
                factors[factor] = (interval[1] - interval[0]) * int(call.loops.factors[factor].size) // span.size
        shapes = tuple(tuple(size_of(size) for size in operand.meta["val"].shape) for operand in operands)
        for sizes, reads in zip(shapes, call.reads, strict=True):
            for read in reads:
                if read is not None and read.window is not None and read.window.part is not None:
                    factors[read.window.part] = sizes[read.span.dimension] // read.span.inner
        return LocalCall(bound_arguments(call.node), shapes, (tuple(shape),), tuple(factors), cut)

    def _decomposed(self, call: TileCall, box: Box, arguments: Mapping[str, Any], starts: Mapping[int, int], name: str) -> fx.Node:
        """Write a call whose op cannot compute its windows on a tile (pooling, resizing) by ``passes.spmd.decompose``."""
        rank = len(call.loops.operands[0])
        intervals = {span.dimension: interval for span, interval in zip(call.spans, box, strict=True) if span is not None}
        space: list[Along] = []
        for window in call.loops.windows:
            steps = 1 if window.factor is None else int(call.loops.factors[window.factor].size)
            start, stop = intervals.get(window.dimension) or (0, steps)
            fetched = window.dimension in starts
            space.append(Along(window.dimension - rank, window.reach, start, stop, steps, starts.get(window.dimension, 0), fetched))

        def emit(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], node_name: str) -> fx.Node:
            return self.emit(function, args, node_name, call.node, **kwargs)

        return write_windows(call.node, WindowWriter(emit, arguments, name, tuple(space)))

    def size(self, size: Size) -> Any:
        """Return a size as an argument of a call: a number, or a node that computes it from the batch size."""
        if isinstance(size, int):
            return size
        assert self._batch is not None
        return emit_size(self.target, size, self._graph.batch, self._batch)
