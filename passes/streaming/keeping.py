"""What is kept whole where a graph is streamed, what tiles need of the rest, and how much memory that holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.axes import Axes, returned_values
from passes.ir.graph import ModelGraph
from passes.size_expression import bytes_of
from passes.streaming.calls import TileCall, tile_call
from passes.streaming.spans import Box, TileGrid, united

__all__ = ["Keeping", "StreamSize", "demand", "stream_size", "tiles_of", "what_to_keep"]


@dataclass(frozen=True)
class Keeping:
    """What is kept.

    Attributes:
        calls: how tiles see the calls that they may compute.
        whole: calls that are computed at once, as they are.
        swept: calls whose values a sweep makes whole.
        statistics: normalisations whose statistics a sweep gathers.
    """

    calls: Mapping[fx.Node, TileCall]
    whole: frozenset[fx.Node]
    swept: frozenset[fx.Node]
    statistics: frozenset[fx.Node]


class _Keeper:
    """Decides what is kept, in the order of the graph."""

    def __init__(self, graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> None:
        self._graph, self._axes, self._budget = graph, axes, budget
        computing = [node for node in graph.computing_nodes() if node.op == "call_function"]
        self._calls = {node: call for node in computing if (call := tile_call(node, axes, grid)) is not None}
        self._kept = {node for node in graph.graph.nodes if node.op == "placeholder"}
        self._whole: set[fx.Node] = set()
        self._swept: set[fx.Node] = set()
        self._statistics: set[fx.Node] = set()

    def plan(self) -> Keeping:
        for node in self._graph.computing_nodes():
            self._decide(node)
        for node in returned_values(self._graph.graph.output_node()):
            self._keep(node)
        return Keeping(self._calls, frozenset(self._whole), frozenset(self._swept), frozenset(self._statistics))

    def _keep(self, node: fx.Node) -> None:
        """What somebody needs whole."""
        if not self._is_kept(node):
            self._kept.add(node)
            self._swept.add(node)

    def _is_kept(self, node: fx.Node) -> bool:
        return node in self._kept or not isinstance(node.meta.get("val"), Tensor)

    def _decide(self, node: fx.Node) -> None:
        call = self._calls.get(node)
        operands = node.all_input_nodes if call is None else self._axes.operands[node.name]
        for place, operand in enumerate(operands):
            reads = () if call is None else call.reads[place]
            if call is None or any(read is not None and read.factor is None for read in reads):
                self._keep(operand)
        small = call is None or call.kind == "reduction" or self._fits(node)
        if small and all(map(self._is_kept, operands)):
            self._whole.add(node)
            self._kept.add(node)
            return
        if call is not None and call.kind == "statistics":
            self._statistics.add(node)
        if call is not None and small:
            self._keep(node)

    def _fits(self, node: fx.Node) -> bool:
        return bytes_of(node.meta["val"], self._graph.batch, self._graph.batch_size) <= self._budget


def what_to_keep(graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> Keeping:
    """Keep whole what is no larger than a budget of bytes, and what somebody needs whole."""
    return _Keeper(graph, axes, grid, budget).plan()


def tiles_of(grid: TileGrid, cut: Sequence[bool]) -> list[tuple[int, ...]]:
    """The coordinates of all tiles; along grid dimensions that are not cut, there is one."""
    return list(itertools.product(*(range(count if each else 1) for count, each in zip(grid.counts, cut, strict=True))))


def demand(
    target: fx.Node, box: Box, keeping: Keeping, axes: Axes, order: Mapping[fx.Node, int], whole: Collection[fx.Node]
) -> dict[fx.Node, Box]:
    """What one tile of a value needs of every value that is not whole, in the order in which it is computed.

    Args:
        order: place of every node in the graph.
        whole: what is whole by now.
    """
    boxes: dict[fx.Node, Box] = {target: box}
    waiting = {target}
    done: list[fx.Node] = []
    while waiting:
        node = max(waiting, key=order.__getitem__)
        waiting.remove(node)
        done.append(node)
        call = keeping.calls[node]
        for operand, need in zip(axes.operands[node.name], call.needs(boxes[node]), strict=True):
            if operand not in whole:
                boxes[operand] = united(boxes.get(operand), need)
                waiting.add(operand)
    return {node: boxes[node] for node in reversed(done)}


# -- how much memory it takes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamSize:
    """What streaming takes, by the boxes of tiles; no graph is written.

    Attributes:
        peak: bytes held at once, beside inputs and parameters.
        calls: how many calls there are.
    """

    peak: int
    calls: int


def stream_size(graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> StreamSize:
    """How much memory a budget would take."""
    keeping = what_to_keep(graph, axes, grid, budget)
    return _Measure(graph, axes, grid, keeping).run()


class _Measure:
    """Walks the sweeps: of each, the tile in the middle, which has neighbours on all sides."""

    def __init__(self, graph: ModelGraph, axes: Axes, grid: TileGrid, keeping: Keeping) -> None:
        self._graph, self._axes, self._grid, self._keeping = graph, axes, grid, keeping
        self._order = {node: place for place, node in enumerate(graph.graph.nodes)}
        self._whole = {node for node in graph.graph.nodes if node.op == "placeholder"}
        self._given = frozenset(self._whole)

    def run(self) -> StreamSize:
        steps = list(self._steps())
        last: dict[fx.Node, int] = {}
        for place, (made, reads, _, _) in enumerate(steps):
            last.update(dict.fromkeys((made, *reads), place))
        last.update(dict.fromkeys(returned_values(self._graph.graph.output_node()), len(steps)))
        live, peak = 0, 0
        for place, (made, reads, inside, _) in enumerate(steps):
            size = self._bytes(made, None) if made in self._whole else 0  # statistics are small
            peak = max(peak, live + size + inside)
            live += size
            over = {node for node in (made, *reads) if last[node] == place and node in self._whole and node not in self._given}
            live -= sum(self._bytes(node, None) for node in over)
        return StreamSize(peak, sum(calls for *_, calls in steps))

    def _steps(self) -> Iterator[tuple[fx.Node, frozenset[fx.Node], int, int]]:
        """What each makes whole, which whole values it reads, what its tile holds besides, how many calls it has."""
        keeping = self._keeping
        for node in self._graph.computing_nodes():
            if node in keeping.whole:
                self._whole.add(node)
                yield node, frozenset(node.all_input_nodes), 0, 1
                continue
            if node in keeping.statistics:
                (x, *_) = self._axes.operands[node.name]
                yield self._sweep(node, x, keeping.calls[node])
            if node in keeping.swept:
                found = self._sweep(node, node, keeping.calls[node])
                self._whole.add(node)
                yield found

    def _sweep(self, made: fx.Node, target: fx.Node, call: TileCall) -> tuple[fx.Node, frozenset[fx.Node], int, int]:
        if call.kind == "reduction":
            (target, *_) = [operand for operand in self._axes.operands[made.name] if operand not in self._whole]
            call = self._keeping.calls[target]
        cut = [span is not None for span in call.spans]
        tiles = tiles_of(self._grid, cut)
        box = self._grid.owned(call.spans, tiles[len(tiles) // 2])
        if target in self._whole:
            return made, frozenset({target}), self._bytes(target, box), len(tiles)
        boxes = demand(target, box, self._keeping, self._axes, self._order, self._whole)
        reads = {operand for node in boxes for operand in self._axes.operands[node.name] if operand in self._whole}
        return made, frozenset(reads), self._chain(boxes), len(boxes) * len(tiles)

    def _chain(self, boxes: Mapping[fx.Node, Box]) -> int:
        """The most that one tile holds at once; of what a call reads there may be a piece."""
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(boxes):
            last.update(dict.fromkeys((node, *self._axes.operands[node.name]), place))
        live, peak = 0, 0
        for place, node in enumerate(boxes):
            size = self._bytes(node, boxes[node])
            call = self._keeping.calls[node]
            needs = zip(self._axes.operands[node.name], call.needs(boxes[node]), strict=True)
            pieces = sum(self._bytes(operand, need) for operand, need in needs if any(each is not None for each in need))
            peak = max(peak, live + size + pieces)
            live += size
            live -= sum(
                self._bytes(each, boxes[each]) for each in {node, *self._axes.operands[node.name]} if each in boxes and last[each] == place
            )
        return peak

    def _bytes(self, node: fx.Node, box: Box | None) -> int:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return 0
        size = bytes_of(value, self._graph.batch, self._graph.batch_size)
        call = self._keeping.calls.get(node)
        if box is None or call is None:
            return size
        share = math.prod(
            (own[1] - own[0]) / span.size for own, span in zip(box, call.spans, strict=True) if own is not None and span is not None
        )
        return int(size * share)
