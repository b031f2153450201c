"""Costs of decomposed ops: ops that reduce over a sharded axis, and run as local kernels and collectives.

group_norm on one device    one kernel that reads twice and writes once
sharded in space            sum | all_reduce | distances, squares, sum | all_reduce | normalize

``passes.spmd.decompose`` lists the kernels of each decomposition, forward and backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import fx

from cost_models.graph_cost import GraphCost
from cost_models.ops.cost import OperationCost
from cost_models.ops.work import Work
from partitioner.planner.costs.collectives import reduced_in_parts
from passes.analysis.axes import Axes
from passes.graph.schemas import bound_arguments
from passes.ir.graph import ModelGraph
from passes.ir.tensor_spec import Size
from passes.spmd.decompose.registry import SINGLE_BYTES, Decomposition, decomposition_of
from passes.spmd.propagate import Layouts

__all__ = ["with_decompositions"]


def with_decompositions(cost: GraphCost, graph: ModelGraph, axes: Axes, layouts: Layouts) -> GraphCost:
    """Return the costs with those of decomposed ops replaced: time by their kernels, memory by the activations that these save."""
    decomposed: dict[str, OperationCost] = {}
    for node in graph.computing_nodes():
        loops = [axes.loops[node.name].factors[factor].name for _, factor in reduced_in_parts(node.name, axes, layouts)]
        decomposition = decomposition_of(node, loops[0]) if loops else None
        if decomposition is not None and decomposition.kernels:
            decomposed[node.name] = _decomposed_cost(cost.nodes[node.name], node, decomposition, cost.bytes[node.name])
    return dataclasses.replace(cost, nodes={**cost.nodes, **decomposed}) if decomposed else cost


def _decomposed_cost(cost: OperationCost, node: fx.Node, decomposition: Decomposition, result: Size) -> OperationCost:
    """Return the cost of the kernels whose arguments the call has; ``result``: bytes of its result, the size of one pass."""
    arguments = bound_arguments(node)
    kernels = [kernel for name, kernel in decomposition.kernels.items() if not name or arguments.get(name) is not None]
    size = result * SINGLE_BYTES / cost.dtype.itemsize if cost.dtype.itemsize < SINGLE_BYTES else result
    return dataclasses.replace(
        cost,
        forward=_work(cost.forward, (each.forward for each in kernels), size),
        backward_input=_work(cost.backward_input, (each.activation for each in kernels), size),
        backward_weight=_work(cost.backward_weight, (each.weight for each in kernels), size),
        keeps=cost.keeps + result * sum(each.keeps for each in kernels) if cost.saves else cost.keeps,
    )


def _work(whole: Work, kernels: Iterable[tuple[int, int]], size: Size) -> Work:
    """Return the work of all kernels of a decomposition.

    Args:
        whole: work of the undecomposed op; without launches (no such gradient) the decomposition has no work either.
        kernels: (launches, passes over the tensor) of each kernel.
        size: bytes of one pass.
    """
    if not whole.launches:
        return whole
    launches, passes = (sum(each) for each in zip(*kernels, strict=True))
    return Work(0, size * passes, launches, "pointwise")
