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

__all__ = ["StreamSize", "stream_size"]


@dataclass(frozen=True)
class StreamSize:
    """What streaming takes.

    Attributes:
        peak: bytes held at once, beside inputs and parameters, and beside gradients of parameters.
        calls: how many calls a forward has.
    """

    peak: int
    calls: int


@dataclass(frozen=True)
class _Sweep:
    """One call or sweep that computes a whole value, or its statistics.

    Attributes:
        made: the value.
        reads: the whole values that are read.
        tile: peak bytes of one tile.
        recomputed: bytes of all values of one tile: its backward holds them all.
        calls: number of calls.
    """

    made: fx.Node
    reads: frozenset[fx.Node]
    tile: int
    recomputed: int
    calls: int


def stream_size(graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> StreamSize:
    """Return the peak memory for a budget: of a training step if the model trains, else of a forward."""
    measure = _Measure(graph, axes, grid, select_checkpoints(graph, axes, grid, budget))
    sweeps = list(measure.sweeps())
    return StreamSize(measure.step_peak(sweeps) if graph.training else measure.forward_peak(sweeps), sum(sweep.calls for sweep in sweeps))


class _Measure:
    """Walks the sweeps: of each, the tile in the middle, which has neighbours on all sides."""

    def __init__(self, graph: ModelGraph, axes: Axes, grid: TileGrid, keeping: CheckpointSelection) -> None:
        self._graph, self._axes, self._grid, self._keeping = graph, axes, grid, keeping
        self._order = {node: place for place, node in enumerate(graph.graph.nodes)}
        self._whole = {node for node in graph.graph.nodes if node.op == "placeholder"}
        self._given = frozenset(self._whole)

    def forward_peak(self, sweeps: Sequence[_Sweep]) -> int:
        """Return the peak of a forward, which frees a whole value after its last reader."""
        returned = returned_values(self._graph.graph.output_node())
        lives = lifetimes([*((sweep.made, *sweep.reads) for sweep in sweeps), returned])
        held = held_at(len(sweeps) + 1, ((life, self._kept_bytes(node)) for node, life in lives.items()))
        return max((size + sweep.tile for size, sweep in zip(held, sweeps, strict=False)), default=0)

    def step_peak(self, sweeps: Sequence[_Sweep]) -> int:
        """Return the peak of a forward that saves every whole value, and a backward that frees them one by one.

        made     first read    last read              in the backward, from the right to the left:
         |           |             |
         .           ===================== value      until its first reader has gone backward
         ===========================       gradient   from its last reader to its maker
        """
        n_sweeps = len(sweeps)
        sizes = {sweep.made: self._kept_bytes(sweep.made) for sweep in sweeps}
        made = {sweep.made: place for place, sweep in enumerate(sweeps)}
        read = lifetimes([*(sweep.reads for sweep in sweeps), returned_values(self._graph.graph.output_node())])
        values = [(Lifetime(read[node].first, n_sweeps), size) for node, size in sizes.items() if node in read]
        gradients = [(Lifetime(made[node], read[node].last), size) for node, size in sizes.items() if node in read]
        backward = zip(sweeps, held_at(n_sweeps + 1, [*values, *gradients]), strict=False)
        forward = sum(sizes.values()) + max(sweep.tile for sweep in sweeps)
        return max(forward, *(2 * sweep.recomputed + size for sweep, size in backward))

    def _kept_bytes(self, node: fx.Node) -> int:
        return self._bytes(node, None) if node in self._whole and node not in self._given else 0

    def sweeps(self) -> Iterator[_Sweep]:
        """Yield the sweeps in the order of the graph."""
        keeping = self._keeping
        for node in self._graph.computing_nodes():
            if node in keeping.whole:
                self._whole.add(node)
                yield _Sweep(node, frozenset(node.all_input_nodes), 0, 0, 1)
                continue
            if node in keeping.statistics:
                (x, *_) = self._axes.operands[node.name]
                yield self._sweep(node, x, keeping.calls[node])
            if node in keeping.swept:
                found = self._sweep(node, node, keeping.calls[node])
                self._whole.add(node)
                yield found

    def _sweep(self, made: fx.Node, target: fx.Node, call: TileCall) -> _Sweep:
        if call.kind == "reduction":
            (target, *_) = [operand for operand in self._axes.operands[made.name] if operand not in self._whole]
            call = self._keeping.calls[target]
        cut = [span is not None for span in call.spans]
        tiles = tiles_of(self._grid, cut)
        box = self._grid.owned(call.spans, tiles[len(tiles) // 2])
        if target in self._whole:
            return _Sweep(made, frozenset({target}), self._bytes(target, box), self._bytes(target, box), len(tiles))
        boxes = demand({target: box}, self._keeping.calls, self._axes, self._order, self._whole)
        reads = {operand for node in boxes for operand in self._axes.operands[node.name] if operand in self._whole}
        recomputed = sum(self._bytes(node, box) for node, box in boxes.items())
        return _Sweep(made, frozenset(reads), self._chain(boxes), recomputed, len(boxes) * len(tiles))

    def _chain(self, boxes: Mapping[fx.Node, Box]) -> int:
        """Return the peak bytes of one tile, with the pieces that a call slices from its operands."""
        lives = lifetimes((node, *self._axes.operands[node.name]) for node in boxes)
        held = held_at(len(boxes), ((life, self._bytes(node, boxes[node])) for node, life in lives.items() if node in boxes))
        return max((size + self._pieces(node, box) for (node, box), size in zip(boxes.items(), held, strict=True)), default=0)

    def _pieces(self, node: fx.Node, box: Box) -> int:
        """Bytes of the pieces that a call takes of what it reads."""
        needs = zip(self._axes.operands[node.name], self._keeping.calls[node].needs(box), strict=True)
        return sum(self._bytes(operand, need) for operand, need in needs if any(each is not None for each in need))

    def _bytes(self, node: fx.Node, box: Box | None) -> int:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return 0
        size = bytes_of(value, self._graph.batch, self._graph.batch_size)
        call = self._keeping.calls.get(node)
        if box is None or call is None:
            return size
        return int(size * fraction(box, call.spans))
