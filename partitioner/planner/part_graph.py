"""The graph that parts of a model are cut from: repeated blocks folded, and how its units repeat."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cost_models.graph_cost import Reading, read_graph
from partitioner.planner.cut_points import CutPoints, find_cut_points
from partitioner.planner.unfold import Unfolding, unfolding_of
from partitioner.planner.unit_prices import Triple
from passes.fold_repeats import Folded
from passes.ir.graph import ModelGraph
from passes.size_expression import bytes_of

__all__ = ["PartGraph", "part_graph", "unfolded"]


@dataclass(frozen=True, eq=False)
class PartGraph:
    """A graph that parts are cut from.

    Attributes:
        graph: of the model, repeated blocks folded.
        points: its units.
        whole: of the model.
        unfolding: how the units repeat; None where nothing is folded.
        known_seconds: of operations, by kind of device and microbatch size: worked out once for all parts, meshes and policies.
    """

    graph: ModelGraph
    points: CutPoints
    whole: ModelGraph
    unfolding: Unfolding | None = None
    known_seconds: dict[Hashable, Triple] = field(default_factory=dict)

    @property
    def all_points(self) -> CutPoints:
        """The units of the whole model."""
        return self.points if self.unfolding is None else self.unfolding.points

    def reading(self, *, differentiate: bool) -> Reading:
        """What prices of all parts have in common."""
        return self._differentiated if differentiate else self._alone

    @cached_property
    def _differentiated(self) -> Reading:
        return read_graph(self.graph, differentiate=True)

    @cached_property
    def _alone(self) -> Reading:
        return read_graph(self.graph, differentiate=False)

    def copies(self, name: str) -> tuple[str, ...]:
        """The nodes that a node of the folded graph stands for."""
        return (name,) if self.unfolding is None else self.unfolding.copies.get(name, (name,))


def unfolded(graph: ModelGraph) -> PartGraph:
    """A graph as it is."""
    return PartGraph(graph, find_cut_points(graph), graph)


def part_graph(folded: Folded, whole: ModelGraph, prepare: Callable[[ModelGraph], ModelGraph]) -> PartGraph:
    """A graph to cut parts from, written anew by ``prepare``; unfolded where the copies do not begin with units of their own."""
    if folded.n_copies > 1:
        graph = prepare(folded.graph)
        points = _thinned(graph, folded)
        unfolding = unfolding_of(points, _with_written(folded, graph), folded.following)
        if unfolding is not None:
            return PartGraph(graph, points, whole, unfolding)
    graph = prepare(whole)
    return PartGraph(graph, find_cut_points(graph, frozenset(node.name for node in whole.graph.nodes)), graph)


def _with_written(folded: Folded, graph: ModelGraph) -> dict[str, tuple[str, ...]]:
    """The copies of each node of the block, and of each that was written in the place of one: it bears that name in front."""
    known = {node.name for node in folded.graph.graph.nodes}
    found = dict(folded.copies)
    for name in (node.name for node in graph.graph.nodes if node.name not in known):
        parts = name.split("_")
        fronts = ("_".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        source = next((front for front in fronts if front in known), None)
        if source in folded.copies:
            found[name] = tuple(f"{copy}{name.removeprefix(source)}" for copy in folded.copies[source])
    return found


def _thinned(graph: ModelGraph, folded: Folded) -> CutPoints:
    """The units of a folded graph; where copies are so many that cuts are plenty, only where least crosses inside of a copy."""
    names = frozenset(node.name for node in folded.graph.graph.nodes)
    points = find_cut_points(graph, names)
    in_block = [index for index, unit in enumerate(points.units) if unit[0] in folded.copies]
    if len(in_block) * folded.n_copies < _PLENTY:
        return points
    crossing = np.zeros(len(points.units))
    nodes = {node.name: node for node in graph.graph.nodes}
    for value in points.values:
        size = bytes_of(nodes[value.node].meta["val"], graph.batch, graph.batch_size)
        crossing[value.producer + 1 : value.readers[-1] + 1] += size
    least = crossing[in_block].min()
    return find_cut_points(graph, frozenset(unit[0] for unit, size in zip(points.units, crossing, strict=True) if size <= least * 1.01))


_PLENTY = 60
"""Units from which on cuts are considered only where least crosses."""
