"""Squeeze the dimensions that are one by construction, and no batch that happens to be of one row.

Before, for x of (batch, 1, 6):              After:

    y = aten.squeeze(x)                          y = aten.squeeze(x, [1])
    z = aten.squeeze(x, 0)                       (nothing: z is x)
"""

from __future__ import annotations

import torch
from torch import fx

from passes.operators import bound_arguments
from passes.size_expression import size_of

__all__ = ["pin_squeezes"]

aten = torch.ops.aten


def pin_squeezes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Rewrite in place.

    Returns:
        What was squeezed of values with an open size: there, a batch of one row would have lost its dimension.
    """
    pinned = []
    for node in list(graph.nodes):
        if node.target not in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        sizes = [size_of(size) for size in source.meta["val"].shape]
        given = bound_arguments(node).get("dim")
        chosen = range(len(sizes)) if given is None else given if isinstance(given, list | tuple) else [given]
        dimensions = sorted({int(dim) % max(len(sizes), 1) for dim in chosen})
        if all(isinstance(sizes[dim], int) for dim in dimensions if sizes):
            continue
        pinned.append(source)
        ones = [dim for dim in dimensions if sizes[dim] == 1]
        if ones:
            node.target, node.args, node.kwargs = aten.squeeze.dims, (source, ones), {}
        else:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    return tuple(pinned)
