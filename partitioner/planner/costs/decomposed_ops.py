"""Costs of decomposed ops: ops that reduce over a sharded axis, and run as local kernels and collectives.

group_norm on one device    one kernel that reads twice and writes once
sharded in space            sum | all_reduce | variance | all_reduce | normalize

``passes.spmd.decompose`` lists the kernels of each decomposition, forward and backward.

Random numbers are drawn whole on every rank, which copies its part of them.

Attention on a ring does the work of one block at each of its steps, and joins the result with what it has: fused kernels, which keep no
scores. Each step of a causal ring takes as long as on the rank for which its block counts whole. In zigzag order a block has four products
of pieces, and a rank computes those alone that a causal mask does not hide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from cost_models.graph_cost import GraphCost
from cost_models.ops.cost import OperationCost, Recomputation
from cost_models.ops.work import Work
from partitioner.planner.costs.collectives import reduced_in_parts
from partitioner.planner.costs.part_sizes import PartSizes
from passes.analysis.axes import Axes
from passes.graph.schemas import bound_arguments, draws
from passes.ir.graph import ModelGraph
from passes.ir.tensor_spec import Size, TensorSpec
from passes.spmd.decompose.registry import SINGLE_BYTES, Decomposition, Kernels, decomposition_of
from passes.spmd.decompose.ring_attention import is_causal, products_of_pieces
from passes.spmd.propagate.layouts import Layouts


def with_decompositions(cost: GraphCost, graph: ModelGraph, axes: Axes, layouts: Layouts, sizes: PartSizes) -> GraphCost:
    """Return the costs with those of decomposed ops replaced: time by their kernels, memory by the activations that these save."""
    for node in (node for node in graph.computing_nodes() if node.name in layouts.rings):
        parts = sizes.operands(node)
        blocks = [parts[operand][0] for operand in axes.operands[node.name][:3]]
        ring = layouts.rings[node.name]
        cost = _with_ring(cost, node, layouts.mesh[ring.dimension][1], *blocks, is_zigzag=ring.is_zigzag)
    decomposed: dict[str, OperationCost] = {}
    for node in graph.computing_nodes():
        if draws(node) and (part := _copied_part(node, sizes)):
            work = cost.nodes[node.name].forward
            more = dataclasses.replace(work, bytes=work.bytes + 2 * part.bytes, launches=work.launches + 1, call=None)
            decomposed[node.name] = dataclasses.replace(cost.nodes[node.name], forward=more)
        loops = [axes.loops[node.name].factors[factor].name for _, factor in reduced_in_parts(node.name, axes, layouts)]
        decomposition = decomposition_of(node, loops[0]) if loops else None
        if decomposition is not None and decomposition.kernels:
            decomposed[node.name] = _decomposed_cost(cost.nodes[node.name], node, decomposition, cost.bytes[node.name])
        elif decomposition is not None and decomposition.more:
            passed = decomposition.passes_over
            size = sizes.operands(node)[bound_arguments(node)[passed]][0].bytes if passed else cost.bytes[node.name]
            decomposed[node.name] = _with_more(cost.nodes[node.name], node, decomposition, size)
    return dataclasses.replace(cost, nodes={**cost.nodes, **decomposed}) if decomposed else cost


def _copied_part(node: fx.Node, sizes: PartSizes) -> TensorSpec | None:
    """Return the part that a rank copies of a value that every rank draws whole; None: it reads the whole."""
    whole = sizes.results(node)[0].shape
    parts = (sizes.operands(reader).get(node, ()) for reader in node.users)
    return next((part for (part,) in filter(None, parts) if part.shape != whole), None)


def _with_ring(
    cost: GraphCost, node: fx.Node, count: int, query: TensorSpec, key: TensorSpec, value: TensorSpec, *, is_zigzag: bool
) -> GraphCost:
    """Return the costs with those of attention on a ring of ``count`` ranks, from those of one block of its parts."""
    whole = cost.nodes[node.name]
    precise = max(SINGLE_BYTES, whole.dtype.itemsize) / whole.dtype.itemsize
    products, pieces = (products_of_pieces(count), 2) if is_zigzag else (count, 1)
    result = query.bytes / query.shape[-1] * value.shape[-1] * precise / pieces
    blocks = products / pieces**2
    mask = bound_arguments(node)["attn_mask"]
    is_fused = query.shape[-1] == value.shape[-1] and (mask is None or mask.meta["val"].dtype == torch.bool)
    scores = 0 if is_fused else query.bytes / query.shape[-1] * key.shape[-2] * precise / pieces**2
    # Of a causal block a kernel computes half: that is the first of a ring, and two of the own products of pieces in zigzag order.
    is_halved = is_causal(node) and query.shape[-2] == key.shape[-2]
    computed = 1 - (1 if is_zigzag else 0.5 * is_halved) / products

    def steps(work: Work, passes: int, over_scores: int) -> Work:
        if not work.launches:
            return work
        moved = (work.bytes / pieces + passes * result + over_scores * scores) * products
        repeated = tuple(dataclasses.replace(product, batch=product.batch * blocks, computed=computed) for product in work.products)
        return Work(work.flops * blocks, moved, (work.launches + _JOINING) * products, work.family, repeated, then=work.then)

    forward, backward = steps(whole.forward, *_RING_FORWARD), steps(whole.backward_input, *_RING_BACKWARD)
    nodes = {**cost.nodes, node.name: dataclasses.replace(whole, forward=forward, backward_input=backward)}
    block = max(cost.allocation_bytes, default=-1) + 1
    size = _RING_RESULTS * result * pieces + _RING_BLOCKS * (key.bytes + value.bytes) + _RING_SCORES * scores
    *copies, touched = cost.touched[node.name]
    return dataclasses.replace(
        cost,
        nodes=nodes,
        allocation_bytes={**cost.allocation_bytes, block: size},
        maker={**cost.maker, block: node.name},
        touched={**cost.touched, node.name: (*copies, (*touched, block))},
    )


_JOINING = 1
"""Kernels that join the result of a block, or add its gradients, beside those of attention."""

_RING_FORWARD, _RING_BACKWARD = (3, 6), (6, 8)
"""Passes over a result, or queries, in that: two are read and one is written; the same for gradients of queries, keys and values. And those
over the scores of a block, where no fused kernel keeps them to itself (``passes.spmd.decompose.attention_block``)."""

_RING_RESULTS, _RING_BLOCKS, _RING_SCORES = 3, 3, 3
"""In memory at once: results, of a block, of those before, and of both; blocks of keys and values beside the own, the next and gradients;
and scores, or values of their size, where they are in memory."""


def _decomposed_cost(cost: OperationCost, node: fx.Node, decomposition: Decomposition, result: Size) -> OperationCost:
    """Return the cost of the kernels whose arguments the call has; ``result``: bytes of its result, the size of one pass."""
    kernels = _kernels_of(node, decomposition.kernels)
    converts_input = bool({"input", "self"} & set(decomposition.widened))
    size = _single_bytes(result, cost.dtype) if converts_input else result
    more = [decomposition.sums_of_half] if not converts_input and cost.dtype.itemsize < SINGLE_BYTES else []
    of_forward = (*kernels, *more)
    derived = result * sum(each.keeps for each in kernels) if cost.saves else 0
    of_weights = cost.backward_input if "weight" in dict(cost.forward.gradients).values() else cost.backward_weight  # one kernel before
    return dataclasses.replace(
        cost,
        forward=_work(cost.forward, (each.forward for each in of_forward), size),
        repeated=_recomputation(cost.forward, [each for each in of_forward if not each.updates], size),
        backward_input=_work(cost.backward_input, (each.activation for each in kernels), size),
        backward_weight=_work(_alone(of_weights), (each.weight for each in kernels), size),
        keeps=cost.keeps + derived,
        derived=derived,
    )


def _recomputation(forward: Work, kernels: Sequence[Kernels], size: Size) -> Recomputation:
    """Return the work of computing a call again; ``forward``, ``size``: as ``whole`` and ``size`` of ``_work``."""
    of_result = [each.repeated or each.forward for each in kernels]
    of_both = [each.forward for each in kernels]
    of_statistics = [(both[0] - each[0], both[1] - each[1]) for both, each in zip(of_both, of_result, strict=True)]
    return Recomputation(_work(forward, of_result, size), _work(_alone(forward), of_statistics, size), _work(forward, of_both, size))


def _alone(work: Work) -> Work:
    """Return work without the kernels that follow."""
    return dataclasses.replace(work, then=())


def _kernels_of(node: fx.Node, kernels: Mapping[str, Kernels]) -> list[Kernels]:
    """Return the kernels whose arguments the call has: no ``padding_idx`` is -1."""
    arguments = bound_arguments(node)
    return [kernel for name, kernel in kernels.items() if not name or arguments.get(name) not in (None, -1)]


def _single_bytes(size: Size, dtype: torch.dtype) -> Size:
    """Return the bytes of a tensor that is computed in float32 instead of half precision."""
    return size * SINGLE_BYTES / dtype.itemsize if dtype.itemsize < SINGLE_BYTES else size


def _with_more(cost: OperationCost, node: fx.Node, decomposition: Decomposition, size: Size) -> OperationCost:
    """Return the cost of an op with the kernels beside it; ``size``: bytes of one pass."""
    kernels, one_pass = _kernels_of(node, decomposition.more), _single_bytes(size, cost.dtype) if decomposition.widened else size

    def with_kernels(work: Work, each: Sequence[tuple[int, int]]) -> Work:
        launches, passes = (sum(numbers) for numbers in zip(*each, strict=True))
        more = (Work.of_kernels(one_pass, passes, launches),) if launches else ()
        return dataclasses.replace(work, call=None, then=(*work.then, *more)) if work.launches else work

    forward = with_kernels(cost.forward, [kernel.forward for kernel in kernels])
    of_result = [kernel.repeated for kernel in kernels if kernel.repeated is not None]
    return dataclasses.replace(
        cost,
        forward=forward,
        repeated=Recomputation(_work(_alone(forward), of_result, one_pass), forward, forward) if of_result else None,
        backward_input=with_kernels(cost.backward_input, [kernel.activation for kernel in kernels]),
        backward_weight=with_kernels(cost.backward_weight, [kernel.weight for kernel in kernels]),
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
    work = Work.of_kernels(size, passes, launches)
    return dataclasses.replace(work, then=(*work.then, *whole.then))
