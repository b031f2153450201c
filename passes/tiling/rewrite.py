"""Rewrite a graph so that values larger than a budget are computed tile by tile, in sequence.

Before:                                       After, two tiles, where c1 and c2 are larger than the budget:

    c1 = conv2d(x, w1, b1)   64 x 512 x 512       p = empty(64, 128, 128)
    c2 = conv2d(c1, w2, b2)  64 x 512 x 512       x_tile0 = x[.., 0:259]            what tile 0 of p reads, through both windows
    p = max_pool2d(c2, 4)    64 x 128 x 128       c1_tile0 = conv2d(x_tile0, ..)
                                                  c2_tile0 = conv2d(c1_tile0, ..)
                                                  p_tile0 = max_pool2d(c2_tile0, 4)
                                                  p[.., 0:64].copy_(p_tile0)
                                                  ...                               tile 1, after tile 0 is freed

Values within the budget are computed whole. Larger ones exist only as tiles, and are computed again in every sweep that reads them. A sweep
goes over all tiles to compute one whole value, a reduction over space, or the statistics of a normalization, which later sweeps apply. Both
tiles compute their overlap, so results are exact.

This is the forward; ``passes.tiling.backward`` writes the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes, find_axes
from passes.analysis.axis_names import space_axes
from passes.graph.fake_tensors import fake_mode
from passes.graph.lazy_graph_module import rewritten
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.tensor_spec import Size
from passes.normalize.randomness.draw_order import draw_in_rows, draws, laid_out_anew
from passes.spmd.halo.boxes import Box, TileGrid, fraction
from passes.spmd.halo.call_tiles import Read, TileCall
from passes.spmd.halo.demand import CheckpointSelection, demand, select_checkpoints, tiles_of
from passes.tiling.builder import Tiles, TileWriter
from passes.tiling.normalization import Scaling, apply_scaling, merge_statistics, tile_statistics
from passes.tiling.steps import TEMPLATES, templates_of

aten = torch.ops.aten


def stream(graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> ModelGraph:
    """Return the tiled graph.

    Args:
        budget: bytes up to which values are computed whole; inputs, and values that cannot be tiled, may be larger.
    """
    return _Streamer(graph, axes, grid, select_checkpoints(graph, axes, grid, budget)).run()


class _Streamer:
    """Writes the tiled graph in the order of the old one. ``scalings``: scale and shift of each normalization whose sweep is written."""

    def __init__(self, graph: ModelGraph, axes: Axes, grid: TileGrid, plan: CheckpointSelection) -> None:
        self.graph, self.axes, self.grid, self.plan = graph, axes, grid, plan
        self.writer = TileWriter(graph, axes, len(grid.counts))
        self.scalings: dict[fx.Node, Scaling] = {}
        self.order = {node: index for index, node in enumerate(graph.graph.nodes)}

    def run(self) -> ModelGraph:
        with fake_mode(self.graph.graph):
            for node in self.graph.graph.nodes:
                if node.op == "placeholder":
                    self.writer.placeholder(node)
                elif node.op == "output":
                    self.writer.target.output(fx.map_arg(node.args[0], self.writer.whole.__getitem__))
                elif node in self.plan.whole:
                    self.writer.copy(node)
                else:
                    if node in self.plan.statistics:
                        self._gather_statistics(node)
                    if node in self.plan.swept:
                        self._sweep(node)
            self._draw_in_rows()
        tiled = rewritten(self.graph, self.writer.target, {old.name: new.name for old, new in self.writer.whole.items()}, "Streamed")
        tiled.module.meta[TEMPLATES] = templates_of(self.graph.module)  # equal tiles of other budgets are known, too
        return tiled

    def _draw_in_rows(self) -> None:
        """Make the inputs of draws contiguous where sweeps fill row-major memory for a value that had other strides."""
        target = self.writer.target
        if draws(target):
            anew = {new for old, new in self.writer.whole.items() if _strides(old) != _strides(new)}
            draw_in_rows(target, {node.name for node in laid_out_anew(target, anew.__contains__)})

    def _sweep(self, node: fx.Node) -> None:
        """Compute a value whole: each tile into its slice of a buffer; a reduction over space as the sum of its tiles."""
        call = self.plan.calls[node]
        if call.kind == "reduction":
            self.writer.whole[node] = self._reduce(call)
            return
        buffer = self.writer.buffer(node)
        for tile in tiles_of(self.grid, [span is not None for span in call.spans]):
            box = self.grid.owned(call.spans, tile)
            with self._in_tile(node, tile) as label:
                value = self._tile(node, box, label)
            self.writer.put(buffer, call.spans, box, value, node)
        self.writer.whole[node] = buffer

    @contextlib.contextmanager
    def _in_tile(self, node: fx.Node, tile: Sequence[int]) -> Iterator[str]:
        """Mark the calls written while active as those of one tile of a sweep; yields the name of the tile."""
        label = f"tile{'_'.join(str(index) for index in tile)}_of_{node.name}"
        self.writer.tile = label
        yield label
        self.writer.tile = ""

    def _tile(self, node: fx.Node, box: Box, label: str) -> fx.Node:
        """Write one tile of a value, with all tiles of other values that it depends on, from whole values."""
        tiles: dict[fx.Node, tuple[fx.Node, Box]] = {}
        for needed, needed_box in demand({node: box}, self.plan.calls, self.axes, self.order, self.writer.whole).items():
            tiles[needed] = (self._compute(needed, needed_box, tiles, label), needed_box)
        result, _ = tiles[node]
        return result

    def _compute(self, node: fx.Node, box: Box, tiles: Tiles, label: str) -> fx.Node:
        """Write one call for a box of its result, from tiles of its operands; a normalization only scales and shifts here."""
        call = self.plan.calls[node]
        if call.kind == "statistics":
            (x, *_) = self.axes.operands[node.name]
            return apply_scaling(self.writer, node, self.writer.part(x, tiles, call.reads[0], box), self.scalings[node], label)
        return self.writer.call(call, box, tiles, label)

    def _gather_statistics(self, node: fx.Node) -> None:
        """Write the sweep that computes the statistics of a normalization, from those of its tiles."""
        call = self.plan.calls[node]
        (x, *_) = self.axes.operands[node.name]
        statistics = []
        for tile in tiles_of(self.grid, [span is not None for span in call.spans]):
            box = self.grid.owned(call.spans, tile)
            with self._in_tile(node, tile) as label:
                part = self.writer.part(x, self._operand_tile(x, box, label), call.reads[0], box)
                statistics.append((fraction(box, call.spans), tile_statistics(self.writer, node, part, label)))
        self.scalings[node] = merge_statistics(self.writer, node, statistics)

    def _operand_tile(self, node: fx.Node, box: Box, label: str) -> Tiles:
        """Write the tile of an operand that is not whole; empty for one that is."""
        return {} if node in self.writer.whole else {node: (self._tile(node, box, label), box)}

    def _reduce(self, call: TileCall) -> fx.Node:
        """Write a reduction over space: reduce each tile of the operands, and combine the results."""
        grid_dimensions = range(len(self.grid.counts))
        reads = [next((operand[index] for operand in call.reads if operand[index] is not None), None) for index in grid_dimensions]
        cut = [read is not None and call.factors[index] is not None for index, read in enumerate(reads)]
        total: fx.Node | None = None
        for tile in tiles_of(self.grid, cut):
            box = tuple(
                self.grid.part(read.span, index, tile) if read is not None and cut[index] else None for index, read in enumerate(reads)
            )
            with self._in_tile(call.node, tile) as label:
                part = self._reduced_tile(call, reads, box, label, first=total is None)
            total = part if total is None else self.writer.emit(_combining_op(call), (total, part), f"{part.name}_total", call.node)
        assert total is not None
        return total

    def _reduced_tile(self, call: TileCall, reads: Sequence[Read | None], box: Box, label: str, *, first: bool) -> fx.Node:
        """Write the reduction of one tile; for a mean, weighted with the tile's fraction of the elements."""
        tiles: dict[fx.Node, tuple[fx.Node, Box]] = {}
        for operand, need in zip(self.axes.operands[call.node.name], call.needs(box), strict=True):
            tiles.update(self._operand_tile(operand, need, label))
        weight = 1.0
        for index, read in enumerate(reads):
            interval, factor = box[index], call.factors[index]
            if read is not None and interval is not None and factor is not None and call.loops.factors[factor].reduction == "mean":
                weight *= (interval[1] - interval[0]) / read.span.size
        part = self.writer.call(call, box, tiles, label, first=first)
        return part if weight == 1.0 else self.writer.emit(aten.mul.Tensor, (part, weight), f"{part.name}_share", call.node)


def _strides(node: fx.Node) -> list[Size]:
    """Return the strides of a value; [] if it is no tensor."""
    value = node.meta.get("val")
    return [size_of(stride) for stride in value.stride()] if isinstance(value, Tensor) else []


def _combining_op(call: TileCall) -> Any:
    """Return the op that combines the reductions of two tiles: maximum, minimum, or add (for sums and weighted means)."""
    kinds = {call.loops.factors[factor].reduction for factor in call.factors if factor is not None}
    return {"max": aten.maximum.default, "min": aten.minimum.default}.get(str(next(iter(kinds))), aten.add.Tensor)


_TILED: WeakKeyDictionary[fx.GraphModule, dict[tuple[tuple[int, ...], int], ModelGraph]] = WeakKeyDictionary()
"""Tiled graphs of each model by tiles and budget, for the lifetime of the model's graph."""


def tiled_graph(graph: ModelGraph, tiles: tuple[int, ...], budget: int) -> ModelGraph:
    """Return ``stream``'s tiled graph, cached: the same object for equal arguments. Without tiles, return the graph itself.

    Args:
        tiles: number of tiles along each dimension of space, outermost first.
        budget: bytes up to which values are computed whole.
    """
    if not tiles:
        return graph
    cached = _TILED.setdefault(graph.module, {})
    if (tiles, budget) not in cached:
        axes = find_axes(graph.graph)
        cached[tiles, budget] = stream(graph, axes, grid_over(axes, tiles), budget)
    return cached[tiles, budget]


def grid_over(axes: Axes, counts: Sequence[int]) -> TileGrid:
    """Return the grid with a number of tiles along each dimension of space, outermost first.

    An axis that belongs to several of these dimensions is cut along the outermost.

    Raises:
        ConfigError: space has fewer dimensions.
    """
    space = list(space_axes(axes).values())
    if len(counts) > len(space):
        raise ConfigError(
            f"a grid of tiles {tuple(counts)} has {len(counts)} dimensions, the space of this model has {len(space)}",
            remedy=f"pass {len(space)} numbers, or one" if space else 'mode "tile" is for models with convolutions or pooling',
        )
    cut_axes: list[frozenset[int]] = []
    for dimension_axes in space[: len(counts)]:
        cut_axes.append(frozenset(dimension_axes).difference(*cut_axes))
    return TileGrid(tuple(counts), tuple(cut_axes))
