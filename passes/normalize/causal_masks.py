"""Write masks of attention that are computed from positions alone as what they are: causal, or none.

Before:                                                      After:

    rows = aten.arange(8)
    mask = aten.le(rows, aten.reshape(rows, [8, 1]))             attention = aten.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention = aten.scaled_dot_product_attention(q, k, v, mask)

Libraries build such masks where they cannot see that no sample is padded, as in a trace. Fused kernels leave out what ``is_causal`` hides,
ranks that share a sequence balance it, and nobody keeps a mask of queries times keys.

A mask that depends on no tensor that a model is given is computed once, here, for a batch of two. It must be the triangle in all of its
elements: a window, a prefix, or packed sequences stay a mask. That its rows of a larger batch are no others follows from the rules of the
operations that compute it: none mixes rows, and none reads their numbers but to pick from rows that are all alike.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.dependencies import with_ancestors
from passes.graph.schemas import bound_arguments, draws, packet, written_arguments
from passes.graph.symbolic_sizes import SIZE_OPERATORS, bytes_of
from passes.ir.torch_private import OpOverload
from passes.normalize.rows.row_dimension import UNREAD, row_dimension

__all__ = ["LARGEST", "name_masks"]

aten = torch.ops.aten

LARGEST = 2**28
"""Bytes of the largest value that is computed to look at a mask."""

_BATCH = 2


def name_masks(graph: fx.Graph, batch: fx.Node | None) -> None:
    """Rewrite attention in place.

    Args:
        batch: the placeholder of the batch size; None when it is fixed.
    """
    values: dict[fx.Node, Any] = {} if batch is None else {batch: _BATCH}
    for node in list(graph.nodes):
        if packet(node.target) is not aten.scaled_dot_product_attention:
            continue
        arguments = bound_arguments(node)
        mask = arguments["attn_mask"]
        if not isinstance(mask, fx.Node) or arguments["is_causal"]:
            continue
        if not _is_of_positions(mask, batch) or not _has_equal_rows(mask):
            continue
        meaning = _meaning(_value(mask, values), *(arguments[name].meta["val"].shape[-2] for name in ("query", "key")))
        if meaning is not None:
            node.args = (*(arguments[name] for name in ("query", "key", "value")), None, arguments["dropout_p"], meaning == "causal")
            node.kwargs = {name: arguments[name] for name in ("scale", "enable_gqa")}
            _erase_unread(graph, mask)


def _is_of_positions(mask: fx.Node, batch: fx.Node | None) -> bool:
    """Return whether a mask depends on sizes alone, and is small enough to be looked at."""
    for node in with_ancestors([mask]):
        if node is batch:
            continue
        is_size = node.target in SIZE_OPERATORS or node.target is operator.getitem
        if node.op != "call_function" or not (is_size or isinstance(node.target, OpOverload)):
            return False
        if not is_size and (draws(node) or written_arguments(node)):
            return False
        value = node.meta.get("val")
        if isinstance(value, Tensor) and bytes_of(value, _symbol(batch), _BATCH) > LARGEST:
            return False
    return True


_FILLED = frozenset({aten.ones, aten.zeros, aten.full, aten.new_ones, aten.new_zeros, aten.new_full, aten.expand, aten.repeat})
"""Operations whose results have equal rows, if their operands have none."""

_MOVED = frozenset({aten.view, aten.reshape, aten.unsqueeze, aten.expand, aten.to})
"""Operations whose results have the numbers of their operand."""


def _has_equal_rows(mask: fx.Node) -> bool:
    """Return whether a mask is the same for each row of any batch."""
    equal: dict[fx.Node, int] = {}
    numbers: dict[fx.Node, int] = {}
    needed = with_ancestors([mask])
    for node in (node for node in mask.graph.nodes if node in needed and isinstance(node.meta.get("val"), Tensor)):
        own = [dimension for dimension, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)]
        of_rows = {source: {**equal, **numbers}[source] for source in node.all_input_nodes if source in equal or source in numbers}
        if not own and not of_rows:
            continue
        name, is_numbered = packet(node.target), any(source in numbers for source in of_rows)
        if len(own) != 1:
            return False
        if not of_rows and name is aten.arange:
            numbers[node] = own[0]
        elif is_numbered and name is aten.index:
            picked, places = bound_arguments(node)["self"], bound_arguments(node)["indices"]
            if picked not in equal or any(place in numbers and dimension != equal[picked] for dimension, place in enumerate(places)):
                return False
            equal[node] = own[0]
        elif of_rows and row_dimension(node, of_rows) in (own[0], UNREAD) and (not is_numbered or name in _MOVED):
            (numbers if is_numbered else equal)[node] = own[0]
        elif not of_rows and name in _FILLED:
            equal[node] = own[0]
        else:
            return False
    return True


def _symbol(batch: fx.Node | None) -> Any:
    return None if batch is None else batch.meta["val"].node.expr


def _value(mask: fx.Node, values: dict[fx.Node, Any]) -> Tensor:
    """Return the value of a mask, and remember those that it is computed from."""
    needed = with_ancestors([mask])
    for node in mask.graph.nodes:
        if node in needed and node not in values:
            values[node] = _call(node, values)
    value: Tensor = values[mask]
    return value


def _call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Run a call on the CPU: a planned model names another device, or none."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    args = tuple(torch.device("cpu") if isinstance(each, torch.device) else each for each in args)
    kwargs = {name: torch.device("cpu") if isinstance(each, torch.device) else each for name, each in kwargs.items()}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _meaning(mask: Tensor, queries: int, keys: int) -> str | None:
    """Return ``"causal"``, or ``"none"`` for a mask that hides nothing; None: another."""
    if mask.dtype == torch.bool:
        shown, hidden = mask, ~mask
    else:
        shown, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    if bool(shown.all()):
        return "none"
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril()
    return "causal" if bool((shown == triangle).all()) and bool((hidden != triangle).all()) else None


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nobody reads, and what it alone has read."""
    if node.op == "call_function" and not node.users:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _erase_unread(graph, source)
