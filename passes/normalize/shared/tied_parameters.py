"""Make one placeholder of all that name the same tensor.

Before:                                     After:

    p_wte, p_head                               p_wte
    h = aten.embedding(p_head, ids)             h = aten.embedding(p_wte, ids)
    y = aten.linear(h, p_head)                  y = aten.linear(h, p_wte)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx


def tie_parameters(graph: fx.Graph, first: Mapping[str, str]) -> None:
    """Replace placeholders by the ones they equal, in place.

    Args:
        first: name of a placeholder to remove -> name of the placeholder of the same tensor to use instead.
    """
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for name, kept in first.items():
        placeholders[name].replace_all_uses_with(placeholders[kept])
        graph.erase_node(placeholders[name])
