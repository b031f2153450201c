"""Read every size that depends on the batch from one placeholder.

Before:                                          After:

    x                                                batch, x
    sym_size = aten.sym_size.int(x, 0)
    mul = sym_size * 5                               mul = batch * 5
    view = aten.view(x, [mul, 8])                    view = aten.view(x, [mul, 8])

Sizes that depend on values (``nonzero``) stay where they are.

Squeeze the dimensions that are one by construction, and no batch that happens to be of one row.

Before, for x of (batch, 1, 6):              After:

    y = aten.squeeze(x)                          y = aten.squeeze(x, [1])
    z = aten.squeeze(x, 0)                       (nothing: z is x)

Say the padding of a convolution in numbers where a word says it, so that a part can have less of it.

Before:                                                       After:

    y = aten.conv2d.padding(x, w, b, [1, 1], "same")              y = aten.conv2d.default(x, w, b, [1, 1], [1, 1])

``"same"`` with a kernel of an even size pads unevenly, which numbers cannot say: that stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from passes.graph.schemas import bound_arguments
from passes.graph.symbolic_sizes import emit_size, size_of

__all__ = ["READS", "number_paddings", "pin_squeezes", "read_sizes_from_batch"]

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


# -- squeeze the dimensions that are one by construction ---------------------------------------------------------------------------


def pin_squeezes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Replace squeezes of tensors with a symbolic size by squeezes of the dimensions that are always one, in place.

    Returns:
        The squeezed tensors: in the model, a batch of one row loses its dimension there.
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


# -- say the padding of a convolution in numbers where a word says it, so that a part can have less of it --------------------------


_BY_NUMBERS: Mapping[Any, Any] = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def number_paddings(graph: fx.Graph) -> None:
    """Replace ``padding="same"`` and ``"valid"`` of convolutions by numbers, in place."""
    for node in graph.nodes:
        if node.target not in _BY_NUMBERS:
            continue
        given = bound_arguments(node)
        kernel = [int(size) for size in given["weight"].meta["val"].shape[2:]]
        dilation = list(given["dilation"]) * (len(kernel) // len(given["dilation"]))
        extents = [step * (size - 1) if given["padding"] == "same" else 0 for step, size in zip(dilation, kernel, strict=True)]
        if all(extent % 2 == 0 for extent in extents):
            order = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given["padding"] = [extent // 2 for extent in extents]
            node.target, node.args, node.kwargs = _BY_NUMBERS[node.target], tuple(given[name] for name in order), {}
