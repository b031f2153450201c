"""Rates of a step: samples and tokens a second, and model FLOPs utilization."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cost_models.graph_cost import graph_cost
from cost_models.hardware.clusters import Cluster
from cost_models.ops.cost import OperationCost
from partitioner.experiments.models.factory import FactoryResult
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import pytree


def model_flops(graph: ModelGraph) -> Mapping[torch.dtype, float]:
    """Return the FLOPs of the matrix products of a step of the unpartitioned model, by dtype: nothing is recomputed."""
    cost = graph_cost(graph, differentiate=graph.training)
    batch = {} if cost.batch is None else {cost.batch: graph.batch_size}
    counted: dict[int, float] = {}  # equal calls share their cost
    totals: dict[torch.dtype, float] = {}
    for operation in cost.nodes.values():
        if id(operation) not in counted:
            counted[id(operation)] = _flops(operation, batch)
        totals[operation.dtype] = totals.get(operation.dtype, 0.0) + counted[id(operation)]
    return {dtype: flops for dtype, flops in totals.items() if flops}


def _flops(operation: OperationCost, batch: Mapping[object, int]) -> float:
    works = (operation.forward, operation.backward_input, operation.backward_weight)
    flops = sum((work.flops for work in works), start=0)
    return float(flops if isinstance(flops, int) else flops.subs(batch))


def utilization(flops: Mapping[torch.dtype, float], cluster: Cluster, n_devices: int, step_time: float) -> float | None:
    """Return model FLOPs utilization: the time of these FLOPs at the devices' peak, relative to that of a step; None without any FLOPs."""
    if not flops or not step_time:
        return None
    used = cluster.devices[:n_devices]
    peaks = {dtype: sum(device.peak(str(dtype).removeprefix("torch.")) for device in used) for dtype in flops}
    return sum(count / peaks[dtype] for dtype, count in flops.items()) / step_time


def tokens_of_sample(made: FactoryResult) -> int | None:
    """Return the tokens of each sample: the length of the first input that is a matrix of integers; None without one."""
    leaves = pytree.tree_leaves((made.args or (), dict(made.kwargs)))
    matrices = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in (torch.int64, torch.int32))
    tokens = next(matrices, None)
    return None if tokens is None else tokens.size(1)
