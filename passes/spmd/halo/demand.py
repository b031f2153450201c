"""Choose the values that a tiled graph keeps whole, and find the boxes that tiles need of all other values."""

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

__all__ = ["CheckpointSelection", "demand", "tiles_of", "what_to_keep"]


@dataclass(frozen=True)
class CheckpointSelection:
    """The values that a tiled graph keeps whole.

    Attributes:
        calls: all calls that tiles may compute.
        whole: calls that are computed whole, as in the model.
        swept: calls whose values are computed whole tile by tile, in a sweep.
        statistics: normalisations whose statistics are computed in a sweep.
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

    def plan(self) -> CheckpointSelection:
        for node in self._graph.computing_nodes():
            self._decide(node)
        for node in returned_values(self._graph.graph.output_node()):
            self._keep(node)
        for node in [node for node in self._swept if self._calls[node].kind == "reduction"]:
            if all(map(self._is_kept, self._axes.operands[node.name])):  # a later call reads them whole, or they are returned
                self._swept.remove(node)
                self._whole.add(node)
        return CheckpointSelection(self._calls, frozenset(self._whole), frozenset(self._swept), frozenset(self._statistics))

    def _keep(self, node: fx.Node) -> None:
        """Keep a value whole: computed by a sweep, if it is not whole already."""
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


def what_to_keep(graph: ModelGraph, axes: Axes, grid: TileGrid, budget: int) -> CheckpointSelection:
    """Keep whole the values of at most ``budget`` bytes, and those that a call or the output reads whole."""
    return _Keeper(graph, axes, grid, budget).plan()


def tiles_of(grid: TileGrid, cut: Sequence[bool]) -> list[tuple[int, ...]]:
    """The coordinates of all tiles; along grid dimensions that are not cut, there is one."""
    return list(itertools.product(*(range(count if each else 1) for count, each in zip(grid.counts, cut, strict=True))))


def demand(
    targets: Mapping[fx.Node, Box],
    calls: Mapping[fx.Node, TileCall],
    axes: Axes,
    order: Mapping[fx.Node, int],
    whole: Collection[fx.Node] = frozenset(),
) -> dict[fx.Node, Box]:
    """Return the boxes of all values that some boxes are computed from, these included, in the order of the graph.

    Args:
        targets: the wanted boxes.
        calls: calls that are computed in boxes; operands that are not among them are left out.
        order: place of every node in the graph.
        whole: calls whose values are whole already; they are left out, too.
    """
    boxes: dict[fx.Node, Box] = dict(targets)
    waiting = set(targets)
    done: list[fx.Node] = []
    while waiting:
        node = max(waiting, key=order.__getitem__)
        waiting.remove(node)
        done.append(node)
        call = calls[node]
        for operand, need in zip(axes.operands[node.name], call.needs(boxes[node]), strict=True):
            if operand in calls and operand not in whole:
                boxes[operand] = united(boxes.get(operand), need)
                waiting.add(operand)
    return {node: boxes[node] for node in reversed(done)}
