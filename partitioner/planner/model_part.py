"""What one rank has of a model whose axes are cut: prices, cut points and collectives, from layouts alone.

    axes that each mesh dimension cuts -> layouts -> local sizes -> prices, exchanges, sums of gradients

Links are left out: the same part is priced on any links between the ranks of a stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.graph_cost import GraphCost, graph_cost
from cost_models.group_communication import GroupLinks
from cost_models.hardware import Device
from partitioner.planner.cut_points import CutPoints
from partitioner.planner.exchanges import (
    Exchange,
    GradientSum,
    counted_together,
    find_exchanges,
    find_gradient_sums,
    shares_of_bucket,
    sum_seconds,
)
from partitioner.planner.part_graph import PartGraph
from partitioner.planner.part_sizes import PartSizes
from partitioner.planner.unfold import RepeatedPrices
from partitioner.planner.unit_prices import PriceList, Prices
from partitioner.planner.written_out import with_written_out
from passes.axes import Axes
from passes.cut_axes import AxisCut, layouts_of_cut
from passes.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, STORED, Mesh
from passes.layouts import Layouts
from passes.recompute import Recompute

__all__ = ["ModelPart", "axis_cut", "cut_part", "whole_part"]


@dataclass(frozen=True, eq=False)
class ModelPart:
    """One rank's part of a model, over all stages.

    Attributes:
        of: the graph that it is a part of.
        batch_size: rows that one rank has.
        cost: the prices of the part.
        cutting: the mesh dimensions that cut axes.
        sums: the gradients that are summed once a step.
        layouts: how every value lies; None where nothing is cut.
        axes: of the graph; None where nothing is cut.
        sizes: of the part; None where nothing is cut.
        known_prices: by kinds of devices, optimizer and policy: worked out once for all links and batches.
    """

    of: PartGraph
    batch_size: int
    cost: GraphCost
    cutting: Mesh
    sums: tuple[GradientSum, ...] = ()
    layouts: Layouts | None = None
    axes: Axes | None = None
    sizes: PartSizes | None = None
    known_prices: dict[Hashable, PriceList] = field(default_factory=dict)

    @cached_property
    def graph(self) -> ModelGraph:
        """The whole model's graph, with the batch that one rank has of it."""
        return dataclasses.replace(self.of.whole, batch_size=self.batch_size)

    @property
    def points(self) -> CutPoints:
        """Where stages may be cut."""
        return self.of.all_points

    @property
    def n_row_parts(self) -> int:
        """Into how many parts the batch is cut."""
        return math.prod(self.cutting.length(name) for name in self.cutting.names if name in ROWS)

    def prices(
        self,
        kinds: Sequence[Device],
        cost_model: CostModel,
        optimizer: str,
        policy: Recompute = "none",
        links: Mapping[str, GroupLinks] = MappingProxyType({}),
        *,
        n_stages: int = 1,
        adding: bool = True,
    ) -> Prices:
        """The prices of its units, on links for each mesh dimension.

        Args:
            n_stages: how many the units are cut into: what is small travels with others of its stage.
            adding: whether microbatches add their gradients to those of earlier ones.
        """
        graph = dataclasses.replace(self.of.graph, batch_size=self.batch_size)
        exchanges = [(exchange.in_stages(n_stages), links[exchange.dimension]) for exchange in self.exchanges]
        key = (tuple(kinds), optimizer, policy)
        if key not in self.known_prices:
            known = (graph, self.cost, self.of.points, kinds, cost_model, optimizer, policy)
            is_cut = self.layouts is not None
            self.known_prices[key] = PriceList(*known, known_seconds=self.of.known_seconds, summed=self._summed_at_once, is_cut=is_cut)
        prices = self.known_prices[key].on(graph, exchanges, adding=adding, n_stages=n_stages)
        return prices if self.of.unfolding is None else RepeatedPrices(prices, self.of.unfolding)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The collectives of every microbatch."""
        if self.layouts is None or self.axes is None or self.sizes is None:
            return ()
        found = find_exchanges(self.of.graph, self.axes, self.layouts, self.sizes, self.cost.gradients)
        return tuple(counted_together(found, dict(self.layouts.mesh), self.of.copies))

    @cached_property
    def exchange_counts(self) -> tuple[tuple[Exchange, int], ...]:
        """The collectives that differ in more than who waits for them, and how many of each the whole model has."""
        counts: dict[Exchange, int] = {}
        for exchange in self.exchanges:
            alike = dataclasses.replace(exchange, reader="")
            counts[alike] = counts.get(alike, 0) + len(self.of.copies(exchange.reader))
        return tuple(counts.items())

    @cached_property
    def bytes_summed(self) -> dict[str, float]:
        """Mesh dimension -> bytes of the gradients that are summed over it, of all stages together."""
        totals: dict[str, float] = {}
        for each in self.sums:
            totals[each.dimension] = totals.get(each.dimension, 0.0) + each.size
        return totals

    @property
    def _summed_at_once(self) -> tuple[float, float]:
        """Bytes of gradients that are there twice at the end of a step, and before: what a message is on its way with, and its sums."""
        sizes = [each.size for each in self.sums]
        most = min(BUCKET_BYTES + max(sizes, default=0.0), sum(sizes))
        return most, most if sum(sizes) > FIRST_BUCKET_BYTES else 0.0

    def sum_seconds(self, by_dimension: Mapping[str, tuple[float, float]], links: Mapping[str, GroupLinks]) -> float:
        """How long it takes to sum the gradients of a stage over each mesh dimension, if nothing hides it.

        Args:
            by_dimension: bytes, and how many buckets they fill (``StageSums``).
        """
        largest = float(shares_of_bucket(np.array([each.size for each in self.sums])).max(initial=0.0))
        return sum(sum_seconds(size, buckets, largest, links[name]) for name, (size, buckets) in by_dimension.items() if size)


def whole_part(of: PartGraph, *, differentiate: bool) -> ModelPart:
    """The whole model, for a mesh that cuts no axes."""
    cost = graph_cost(of.graph, differentiate=differentiate, reading=of.reading(differentiate=differentiate))
    return ModelPart(of, of.graph.batch_size, cost, Mesh(()))


def cut_part(of: PartGraph, batch_size: int, axes: Axes, cut: AxisCut, *, differentiate: bool) -> ModelPart:
    """The part of a rank under a cut.

    Args:
        batch_size: rows of the whole batch.
        axes: of the folded graph.
        differentiate: whether there is a backward.
    """
    layouts = layouts_of_cut(of.graph, axes, cut)
    sizes = PartSizes(of.graph, axes, layouts, cut.rows, [name for name in cut.stored if name == "fsdp"])
    cost = graph_cost(of.graph, differentiate=differentiate, parts=sizes, reading=of.reading(differentiate=differentiate))
    cost = with_written_out(cost, of.graph, axes, layouts)
    sums = tuple(
        dataclasses.replace(each, parameter=name)
        for each in find_gradient_sums(layouts, cost.bytes, cost.gradients)
        for name in of.copies(each.parameter)
    )
    part = ModelPart(of, batch_size, cost, cut.mesh, sums, layouts, axes, sizes)
    return dataclasses.replace(part, batch_size=-(-batch_size // part.n_row_parts))


def axis_cut(cutting: Mesh, assigned: Mapping[str, tuple[int, ...]], batchnorm: str) -> AxisCut:
    """The cut of a mesh, from the axes that each of its dimensions cuts."""
    rows = tuple(name for name in cutting.names if name in ROWS)
    stored = tuple(name for name in cutting.names if name in STORED)
    return AxisCut(cutting, assigned, rows, stored, batchnorm == "local")
