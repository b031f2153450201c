"""Write grids of affine transformations as a product of the matrices with the points of one grid.

Before:                                                             After:

    grid = aten.affine_grid_generator(x, [batch, 1, 4, 5], False)       points = aten.affine_grid_generator(identity, [1, 1, 4, 5], False)
                                                                        points = aten.cat([points, ones], -1)
                                                                        grid = aten.reshape(points, [-1, 3]) @ aten.transpose(x, 1, 2)
                                                                        grid = aten.unflatten(grid, 1, [4, 5])

The kernel takes the size of the batch as a number, and its backward takes no symbolic one. The product has the same rounding: the kernel
computes it, too.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from passes.graph.canonicalize import remove_dead
from passes.graph.fake_tensors import call_like, fake_mode
from passes.graph.schemas import bound_arguments, packet

aten = torch.ops.aten


def write_grids(graph: fx.Graph) -> None:
    """Rewrite in place all grids whose space has a fixed size."""
    found = [node for node in graph.nodes if packet(node.target) is aten.affine_grid_generator]
    found = [node for node in found if all(isinstance(size, int) for size in bound_arguments(node)["size"][1:])]
    if not found:
        return
    with fake_mode(graph):
        for node in found:
            with graph.inserting_before(node):
                result = _grid(graph, node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
    remove_dead(graph)


def _grid(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the grids of a call."""
    arguments, call = bound_arguments(node), functools.partial(call_like, graph, node)
    matrices, (_, *size), align_corners = arguments["theta"], arguments["size"], arguments["align_corners"]
    space = size[1:]
    rows, columns = len(space), len(space) + 1
    ones = call(aten.new_ones.default, matrices, [1, rows, columns])
    identity = call(aten.tril.default, call(aten.triu.default, ones))
    points = call(aten.affine_grid_generator.default, identity, [1, *size], align_corners)
    last = call(aten.new_ones.default, matrices, [1, *space, 1])
    homogeneous = call(aten.reshape.default, call(aten.cat.default, [points, last], -1), [-1, columns])
    grids = call(aten.matmul.default, homogeneous, call(aten.transpose.int, matrices, 1, 2))
    return call(aten.unflatten.int, grids, 1, space)
