"""Draw random numbers into row-major memory: kernels fill memory in its own order, so strides decide which element gets which number.

Before, for x with strides of a transpose:    After:

    y = dropout(x, p)                             rows = contiguous(permute(x, order))      what memory holds, in its order
                                                  y = permute(dropout(rows, p), inverse)

The strides of a value do not survive a partition: a rank that receives it, or holds a part of it, has row-major memory. A shape does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.schemas import packet
from passes.graph.symbolic_sizes import size_at

__all__ = ["draw_in_memory_order"]

aten = torch.ops.aten

_FILLING = frozenset({aten.alpha_dropout, aten.dropout, aten.rand_like, aten.randint_like, aten.uniform})
"""Operators that draw a number for each element of their first argument, in the order of the memory of the result. (Kernels of normal
numbers draw row-major memory by another algorithm than the rest.)"""


def draw_in_memory_order(graph: fx.Graph) -> None:
    """Rewrite in place the draws whose results are not row-major."""
    for node in list(graph.nodes):
        if packet(node.target) in _FILLING and node.all_input_nodes == [node.args[0]]:
            order = _memory_order(node.meta["val"])
            if order != sorted(order):
                _permute(graph, node, order)


def _memory_order(value: Tensor) -> list[int]:
    """The dimensions of a value, outermost in memory first, as memory that is allocated like it has them."""
    sizes, strides = ([size_at(each, None, 1) for each in every] for every in (value.shape, value.stride()))
    like = torch.empty_like(torch.empty_strided(sizes, strides, device="meta"))
    if like.is_contiguous():  # dimensions of size one have any stride
        return list(range(value.dim()))
    return sorted(range(value.dim()), key=like.stride().__getitem__, reverse=True)


def _permute(graph: fx.Graph, node: fx.Node, order: list[int]) -> None:
    source, value, inverse = node.args[0], node.meta["val"], sorted(range(len(order)), key=order.__getitem__)
    assert isinstance(source, fx.Node)

    def call(target: Any, args: tuple[Any, ...], result: Tensor) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = {**node.meta, "val": result}
        return made

    with graph.inserting_before(node):
        rows = call(aten.permute.default, (source, order), source.meta["val"].permute(order))
        rows = call(aten.contiguous.default, (rows,), rows.meta["val"].contiguous())
    with graph.inserting_after(node):
        result = call(aten.permute.default, (node, inverse), value)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    node.args, node.kwargs = (rows, *node.args[1:]), {name: each for name, each in node.kwargs.items() if name != "memory_format"}
    node.meta["val"] = value.permute(order)
