"""Work and bytes of the stages of a plan as formulas in the rows of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import Tensor

from cost_models.graph_cost import graph_cost
from partitioner.reports.sources import Explained
from passes.graph.symbolic_sizes import size_of
from passes.ir.tensor_spec import total

__all__ = ["stage_formulas"]


def stage_formulas(explained: Explained) -> Mapping[str, sympy.Expr]:
    """Return FLOPs, bytes of messages and saved bytes of each stage of the first pipeline; ``b`` is the rows of a microbatch."""
    lowered = explained.lowered
    rows = sympy.Symbol("b", positive=True, integer=True)
    symbol = lowered.graph.batch

    def in_rows(expression: sympy.Expr) -> sympy.Expr:
        sympified = sympy.sympify(expression)
        return sympy.factor_terms(sympy.expand(sympified if symbol is None else sympified.subs(symbol, rows)))

    costs = graph_cost(lowered.graph, differentiate=False).nodes
    formulas: dict[str, sympy.Expr] = {}
    for stage in lowered.stages:
        nodes = [node for node in stage.module.graph.nodes if node.name in costs]
        formulas[f"forward FLOPs of stage {stage.index}"] = in_rows(total(costs[node.name].forward.flops for node in nodes))
        values = {node.name: node.meta.get("val") for node in stage.module.graph.nodes}
        sent = [values[name] for name in stage.outputs if stage.index + 1 < len(lowered.stages)]
        if sent:
            formulas[f"bytes of activations that leave stage {stage.index}"] = in_rows(total(map(_bytes, sent)))
    for stage, training in zip(lowered.stages, lowered.training, strict=False):
        saved = [value for value in training.saved_values if isinstance(value, Tensor)]
        formulas[f"bytes that stage {stage.index} keeps for its backward"] = in_rows(total(map(_bytes, saved)))
    return formulas


def _bytes(value: object) -> sympy.Expr:
    assert isinstance(value, Tensor)
    return sympy.Mul(*(size_of(size) for size in value.shape), value.dtype.itemsize)
