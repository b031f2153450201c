"""Sizes and numbers of a graph as expressions in the batch size.

A graph with an open batch has them; of a graph with a fixed batch they are fitted to two traces with different batch sizes:

    batch 4: view(x, [8, 6])      batch 6: view(x, [12, 6])      fitted: view(x, [2 * batch, 6])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

from passes.analysis.batch.call import Shape
from passes.graph.schemas import bound_arguments
from passes.graph.symbolic_sizes import size_of
from passes.ir.torch_private import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["FittedValues", "OpenValues", "Values", "pair_nodes"]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Values(Protocol):
    """Where rules read sizes and numbers."""

    @property
    def batch(self) -> sympy.Symbol:
        """The symbol of the batch size."""

    def shapes(self, node: fx.Node) -> tuple[Shape, ...]:
        """The shapes of the tensors that a node gives; ``((),)`` for a number."""

    def number(self, node: fx.Node) -> Any:
        """The number that a node gives, if it follows from the batch size; else None."""

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """The operator's parameters by name, numbers as expressions where they depend on the batch."""


@dataclass(frozen=True)
class OpenValues:
    """Of a graph with an open batch size."""

    batch: sympy.Symbol

    def shapes(self, node: fx.Node) -> tuple[Shape, ...]:
        value = node.meta.get("val")
        if isinstance(value, (*_SYMBOLIC, int, float)):
            return ((),)
        return tuple(tuple(size_of(size) for size in leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

    def number(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, _SYMBOLIC):
            return value if isinstance(value, int | float) else None
        expression = value.node.expr
        if not isinstance(expression, sympy.Expr) or expression.free_symbols - {self.batch}:
            return None
        return int(expression) if expression.is_Integer else expression

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        def value(source: fx.Node) -> Any:
            number = self.number(source)
            return source if number is None else number

        return {name: fx.map_arg(argument, value) for name, argument in bound_arguments(node).items()}


@dataclass(frozen=True)
class FittedValues:
    """Of a graph with a fixed batch size, compared with a second trace.

    Attributes:
        pairs: node -> the node of the second trace that does the same.
        sizes: the two batch sizes.
        batch: a symbol to write them with.
    """

    pairs: Mapping[fx.Node, fx.Node]
    sizes: tuple[int, int]
    batch: sympy.Symbol

    def shapes(self, node: fx.Node) -> tuple[Shape, ...]:
        own, other = (OpenValues(self.batch).shapes(each) for each in (node, self.pairs[node]))
        return tuple(tuple(self._fit(*pair) for pair in zip(*shapes, strict=True)) for shapes in zip(own, other, strict=True))

    def number(self, node: fx.Node) -> Any:
        own, other = (each.meta.get("val") for each in (node, self.pairs[node]))
        return self._fit(own, other) if isinstance(own, int | float) and isinstance(other, int | float) else None

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        own, other = bound_arguments(node), bound_arguments(self.pairs[node])
        leaves, tree = tree_flatten(own)
        fitted = [self._fit(*pair) for pair in zip(leaves, tree_leaves(other), strict=True)]
        return dict(tree_unflatten(fitted, tree))

    def _fit(self, own: Any, other: Any) -> Any:
        """One expression for both: constant, a multiple of the batch size, or a constant divided by it."""
        if not isinstance(own, int | float) or isinstance(own, bool) or own == other:
            return own
        first, second = self.sizes
        if own * second == other * first:
            return sympy.nsimplify(own) / first * self.batch
        if own * first == other * second:
            return sympy.nsimplify(own) * first / self.batch
        return sympy.Symbol("unknown") * self.batch


def pair_nodes(graph: fx.Graph, other: fx.Graph) -> dict[fx.Node, fx.Node] | None:
    """Node -> the node of another trace of the same model at the same place; None when the two do different things."""
    nodes, others = list(graph.nodes), list(other.nodes)
    if len(nodes) != len(others):
        return None
    pairs = dict(zip(nodes, others, strict=True))
    for node, twin in pairs.items():
        if node.op != twin.op or (node.op == "call_function" and node.target is not twin.target):
            return None
        if [pairs[source] for source in node.all_input_nodes] != twin.all_input_nodes:
            return None
        if len(tree_leaves(node.args)) != len(tree_leaves(twin.args)):
            return None
    return pairs
