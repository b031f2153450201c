"""Remove what a traced backward leaves behind: operations that return their input unchanged.

Before:                                        After:

    detach = aten.detach(weight)
    t = aten.t(detach)                             t = aten.t(weight)
    t_1 = aten.t(t)                                mm = aten.mm(gradient, weight)
    mm = aten.mm(gradient, t_1)

Programs run without autograd, so ``detach`` is the identity; a transpose of a transpose and a slice of everything are too.
"""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["simplify"]

aten = torch.ops.aten
_EVERYTHING = 2**63 - 1


def simplify(graph: fx.Graph) -> None:
    """Replace each such operation by its input, in place."""
    for node in list(graph.nodes):
        source = _same_as(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and node.target in _VIEWS:
            graph.erase_node(node)


_VIEWS = frozenset({aten.t.default, aten.detach.default, aten.slice.Tensor, aten.view.default, aten.sym_size.int})


def _same_as(node: fx.Node) -> fx.Node | None:
    """The node that this one equals, if it does nothing."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if node.target is aten.detach.default:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        inner = source.args[0]
        return inner if isinstance(inner, fx.Node) else None
    if node.target is aten.slice.Tensor:
        start, end, step = [*node.args, *(None, None, None, None, 1)[len(node.args) :]][2:5]
        if start in (None, 0) and end in (None, _EVERYTHING) and step == 1:
            return source
    return None
