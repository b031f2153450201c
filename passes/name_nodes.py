"""Name every computing node after its operation, numbered in the order of the graph.

Before:                                     After:

    slice_scatter_default = ...                 slice_scatter = ...
    add_ = aten.add(x, y)                       add = aten.add(x, y)
    linear_7 = ...                              linear = ...
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

__all__ = ["name_nodes"]


def name_nodes(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with such names; placeholders keep theirs."""
    named = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = named.create_node(node.op, node.target, args, kwargs, name=_name(node))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = named.node_copy(node, copies.__getitem__)
    return named


def _name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target.name().partition("::")[2].partition(".")[0].strip("_") or node.name
    return str(getattr(node.target, "__name__", node.name)).strip("_") or node.name
