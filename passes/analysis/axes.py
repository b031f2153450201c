"""Find the axes of a model: which dimensions of which tensors are one and the same loop.

Every dimension of every tensor starts with an axis of its own. One walk over the graph: where an operation's rule says that dimensions
run together, their axes become one; where a reshape splits a dimension, its axis is split into parts, wherever it occurs.

    linear      x[batch, sequence, hidden], weight[3*heads*head, hidden]  ->  y[batch, sequence, 3*heads*head]
    view        y[batch, sequence, 3*heads*head]                          ->  z[batch, sequence, 3, heads, head]
    so          weight[(3 heads head), hidden]        cut by heads, the weight's shard is three runs of rows

Unequal numbers of heads in one projection have no such product. ``Axes.segments`` says that its dimension, labelled (groups, heads of a
group), is a concatenation in memory.

A union-find with refinement; linear in the graph for all practical purposes (Tarjan 1975).
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import sympy
import torch
from torch import Tensor, fx

from passes.graph.schemas import draws, tensor_operands
from passes.graph.symbolic_sizes import size_of
from passes.rules.call import call_of
from passes.rules.loops import Loops, Size
from passes.rules.ops.fused_heads import FusedHeads, loops_of_fused_heads
from passes.rules.registry import loops_of
from passes.rules.window import Window

TensorAxes = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor its axes, outermost first."""


@dataclass(frozen=True)
class Axes:
    """The axes of a graph. An axis is an index into ``sizes``.

    Attributes:
        sizes: of each axis.
        tensors: node -> the axes of each tensor that it gives (one for a plain tensor).
        loops: node -> what its rule says; absent where there is no rule, or no tensor.
        factors: node -> for each factor of its loops, the axes, outermost first.
        roles: for each axis the names that rules give the factors that run over it, with how often.
        unruled: operations without a rule, by name of the node.
        operands: call -> the tensors among its arguments; see ``passes.graph.schemas.tensor_operands``.
        segments: innermost axis of a dimension that is a concatenation of segments in memory -> their sizes in one step of the outer
            axes: [24 heads | 8 | 8] of size 128 has axes (8, 640), and 640 the segments (384, 128, 128). Such an axis is never sharded.
    """

    sizes: tuple[Size, ...]
    tensors: Mapping[str, tuple[TensorAxes, ...]]
    loops: Mapping[str, Loops]
    factors: Mapping[str, tuple[tuple[int, ...], ...]]
    roles: tuple[Mapping[str, int], ...]
    unruled: Mapping[str, str]
    operands: Mapping[str, tuple[fx.Node, ...]]
    segments: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @functools.cached_property
    def has_windows(self) -> bool:
        """Return whether any call slides a window."""
        return any(loops.windows for loops in self.loops.values())

    def of(self, node: str) -> TensorAxes:
        """Return the axes of a node with one tensor."""
        (axes,) = self.tensors[node]
        return axes

    def segments_of(self, dimension: Sequence[int]) -> tuple[int, ...]:
        """Return the segments of a dimension with the given axes; none if it is the product of its axes."""
        return self.segments.get(dimension[-1], ()) if dimension else ()

    def under(self, name: str, window: Window) -> tuple[int, ...]:
        """Return the axes that a window of the call ``name`` slides over, outermost first."""
        if window.part is not None:
            return self.factors[name][window.part]
        operand = self.operands[name][window.operand]
        return self.of(operand.name)[window.dimension]

    def is_aligned(self, name: str, factor: int, axis: int) -> bool:
        """Return whether a part of an axis is the same steps of a call's loop in every operand that has the loop.

        Dimensions of 24 heads, (3, 8) of queries and (8, 3) of keys, have an axis of 8 in common; its first part is other heads in each.
        """
        own = self.factors[name][factor]
        if axis not in own or axis in self.segments:
            return False
        within = self._product(own[own.index(axis) + 1 :])
        for operand, of_operand in zip(self.operands[name], self.loops[name].operands, strict=True):
            for axes, factors in zip(self.of(operand.name), of_operand, strict=True):
                if factor not in factors:
                    continue
                if axes.count(axis) != 1:
                    return False
                inner = (self.loops[name].factors[each].size for each in factors[factors.index(factor) + 1 :])
                if not _equal(self._product(axes[axes.index(axis) + 1 :]), functools.reduce(operator.mul, inner, within)):
                    return False
        return True

    def _product(self, axes: Iterable[int]) -> Size:
        """Return the product of the sizes of axes."""
        return functools.reduce(operator.mul, (self.sizes[axis] for axis in axes), 1)

    @functools.cached_property
    def of_calls(self) -> Mapping[str, frozenset[int]]:
        """Call -> all axes that it loops over; absent where there is no rule."""
        return {name: frozenset(axis for axes in factors for axis in axes) for name, factors in self.factors.items()}

    @functools.cached_property
    def slid_over(self) -> Mapping[str, frozenset[int]]:
        """Call -> the outermost axis under each of its windows; absent where there are no windows."""
        slid = {
            name: frozenset(self.under(name, window)[0] for window in loops.windows if window.factor is not None)
            for name, loops in self.loops.items()
        }
        return {name: axes for name, axes in slid.items() if axes}


class _Axis:
    """A union-find node: axes with one root (``parent`` None) are the same axis; a split root has ``parts``, outermost first."""

    __slots__ = ("parent", "parts", "roles", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.parent: _Axis | None = None
        self.parts: tuple[_Axis, ...] = ()
        self.roles: Counter[str] = Counter()


def _root(axis: _Axis) -> _Axis:
    """Return the representative of an axis, and halve the path to it."""
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def _leaves(axes: Iterable[_Axis]) -> list[_Axis]:
    """Return the unsplit axes that make up a dimension, outermost first."""
    leaves: list[_Axis] = []
    for axis in axes:
        root = _root(axis)
        leaves += _leaves(root.parts) if root.parts else [root]
    return leaves


def _quotient(size: Size, divisor: Size) -> Size | None:
    """Return ``size / divisor`` if it is a whole number for every batch size, else None."""
    if isinstance(size, int) and isinstance(divisor, int):
        return None if divisor == 0 or size % divisor else size // divisor
    ratio = sympy.cancel(sympy.sympify(size) / sympy.sympify(divisor))
    if ratio.is_number:
        return int(ratio) if ratio.is_Integer else None
    if not ratio.is_polynomial() or not all(number.is_integer for number in sympy.Poly(ratio).coeffs()):
        return None
    return ratio


def _equal(left: Size, right: Size) -> bool:
    """Return whether two sizes are equal for every batch size."""
    return left == right or (not (isinstance(left, int) and isinstance(right, int)) and bool(sympy.cancel(left - right) == 0))


def _split(axis: _Axis, outer: Size, inner: Size) -> None:
    """Split an unsplit axis into an outer and an inner part of the given sizes; both inherit its roles."""
    axis.parts = (_Axis(outer), _Axis(inner))
    for part in axis.parts:
        part.roles = Counter(axis.roles)


def _unify(left: Sequence[_Axis], right: Sequence[_Axis]) -> None:
    """Make two lists of axes of the same dimension one: join axes of equal size, split the larger of unequal ones.

    [6] and [2, 3] become [2, 3]. It stops at two sizes of which neither divides the other.
    """
    left_stack, right_stack = _leaves(left)[::-1], _leaves(right)[::-1]
    while left_stack and right_stack:
        first, second = left_stack.pop(), right_stack.pop()
        if first is second:
            continue
        if first.size == second.size:
            _join(first, second)
        elif (inner := _quotient(first.size, second.size)) is not None:
            _split(first, second.size, inner)
            left_stack += [first.parts[1], first.parts[0]]
            right_stack.append(second)
        elif (inner := _quotient(second.size, first.size)) is not None:
            _split(second, first.size, inner)
            right_stack += [second.parts[1], second.parts[0]]
            left_stack.append(first)
        else:
            return
        # A split may have reached axes that are still to be compared.
        left_stack, right_stack = _leaves(left_stack[::-1])[::-1], _leaves(right_stack[::-1])[::-1]


def _unify_dimensions(tensors: Mapping[fx.Node, list[list[list[_Axis]]]], alike: Iterable[tuple[fx.Node, fx.Node]]) -> None:
    """Make the dimensions of two tensors one, for each pair of tensors."""
    for one, other in alike:
        for left, right in zip(_single(tensors[one]), _single(tensors[other]), strict=True):
            _unify(left, right)


def _join(first: _Axis, second: _Axis) -> None:
    """Make two roots the same axis."""
    second.parent = first
    first.roles.update(second.roles)


def find_axes(
    graph: fx.Graph, alike: Iterable[tuple[fx.Node, fx.Node]] = (), fused: Mapping[str, FusedHeads] = MappingProxyType({})
) -> Axes:
    """Return the axes of a graph whose nodes hold fake tensors in ``meta["val"]``.

    Args:
        alike: pairs of tensors whose dimensions run together, whatever calls say: a value and its gradient.
        fused: calls that take pieces of a fused projection, by groups of heads (``find_fused_heads``). None of them is taken by groups if
            another call reads such a projection by elements.
    """
    tensors: dict[fx.Node, list[list[list[_Axis]]]] = {}
    loops: dict[str, Loops] = {}
    factors: dict[str, list[_Axis]] = {}
    unruled: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function" and node.target is operator.getitem and node.args[0] in tensors:
            tensors[node] = [tensors[node.args[0]][node.args[1]]]
            continue
        results = _tensors(node.meta.get("val"))
        if not results:
            continue
        rule = _rule_of(node, fused) if node.op == "call_function" else None
        if rule is None:
            tensors[node] = [[[_Axis(size_of(size))] for size in result.shape] for result in results]
            if node.op == "call_function" and not draws(node):
                unruled[node.name] = str(node.target)
            continue
        axes = _factor_axes(rule)
        for operand, operand_factors in zip(tensor_operands(node), rule.operands, strict=True):
            for dimension_axes, dimension_factors in zip(_single(tensors[operand]), operand_factors, strict=True):
                if dimension_factors:
                    _unify(dimension_axes, [axes[factor] for factor in dimension_factors])
        for window in rule.windows:
            if window.factor is None:
                continue
            slid = _single(tensors[tensor_operands(node)[window.operand]])[window.dimension] if window.part is None else [axes[window.part]]
            (outermost, *_) = _leaves(slid)
            outermost.roles[rule.factors[window.factor].name] += 1
        tensors[node] = [_result_axes(result, dimensions, axes) for result, dimensions in zip(results, rule.results, strict=True)]
        loops[node.name], factors[node.name] = rule, axes
    _unify_dimensions(tensors, alike)
    found = _number_axes(tensors, loops, factors, unruled)
    segments = _find_segments(found, fused)
    return find_axes(graph, alike) if segments is None else replace(found, segments=segments)


def _rule_of(node: fx.Node, fused: Mapping[str, FusedHeads]) -> Loops | None:
    """Return the loops of a call; None if there is no rule."""
    call = call_of(node) if node.name in fused else None
    return loops_of(node) if call is None else loops_of_fused_heads(call, fused[node.name])


def _find_segments(axes: Axes, fused: Mapping[str, FusedHeads]) -> dict[int, tuple[int, ...]] | None:
    """Return the segments of axes; None if a call would read elements of a fused projection by their places in memory.

    All calls but those that take the pieces loop over the whole dimension, one element like another.
    """
    segments: dict[int, tuple[int, ...]] = {}
    dimensions: dict[int, tuple[int, ...]] = {}
    for name, each in fused.items():
        dimension = axes.of(axes.operands[name][0].name)[-1]
        if axes.sizes[dimension[-1]] != sum(each.segments) or segments.setdefault(dimension[-1], each.segments) != each.segments:
            return None
        dimensions[dimension[-1]] = dimension
    everywhere = (dimension for tensors in axes.tensors.values() for tensor in tensors for dimension in tensor)
    if any(dimensions.get(axis, dimension) != dimension for dimension in everywhere for axis in dimension):
        return None
    for name, loops in axes.loops.items():
        by_place = {axis for window in loops.windows for axis in axes.under(name, window)}
        for factor, of_factor in zip(loops.factors, axes.factors[name], strict=True):
            is_whole = any(dimensions.get(axis, of_factor) != of_factor for axis in of_factor)
            if name not in fused and (is_whole or factor.reduction not in (None, "sum") or not axes.operands[name]):
                by_place.update(of_factor)
        if not by_place.isdisjoint(segments):
            return None
    return segments


def returned_values(output: fx.Node) -> list[fx.Node]:
    """Return the values of a graph's flat output, each once, without sizes: these have no layout."""
    (values,) = output.args
    assert isinstance(values, tuple | list)
    nodes = dict.fromkeys(value for value in values if isinstance(value, fx.Node))
    return [node for node in nodes if not isinstance(node.meta.get("val"), torch.SymInt)]


def _single(tensors: list[list[list[_Axis]]]) -> list[list[_Axis]]:
    """Return the axes of the only tensor of a node."""
    (tensor,) = tensors
    return tensor


def is_item(node: fx.Node) -> bool:
    """Return whether a node takes one result of a call that gives several."""
    return node.target is operator.getitem


def _factor_axes(loops: Loops) -> list[_Axis]:
    """Return a new axis for each factor of a call."""
    axes = []
    for factor in loops.factors:
        axis = _Axis(factor.size)
        axis.roles[factor.name] = 1
        axes.append(axis)
    return axes


def _result_axes(result: Tensor, dimensions: Sequence[Sequence[int]], axes: Sequence[_Axis]) -> list[list[_Axis]]:
    """Return the axes of a result: those of each dimension's factors, a new one for a dimension without factors."""
    sizes = zip(result.shape, dimensions, strict=True)
    return [[axes[factor] for factor in dimension] if dimension else [_Axis(size_of(size))] for size, dimension in sizes]


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors of a node's value: a tensor, or a tuple of tensors; empty for anything else."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list) and value and all(isinstance(part, Tensor) for part in value):
        return list(value)
    return []


def _number_axes(
    tensors: Mapping[fx.Node, list[list[list[_Axis]]]],
    loops: Mapping[str, Loops],
    factors: Mapping[str, list[_Axis]],
    unruled: Mapping[str, str],
) -> Axes:
    """Replace the unsplit axes by numbers, in order of appearance."""
    numbers: dict[_Axis, int] = {}

    def number(axes: Iterable[_Axis]) -> tuple[int, ...]:
        """Return the numbers of the unsplit parts of axes; new ones get the next number."""
        return tuple(numbers.setdefault(leaf, len(numbers)) for leaf in _leaves(axes))

    by_node = {
        node.name: tuple(tuple(number(dimension) for dimension in tensor) for tensor in node_tensors)
        for node, node_tensors in tensors.items()
    }
    by_factor = {name: tuple(number([axis]) for axis in axes) for name, axes in factors.items()}
    operands = {node.name: tuple(tensor_operands(node)) for node in tensors if node.op == "call_function" and not is_item(node)}
    return Axes(tuple(axis.size for axis in numbers), by_node, loops, by_factor, tuple(axis.roles for axis in numbers), unruled, operands)
