"""Name the calls of a graph for other sizes of the inputs as the planned graph does.

    planned, length 8                          length 32, which is the size of the table
    slice_1 = aten.slice(table, 1, 0, 8)       (no call: it takes all)        ->    slice_1 = aten.slice(table, 1, 0, all)
    add = aten.add(x, slice_1)                 add = aten.add(x, table)             add = aten.add(x, slice_1)

A slice of everything computes nothing, and is no call in a trace for one size: it may be in one of the two graphs alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from passes.graph.aliasing import OWN_MEMORY
from passes.graph.fake_tensors import fake_mode, fake_result
from passes.graph.lazy_graph_module import rewritten
from passes.graph.schemas import bound_arguments
from passes.ir.graph import VARIES, ModelGraph

aten = torch.ops.aten

_Pair = tuple[fx.Node | None, fx.Node | None]
"""A call of a graph, and that of the other one; None: it has none."""


def named_like(graph: ModelGraph, like: ModelGraph) -> ModelGraph | None:
    """Return a graph with the names of another one that makes the same calls for other sizes; None if it makes other calls.

    Arithmetic on sizes may differ, and with it the numbers in names: ``batch * 7`` is written twice where ``batch * 12`` was once. Slices
    that take everything in one of the graphs are calls in both, or have names of their own.
    """
    pairs = _pairs(
        [node for node in graph.graph.nodes if not _is_number(node)], [node for node in like.graph.nodes if not _is_number(node)]
    )
    if pairs is None:
        return None
    if all(own and other and own.name == other.name and (VARIES in own.meta) == (VARIES in other.meta) for own, other in pairs):
        return graph
    return _Renaming(graph, like, pairs).result()


def _pairs(own: list[fx.Node], others: list[fx.Node]) -> list[_Pair] | None:
    """Return the calls of two graphs in their order, those alike as pairs; None if more differs than slices."""
    pairs: list[_Pair] = []
    left, right = own[::-1], others[::-1]
    while left or right:
        if left and right and _form(left[-1]) == _form(right[-1]):
            pairs.append((left.pop(), right.pop()))
        elif right and _takes_from_start(right[-1]):
            pairs.append((None, right.pop()))
        elif left and _takes_from_start(left[-1]):
            pairs.append((left.pop(), None))
        else:
            return None
    return pairs


def _form(node: fx.Node) -> object:
    """Return the key of similar calls: the operator; of a slice, also the dimension."""
    return node.op, node.target, _dimension(node) if node.target is aten.slice.Tensor else None


def _dimension(node: fx.Node) -> int:
    dimension: int = bound_arguments(node)["dim"]
    rank: int = node.meta["val"].dim()
    return dimension % rank


def _takes_from_start(node: fx.Node) -> bool:
    """Return whether a call is a slice that may take everything, for some sizes."""
    if node.target is not aten.slice.Tensor:
        return False
    bound = bound_arguments(node)
    return bound["step"] == 1 and bound["start"] in (None, 0)


class _Renaming:
    """Copy of a graph with the names of ``like``; slices of everything that only ``like`` has are added."""

    def __init__(self, graph: ModelGraph, like: ModelGraph, pairs: list[_Pair]) -> None:
        self._model, self._graph = graph, fx.Graph()
        self._others = {own: other for own, other in pairs if own is not None}
        self._partner = {other: own for own, other in pairs if other is not None and own is not None}
        self._lacking = _lacking(pairs)
        self._taken = {node.name for node in like.graph.nodes if not _is_number(node)}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._added: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # slice of the other graph -> node that it takes all of, and its copy

    def result(self) -> ModelGraph:
        with fake_mode(self._model.graph):
            for node in self._model.graph.nodes:
                for other in self._lacking.get(node, ()):
                    self._add(other)
                self._copy(node)
        return rewritten(self._model, self._graph, {node.name: copy.name for node, copy in self._copies.items()})

    def _copy(self, node: fx.Node) -> None:
        other = self._others.get(node)
        added = dict(self._added[source] for source in other.all_input_nodes if source in self._added) if other is not None else {}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: added.get(source) or self._copies[source])
        name = other.name if other is not None else f"{node.name}_of_sizes" if node.name in self._taken else node.name
        copy = self._copies[node] = self._graph.create_node(node.op, node.target, args, kwargs, name=name)
        copy.meta = dict(node.meta)
        if node in self._others and (other is None or VARIES in other.meta):
            copy.meta[VARIES] = True

    def _add(self, other: fx.Node) -> None:
        """Add a slice of everything."""
        source = other.args[0]
        assert isinstance(source, fx.Node)
        whole, copy = self._added[source] if source in self._added else (self._partner[source], self._copies[self._partner[source]])
        args: tuple[Any, ...] = (copy, _dimension(other), 0, sys.maxsize)
        new = self._graph.create_node(other.op, other.target, args, name=other.name)
        new.meta = {key: entry for key, entry in other.meta.items() if key != OWN_MEMORY} | {VARIES: True}
        new.meta["val"] = fake_result(new)
        self._added[other] = whole, new


def _lacking(pairs: list[_Pair]) -> dict[fx.Node, list[fx.Node]]:
    """Return for calls of a graph those of the other one that come before them, and have no partner."""
    lacking: dict[fx.Node, list[fx.Node]] = {}
    waiting: list[fx.Node] = []
    for own, other in pairs:
        if own is None and other is not None:
            waiting.append(other)
        elif own is not None and waiting:
            lacking[own], waiting = waiting, []
    return lacking


def _is_number(node: fx.Node) -> bool:
    """Return whether a node computes a number from sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
