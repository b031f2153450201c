"""What values are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

__all__ = ["with_ancestors"]


def with_ancestors(
    nodes: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes
) -> set[fx.Node]:
    """Nodes, what they are made of, what that is made of, and so on.

    Args:
        sources: what a node is made of; by default all that it reads.
    """
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += sources(node)
    return found
