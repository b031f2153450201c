"""What values are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from passes.ir.graph import ModelGraph
from passes.ir.torch_private import tree_leaves

__all__ = ["boundary", "is_differentiable", "may_require_gradient", "parameter_values", "with_ancestors"]


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


def boundary(nodes: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """What nodes read from outside, in order of first use, and those of them that are read outside."""
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    return tuple(inputs), tuple(node for node in nodes if any(user not in inside for user in node.users))


# -- which values may carry a gradient, whatever the caller asks for ---------------------------------------------------------------


_CUTS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})


def may_require_gradient(graph: fx.Graph, without: Collection[str] = ()) -> frozenset[fx.Node]:
    """The nodes whose values may require a gradient.

    Args:
        without: placeholders that never do: buffers and constants. All others may, when their type is floating point.
    """
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            starts = node.name not in without
        else:
            starts = node.target not in _CUTS and any(source in reached for source in node.all_input_nodes)
        if starts and is_differentiable(node):
            reached.add(node)
    return frozenset(reached)


def parameter_values(graph: ModelGraph) -> frozenset[str]:
    """Name the parameters, and the values that are computed from parameters alone."""
    values = set(graph.parameters)
    for node in graph.computing_nodes():
        if node.all_input_nodes and all(argument.name in values for argument in node.all_input_nodes):
            values.add(node.name)
    return frozenset(values)


def is_differentiable(node: fx.Node) -> bool:
    """Whether a gradient could flow through the node's value, by its type; unknown values count."""
    value = node.meta.get("val")
    if value is None:
        return True
    return any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in tree_leaves(value))
