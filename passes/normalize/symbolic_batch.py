"""Give every open size of the inputs but the batch its number.

Before (any length):                             After (length 12):

    x                (batch, length, 8)              x            (batch, 12, 8)
    sym_size = aten.sym_size.int(x, 1)
    add = sym_size + 1
    y = aten.arange.default(add)                     y = aten.arange.default(13)

Nothing is run again: shapes and strides of the trace are expressions, in which the numbers are put. A call that takes an open number of
elements of a table (``table[:, :length]``) says so in ``meta`` (``VARIES``): it stays a call where the number is that of all of them.

Read every size that depends on the batch from one placeholder.

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

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY, MemoryOf, aliasing, memory_keys
from passes.graph.fake_tensors import fake_mode
from passes.graph.schemas import bound_arguments, packet, tensor_operands
from passes.graph.symbolic_sizes import emit_size, evaluated, size_of
from passes.ir.graph import VARIES

aten = torch.ops.aten

READS = frozenset({aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten.sym_storage_offset.default})
"""Operators that read a size of a tensor."""


_CHECKS = frozenset({aten._assert_scalar, aten.sym_constrain_range, aten.sym_constrain_range_for_size})  # noqa: SLF001
"""Operators that check a number, and compute nothing."""

TAKING = frozenset(
    {aten.slice, aten.narrow, aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.cat, aten.concat}
)
"""Operators that take some elements of a dimension, or join dimensions."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


# -- give every open size of the inputs but the batch its number -------------------------------------------------------------------


def fix_sizes(graph: fx.Graph, batch: fx.Node, symbol: sympy.Symbol, sizes: Mapping[sympy.Symbol, int]) -> fx.Graph:
    """Return a copy of a graph with numbers for all symbols of sizes but that of the batch.

    Args:
        batch: the placeholder of the batch size.
        symbol: its symbol.
        sizes: symbol -> number.
    """
    target, copies = fx.Graph(), dict[fx.Node, Any]()
    memory, values = aliasing(graph), _FixedValues(symbol, batch.meta["val"], sizes)
    with fake_mode(graph):
        for node in graph.nodes:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, _NUMBERS):
                number = values.number(value) if node.target in READS else node.target(*map(_value_of, arguments))
                if isinstance(number, int | float):
                    copies[node] = number
                    continue
                value = number
            elif packet(node.target) in _CHECKS and not isinstance(arguments[0], fx.Node):
                continue
            elif node.target is aten.slice.Tensor and any(isinstance(part, fx.Node) for part in node.args[2:]):
                arguments = _with_ends(arguments, values.number(node.args[0].meta["val"].shape[node.args[1]]))
            copies[node] = target.create_node(node.op, node.target, arguments, keywords, name=node.name)
            copies[node].meta = dict(node.meta)
            if values.varies(node):
                copies[node].meta[VARIES] = True
            if value is not None:
                # In-place writes change ``requires_grad`` of fake tensors: a value in such memory has its own.
                copies[node].meta["val"] = fixed = values.of(value, shared=not memory.written(node))
                copies[node].meta[OWN_MEMORY] = MemoryOf(fixed, tuple(key for _, key in memory_keys(node)))
    return target


def _with_ends(arguments: tuple[Any, ...], size: int | torch.SymInt) -> tuple[Any, ...]:
    """Return the arguments of a slice with its start and end as numbers, as a trace of a dimension of this fixed size has them."""
    source, dimension, start, end, *step = (*arguments, None)[: max(len(arguments), 4)]
    is_last = end is None or (start in (None, 0) and isinstance(end, int) and isinstance(size, int) and end >= size)
    return source, dimension, 0 if start is None else start, sys.maxsize if is_last else end, *step


def _value_of(argument: Any) -> Any:
    """Return the traced value of an argument: a node's, or the argument itself."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


class _FixedValues:
    """Traced values with numbers for symbols. To be used inside the fake mode of the graph."""

    def __init__(self, symbol: sympy.Symbol, batch: torch.SymInt, sizes: Mapping[sympy.Symbol, int]) -> None:
        self._symbol, self._batch = symbol, batch
        self._tensors: dict[Hashable, Tensor] = {}
        self._numbers = {each: sympy.Integer(size) for each, size in sizes.items()}
        self._known: dict[sympy.Expr, int | torch.SymInt] = {}

    def number(self, value: Any) -> int | torch.SymInt:
        """Return a size with the numbers put in."""
        size = size_of(value)
        if isinstance(size, int):
            return size
        if size not in self._known:
            self._known[size] = evaluated(size.xreplace(self._numbers), self._symbol, self._batch)
        return self._known[size]

    def of(self, value: Any, *, shared: bool) -> Any:
        """Return a value, a tensor or a list of some, with the numbers put in; the value itself where nothing changes.

        Args:
            shared: whether equal tensors may be one fake tensor.
        """
        if isinstance(value, tuple | list):
            parts = [self.of(part, shared=shared) for part in value]
            return value if all(part is old for part, old in zip(parts, value, strict=True)) else type(value)(parts)
        if isinstance(value, torch.SymInt):
            return self.number(value)
        if not isinstance(value, Tensor) or not any(self._is_open(size) for size in (*value.shape, *value.stride())):
            return value
        shape, strides = ([self.number(size) for size in sizes] for sizes in (value.shape, value.stride()))
        key = (*map(size_of, (*shape, *strides)), value.dtype, value.device, value.requires_grad)
        if shared and key in self._tensors:
            return self._tensors[key]
        fixed = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).requires_grad_(value.requires_grad)
        if shared:
            self._tensors[key] = fixed
        return fixed

    def varies(self, node: fx.Node) -> bool:
        """Return whether the call of a node is one for ``VARIES``."""
        if packet(node.target) not in TAKING or not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return False
        bound, tensors = bound_arguments(node), tensor_operands(node)
        shapes = [tensor.meta["val"].shape for tensor in tensors]
        are_open = [self._is_open(shape[bound.get("dim", 0)]) for shape in shapes if len(shape) > bound.get("dim", 0) >= -len(shape)]
        by_size = any(self._is_open(part.meta["val"]) for part in node.all_input_nodes if part not in tensors)
        return not all(are_open) and (any(are_open) or by_size)

    def _is_open(self, size: int | torch.SymInt) -> bool:
        expression = size_of(size)
        return not isinstance(expression, int) and not expression.free_symbols.isdisjoint(self._numbers)


# -- read every size that depends on the batch from one placeholder ----------------------------------------------------------------


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
    """Arithmetic before a node; it comes from where the node comes from."""
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
