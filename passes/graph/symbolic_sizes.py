"""Write a size, a sympy expression in the batch, as nodes of integer arithmetic.

4*batch + 1    ->    mul = 4 * size;  add = 1 + mul
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.ir.errors import TraceError
from passes.ir.graph import ModelGraph
from passes.ir.tensor_spec import RowCount
from passes.ir.torch_private import FloorDiv, Max, Min, Mod, ModularIndexing

SIZE_OPERATORS: Mapping[Callable[[Any, Any], Any], Any] = {
    operator.add: sympy.Add,
    operator.mul: sympy.Mul,
    operator.pow: sympy.Pow,
    operator.floordiv: FloorDiv,
    operator.mod: Mod,
}
"""The Python functions that ``emit_size`` writes nodes with -> their sympy functions."""

_OPERATORS = {**{expression: function for function, expression in SIZE_OPERATORS.items()}, sympy.Mod: operator.mod}


def traced_size(value: int | torch.SymInt) -> int | sympy.Expr:
    """Return the expression of a traced size, in which counts of received rows are symbols; an int if it is constant."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_Integer else expression


def size_of(value: int | torch.SymInt) -> int | sympy.Expr:
    """Return the expression of a traced size, with expected values of counts that are known only at run time; an int if it is constant."""
    return expected_size(traced_size(value))


@functools.lru_cache(maxsize=65536, typed=True)  # typed: 1 and sympy.Integer(1) are equal
def expected_size(size: int | sympy.Expr) -> int | sympy.Expr:
    """Return a size with the expected values of counts that are known only at run time."""
    if isinstance(size, int):
        return size
    counts = size.atoms(RowCount)
    expected = size.subs({count: count.expected for count in counts}) if counts else size
    return int(expected) if expected.is_Integer else expected


@functools.lru_cache(maxsize=65536, typed=True)  # typed: 1 and sympy.Integer(1) are equal
def canonical_size(size: int | sympy.Expr) -> int | sympy.Expr:
    """Return the size written with the functions of ``SIZE_OPERATORS`` alone, as ``emit_size`` computes it."""
    if isinstance(size, int):
        return size
    return size.replace(ModularIndexing, lambda base, divisor, modulus: Mod(FloorDiv(base, divisor), modulus)).replace(sympy.Mod, Mod)


def apply_to_sizes(function: Callable[[Any, Any], Any], left: int | sympy.Expr, right: int | sympy.Expr) -> int | sympy.Expr:
    """Return the expression of one of ``SIZE_OPERATORS`` applied to two sizes."""
    result = SIZE_OPERATORS[function](sympy.sympify(left), sympy.sympify(right))
    return int(result) if result.is_Integer else result


def bytes_of(value: torch.Tensor, symbol: sympy.Symbol | None, batch: int) -> int:
    """Return the bytes of a traced tensor for a batch size; sizes with other symbols are those of the trace."""
    sizes = tuple(size_of(size) if _depends_on_batch_alone(size, symbol) else size_at(size, symbol, batch) for size in value.shape)
    return _numel(sizes, symbol, batch) * value.dtype.itemsize


def size_at(size: int | torch.SymInt, symbol: sympy.Symbol | None, batch: int) -> int:
    """Return a traced size for a batch size; a size with other symbols is that of the trace."""
    expression = size_of(size)
    if isinstance(expression, int) or expression.is_number:  # of a size that was open in the trace
        return int(expression)
    assert not isinstance(size, int)
    return int(expression.subs(symbol, batch) if _depends_on_batch_alone(size, symbol) else size.node.hint)


def _depends_on_batch_alone(size: int | torch.SymInt, symbol: sympy.Symbol | None) -> bool:
    """Return whether a traced size has no symbol but that of the batch."""
    expression = size_of(size)
    return isinstance(expression, int) or expression.free_symbols <= {symbol}


@functools.lru_cache(maxsize=65536)
def _numel(sizes: tuple[int | sympy.Expr, ...], symbol: sympy.Symbol | None, batch: int) -> int:
    """Return the product of sizes for a batch size."""
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) == len(sizes):
        return math.prod(numbers)
    elements = sympy.Mul(*sizes)
    return int(elements.subs(symbol, batch) if symbol is not None else elements)


def emit_size(graph: fx.Graph, size: int | sympy.Expr, symbol: sympy.Symbol | None, batch: fx.Node | int) -> fx.Node | int:
    """Write nodes that compute a size at the graph's insertion point; return the last one, or the size if it is constant.

    Args:
        symbol: the symbol of the batch.
        batch: the node, or the number, to use for it.

    Raises:
        TraceError: the size depends on anything but the batch, or on it through an unknown function.
    """

    def emit(function: Callable[[Any, Any], Any], left: Any, right: Any) -> fx.Node:
        return _with_traced_value(graph.call_function(function, (left, right)))

    result: fx.Node | int = _computed(size, symbol, batch, emit)
    return result


def evaluated(size: int | sympy.Expr, symbol: sympy.Symbol | None, batch: int | torch.SymInt) -> int | torch.SymInt:
    """Return a size for a batch, which may be symbolic itself: ``emit_size`` without a graph.

    Raises:
        TraceError: the size depends on anything but the batch, or on it through an unknown function.
    """
    if not isinstance(size, int):
        size = size.replace(lambda part: isinstance(part, Min | Max), lambda part: _extreme(part, symbol))
    result: int | torch.SymInt = _computed(size, symbol, batch, lambda function, left, right: function(left, right))
    return result


def _computed(size: int | sympy.Expr, symbol: sympy.Symbol | None, batch: Any, apply: Callable[[Any, Any, Any], Any]) -> Any:
    """Compute a size from ``batch``; ``apply`` takes an operator and its two operands."""
    if isinstance(size, int) or size.is_Integer:
        return int(size)
    if size == symbol:
        return batch
    if isinstance(size, ModularIndexing):
        base, divisor, modulus = size.args
        return _computed(Mod(FloorDiv(base, divisor), modulus), symbol, batch, apply)
    parts = [_computed(part, symbol, batch, apply) for part in size.args]
    return functools.reduce(functools.partial(apply, _operator_of(size)), parts)


def _extreme(size: Min | Max, symbol: sympy.Symbol | None) -> sympy.Expr:
    """Return the argument that is the least, or the largest, for all batches of two rows or more, as traces assume; else raise TraceError.

    Strides have them: ``min(32, 32 * batch)`` is 32.
    """
    compare = operator.le if isinstance(size, Min) else operator.ge
    for candidate in size.args:
        differences = [sympy.expand(candidate - other) for other in size.args]
        is_linear = all(difference.diff(symbol).is_number for difference in differences)
        if is_linear and all(compare(difference.subs(symbol, rows), 0) for difference in differences for rows in (2, 2**20)):
            return candidate
    raise _unknown_function(size)


def _operator_of(size: sympy.Expr) -> Callable[[Any, Any], Any]:
    """Return the Python function of the outermost operator of a size."""
    function = _OPERATORS.get(type(size))
    if function is None:
        raise _unknown_function(size)
    return function


def _unknown_function(size: sympy.Expr) -> TraceError:
    return TraceError(
        f"a size of the graph, {size}, does not follow from the batch size",
        remedy="sizes that depend on values (nonzero, boolean indexing) cannot cross between ranks; cut elsewhere",
    )


def _with_traced_value(node: fx.Node) -> fx.Node:
    """Set ``meta["val"]`` of a node if its arguments have theirs; return the node."""
    values = [part.meta.get("val") if isinstance(part, fx.Node) else part for part in node.args]
    if all(value is not None for value in values):
        assert callable(node.target)
        node.meta["val"] = node.target(*values)
    return node


class ValueBytes:
    """Bytes of the values of a graph, each computed once."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._counted: dict[fx.Node, int] = {}

    def of(self, node: fx.Node) -> int:
        """Return the bytes of a node's value (several tensors: their sum) at the batch size that the graph was traced with."""
        if node not in self._counted:
            value = node.meta["val"]
            tensors = [value] if isinstance(value, Tensor) else [part for part in value if isinstance(part, Tensor)]
            self._counted[node] = sum(bytes_of(tensor, self._graph.batch, self._graph.batch_size) for tensor in tensors)
        return self._counted[node]
