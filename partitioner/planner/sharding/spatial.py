"""Which axes the dimensions of a grid of tiles cut: space where it is worth its halos, another axis elsewhere.

A U-Net of three levels, three images, two devices:

    level     height    cut along
    0         256       height      large images, few channels: halos are little beside the work
    1         128       height
    2         64        batch       two images and one: what takes longer is less than messages between thin tiles
    1         128       height      parts of the batch are exchanged for parts of the height: all_to_all
    0         256       height

The first call that can is cut by space, and space comes first wherever it is cut (``passes.spmd.propagate``); what stands in for it are the
batch, and axes of parameters. Which height is cut and which is not is chosen call by call, exactly, for the prices of ``space_prices``
(``axis_choice``). Whether the choice is better than tiles throughout, whole plans tell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cost_models.cost_model import CostModel
from cost_models.graph_cost import GraphCost
from cost_models.hardware.clusters import Cluster
from partitioner.planner.costs.links import LinkTable, places_of
from partitioner.planner.sharding.axis_problem import AxisChoice, AxisProblem
from partitioner.planner.sharding.space_costs import Ranks, SpacePrices
from partitioner.planner.tile_grid import tile_axes
from passes.analysis.axes import Axes
from passes.analysis.axis_names import batch_axes, space_axes
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, TILES, Mesh

__all__ = ["Hardware", "SpaceProblem", "Switched", "may_switch"]


def may_switch(axes: Axes, cutting: Mesh, fixed: Mapping[str, Sequence[int]], *, free: bool) -> bool:
    """Whether tiles could cut anything but space: where the planner is free to, where somebody says so, and where space is too short.

    Args:
        fixed: mesh dimension -> axes that are cut because somebody says so.
        free: whether nobody asked for tiles.
    """
    dimensions = [name for name in cutting.names if name in TILES]
    short = any(not _fits(axes, axis, cutting.length(name)) for name in dimensions for axis in tile_axes(axes, cutting, name))
    return bool(dimensions) and (free or short or any(fixed[name] for name in dimensions))


@dataclass(frozen=True)
class Hardware:
    """What tiles are for.

    Attributes:
        cluster: of all ranks.
        cost_model: prices work.
    """

    cluster: Cluster
    cost_model: CostModel

    def along(self, cutting: Mesh, n_microbatches: int) -> dict[str, Ranks]:
        """Who computes along each dimension of a mesh."""
        used = self.cluster.first(cutting.size)
        links, device = LinkTable(used).of(cutting), places_of(cutting, used).devices[0]
        return {
            name: Ranks(device, links[name], self.cost_model, count / cutting.size / n_microbatches) for name, count in cutting.dimensions
        }


@dataclass(frozen=True)
class Switched:
    """What dimensions of tiles cut.

    Attributes:
        chosen: mesh dimension -> its axes.
        in_numbers: whether these are axes of the graph for one batch size alone.
    """

    chosen: Mapping[str, AxisChoice]
    in_numbers: bool

    def cuts(self, axes: Collection[int]) -> bool:
        """Whether one of some axes is among them."""
        return any(axis in each.axes for each in self.chosen.values() for axis in axes)


@dataclass(frozen=True)
class SpaceProblem:
    """What the dimensions of tiles cut.

    Attributes:
        graph: the model.
        axes: of the graph.
        cost: of the graph.
        cutting: the mesh dimensions that cut axes.
        ranks: who computes along each.
        fixed: mesh dimension -> axes that somebody names: of space those that are cut for sure, of others those that may stand in for it.
        free: whether nobody asked for tiles: else all space is cut that can be, unless somebody names axes.
    """

    graph: ModelGraph
    axes: Axes
    cost: GraphCost
    cutting: Mesh
    ranks: Mapping[str, Ranks]
    fixed: Mapping[str, Sequence[int]]
    free: bool

    def solve(self) -> dict[str, AxisChoice]:
        """For each dimension of tiles, its axes."""
        found: dict[str, AxisChoice] = {}
        for name in self.cutting.names:
            if name in TILES:
                found[name] = self._along(name, found)
        return found

    def _along(self, name: str, before: Mapping[str, AxisChoice]) -> AxisChoice:
        count, every = self.cutting.length(name), {axis for each in space_axes(self.axes).values() for axis in each}
        space = [axis for axis in tile_axes(self.axes, self.cutting, name) if _fits(self.axes, axis, count)]
        named = [axis for axis in space if axis in self.fixed[name]]
        others = [axis for axis in self.fixed[name] if axis not in space]
        cut = named or self._first(space) if self.free or self.fixed[name] else space
        rows = [axis for axis in sorted(batch_axes(self.graph, self.axes)) if _fits(self.axes, axis, count * self._parts(axis, before))]
        alone = (*(axis for axis in space if axis not in cut), *(axis for axis in rows if not others or axis in others))
        elsewhere = {axis for other, each in self.fixed.items() if other not in TILES for axis in each}
        elsewhere |= self._of_parameters().difference(others) if others or {"tensor", "sequence"} & set(self.cutting.names) else set()
        prices = SpacePrices(self.graph, self.axes, self.cost, self.ranks[name], asked=not self.free)
        short = {axis for each in before.values() for axis in each.axes if not _fits(self.axes, axis, count * self._parts(axis, before))}
        excluded = (every | elsewhere | short).difference(cut, alone)
        problem = AxisProblem(self.graph, self.axes, (name, count), cut, excluded, alone=alone, prices=prices)
        chosen = problem.solve(count)
        assert chosen is not None
        return chosen if not others else problem.with_any(count, others, chosen)

    def _first(self, space: Sequence[int]) -> list[int]:
        """The axis of the first call that could be cut along one: tiles begin with space, whatever they cut later on."""
        looped = (axis for factors in self.axes.factors.values() for each in factors for axis in each)
        return list(itertools.islice((axis for axis in looped if axis in space), 1))

    def _of_parameters(self) -> set[int]:
        held = self.graph.parameters
        return {axis for name in held if name in self.axes.tensors for each in self.axes.of(name) for axis in each}

    def _parts(self, axis: int, before: Mapping[str, AxisChoice]) -> int:
        """Into how many parts outer mesh dimensions cut an axis."""
        rows = axis in batch_axes(self.graph, self.axes)
        outer = [name for name in self.cutting.names if (rows and name in ROWS) or (name in before and axis in before[name].axes)]
        return math.prod(self.cutting.length(name) for name in outer)


def _fits(axes: Axes, axis: int, count: int) -> bool:
    size = axes.sizes[axis]
    return isinstance(size, int) and size >= count
