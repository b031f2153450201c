"""Start every collective as early and wait for it as late as the program allows, so that compute in between hides it.

    before                                  after

    dw2 = mm(...)                           dw2 = mm(...)
    dx = mm(...)                            pending = all_reduce([dw2])      as soon as dw2 is there
    dw1 = mm(...)                           dx = mm(...)
    pending = all_reduce([dw2])             dw1 = mm(...)
    sums = wait(pending)                    ...
    ...                                     sums = wait(pending)             in front of its first reader
    store(sums)                             store(sums)

All ranks of a group move theirs alike: their programs differ in numbers alone, and ``passes.verify`` proves what comes out. A start does
not move up past a call that writes in place, which might write what it sends.
"""

from __future__ import annotations

import operator

from torch import fx
from torch._ops import OpOverload

from passes.ir.communication import COLLECTIVES, wait
from passes.operators import written_arguments

__all__ = ["overlap_communication"]


def overlap_communication(graph: fx.Graph) -> None:
    """Reorder a program in place."""
    order = _Order(graph)
    nodes = [node for node in graph.nodes if node.op != "output"]
    for node in nodes:
        if not order.is_late(node):
            order.place(node)
    for node in nodes:
        order.place(node)  # what nobody reads is waited for at the end
    output = graph.output_node()
    for node in order.placed:
        output.prepend(node)
    graph.lint()


class _Order:
    """The new order, as far as it has been decided."""

    def __init__(self, graph: fx.Graph) -> None:
        self.placed: dict[fx.Node, None] = {}
        self._late = _late_nodes(graph)
        self._starts = _early_starts(graph, self._late)

    def is_late(self, node: fx.Node) -> bool:
        """Whether a node stands in front of its first reader, not where it stood."""
        return node in self._late

    def place(self, node: fx.Node) -> None:
        """Place a node behind what it reads, and behind it the collectives that it was the last to be ready for."""
        if node in self.placed:
            return
        for source in node.all_input_nodes:
            self.place(source)
        self.placed[node] = None
        for start in self._starts.get(node, ()):
            self.place(start)


def _late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Waits for collectives, and what takes their results apart."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if (node.target is wait and source.target in COLLECTIVES) or (node.target is operator.getitem and source in late):
            late.add(node)
    return late


def _early_starts(graph: fx.Graph, late: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the collectives that can start as soon as it is there: it is the last of what they read, or writes in place."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    starts: dict[fx.Node, list[fx.Node]] = {}
    barrier: fx.Node | None = None
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and written_arguments(node):
            barrier = node
        if node.target not in COLLECTIVES or any(source in late for source in node.all_input_nodes):
            continue
        candidates = [*node.all_input_nodes, *([barrier] if barrier is not None else [])]
        if candidates:
            starts.setdefault(max(candidates, key=position.__getitem__), []).append(node)
    return starts
