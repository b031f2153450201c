"""What calls cost that are written out on ranks' parts, because they reduce inside over what is cut.

group_norm of one device    a kernel that reads twice and writes once
cut in space                sum | all_reduce | distances, squares, sum | all_reduce | normalize

The second is what the ranks' programs run: ``passes.spmd.decompose`` tells the kernels of each call, and those of its backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import fx

from cost_models.graph_cost import GraphCost
from cost_models.ops.cost import OperationCost
from cost_models.ops.sizes import Size
from cost_models.ops.work import Work
from partitioner.planner.costs.collectives import reduced_in_parts
from passes.analysis.axes import Axes
from passes.graph.schemas import bound_arguments
from passes.ir.graph import ModelGraph
from passes.spmd.decompose.registry import SINGLE_BYTES, Inside, inside_of
from passes.spmd.propagate import Layouts

__all__ = ["with_written_out"]


def with_written_out(cost: GraphCost, graph: ModelGraph, axes: Axes, layouts: Layouts) -> GraphCost:
    """Prices with the calls that are written out as they run: their kernels, and what they keep."""
    written: dict[str, OperationCost] = {}
    for node in graph.computing_nodes():
        factors = [axes.loops[node.name].factors[factor].name for _, factor in reduced_in_parts(node.name, axes, layouts)]
        found = inside_of(node, factors[0]) if factors else None
        if found is not None and found.kernels:
            written[node.name] = _written_out(cost.nodes[node.name], node, found, cost.bytes[node.name])
    return dataclasses.replace(cost, nodes={**cost.nodes, **written}) if written else cost


def _written_out(cost: OperationCost, node: fx.Node, inside: Inside, result: Size) -> OperationCost:
    given = bound_arguments(node)
    kernels = [each for name, each in inside.kernels.items() if not name or given.get(name) is not None]
    size = result * SINGLE_BYTES / cost.dtype.itemsize if cost.dtype.itemsize < SINGLE_BYTES else result
    return dataclasses.replace(
        cost,
        forward=_work(cost.forward, (each.forward for each in kernels), size),
        backward_input=_work(cost.backward_input, (each.activation for each in kernels), size),
        backward_weight=_work(cost.backward_weight, (each.weight for each in kernels), size),
        keeps=cost.keeps + result * sum(each.keeps for each in kernels) if cost.saves else cost.keeps,
    )


def _work(whole: Work, kernels: Iterable[tuple[int, int]], size: Size) -> Work:
    """Of the kernels, in the place of the work of the call in one piece; none where that is none."""
    if not whole.launches:
        return whole
    launches, passes = (sum(each) for each in zip(*kernels, strict=True))
    return Work(0, size * passes, launches, "pointwise")
