"""Write bags of equal length as a lookup of all their rows and a reduction of each bag.

Before:                                                       After:

    starts = aten.arange(0, batch * 5, 5)
    ids = aten.reshape(x, [-1])                               rows = aten.embedding(table, x)
    bag = aten.embedding_bag(table, ids, starts, ...)         y = aten.sum(rows, [1])
    y = bag[0]

``nn.EmbeddingBag`` writes a matrix of ids as one long row of ids and the start of each bag. Offsets mix the rows of the batch, although no
bag depends on another. A lookup and a reduction can be sharded by rows, by columns and by the words of the table.

The kernel of a bag holds no looked-up rows: these take the memory of the bags times their length.

Ids of ``padding_idx`` count in no sum, mean or maximum; a bag of nothing else is zero. Bags whose offsets are inputs, ``sparse``,
``scale_grad_by_freq`` and ``include_last_offset`` stay.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from passes.graph.canonicalize import remove_dead
from passes.graph.fake_tensors import call_like, fake_mode
from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_of

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)
"""The argument ``mode`` of ``aten.embedding_bag``."""


@dataclass(frozen=True)
class _Bags:
    """Bags of equal length.

    Attributes:
        table: the rows.
        ids: of the bags, a matrix.
        weights: of the ids, a matrix; None: all are one.
        mode: of the reduction.
        padding: the id that counts nowhere; None: every id counts.
    """

    table: fx.Node
    ids: fx.Node
    weights: fx.Node | None
    mode: int
    padding: int | None


def write_bags(graph: fx.Graph) -> None:
    """Rewrite in place all bags of equal length of which nothing but the result is read."""
    found = [(node, bags) for node in graph.nodes if (bags := _bags_of(node)) is not None]
    if not found:
        return
    with fake_mode(graph):
        for node, bags in found:
            with graph.inserting_before(node):
                result = _Writer(graph, node, bags).result()
            for item in list(node.users):
                item.replace_all_uses_with(result)
    remove_dead(graph)


def _bags_of(node: fx.Node) -> _Bags | None:
    """Return the bags of a call; None of other calls, and of bags that stay."""
    if packet(node.target) is not aten.embedding_bag or not all(_is_result(user) for user in node.users):
        return None
    arguments = bound_arguments(node)
    if any(arguments[name] for name in ("sparse", "scale_grad_by_freq", "include_last_offset")):
        return None
    table, weights, padding = arguments["weight"], arguments["per_sample_weights"], arguments.get("padding_idx")
    length = _equal_length(arguments["indices"], arguments["offsets"])
    ids = _matrix(arguments["indices"], length)
    weights_matrix = None if weights is None else _matrix(weights, length)
    if ids is None or (weights_matrix is None) != (weights is None):
        return None
    return _Bags(table, ids, weights_matrix, arguments["mode"], None if padding is None else padding % int(table.meta["val"].shape[0]))


def _is_result(item: fx.Node) -> bool:
    """Return whether an item of the results is that of the bags, or unread: the kernel returns what its backward needs besides."""
    return item.target is operator.getitem and bool(item.args[1] == 0 or not item.users)


def _equal_length(ids: fx.Node, offsets: fx.Node) -> int | None:
    """Return the length of bags that divide the ids evenly; None: offsets are not known to do so."""
    if packet(offsets.target) is not aten.arange:
        return None
    arguments = bound_arguments(offsets)
    start, end, step = arguments.get("start", 0), arguments["end"], arguments.get("step", 1)
    end = end.meta["val"] if isinstance(end, fx.Node) else end
    is_even = start == 0 and isinstance(step, int) and not isinstance(end, float) and size_of(end) == size_of(ids.meta["val"].shape[0])
    return step if is_even else None


def _matrix(flat: fx.Node, length: int | None) -> fx.Node | None:
    """Return the matrix, with rows of a length, that a call flattens; None: the value is not known to be such a matrix, flattened."""
    source = flat.args[0] if packet(flat.target) in _FLATTENED else None
    if not isinstance(source, fx.Node) or flat.meta["val"].dim() != 1:
        return None
    value: Tensor = source.meta["val"]
    return source if value.dim() == 2 and size_of(value.shape[1]) == length else None


_FLATTENED = frozenset({aten.view, aten.reshape, aten.flatten, aten.ravel, aten._unsafe_view})  # noqa: SLF001


class _Writer:
    """Writes the calls that take the place of one."""

    def __init__(self, graph: fx.Graph, node: fx.Node, bags: _Bags) -> None:
        self._call = functools.partial(call_like, graph, node)
        self._bags = bags
        self._is_padding = None if bags.padding is None else self._call(aten.eq.Scalar, bags.ids, bags.padding)

    def result(self) -> fx.Node:
        """Return the sum, mean or maximum of each bag."""
        rows = self._call(aten.embedding.default, self._bags.table, self._bags.ids)
        if self._bags.mode == _MAX:
            return self._maximum(rows)
        if self._is_padding is not None:  # a product with zero would spread nan of the table, and give its row a gradient
            rows = self._filled(rows, self._is_padding, 0.0)
        if self._bags.weights is not None:
            rows = self._call(aten.mul.Tensor, rows, self._call(aten.unsqueeze.default, self._bags.weights, -1))
        if self._bags.mode == _MEAN and self._is_padding is None:
            return self._call(aten.mean.dim, rows, [1])
        total = self._call(aten.sum.dim_IntList, rows, [1])
        return total if self._bags.mode == _SUM else self._call(aten.div.Tensor, total, self._counts())

    def _counts(self) -> fx.Node:
        """Return the number of ids of each bag without padding, and one for a bag of nothing else."""
        counted = self._call(aten.sum.dim_IntList, self._call(aten.logical_not.default, self._is_padding), [1], True)
        return self._call(aten.clamp.default, counted, 1)

    def _maximum(self, rows: fx.Node) -> fx.Node:
        """Return the maximum of each bag; the gradient is that of the first of equal elements, as in a bag."""
        if self._is_padding is None:
            return self._first(rows)
        largest = self._first(self._filled(rows, self._is_padding, -math.inf))
        is_empty = self._call(aten.all.dim, self._is_padding, 1)
        return self._filled(largest, is_empty, 0.0)

    def _first(self, rows: fx.Node) -> fx.Node:
        return self._call(operator.getitem, self._call(aten.max.dim, rows, 1), 0)

    def _filled(self, value: fx.Node, mask: fx.Node, number: float) -> fx.Node:
        """Return a value with a number where a mask, which lacks the last dimension, is true."""
        return self._call(aten.masked_fill.Scalar, value, self._call(aten.unsqueeze.default, mask, -1), number)
