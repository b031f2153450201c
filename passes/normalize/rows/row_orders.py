"""Compute rows in their own order where a model sorts them by group, computes each row by itself, and puts them back.

Before:                                                       After:

    keys, order = aten.sort(experts)
    x_sorted = aten.index(x, [order // 2])                        x_repeated = aten.repeat_interleave(x, 2, 0)
    ends = aten.cumsum(aten.histc(keys, 4, 0, 3), 0)
    y_sorted = transformers.grouped_mm_fallback(x_sorted, w, ends)    y = partitioner.grouped_mm(x_repeated, w, experts)
    z_sorted = aten.silu(y_sorted)                                z = aten.silu(y)
    inverse = aten.index_put(empty, [order], aten.arange(n))
    z = aten.index(z_sorted, [inverse])

A sort mixes all rows of the batch in memory, although no row depends on another. Later calls can then neither be cut by rows nor
computed in microbatches. ``partitioner.grouped_mm`` takes rows in any order, and sorts them in its kernel.

Every value between is followed, by the rules of its operations: one whose rows are sorted has a twin whose rows are not. If a value shows
the order to anything else (the model returns it, or sums it up cumulatively), the sort stays. A product of groups that are given by their
ends is then still one of ``partitioner.grouped_mm``, with the group of each row counted from the ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY
from passes.graph.fake_tensors import fake_mode, fake_result, memory_among
from passes.graph.schemas import bound_arguments, draws, packet
from passes.graph.symbolic_sizes import size_of
from passes.ir.torch_private import OpOverload
from passes.normalize.rows.row_dimension import REDUCED, UNREAD, row_dimension
from passes.rules.ops.grouped_mm import grouped_mm

aten = torch.ops.aten


@dataclass(frozen=True)
class _Sort:
    """Result of a sort: sorted keys and their order."""

    sort: fx.Node


@dataclass(frozen=True)
class _Order:
    """The numbers of the rows in the order of a sort, each divided by ``repeat``."""

    sort: fx.Node
    repeat: int = 1


@dataclass(frozen=True)
class _Overwritten:
    """A tensor like the order, whose elements nothing reads before they are written."""

    sort: fx.Node


@dataclass(frozen=True)
class _Inverse:
    """Position of each row in the order of a sort."""

    sort: fx.Node


@dataclass(frozen=True)
class _Sorted:
    """A tensor whose rows (dimension 0), or those of its items, are in the order of a sort; ``twin``: the same in their own order."""

    sort: fx.Node
    twin: fx.Node


_Fact: TypeAlias = "_Sort | _Order | _Overwritten | _Inverse | _Sorted"


def keep_rows_in_order(graph: fx.Graph) -> None:
    """Rewrite in place all sorts of rows whose order nothing else reads, and products of groups that are given by their ends."""
    if not any(node.op == "call_function" and (packet(node.target) in _SORTS or _is_by_ends(node)) for node in graph.nodes):
        return
    with fake_mode(graph):
        walk = _Walk(graph)
        for node in list(graph.nodes):
            walk.visit(node)
        walk.replace()
        for node in list(graph.nodes):
            if _is_by_ends(node):
                _count_groups(graph, node)


class _Walk:
    """One pass over the nodes, in order, which writes the twins beside them.

    Attributes:
        facts: what is known of a node.
        replaced: node that no longer depends on the order of a sort -> (the sort, the node that computes the same without it).
        kept: sorts whose order something else reads.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.facts: dict[fx.Node, _Fact] = {}
        self.replaced: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.kept: set[fx.Node] = set()
        self._written: list[fx.Node] = []

    def visit(self, node: fx.Node) -> None:
        """Derive the row order of a node; sorts whose order it reads in an unknown way are kept."""
        facts = [self.facts[source] for source in node.all_input_nodes if source in self.facts]
        if node.op == "call_function" and (facts or packet(node.target) in _SORTS):
            with self.graph.inserting_before(node):
                handle = _Walk.multiply if _is_by_ends(node) else _KNOWN.get(packet(node.target), _Walk.row_wise)
                if handle(self, node) or self.row_wise(node):
                    return
        self.kept.update(fact.sort for fact in facts)

    def replace(self) -> None:
        """Let readers of values that do not depend on a sort read the node that computes them without it, and erase unread nodes."""
        for node, (sort, twin) in self.replaced.items():
            if sort not in self.kept:
                node.replace_all_uses_with(twin)
        unread = {*self.facts, *self.replaced, *self._written}
        for node in reversed(list(self.graph.nodes)):
            if node in unread and not node.users and node.op == "call_function":
                unread.update(node.all_input_nodes)
                self.graph.erase_node(node)

    def learn(self, node: fx.Node, fact: _Fact) -> bool:
        """Record a fact about a node; return True."""
        self.facts[node] = fact
        return True

    def give(self, node: fx.Node, sort: fx.Node, twin: fx.Node) -> bool:
        """Record that ``twin`` computes the node without the sort; whether it has the same type."""
        if _type_of(node) != _type_of(twin):
            return False
        self.replaced[node] = sort, twin
        return True

    def write(self, like: fx.Node, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call, with the metadata of a node."""
        return self._describe(self.graph.call_function(function, args, kwargs), like)

    def _describe(self, node: fx.Node, like: fx.Node) -> fx.Node:
        node.meta = dict(like.meta)
        node.meta["val"] = fake_result(node)
        node.meta[OWN_MEMORY] = memory_among(node, node.all_input_nodes)
        self._written.append(node)
        return node

    def row_wise(self, node: fx.Node) -> bool:
        """Follow a call that computes each row by itself, or whose result does not depend on the order of rows: a sum, a histogram."""
        facts = {source: self.facts[source] for source in node.all_input_nodes if source in self.facts}
        sorts = {fact.sort for fact in facts.values()}
        if len(sorts) != 1 or not all(isinstance(fact, _Sorted) for fact in facts.values()):
            return False
        if node.target is not operator.getitem and (not isinstance(node.target, OpOverload) or draws(node)):
            return False
        dimension = 0 if node.target is operator.getitem else row_dimension(node, dict.fromkeys(facts, 0))
        if dimension not in (0, REDUCED, UNREAD):
            return False
        (sort,) = sorts
        twins = {source: fact.twin for source, fact in facts.items() if isinstance(fact, _Sorted)}
        twin = self._describe(self.graph.node_copy(node, lambda source: twins.get(source, source)), node)
        return self.learn(node, _Sorted(sort, twin)) if dimension == 0 else self.give(node, sort, twin)

    # -- calls that make, use or undo the order of a sort --------------------------------------------------------------------------

    def sort(self, node: fx.Node) -> bool:
        """Recognise a sort of numbers, one for each row; the sort of an order is its inverse."""
        source, arguments = node.args[0], bound_arguments(node)
        assert isinstance(source, fx.Node)
        if source.meta["val"].dim() != 1:
            return False
        fact = self.facts.get(source)
        if packet(node.target) is not aten.argsort:
            return fact is None and self.learn(node, _Sort(node))
        if fact is None:
            return self.learn(node, _Order(node))
        return fact == _Order(fact.sort) and not arguments["descending"] and self.learn(node, _Inverse(fact.sort))

    def item(self, node: fx.Node) -> bool:
        """Sorted keys, or their order."""
        source, place = node.args
        fact = self.facts[source]  # type: ignore[index]
        if not isinstance(fact, _Sort):
            return False
        keys = fact.sort.args[0]
        assert isinstance(keys, fx.Node)
        return self.learn(node, _Sorted(fact.sort, keys) if place == 0 else _Order(fact.sort))

    def divide(self, node: fx.Node) -> bool:
        """Recognise the token number of each row, if tokens have several rows."""
        arguments = bound_arguments(node)
        fact, divisor = self.facts.get(arguments["self"]), arguments["other"]
        whole = packet(node.target) is aten.floor_divide or arguments.get("rounding_mode") in ("floor", "trunc")
        is_number = isinstance(divisor, int) and divisor > 0
        return isinstance(fact, _Order) and whole and is_number and self.learn(node, _Order(fact.sort, fact.repeat * divisor))

    def copy(self, node: fx.Node) -> bool:
        """Recognise a copy of the order."""
        fact = self.facts.get(node.args[0])  # type: ignore[arg-type]
        return isinstance(fact, _Order | _Inverse) and not node.meta["val"].is_floating_point() and self.learn(node, fact)

    def made_like(self, node: fx.Node) -> bool:
        """Recognise a tensor allocated for the inverse of the order."""
        fact = self.facts.get(node.args[0])  # type: ignore[arg-type]
        return isinstance(fact, _Order) and self.learn(node, _Overwritten(fact.sort))

    def take(self, node: fx.Node) -> bool:
        """Recognise rows in the order of a sort, or sorted rows in their original order."""
        source, place = _indexed_rows(node)
        fact, rows = self.facts.get(place), self.facts.get(source)  # type: ignore[arg-type]
        if isinstance(fact, _Inverse) and isinstance(rows, _Sorted) and rows.sort is fact.sort:
            return self.give(node, fact.sort, rows.twin)
        if not isinstance(fact, _Order) or rows is not None or source is None or place is None:
            return False
        if size_of(source.meta["val"].shape[0]) * fact.repeat != _n_rows(fact.sort):
            return False
        twin = source if fact.repeat == 1 else self.write(node, aten.repeat_interleave.self_int, source, fact.repeat, 0)
        return _type_of(twin) == _type_of(node) and self.learn(node, _Sorted(fact.sort, twin))

    def put(self, node: fx.Node) -> bool:
        """Recognise a write of rows at the order of a sort.

        index_put(new, [order], arange(n))         the inverse of the order
        index_put(new, [order], sorted rows)       the rows in their own order: their twin
        index_add(base, 0, order // k, rows)       ``base`` plus, for each token, the sum of its k rows
        """
        base, place, values, adds = _written_rows(node)
        fact, rows, target = (self.facts.get(each) for each in (place, values, base))  # type: ignore[arg-type]
        if not isinstance(fact, _Order) or base is None or values is None or not (target is None or target.sort is fact.sort):
            return False
        if fact.repeat == 1 and not adds and rows is None and _counts_rows(values, _n_rows(fact.sort)):
            return self.learn(node, _Inverse(fact.sort))
        if not isinstance(rows, _Sorted) or rows.sort is not fact.sort or (fact.repeat > 1 and not adds):
            return False
        if size_of(base.meta["val"].shape[0]) * fact.repeat != _n_rows(fact.sort):
            return False
        if not adds:
            return self.give(node, fact.sort, rows.twin)
        return target is None and self.give(node, fact.sort, self._added(node, base, rows.twin, fact.repeat))

    def _added(self, node: fx.Node, base: fx.Node, rows: fx.Node, repeat: int) -> fx.Node:
        """Write the sum of the base and of the rows, ``repeat`` of them to each of its own."""
        if repeat > 1:
            rows = self.write(node, aten.sum.dim_IntList, self.write(node, aten.unflatten.int, rows, 0, [-1, repeat]), [1])
        return self.write(node, aten.add.Tensor, base, rows)

    def multiply(self, node: fx.Node) -> bool:
        """Recognise a product of groups given by their ends among rows sorted by group."""
        rows, weight, ends = _by_ends(node)
        fact = self.facts.get(rows)
        if not isinstance(fact, _Sorted) or fact.sort.args[0].meta["val"].is_floating_point():  # type: ignore[union-attr]
            return False
        if not _are_ends(ends, weight.meta["val"].shape[0], fact.sort):
            return False
        twin = self.write(node, grouped_mm, fact.twin, *_untransposed(weight, fact.sort.args[0]))
        return self.learn(node, _Sorted(fact.sort, twin))


_SORTS = frozenset({aten.sort, aten.argsort})

_KNOWN: Mapping[Any, Callable[[_Walk, fx.Node], bool]] = {
    **dict.fromkeys(_SORTS, _Walk.sort),
    operator.getitem: _Walk.item,
    **dict.fromkeys((aten.floor_divide, aten.div), _Walk.divide),
    **dict.fromkeys((aten.to, aten._to_copy, aten.clone, aten.detach, aten.alias), _Walk.copy),  # noqa: SLF001
    **dict.fromkeys((aten.empty_like, aten.zeros_like), _Walk.made_like),
    **dict.fromkeys((aten.index, aten.index_select), _Walk.take),
    **dict.fromkeys((aten.index_put, aten.index_add, aten.index_copy, aten.scatter), _Walk.put),
}
"""Operator -> what becomes of an order in it; the rule decides where that says nothing."""


def _n_rows(sort: fx.Node) -> Any:
    keys = sort.args[0]
    assert isinstance(keys, fx.Node)
    return size_of(keys.meta["val"].shape[0])


def _type_of(node: fx.Node) -> tuple[Any, ...]:
    value: Tensor = node.meta["val"]
    return tuple(map(size_of, value.shape)), value.dtype, value.device


def _indexed_rows(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Return a tensor and the index of its first dimension, if that alone is indexed, by one number for each row."""
    arguments = bound_arguments(node)
    if "indices" in arguments:
        place, *others = arguments["indices"]
        alone = all(other is None for other in others)
    else:
        place, alone = arguments["index"], arguments["dim"] == 0
    return (arguments["self"], place) if alone else (None, None)


def _written_rows(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None, bool]:
    """Return the tensor that is written, the index of its first dimension, the values, and whether they are added.

    Nothing if anything but whole rows is written.
    """
    arguments = bound_arguments(node)
    values = next((arguments[name] for name in ("values", "source", "src") if name in arguments), None)
    base, place = _indexed_rows(node)
    if not isinstance(values, fx.Node) or base is None or arguments.get("alpha", 1) != 1 or arguments.get("reduce") is not None:
        return None, None, None, False
    if packet(node.target) is aten.scatter and values.meta["val"].dim() != 1:
        return None, None, None, False
    if tuple(values.meta["val"].shape[1:]) != tuple(base.meta["val"].shape[1:]) or not values.meta["val"].dim():
        return None, None, None, False
    return base, place, values, bool(arguments.get("accumulate")) or packet(node.target) is aten.index_add


def _counts_rows(node: fx.Node, n_rows: Any) -> bool:
    """Return whether a value is ``arange(n_rows)``."""
    if packet(node.target) is not aten.arange or size_of(node.meta["val"].shape[0]) != n_rows:
        return False
    arguments = bound_arguments(node)
    return (arguments.get("start", 0), arguments.get("step", 1)) == (0, 1)


# -- products of groups that are given by where each ends --------------------------------------------------------------------------


_BY_ENDS = {"transformers::grouped_mm_fallback": ("input", "weight", "offs"), "aten::_grouped_mm": ("self", "mat2", "offs")}
"""Name of an operator (one exists only if its library is imported) -> its parameters: rows, weights and ends."""


def _is_by_ends(node: fx.Node) -> bool:
    """Return whether a node multiplies rows, sorted by group, with the matrices of their groups."""
    if not isinstance(node.target, OpOverload) or node.target.name() not in _BY_ENDS:
        return False
    arguments = bound_arguments(node)
    rows, weight, ends = (arguments.pop(name) for name in _BY_ENDS[node.target.name()])
    if ends is None or any(value is not None for value in arguments.values()):
        return False
    values = rows.meta["val"], weight.meta["val"]
    return [value.dim() for value in values] == [2, 3] and values[0].dtype == values[1].dtype == node.meta["val"].dtype


def _by_ends(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    arguments = bound_arguments(node)
    rows, weight, ends = (arguments[name] for name in _BY_ENDS[node.target.name()])  # type: ignore[union-attr]
    return rows, weight, ends


def _untransposed(weight: fx.Node, group: Any) -> tuple[Any, ...]:
    """Return the arguments of ``grouped_mm`` after the rows: the stored weight, so that it is the parameter itself."""
    arguments = bound_arguments(weight) if packet(weight.target) is aten.transpose else {}
    if arguments and {arguments["dim0"] % 3, arguments["dim1"] % 3} == {1, 2}:
        return arguments["self"], group, True
    return weight, group


def _are_ends(ends: fx.Node, n_groups: int, sort: fx.Node) -> bool:
    """Return whether numbers are the ends of groups among rows in the order of a sort: the cumulative counts of its keys."""
    total = _uncast(ends)
    if packet(total.target) is not aten.cumsum or bound_arguments(sort).get("descending"):
        return False
    counts = _uncast(total.args[0])  # type: ignore[arg-type]
    keys = counts.args[0] if counts.args else None
    if packet(counts.target) is aten.histc:
        arguments = bound_arguments(counts)
        is_count = (arguments["bins"], arguments["min"], arguments["max"]) == (n_groups, 0, n_groups - 1)
    elif packet(counts.target) is aten.sum and isinstance(keys, fx.Node) and packet(_uncast(keys).target) is aten.one_hot:
        keys, is_count = _uncast(keys).args[0], tuple(counts.meta["val"].shape) == (n_groups,)
    else:
        return False
    return is_count and isinstance(keys, fx.Node) and _keys_of(keys) is _keys_of(sort)


def _uncast(node: fx.Node) -> fx.Node:
    """Return the value of which a node is a cast or a copy."""
    while packet(node.target) in _CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _keys_of(node: fx.Node) -> fx.Node:
    """Return the value whose elements a node has, in any shape or order."""
    while packet(node.target) in _CASTS | _SHAPES | _SORTS or _is_sorted_keys(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_sorted_keys(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[1:] == (0,) and packet(node.all_input_nodes[0].target) is aten.sort


_CASTS = frozenset({aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.detach, aten.alias})  # noqa: SLF001
_SHAPES = frozenset({aten.view, aten.reshape, aten.flatten, aten.ravel, aten.unsqueeze})


def _count_groups(graph: fx.Graph, node: fx.Node) -> None:
    """Write a product of groups with the group of each row, in place: the number of groups that end before it, or with it."""
    rows, weight, ends = _by_ends(node)
    walk = _Walk(graph)
    with graph.inserting_before(node):
        ones = walk.write(node, aten.ones_like.default, walk.write(node, aten.select.int, rows, 1, 0), dtype=torch.int64)
        number = walk.write(node, aten.sub.Tensor, walk.write(node, aten.cumsum.default, ones, 0), 1)
        group = walk.write(node, aten.bucketize.Tensor, number, ends, right=True)
        product = walk.write(node, grouped_mm, rows, *_untransposed(weight, group))
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    if weight.op == "call_function" and not weight.users:
        graph.erase_node(weight)
