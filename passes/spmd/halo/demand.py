"""Choose the values that a tiled graph stores whole, and find the boxes of all other values that tiles need."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.analysis.axes import Axes, returned_values
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.graph import ModelGraph
from passes.spmd.halo.boxes import Box, TileGrid, united
from passes.spmd.halo.call_tiles import TileCall, tile_call


@dataclass(frozen=True)
class CheckpointSelection:
    """The values that a tiled graph stores whole.

    Attributes:
        calls: all calls that tiles may compute.
        whole: calls that are computed whole, as in the model.
        swept: calls whose values are computed tile by tile, in a sweep, and stored whole.
        statistics: normalisations whose statistics are computed in a sweep.
    """

    calls: Mapping[fx.Node, TileCall]
    whole: frozenset[fx.Node]
    swept: frozenset[fx.Node]
    statistics: frozenset[fx.Node]


class _Selector:
    """Decides which values are stored whole, in the order of the graph."""

    def __init__(self, graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> None:
        self._graph, self._axes, self._budget = graph, axes, budget
        computing = [node for node in graph.computing_nodes() if node.op == "call_function"]
        self._calls = {call.node: call for call in filter(None, (tile_call(node, axes, grid) for node in computing))}
        self._stored = {node for node in graph.graph.nodes if node.op == "placeholder"}
        self._whole: set[fx.Node] = set()
        self._swept: set[fx.Node] = set()
        self._statistics: set[fx.Node] = set()

    def select(self) -> CheckpointSelection:
        """Decide for all calls, then store the results of the graph."""
        for node in self._graph.computing_nodes():
            self._decide(node)
        for node in returned_values(self._graph.graph.output_node()):
            self._store(node)
        for node in [node for node in self._swept if self._calls[node].kind == "reduction"]:
            if all(map(self._is_stored, self._axes.operands[node.name])):  # a later call reads them whole, or they are returned
                self._swept.remove(node)
                self._whole.add(node)
        return CheckpointSelection(self._calls, frozenset(self._whole), frozenset(self._swept), frozenset(self._statistics))

    def _store(self, node: fx.Node) -> None:
        """Store a value whole, by a sweep if it is not stored already."""
        if not self._is_stored(node):
            self._stored.add(node)
            self._swept.add(node)

    def _is_stored(self, node: fx.Node) -> bool:
        return node in self._stored or not isinstance(node.meta.get("val"), Tensor)

    def _decide(self, node: fx.Node) -> None:
        """Store the operands that a call reads whole; compute its result whole, or in a sweep, if it is small or cannot be tiled."""
        call = self._calls.get(node)
        operands = node.all_input_nodes if call is None else self._axes.operands[node.name]
        for place, operand in enumerate(operands):
            reads = () if call is None else call.reads[place]
            if call is None or any(read is not None and read.factor is None for read in reads):
                self._store(operand)
        stores_result = call is None or call.kind == "reduction" or self._fits(node)
        if stores_result and all(map(self._is_stored, operands)):
            self._whole.add(node)
            self._stored.add(node)
            return
        if call is not None and call.kind == "statistics":
            self._statistics.add(node)
        if call is not None and stores_result:
            self._store(node)

    def _fits(self, node: fx.Node) -> bool:
        return bytes_of(node.meta["val"], self._graph.batch, self._graph.batch_size) <= self._budget


def select_checkpoints(graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> CheckpointSelection:
    """Store whole the values of at most ``budget`` bytes, and those that a call or the output reads whole."""
    return _Selector(graph, axes, grid, budget).select()


def tiles_of(grid: TileGrid, cut: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return the coordinates of all tiles; one along grid dimensions for which ``cut`` is False."""
    counts = (count if is_cut else 1 for count, is_cut in zip(grid.counts, cut, strict=True))
    return list(itertools.product(*map(range, counts)))


def demand(
    targets: Mapping[fx.Node, Box],
    calls: Mapping[fx.Node, TileCall],
    axes: Axes,
    order: Mapping[fx.Node, int],
    whole: Collection[fx.Node] = frozenset(),
) -> dict[fx.Node, Box]:
    """Return the box of each value that must be computed for the boxes ``targets``, these included, in the order of the graph.

    Args:
        calls: calls that are computed in boxes; operands that are not among them are left out.
        order: position of every node in the graph.
        whole: calls whose values are stored whole; they are left out, too.
    """
    boxes: dict[fx.Node, Box] = dict(targets)
    pending = set(targets)
    done: list[fx.Node] = []
    while pending:
        node = max(pending, key=order.__getitem__)  # all its readers are done
        pending.remove(node)
        done.append(node)
        call = calls[node]
        for operand, need in zip(axes.operands[node.name], call.needs(boxes[node]), strict=True):
            if operand in calls and operand not in whole:
                boxes[operand] = united(boxes.get(operand), need)
                pending.add(operand)
    return {node: boxes[node] for node in reversed(done)}
