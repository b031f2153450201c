"""Read every size that depends on the batch from one placeholder.

Before:                                          After:

    x                                                batch, x
    sym_size = aten.sym_size.int(x, 0)
    mul = sym_size * 5                               mul = batch * 5
    view = aten.view(x, [mul, 8])                    view = aten.view(x, [mul, 8])

Sizes that depend on values (``nonzero``) stay where they are.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from passes.size_expression import emit_size, size_of

__all__ = ["READS", "read_sizes_from_batch"]

aten = torch.ops.aten

READS = frozenset({aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten.sym_storage_offset.default})
"""Operators that read a size of a tensor."""


def read_sizes_from_batch(graph: fx.Graph, batch: fx.Node, symbol: sympy.Symbol) -> None:
    """Replace every node that reads a size of a tensor by arithmetic on ``batch``, in place."""
    written: dict[sympy.Expr, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in READS:
            continue
        size = size_of(node.meta["val"])
        if isinstance(size, int):
            _replace(node, size)
        elif size.free_symbols == {symbol}:
            if size not in written:
                written[size] = _write(node, size, symbol, batch)
            _replace(node, written[size])


def _write(node: fx.Node, size: sympy.Expr, symbol: sympy.Symbol, batch: fx.Node) -> fx.Node:
    """Arithmetic in front of a node; it comes from where the node comes from."""
    before = node.prev
    with node.graph.inserting_before(node):
        result = emit_size(node.graph, size, symbol, batch)
    assert isinstance(result, fx.Node), "an expression in the batch needs the batch"
    new = before.next
    while new is not node:
        new.meta.update(node.meta)
        new.meta["val"] = new.target(*(part.meta["val"] if isinstance(part, fx.Node) else part for part in new.args))  # type: ignore[operator]
        new = new.next
    return result


def _replace(node: fx.Node, by: fx.Node | int) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda part: by if part is node else part)
        user.kwargs = fx.map_arg(user.kwargs, lambda part: by if part is node else part)
    node.graph.erase_node(node)
