"""Sizes and numbers of a graph as expressions in the batch size.

A graph with a symbolic batch has them; for a graph with a fixed batch they are fitted to two traces with different batch sizes:

    batch 4: view(x, [8, 6])      batch 6: view(x, [12, 6])      fitted: view(x, [2 * batch, 6])
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from passes.graph.equivalence import call_key, constant_key
from passes.ir.tensor_spec import TensorSpec
from passes.ir.torch_private import tree_leaves
from passes.rules.call import Call, Operand, call_of

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def depends_on(batch: sympy.Symbol, value: Any) -> bool:
    """Return whether a number, a size of an operand, or any of those in a (nested) tuple depends on the batch size."""
    if isinstance(value, Operand):
        return depends_on(batch, value.shape)
    if isinstance(value, tuple):
        return any(depends_on(batch, part) for part in value)
    return isinstance(value, sympy.Expr) and batch in value.free_symbols


@dataclass(frozen=True)
class OpenSizes:
    """Sizes of a graph with a symbolic batch size.

    Attributes:
        batch: its symbol.
    """

    batch: sympy.Symbol

    def call(self, node: fx.Node) -> Call | None:
        """Return a node's call as sharding rules see it; None if an argument is neither a tensor nor a known number."""
        return call_of(node)

    def number(self, node: fx.Node) -> Any:
        """Return the number that a node computes, if it is constant or depends on the batch size alone; else None."""
        value = node.meta.get("val")
        if not isinstance(value, _SYMBOLIC):
            return value if isinstance(value, int | float) else None
        expression = value.node.expr
        if not isinstance(expression, sympy.Expr) or expression.free_symbols - {self.batch}:
            return None
        return int(expression) if expression.is_Integer else expression


@dataclass(frozen=True)
class FittedSizes:
    """Sizes of a graph with a fixed batch size, fitted to it and a second trace with another batch size.

    Attributes:
        pairs: node -> the same node of the second trace.
        sizes: the two batch sizes.
        batch: the symbol of the batch size in fitted expressions.
    """

    pairs: Mapping[fx.Node, fx.Node]
    sizes: tuple[int, int]
    batch: sympy.Symbol

    def call(self, node: fx.Node) -> Call | None:
        """See ``OpenSizes.call``."""
        own, other = call_of(node), call_of(self.pairs[node])
        if own is None or other is None or len(own.outputs) != len(other.outputs):
            return None
        values, outputs = self._fit(own.values, other.values), self._fit(own.outputs, other.outputs)
        return dataclasses.replace(own, values=values, outputs=outputs)

    def number(self, node: fx.Node) -> Any:
        """See ``OpenSizes.number``."""
        own, other = node.meta.get("val"), self.pairs[node].meta.get("val")
        return self._fit(own, other) if isinstance(own, int | float) and isinstance(other, int | float) else None

    @cached_property
    def digest(self) -> str | None:
        """Digest of every call, with its numbers as expressions: equal for traces of two batch sizes that compute the same.

        None: a number depends on the batch in no known way.
        """
        places = {node: place for place, pair in enumerate(self.pairs.items()) for node in pair}
        calls = []
        for pair in self.pairs.items():
            own, other = (tuple(places.get(leaf, leaf) for leaf in tree_leaves((node.args, node.kwargs))) for node in pair)
            fitted = self._fit(own, other)
            if self._unknown in fitted:
                return None
            calls.append((pair[0].op, str(pair[0].target), fitted))
        return hashlib.sha256(repr(calls).encode()).hexdigest()

    def _fit(self, own: Any, other: Any) -> Any:
        """Return one expression for the values in both traces: a constant, a multiple of the batch size, or a constant divided by it."""
        if isinstance(own, TensorSpec):
            return dataclasses.replace(own, shape=self._fit(own.shape, other.shape))
        if isinstance(own, tuple):
            return tuple(self._fit(*pair) for pair in zip(own, other, strict=True))
        if not isinstance(own, int | float) or isinstance(own, bool) or own == other:
            return own
        first, second = self.sizes
        if own * second == other * first:
            return sympy.nsimplify(own) / first * self.batch
        if own * first == other * second:
            return sympy.nsimplify(own) * first / self.batch
        return self._unknown

    @property
    def _unknown(self) -> sympy.Expr:
        """A number that depends on the batch in no known way."""
        return self.batch ** sympy.Symbol("unknown", positive=True)


Sizes: TypeAlias = OpenSizes | FittedSizes
"""Source of the sizes and numbers of a graph."""


def pair_nodes(graph: fx.Graph, other: fx.Graph) -> dict[fx.Node, fx.Node] | None:
    """Return node -> the same node of another trace of the model; None if the traces differ in more than numbers."""
    places = {node: place for nodes in (graph.nodes, other.nodes) for place, node in enumerate(nodes)}

    def keys(nodes: Iterable[fx.Node]) -> list[Hashable]:
        return [node.op == "placeholder" or call_key(node, places.__getitem__, _constant_key) for node in nodes]

    return dict(zip(graph.nodes, other.nodes, strict=True)) if keys(graph.nodes) == keys(other.nodes) else None


def _constant_key(value: Any) -> Hashable:
    """Return the key of an argument that is no node; None for every number, which may depend on the batch."""
    return None if isinstance(value, int | float) and not isinstance(value, bool) else constant_key(value)
