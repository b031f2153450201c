"""Costs of decomposed ops: ops that reduce over a sharded axis, and run as local kernels and collectives.

group_norm on one device    one kernel that reads twice and writes once
sharded in space            sum | all_reduce | distances, squares, sum | all_reduce | normalize

``passes.spmd.decompose`` lists the kernels of each decomposition, forward and backward.

Attention on a ring does the work of one block at each of its steps, by kernels that read and write scores, and holds those of one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import fx

from cost_models.graph_cost import GraphCost
from cost_models.ops.cost import OperationCost
from cost_models.ops.work import Work
from partitioner.planner.costs.collectives import reduced_in_parts
from partitioner.planner.costs.part_sizes import PartSizes
from passes.analysis.axes import Axes
from passes.graph.schemas import bound_arguments
from passes.ir.graph import ModelGraph
from passes.ir.tensor_spec import Size, TensorSpec
from passes.spmd.decompose.registry import SINGLE_BYTES, Decomposition, decomposition_of
from passes.spmd.propagate import Layouts

__all__ = ["with_decompositions"]


def with_decompositions(cost: GraphCost, graph: ModelGraph, axes: Axes, layouts: Layouts, sizes: PartSizes) -> GraphCost:
    """Return the costs with those of decomposed ops replaced: time by their kernels, memory by the activations that these save."""
    for node in (node for node in graph.computing_nodes() if node.name in layouts.rings):
        parts = sizes.operands(node)
        blocks = [parts[operand][0] for operand in axes.operands[node.name][:3]]
        cost = _with_ring(cost, node, layouts.mesh[layouts.rings[node.name]][1], *blocks)
    decomposed: dict[str, OperationCost] = {}
    for node in graph.computing_nodes():
        loops = [axes.loops[node.name].factors[factor].name for _, factor in reduced_in_parts(node.name, axes, layouts)]
        decomposition = decomposition_of(node, loops[0]) if loops else None
        if decomposition is not None and decomposition.kernels:
            decomposed[node.name] = _decomposed_cost(cost.nodes[node.name], node, decomposition, cost.bytes[node.name])
    return dataclasses.replace(cost, nodes={**cost.nodes, **decomposed}) if decomposed else cost


def _with_ring(cost: GraphCost, node: fx.Node, count: int, query: TensorSpec, key: TensorSpec, value: TensorSpec) -> GraphCost:
    """Return the costs with those of attention on a ring of ``count`` ranks, from those of one block of its parts."""
    whole = cost.nodes[node.name]
    precise = max(SINGLE_BYTES, whole.dtype.itemsize) / whole.dtype.itemsize
    scores = query.bytes / query.shape[-1] * key.shape[-2] * precise

    def steps(work: Work, launches: int, passes: int) -> Work:
        if not work.launches:
            return work
        return Work(work.flops * count, (work.bytes + passes * scores) * count, launches * count, work.family, work.products * count)

    forward, backward = steps(whole.forward, *_RING_FORWARD), steps(whole.backward_input, *_RING_BACKWARD)
    nodes = {**cost.nodes, node.name: dataclasses.replace(whole, forward=forward, backward_input=backward)}
    block = max(cost.allocation_bytes, default=-1) + 1
    size = _RING_SCORES * scores + _RING_BLOCKS * (key.bytes + value.bytes)
    *copies, touched = cost.touched[node.name]
    return dataclasses.replace(
        cost,
        nodes=nodes,
        allocation_bytes={**cost.allocation_bytes, block: size},
        maker={**cost.maker, block: node.name},
        touched={**cost.touched, node.name: (*copies, (*touched, block))},
    )


_RING_FORWARD, _RING_BACKWARD = (14, 10), (16, 12)
"""Kernels of one step of a ring, and their passes over the scores of a block."""

_RING_SCORES, _RING_BLOCKS = 3, 3
"""Scores, or values of their size, that are in memory at once; blocks of keys and values beside the own ones: the next, and gradients."""


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
