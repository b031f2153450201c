"""Recognize masks of attention that are computed from positions alone: causal masks become ``is_causal``, empty masks None.

Before:                                                      After:

    rows = aten.arange(8)
    mask = aten.le(rows, aten.reshape(rows, [8, 1]))             attention = aten.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention = aten.scaled_dot_product_attention(q, k, v, mask)

Libraries build such masks where they cannot see that no sample is padded, as in a trace. Fused kernels leave out what ``is_causal`` hides,
ranks that share a sequence balance it, and no rank keeps a mask of queries times keys.

A mask that depends on no tensor that a model is given is computed once, here, for a batch of two; a large one in blocks of queries, if
pointwise operations compute it. It must be the triangle in all of its
elements: a window, a prefix, or packed sequences stay a mask. That its rows of a larger batch are no others is proved by the operations
that compute it: the size of the batch is nothing but a size in them, none mixes rows, and none reads their numbers but to pick from rows
that are all alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.graph.dependencies import with_ancestors
from passes.graph.schemas import bound_arguments, draws, packet, written_arguments
from passes.graph.symbolic_sizes import SIZE_OPERATORS, bytes_of, size_of
from passes.ir.torch_private import OpOverload
from passes.normalize.rows.row_dimension import row_dimension

aten = torch.ops.aten

LARGEST = 2**28
"""Bytes of the largest value that is computed whole to look at a mask, and of the largest block of another."""

_BATCH = 2

_SIZES = {
    aten.arange: ("end",),
    aten.view: ("size",),
    aten.reshape: ("shape",),
    **dict.fromkeys((aten.ones, aten.zeros, aten.full, aten.new_ones, aten.new_zeros, aten.new_full, aten.expand), ("size",)),
}
"""Operation -> its arguments that may depend on the size of the batch; of all others none may."""

_FILLED = frozenset({aten.ones, aten.zeros, aten.full, aten.new_ones, aten.new_zeros, aten.new_full, aten.expand})
"""Operations whose results have equal rows, if their operands have none."""

_IN_BLOCKS = frozenset({aten.expand, aten.__and__, aten.__or__})
"""Operations that compute a block of a value from blocks of their operands, beside those that torch names pointwise."""

_MOVED = frozenset({aten.view, aten.reshape, aten.unsqueeze, aten.expand, aten.to})
"""Operations whose results have the numbers of their operand."""


def name_masks(graph: fx.Graph, batch: fx.Node | None) -> dict[fx.Node, str]:
    """Rewrite attention in place; return each mask that cannot be computed here, with the error, and that attention computes as given.

    Args:
        batch: the placeholder of the batch size; None when it is fixed.
    """
    failed: dict[fx.Node, str] = {}
    meanings: dict[tuple[fx.Node, int, int], str | None] = {}
    for node in list(graph.nodes):
        if packet(node.target) is not aten.scaled_dot_product_attention:
            continue
        arguments = bound_arguments(node)
        mask = arguments["attn_mask"]
        queries, keys = (size_of(arguments[name].meta["val"].shape[-2]) for name in ("query", "key"))
        if not isinstance(mask, fx.Node) or arguments["is_causal"] or not isinstance(queries, int) or not isinstance(keys, int):
            continue
        if (mask, queries, keys) not in meanings:
            meanings[mask, queries, keys] = _meaning(mask, batch, queries, keys, failed)
        meaning = meanings[mask, queries, keys]
        if meaning is not None:
            node.args = (*(arguments[name] for name in ("query", "key", "value")), None, arguments["dropout_p"], meaning == "causal")
            node.kwargs = {name: arguments[name] for name in ("scale", "enable_gqa")}
    for mask in dict.fromkeys(mask for (mask, _, _), meaning in meanings.items() if meaning is not None):
        _erase_unread(graph, mask)
    return failed


def _meaning(mask: fx.Node, batch: fx.Node | None, queries: int, keys: int, failed: dict[fx.Node, str]) -> str | None:
    """Return ``"causal"``, or ``"none"`` for a mask that hides nothing; None: another, or one that is not known for every batch."""
    needed = with_ancestors([mask])
    in_order = [node for node in mask.graph.nodes if node in needed]
    if not all(node is batch or _is_of_sizes(node, batch) for node in in_order) or not _has_equal_rows(mask, in_order, batch):
        return None
    meanings = {"none", "causal"}
    try:
        with torch.device("cpu"), torch.no_grad():  # a planned model names another device, or none
            for start, value in _blocks(mask, in_order, batch, queries):
                meanings &= _meanings_of_block(value, start, keys)
                if not meanings:
                    return None
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        failed[mask] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None
    return "none" if "none" in meanings else "causal"


def _meanings_of_block(value: Tensor, start: int, keys: int) -> set[str]:
    """Return the possible kinds of the rows of a mask from query ``start`` on: both, if they are those of the last query alone."""
    if not value.numel():
        return set()
    is_boolean = value.dtype == torch.bool
    shown = value if is_boolean else value == 0
    found = {"none"} if bool(shown.all()) else set()
    triangle = torch.ones(value.shape[-2], keys, dtype=torch.bool, device=value.device).tril(start)
    is_causal = bool((shown == triangle).all())
    if is_causal and not is_boolean:
        is_causal = bool(((value <= torch.finfo(value.dtype).min) != triangle).all())
    return found | ({"causal"} if is_causal else set())


def _is_of_sizes(node: fx.Node, batch: fx.Node | None) -> bool:
    """Return whether a node computes with sizes and positions alone, by operations of torch, and large values in blocks alone."""
    if node.op != "call_function":
        return False
    if node.target in SIZE_OPERATORS or node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or draws(node) or written_arguments(node):
        return False
    in_blocks = torch.Tag.pointwise in node.target.tags or packet(node.target) in _IN_BLOCKS
    return in_blocks or not _is_large(node, batch)


def _is_large(node: fx.Node, batch: fx.Node | None) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and bytes_of(value, _symbol(batch), _BATCH) > LARGEST


def _symbol(batch: fx.Node | None) -> sympy.Symbol | None:
    return None if batch is None else batch.meta["val"].node.expr


# -- whether all rows of a batch are alike -----------------------------------------------------------------------------------------


def _has_equal_rows(mask: fx.Node, in_order: list[fx.Node], batch: fx.Node | None) -> bool:
    """Return whether a mask is the same for each row of any batch.

    Args:
        in_order: what it is computed from, and itself.
    """
    depends: set[fx.Node] = set() if batch is None else {batch}
    equal: dict[fx.Node, int] = {}  # value with alike rows -> their dimension
    numbers: dict[fx.Node, int] = {}  # value whose rows are their numbers -> their dimension
    for node in in_order:
        if node is batch or depends.isdisjoint(node.all_input_nodes):
            continue
        depends.add(node)
        if node.target in SIZE_OPERATORS:
            continue
        rows = _dimension_of_rows(node)
        if rows is None or not _reads_batch_as_size(node, depends, equal.keys() | numbers.keys()):
            return False
        of_rows = {source: {**equal, **numbers}[source] for source in node.all_input_nodes if source in equal or source in numbers}
        kind = _kind_of_rows(node, rows, of_rows, equal, numbers)
        if kind is None:
            return False
        (numbers if kind == "numbers" else equal)[node] = rows
    return mask not in numbers


def _dimension_of_rows(node: fx.Node) -> int | None:
    """Return the one dimension whose size depends on the batch; None: there are several, or none."""
    value = node.meta.get("val")
    own = (
        [dimension for dimension, size in enumerate(value.shape) if not isinstance(size_of(size), int)] if isinstance(value, Tensor) else []
    )
    return own[0] if len(own) == 1 else None


def _reads_batch_as_size(node: fx.Node, depends: set[fx.Node], tensors: set[fx.Node]) -> bool:
    """Return whether a node reads the size of the batch, and values computed from it, as sizes alone."""
    allowed = _SIZES.get(packet(node.target), ())
    for name, value in bound_arguments(node).items():
        read: list[fx.Node] = []
        fx.map_arg(value, read.append)
        if name not in allowed and any(source in depends and source not in tensors for source in read):
            return False
    return True


def _kind_of_rows(
    node: fx.Node, rows: int, of_rows: Mapping[fx.Node, int], equal: Mapping[fx.Node, int], numbers: Mapping[fx.Node, int]
) -> str | None:
    """Return whether the rows of a result are ``"equal"`` or their own ``"numbers"``; None: neither is known.

    Args:
        rows: their dimension.
        of_rows: operand with rows -> their dimension.
    """
    name, is_numbered = packet(node.target), any(source in numbers for source in of_rows)
    if not of_rows:
        return "numbers" if name is aten.arange else "equal" if name in _FILLED else None
    if is_numbered and name is aten.index:
        picked, places = bound_arguments(node)["self"], bound_arguments(node)["indices"]
        is_of_equal = picked in equal and all(place not in numbers or dimension == equal[picked] for dimension, place in enumerate(places))
        return "equal" if is_of_equal else None
    if name in _FILLED and name is not aten.expand:  # only the type of the operand is read
        return "equal"
    if row_dimension(node, of_rows) != rows or (is_numbered and name not in _MOVED):
        return None
    return "numbers" if is_numbered else "equal"


# -- its value -----------------------------------------------------------------------------------------------------------------------


def _blocks(mask: fx.Node, in_order: list[fx.Node], batch: fx.Node | None, queries: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the first query of each block of a mask, and its value: one block unless values are large."""
    large = [node for node in in_order if _is_large(node, batch)]
    values: dict[fx.Node, Any] = {}
    for node in in_order:
        if node not in large:
            values[node] = (1 if large else _BATCH) if node is batch else _call(node, values)
    if not large:
        yield 0, values[mask]
        return
    largest = max(bytes_of(node.meta["val"], _symbol(batch), 1) for node in large)
    length = max(queries * LARGEST // largest, 1)
    for start in range(0, queries, length):
        rows, block = min(length, queries - start), dict(values)
        for node in large:
            block[node] = _call_on_rows(node, block, large, queries, start, rows)
        yield start, block[mask]


def _call_on_rows(node: fx.Node, values: Mapping[fx.Node, Any], large: Sequence[fx.Node], queries: int, start: int, rows: int) -> Any:
    """Run a pointwise call, or an expand, for some queries; ``values`` of large nodes are of these alone.

    Raises:
        ValueError: an operand is not broadcast over queries, nor has one row for each.
    """

    def of_rows(source: fx.Node) -> Any:
        value = values[source]
        if source in large or not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-2] == 1:
            return value
        if value.shape[-2] != queries:
            raise ValueError(f"{source.name} has {value.shape[-2]} rows")
        return value.narrow(-2, start, rows)

    operands = {source: of_rows(source) for source in node.all_input_nodes}
    if packet(node.target) is aten.expand:
        arguments: Any = fx.map_arg(node.args, operands.__getitem__)
        source, sizes = arguments
        return source.expand(*sizes[:-2], rows, sizes[-1])
    return _call(node, operands)


def _call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Run a call on the CPU."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    args = tuple(torch.device("cpu") if isinstance(each, torch.device) else each for each in args)
    kwargs = {name: torch.device("cpu") if isinstance(each, torch.device) else each for name, each in kwargs.items()}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _erase_unread(graph: fx.Graph, mask: fx.Node) -> None:
    """Erase a mask that nothing reads, and the values that it alone has read."""
    needed = with_ancestors([mask])
    for node in reversed([node for node in graph.nodes if node in needed]):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
