"""Predict the peak memory of a tiled graph from the boxes of its tiles, without writing the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.analysis.axes import Axes, returned_values
from passes.analysis.lifetimes import Lifetime, held_at, lifetimes
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.graph import ModelGraph
from passes.spmd.halo.boxes import Box, TileGrid, fraction
from passes.spmd.halo.call_tiles import TileCall
from passes.spmd.halo.demand import CheckpointSelection, demand, select_checkpoints, tiles_of


@dataclass(frozen=True)
class StreamSize:
    """Memory and calls of a tiled graph.

    Attributes:
        peak: peak bytes, without inputs, parameters and gradients of parameters.
        calls: number of calls of a forward.
    """

    peak: int
    calls: int


@dataclass(frozen=True)
class _Sweep:
    """One call or sweep that computes a whole value, or its statistics.

    Attributes:
        result: the value.
        reads: the whole values that are read.
        tile: peak bytes of one tile.
        recomputed: bytes of all values of one tile: its backward holds them all.
        calls: number of calls.
    """

    result: fx.Node
    reads: frozenset[fx.Node]
    tile: int
    recomputed: int
    calls: int


def stream_size(graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> StreamSize:
    """Return the peak memory for a budget: of a training step if the model trains, else of a forward."""
    predictor = _PeakPredictor(graph, axes, grid, select_checkpoints(graph, axes, grid, budget))
    sweeps = list(predictor.sweeps())
    peak = predictor.step_peak(sweeps) if graph.training else predictor.forward_peak(sweeps)
    return StreamSize(peak, sum(sweep.calls for sweep in sweeps))


class _PeakPredictor:
    """Adds up bytes sweep by sweep. The tile in the middle, which has neighbours on all sides, stands for all tiles of a sweep."""

    def __init__(self, graph: ModelGraph, axes: Axes, grid: TileGrid, plan: CheckpointSelection) -> None:
        self._graph, self._axes, self._grid, self._plan = graph, axes, grid, plan
        self._order = {node: index for index, node in enumerate(graph.graph.nodes)}
        self._placeholders = frozenset(node for node in graph.graph.nodes if node.op == "placeholder")
        self._whole = set(self._placeholders)

    def forward_peak(self, sweeps: Sequence[_Sweep]) -> int:
        """Return the peak of a forward, which frees a whole value after its last reader."""
        returned = returned_values(self._graph.graph.output_node())
        lives = lifetimes([*((sweep.result, *sweep.reads) for sweep in sweeps), returned])
        live_bytes = held_at(len(sweeps) + 1, ((life, self._whole_bytes(node)) for node, life in lives.items()))
        return max((size + sweep.tile for size, sweep in zip(live_bytes, sweeps, strict=False)), default=0)

    def step_peak(self, sweeps: Sequence[_Sweep]) -> int:
        """Return the peak of a forward that saves every whole value, and a backward that frees them one by one.

        computed   first read   last read             the backward goes from right to left:
         |           |             |
         .           ===================== value      is freed after the backward of its first reader
         ===========================       gradient   lives from the backward of the last reader to its own sweep's
        """
        n_sweeps = len(sweeps)
        sizes = {sweep.result: self._whole_bytes(sweep.result) for sweep in sweeps}
        computed_at = {sweep.result: index for index, sweep in enumerate(sweeps)}
        read = lifetimes([*(sweep.reads for sweep in sweeps), returned_values(self._graph.graph.output_node())])
        values = [(Lifetime(read[node].first, n_sweeps), size) for node, size in sizes.items() if node in read]
        gradients = [(Lifetime(computed_at[node], read[node].last), size) for node, size in sizes.items() if node in read]
        backward = zip(sweeps, held_at(n_sweeps + 1, [*values, *gradients]), strict=False)
        forward = sum(sizes.values()) + max(sweep.tile for sweep in sweeps)
        return max(forward, *(2 * sweep.recomputed + size for sweep, size in backward))

    def _whole_bytes(self, node: fx.Node) -> int:
        """Return the bytes of a value that is computed whole; 0 for placeholders and tiled values."""
        return self._bytes(node, None) if node in self._whole and node not in self._placeholders else 0

    def sweeps(self) -> Iterator[_Sweep]:
        """Yield the sweeps in the order of the graph."""
        for node in self._graph.computing_nodes():
            if node in self._plan.whole:
                self._whole.add(node)
                yield _Sweep(node, frozenset(node.all_input_nodes), 0, 0, 1)
                continue
            if node in self._plan.statistics:
                (x, *_) = self._axes.operands[node.name]
                yield self._sweep(node, x, self._plan.calls[node])
            if node in self._plan.swept:
                sweep = self._sweep(node, node, self._plan.calls[node])
                self._whole.add(node)
                yield sweep

    def _sweep(self, result: fx.Node, tiled: fx.Node, call: TileCall) -> _Sweep:
        """Return the sweep that computes ``result`` from the tiles of ``tiled``: the result itself, or an operand of statistics."""
        if call.kind == "reduction":
            (tiled, *_) = [operand for operand in self._axes.operands[result.name] if operand not in self._whole]
            call = self._plan.calls[tiled]
        tiles = tiles_of(self._grid, [span is not None for span in call.spans])
        box = self._grid.owned(call.spans, tiles[len(tiles) // 2])
        if tiled in self._whole:
            return _Sweep(result, frozenset({tiled}), self._bytes(tiled, box), self._bytes(tiled, box), len(tiles))
        boxes = demand({tiled: box}, self._plan.calls, self._axes, self._order, self._whole)
        reads = {operand for node in boxes for operand in self._axes.operands[node.name] if operand in self._whole}
        recomputed = sum(self._bytes(node, box) for node, box in boxes.items())
        return _Sweep(result, frozenset(reads), self._tile_peak(boxes), recomputed, len(boxes) * len(tiles))

    def _tile_peak(self, boxes: Mapping[fx.Node, Box]) -> int:
        """Return the peak bytes of one tile, with the pieces that a call slices from its operands."""
        lives = lifetimes((node, *self._axes.operands[node.name]) for node in boxes)
        live_bytes = held_at(len(boxes), ((life, self._bytes(node, boxes[node])) for node, life in lives.items() if node in boxes))
        return max((size + self._piece_bytes(node, box) for (node, box), size in zip(boxes.items(), live_bytes, strict=True)), default=0)

    def _piece_bytes(self, node: fx.Node, box: Box) -> int:
        """Return the bytes of the pieces that a call slices from its operands for a box of its result."""
        needs = zip(self._axes.operands[node.name], self._plan.calls[node].needs(box), strict=True)
        return sum(self._bytes(operand, need) for operand, need in needs if any(interval is not None for interval in need))

    def _bytes(self, node: fx.Node, box: Box | None) -> int:
        """Return the bytes of a box of a value; None: of the whole value. 0 for a size."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return 0
        size = bytes_of(value, self._graph.batch, self._graph.batch_size)
        call = self._plan.calls.get(node)
        if box is None or call is None:
            return size
        return int(size * fraction(box, call.spans))
