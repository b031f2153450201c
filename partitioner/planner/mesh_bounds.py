"""How fast a mesh can be at best, before any axis of it is cut: what prices need no layout for.

A rank of a mesh with R parts of the rows, T parts of everything else and P stages does at least one in R T P of the arithmetic and of the
memory traffic of the whole model, and starts all kernels of its stages: cutting an axis makes kernels smaller, not fewer. Replicas sum the
gradients of all parameters once, or gather every parameter that they hold in parts, in each microbatch.
"""

from __future__ import annotations

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.hardware import Cluster
from partitioner.planner.mesh_links import dimension_links, stages_length
from partitioner.planner.model_part import ModelPart
from partitioner.planner.pipeline_problem import memory_limits
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.unit_prices import PriceList
from passes.axes import Axes, find_axes
from passes.ir.mesh import ROWS, Mesh

__all__ = ["MeshBounds"]


class MeshBounds:
    """Bounds of meshes on one cluster.

    Args:
        whole: the model.
        cluster: the hardware.
        request: what was asked for.
        cost_model: prices work. A part of some work may take no less than its share of the time beyond what it costs to start it.
    """

    def __init__(self, whole: ModelPart, cluster: Cluster, request: PlanRequest, cost_model: CostModel) -> None:
        self._cluster, self._whole = cluster, whole
        kinds = tuple(dict.fromkeys(cluster.devices))
        prices = PriceList(whole.graph, whole.cost, whole.points, kinds, cost_model, request.optimizer)
        self._seconds = prices.at(whole.graph.batch_size).units.time.min(axis=1)
        self._starts = prices.starting().min(axis=1)
        self._fixed = sum(item.amount for item in prices.at(whole.graph.batch_size).fixed)
        self._limit = sum(memory_limits(cluster, request))
        trained = [name for name in whole.graph.parameters if name in whole.cost.gradients]
        self._sizes = {name: float(prices.held_bytes(name)) for name in trained}
        axes = find_axes(whole.graph.graph)
        self._longest = {name: _longest_axis(axes, name) for name in trained}

    def of(self, mesh: Mesh) -> float:
        """Seconds of a step that no plan of the mesh can beat; inf where parameters alone exceed the memory of all devices."""
        stages, parts = stages_length(mesh), mesh.cutting.size
        kind, rows = next(((name, size) for name, size in mesh.dimensions if name in ROWS), ("", 1))
        if self._fixed * (rows if kind == "data" else 1) > self._limit:
            return float("inf")
        work = float(np.maximum(self._seconds / parts, self._starts).sum()) / stages
        sending = self._sending(kind, rows, stages * parts // rows, mesh) if rows > 1 and self._whole.graph.training else 0.0
        return (work + sending) * (1 - _ROUNDING)

    def _sending(self, kind: str, rows: int, others: int, mesh: Mesh) -> float:
        """Seconds that replicas send at least, when so many other ranks share the parameters equally."""
        links = dimension_links(mesh, self._cluster)[kind]
        if kind == "data":
            return links.seconds("all_reduce", sum(self._sizes.values()) / others)
        gathered = [size for name, size in self._sizes.items() if self._longest[name] >= rows]
        return sum(
            (len(gathered) * links.seconds(way, 0.0) / stages_length(mesh) + sum(gathered) / others * links.seconds(way, _LARGE) / _LARGE)
            for way in ("all_gather", "reduce_scatter")
        )


def _longest_axis(axes: Axes, parameter: str) -> int:
    """The longest axis that a parameter could be stored by; 0 where nobody reads it."""
    if parameter not in axes.tensors:
        return 0
    return max((size for each in axes.of(parameter) for axis in each if isinstance(size := axes.sizes[axis], int)), default=0)


_LARGE = 1e18
"""Bytes of a message whose latency is nothing beside them."""

_ROUNDING = 1e-6
"""Relative margin for the rounding of sums."""
