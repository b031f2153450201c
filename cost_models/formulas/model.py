"""The work of a model as formulas in its batch and in the lengths of its sequences, operation by operation, forward and backward.

    linear      24*batch*sequence*hidden**2 with numbers for the sizes that a model fixes: 14155776*batch*sequence
    attention   4*batch*sequence**2*hidden                                                    3072*batch*sequence**2

Products and bytes follow from the rules of the operations (``cost_models.graph_cost``). What a sequence is follows from the axes of the
graph: wherever an axis of that name runs, in a position table as in scores, its symbol replaces the traced size. The
formulas hold for the whole model, before any of it is cut; at the traced sizes they are the prices that plans are made from. Where an
operation gives another length than it takes (labels shifted by one, a mask made of positions), what follows keeps that of the trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import sympy
from torch import fx

from cost_models.formulas.symbols import readable
from cost_models.graph_cost import Fetched, GraphCost, graph_cost
from cost_models.ops.cost import OperationCost, tensor_shapes
from passes.analysis.axes import Axes, TensorAxes
from passes.analysis.axis_names import axis_names
from passes.graph.provenance import module_path
from passes.ir.graph import ModelGraph
from passes.ir.tensor_spec import Size, TensorSpec, numel, total

BATCH = sympy.Symbol("batch", positive=True)
"""Rows of a step."""

SEQUENCE = "sequence"
"""The name of the axes that attention compares, and of the symbol of the first; those of others have numbers: ``sequence_1``."""


@dataclass(frozen=True)
class OperationFormula:
    """Work of one operation.

    Attributes:
        name: of its node.
        module: path of the module in which it is computed; empty for the model itself.
        operator: what is called.
        forward_flops: floating-point operations of its products.
        backward_flops: of the products that make its gradients.
        forward_bytes: that it reads and writes.
        backward_bytes: that its gradients read and write.
        parameter_bytes: of the parameters that it reads.
    """

    name: str
    module: str
    operator: str
    forward_flops: sympy.Expr
    backward_flops: sympy.Expr
    forward_bytes: sympy.Expr
    backward_bytes: sympy.Expr
    parameter_bytes: sympy.Expr


@dataclass(frozen=True)
class ModelFormula:
    """The formulas of a model.

    Attributes:
        operations: in the order of the graph, views left out.
        parameter_bytes: of all parameters, each counted once.
        kept_bytes: of what the backward keeps of the forward, nothing recomputed.
        defaults: symbol -> its size in the traced model.
    """

    operations: tuple[OperationFormula, ...]
    parameter_bytes: sympy.Expr
    kept_bytes: sympy.Expr
    defaults: Mapping[str, int]

    @property
    def flops(self) -> sympy.Expr:
        """Of a step: forward, and backward where the model trains."""
        return _total(operation.forward_flops + operation.backward_flops for operation in self.operations)

    @property
    def bytes(self) -> sympy.Expr:
        """That the operations of a step read and write."""
        return _total(operation.forward_bytes + operation.backward_bytes for operation in self.operations)

    def __str__(self) -> str:
        rows = [*self._rows(), ("all", self.flops)]
        width = max(len(name) for name, _ in rows)
        lines = ["FLOPs of the whole model, forward and backward"]
        lines += [f"    {name:<{width}}  {readable(formula)}" for name, formula in rows]
        sizes = (("read and written", self.bytes), ("of parameters", self.parameter_bytes), ("kept for the backward", self.kept_bytes))
        lines += [f"bytes {words}\n    {readable(size)}" for words, size in sizes]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, sympy.Expr]]:
        """Return (modules, FLOPs of all of them) for modules whose paths differ only by numbers, where they multiply."""
        alike: dict[str, list[OperationFormula]] = {}
        for operation in self.operations:
            alike.setdefault(re.sub(r"\b\d+\b", "*", operation.module) or "the model itself", []).append(operation)
        rows = []
        for pattern, group in alike.items():
            flops = _total(operation.forward_flops + operation.backward_flops for operation in group)
            count = len({operation.module for operation in group})
            if flops != 0:
                rows.append((f"{pattern} ({count})" if count > 1 else group[0].module or pattern, flops))
        return rows


def model_formula(graph: ModelGraph, axes: Axes, *, differentiate: bool) -> ModelFormula:
    """Build the formulas of a model.

    Args:
        graph: the whole model.
        axes: of the graph.
        differentiate: whether there is a backward.
    """
    symbols = _symbols(graph, axes)
    sizes = _SymbolicSizes(axes, symbols)
    cost = graph_cost(graph, differentiate=differentiate, parts=sizes)
    rows = {} if cost.batch is None else {cost.batch: BATCH}
    operations = tuple(
        _operation(node, cost.nodes[node.name], rows) for node in graph.computing_nodes() if _does_anything(cost.nodes[node.name])
    )
    held = [shape.bytes for node in graph.graph.nodes if node.name in graph.parameters for shape in sizes.results(node)]
    defaults = {} if cost.batch is None else {str(BATCH): graph.batch_size}
    defaults |= {str(symbol): int(axes.sizes[axis]) for axis, symbol in symbols.items()}
    return ModelFormula(operations, _total(held), _kept(cost, rows), defaults)


def _symbols(graph: ModelGraph, axes: Axes) -> dict[int, sympy.Symbol]:
    """Return the axes that are sequences of a fixed length, with their symbols."""
    names = axis_names(graph, axes)
    found = [axis for axis, name in enumerate(names) if name.startswith(f"{SEQUENCE}[") and isinstance(axes.sizes[axis], int)]
    words = [SEQUENCE if index == 0 else f"{SEQUENCE}_{index}" for index in range(len(found))]
    return {axis: sympy.Symbol(word, positive=True, integer=True) for axis, word in zip(found, words, strict=True)}


class _SymbolicSizes:
    """Shapes with symbols for axes (``cost_models.graph_cost.Parts``)."""

    gathered_again: frozenset[str] = frozenset()
    gathered_once: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    scattered_once: Mapping[str, Size] = MappingProxyType({})

    def __init__(self, axes: Axes, symbols: Mapping[int, sympy.Symbol]) -> None:
        self._axes, self._symbols = axes, symbols

    def results(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        """Return the shapes of a node's results."""
        shapes = tensor_shapes(node.meta.get("val"))
        tensors = self._axes.tensors.get(node.name, ())
        if len(tensors) != len(shapes):
            return shapes
        return tuple(self._symbolic(shape, dimensions) for shape, dimensions in zip(shapes, tensors, strict=True))

    def operands(self, call: fx.Node) -> Mapping[fx.Node, tuple[TensorSpec, ...]]:
        """Return nothing: calls read their operands unchanged."""
        return {}

    def fetched(self, call: fx.Node) -> Mapping[fx.Node, tuple[Fetched, ...]]:
        """Return nothing: there are no other ranks."""
        return {}

    def _symbolic(self, shape: TensorSpec, dimensions: TensorAxes) -> TensorSpec:
        sizes = (
            numel(self._symbols.get(axis, self._axes.sizes[axis]) for axis in axes) if any(axis in self._symbols for axis in axes) else size
            for size, axes in zip(shape.shape, dimensions, strict=True)
        )
        return TensorSpec(tuple(sizes), shape.dtype)


def _does_anything(cost: OperationCost) -> bool:
    return any(work.launches for work in (cost.forward, cost.backward_input, cost.backward_weight))


def _operation(node: fx.Node, cost: OperationCost, rows: Mapping[sympy.Symbol, sympy.Symbol]) -> OperationFormula:
    backward = cost.backward_input + cost.backward_weight
    moved = (sum((each.bytes for each in work.then), start=work.bytes) for work in (cost.forward, backward))
    sizes = (cost.forward.flops, backward.flops, *moved, cost.parameters)
    return OperationFormula(node.name, module_path(node), str(node.target), *(sympy.sympify(size).subs(rows) for size in sizes))


def _kept(cost: GraphCost, rows: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    kept = {allocation for saved in cost.saved.values() for allocation in saved}
    sizes = [cost.allocation_bytes[allocation] for allocation in sorted(kept)] + [each.keeps for each in cost.nodes.values()]
    return sympy.expand(_total(sizes).subs(rows))


def _total(sizes: Iterable[sympy.Expr]) -> sympy.Expr:
    return sympy.expand(sympy.sympify(total(sizes)))
