"""Find partial sums that are later added, so that one all_reduce serves both.

a = mm(x, v)            b = mm(x, w)        partial sums, if the contracted axis is sharded
c = a * mask            d = b * mask        partial sums still: the call is linear
e = c + d                                   partial sum of both: one all_reduce
f = table(words) + other(places)            partial sums, if rows of both tables are sharded
y = x + e                                   x is no partial sum: e is reduced before
"""

from __future__ import annotations

from torch import Tensor, fx

from passes.analysis.axes import Axes


def summed_together(graph: fx.Graph, axes: Axes) -> frozenset[str]:
    """Return the names of values that add several partial sums, and of those that reach such an addition through linear calls only."""
    partial_sums: set[fx.Node] = set()
    for node in graph.nodes:
        with_one_reader = {operand for operand in node.all_input_nodes if operand in partial_sums and len(operand.users) == 1}
        if _may_be_partial(node, axes) or any(operands <= with_one_reader for operands in _linear_in(node, axes)):
            partial_sums.add(node)
    together: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _summands(node, partial_sums, axes):
            together.add(node)
        elif len(node.users) == 1:
            (reader,) = node.users
            if node in _summands(reader, partial_sums, axes) or (reader in together and {node} in _linear_in(reader, axes)):
                together.add(node)
    return frozenset(node.name for node in together)


def _summands(node: fx.Node, partial_sums: set[fx.Node], axes: Axes) -> set[fx.Node]:
    """Return the operands that a call adds, if several of them are partial sums; else nothing."""
    return {summand for operands in _linear_in(node, axes) if len(operands & partial_sums) > 1 for summand in operands}


def _may_be_partial(node: fx.Node, axes: Axes) -> bool:
    """Return whether a call sums products, as a matrix product, or looks up rows of a table, of which a rank has a part."""
    loops = axes.loops.get(node.name)
    if loops is None or len(axes.operands[node.name]) < 2:
        return False
    return any(factor.reduction == "sum" or (factor.reduction == "whole" and factor.name == "vocab") for factor in loops.factors)


def _linear_in(node: fx.Node, axes: Axes) -> list[set[fx.Node]]:
    """Return the sets of operands in each of which a call is linear (jointly: ``a + b`` in {a, b}; ``a * b`` in {a} and in {b})."""
    loops = axes.loops.get(node.name)
    if loops is None or not isinstance(node.meta.get("val"), Tensor):
        return []
    operands = axes.operands[node.name]
    return [{operands[place] for place in linear} for linear in loops.linear]
