"""Choose the axes that tile dimensions shard: space where that is worth its halos, another axis elsewhere (hybrid sharding).

A U-Net of three levels, three images, two devices:

    level     height    sharded along
    0         256       height      large images, few channels: halos cost little beside the work
    1         128       height
    2         64        batch       two images and one: the imbalance costs less than halos of thin tiles
    1         128       height      all_to_all from shards of the batch to shards of the height
    0         256       height

The first call that can be is sharded in space, and space has priority wherever it is sharded (``passes.spmd.propagate.choose_cut``); the
alternatives are the batch and axes of parameters. ``axis_problem`` chooses for each call, exactly, by the costs of ``space_costs``. Whole
plans are compared to decide between the choice and tiles in all layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.cost_model import CostModel
from cost_models.graph_cost import GraphCost
from cost_models.hardware.clusters import Cluster
from partitioner.planner.constraints.tile_grid import fits, tile_axes
from partitioner.planner.costs.links import LinkTable, places_of
from partitioner.planner.sharding.axis_problem import AxisChoice, AxisProblem
from partitioner.planner.sharding.space_costs import Ranks, SpacePrices
from passes.analysis.axes import Axes
from passes.analysis.axis_names import batch_axes, space_axes
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, TILES, Mesh


def may_be_hybrid(axes: Axes, cutting: Mesh, fixed: Mapping[str, Sequence[int]], *, free: bool) -> bool:
    """Return whether tiles may shard other axes than space: the planner is free to, the user names axes, or space is too short.

    Args:
        fixed: mesh dimension -> axes that the user assigns to it.
        free: whether the planner chose tiles, not the user.
    """
    dimensions = [name for name in cutting.names if name in TILES]
    short = any(not fits(axes, axis, cutting.length(name)) for name in dimensions for axis in tile_axes(axes, cutting, name))
    return bool(dimensions) and (free or short or any(fixed[name] for name in dimensions))


@dataclass(frozen=True)
class Hardware:
    """The cluster and its cost model."""

    cluster: Cluster
    cost_model: CostModel

    def along(self, cutting: Mesh, n_microbatches: int) -> dict[str, Ranks]:
        """Return the ranks along each dimension of a mesh."""
        used = self.cluster.first(cutting.size)
        links, device = LinkTable(used).of(cutting), places_of(cutting, used).devices[0]
        return {
            name: Ranks(device, links[name], self.cost_model, count / cutting.size / n_microbatches) for name, count in cutting.dimensions
        }


@dataclass(frozen=True)
class SpaceProblem:
    """The problem of choosing axes for tile dimensions.

    Attributes:
        ranks: the devices and links along each.
        fixed: mesh dimension -> axes that the user names: those of space must be sharded, others may be instead of space.
        free: whether the planner chose tiles; if the user did, all axes of space that are long enough are sharded, or the named ones.
    """

    graph: ModelGraph
    axes: Axes
    cost: GraphCost
    cutting: Mesh
    ranks: Mapping[str, Ranks]
    fixed: Mapping[str, Sequence[int]]
    free: bool

    def solve(self) -> dict[str, AxisChoice]:
        """Return the axes of each tile dimension, outermost first: an inner one divides the shards of the outer ones."""
        choices: dict[str, AxisChoice] = {}
        for name in self.cutting.names:
            if name in TILES:
                choices[name] = self._choose(name, choices)
        return choices

    def _choose(self, name: str, outer: Mapping[str, AxisChoice]) -> AxisChoice:
        """Choose the axes of one tile dimension, given those of the outer ones."""
        count = self.cutting.length(name)

        def is_long_enough(axis: int) -> bool:
            return fits(self.axes, axis, count * self._n_shards(axis, outer))

        space = [axis for axis in tile_axes(self.axes, self.cutting, name) if fits(self.axes, axis, count)]
        named = [axis for axis in space if axis in self.fixed[name]]
        others = [axis for axis in self.fixed[name] if axis not in space]
        required = named or self._first(space) if self.free or self.fixed[name] else space
        batch = [axis for axis in sorted(batch_axes(self.graph, self.axes)) if is_long_enough(axis)]
        optional = (*(axis for axis in space if axis not in required), *(axis for axis in batch if not others or axis in others))
        excluded = {axis for axes in space_axes(self.axes).values() for axis in axes}
        excluded |= {axis for dimension, axes in self.fixed.items() if dimension not in TILES for axis in axes}
        excluded |= {axis for choice in outer.values() for axis in choice.axes if not is_long_enough(axis)}
        if others or {"tensor", "sequence"} & set(self.cutting.names):
            excluded |= self._axes_of_parameters().difference(others)
        excluded = excluded.difference(required, optional)
        prices = SpacePrices(self.graph, self.axes, self.cost, self.ranks[name], asked=not self.free)
        problem = AxisProblem(self.graph, self.axes, (name, count), required, excluded, alone=optional, prices=prices)
        chosen = problem.solve(count)
        assert chosen is not None
        return chosen if not others else problem.with_any(count, others, chosen)

    def _first(self, space: Sequence[int]) -> list[int]:
        """Return the axis of space of the first call that has one, as a list that may be empty: tiles begin with space."""
        looped = (axis for factors in self.axes.factors.values() for axes in factors for axis in axes)
        return list(itertools.islice((axis for axis in looped if axis in space), 1))

    def _axes_of_parameters(self) -> set[int]:
        parameters = (name for name in self.graph.parameters if name in self.axes.tensors)
        return {axis for name in parameters for axes in self.axes.of(name) for axis in axes}

    def _n_shards(self, axis: int, outer: Mapping[str, AxisChoice]) -> int:
        """Return the number of shards of an axis over outer mesh dimensions."""
        is_batch = axis in batch_axes(self.graph, self.axes)
        sharding = [name for name in self.cutting.names if (is_batch and name in ROWS) or (name in outer and axis in outer[name].axes)]
        return math.prod(self.cutting.length(name) for name in sharding)
