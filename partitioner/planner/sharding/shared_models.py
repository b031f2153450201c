"""The models that several plans of one graph share: its axes, the choices of axes and one rank's shards are computed once for all of them.

plan of {"tensor": 4}                 ─┐
the same with recompute="full"         ├─>   one ``CuttableModel``   ->   24 shardings, not 72
the same with n_microbatches=8        ─┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from cost_models.cost_model import CostModel, Roofline
from partitioner.planner.costs.links import ClockRate
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.sharding.rank_shard import ModelPart, unfolded, whole_part
from partitioner.planner.sharding.spatial import Hardware
from passes.ir.graph import ModelGraph
from passes.normalize.loss_alone import graph_of_step


@dataclass(frozen=True, eq=False)
class _Known:
    """A model, and the key of its caches."""

    graph: ModelGraph
    options: Hashable
    clock_rate: ClockRate | None
    hardware: Hardware
    model: CuttableModel


@dataclass(frozen=True, eq=False)
class SharedModels:
    """The models of plans that differ in their requests; the last few are kept, with their graphs."""

    _steps: deque[tuple[ModelGraph, ModelGraph]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _models: deque[_Known] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _wholes: deque[tuple[ModelGraph, CostModel, ModelPart]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def graph_of_step(self, graph: ModelGraph) -> ModelGraph:
        """Return the part of a graph that a training step computes (``loss_alone.graph_of_step``)."""
        found = next((step for known, step in self._steps if known is graph), None)
        if found is None:
            found = graph_of_step(graph)
            self._steps.append((graph, found))
        return found

    def cuttable(self, graph: ModelGraph, request: PlanRequest, clock_rate: ClockRate | None, hardware: Hardware) -> CuttableModel:
        """Return the model of a graph for a request on some hardware."""
        for known in self._models:
            is_same = known.graph is graph and known.options == request.graph_options
            if is_same and known.clock_rate == clock_rate and _is_same_hardware(known.hardware, hardware):
                return known.model.under(request)
        model = CuttableModel(graph, request, clock_rate=clock_rate, hardware=hardware)
        self._models.append(_Known(graph, request.graph_options, clock_rate, hardware, model))
        return model

    def whole(self, graph: ModelGraph, cost_model: CostModel) -> ModelPart:
        """Return the whole model as the shard of a mesh that cuts no axes, with all its blocks as they are."""
        for known, prices, part in self._wholes:
            if known is graph and _has_same_prices(prices, cost_model):
                return part
        part = whole_part(unfolded(graph))
        self._wholes.append((graph, cost_model, part))
        return part


def _is_same_hardware(hardware: Hardware, other: Hardware) -> bool:
    return hardware.cluster == other.cluster and _has_same_prices(hardware.cost_model, other.cost_model)


def _has_same_prices(cost_model: CostModel, other: CostModel) -> bool:
    """Return whether two cost models are one; a roofline has no state, what a user derives from it may have."""
    return cost_model is other or type(cost_model) is type(other) is Roofline


_KEPT = 8
"""Number of models that are kept: of a sweep over a few clusters."""
