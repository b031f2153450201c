"""Dependencies between the nodes of a graph: ancestors, boundaries of regions, paths of gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from passes.ir.graph import ModelGraph
from passes.ir.torch_private import tree_leaves


def with_ancestors(
    nodes: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes
) -> set[fx.Node]:
    """Return nodes and all their ancestors; ``sources`` gives the parents of a node, by default all nodes that it reads."""
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += sources(node)
    return reached


def boundary(nodes: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Return the inputs of a region (nodes outside that it reads, in order of first use) and its outputs (nodes that are read outside)."""
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    return tuple(inputs), tuple(node for node in nodes if any(user not in inside for user in node.users))


_DETACHES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})


def may_require_gradient(graph: fx.Graph, without: Collection[str] = ()) -> frozenset[fx.Node]:
    """Return the nodes whose values may require a gradient.

    Args:
        without: placeholders that never do: buffers and constants. All others may, if their dtype is differentiable.
    """
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            has_path = node.name not in without
        else:
            has_path = node.target not in _DETACHES and any(source in reached for source in node.all_input_nodes)
        if has_path and is_differentiable(node):
            reached.add(node)
    return frozenset(reached)


def parameter_values(graph: ModelGraph) -> frozenset[str]:
    """Return the names of the parameters, and of the values that are computed from parameters alone."""
    values = set(graph.parameters)
    for node in graph.computing_nodes():
        if node.all_input_nodes and all(argument.name in values for argument in node.all_input_nodes):
            values.add(node.name)
    return frozenset(values)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, the values without later readers: inputs of the node, or its own unread value."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen = {graph.output_node()}
    for node in reversed(graph.nodes):
        for value in (*node.all_input_nodes, node):
            if value not in seen:
                seen.add(value)
                last.setdefault(node, []).append(value)
    return last


def is_differentiable(node: fx.Node) -> bool:
    """Return whether a node's value has a floating-point or complex tensor, or is unknown: a gradient could flow through it."""
    value = node.meta.get("val")
    if value is None:
        return True
    return any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in tree_leaves(value))
