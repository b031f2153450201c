"""What one rank has of a model whose axes are cut: prices, cut points and collectives, from layouts alone.

    axes that each mesh dimension cuts -> layouts -> local sizes -> prices, exchanges, sums of gradients

Links are left out: the same part is priced on any links between the ranks of a stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.graph_cost import GraphCost, graph_cost
from cost_models.group_communication import GroupLinks
from partitioner.planner.cut_points import CutPoints, find_cut_points
from partitioner.planner.exchanges import Exchange, GradientSum, find_exchanges, find_gradient_sums
from partitioner.planner.part_sizes import PartSizes
from passes.axes import Axes
from passes.cut_axes import AxisCut, layouts_of_cut
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, STORED, Mesh
from passes.layouts import Layouts

__all__ = ["ModelPart", "axis_cut", "cut_part", "whole_part"]


@dataclass(frozen=True, eq=False)
class ModelPart:
    """One rank's part of a model, over all stages.

    Attributes:
        graph: the whole model's, with the batch that one rank has of it.
        points: where stages may be cut.
        cost: the prices of the part.
        cutting: the mesh dimensions that cut axes.
        sums: the gradients that are summed once a step.
        layouts: how every value lies; None where nothing is cut.
        axes: of the graph; None where nothing is cut.
        sizes: of the part; None where nothing is cut.
    """

    graph: ModelGraph
    points: CutPoints
    cost: GraphCost
    cutting: Mesh
    sums: tuple[GradientSum, ...] = ()
    layouts: Layouts | None = None
    axes: Axes | None = None
    sizes: PartSizes | None = None

    @property
    def n_row_parts(self) -> int:
        """Into how many parts the batch is cut."""
        return math.prod(self.cutting.length(name) for name in self.cutting.names if name in ROWS)

    def exchanges(self, links: Mapping[str, GroupLinks]) -> list[Exchange]:
        """The collectives of every microbatch, on links for each mesh dimension."""
        if self.layouts is None or self.axes is None or self.sizes is None:
            return []
        return find_exchanges(self.graph, self.axes, self.layouts, self.sizes, links, self.cost.gradients)

    def sum_seconds(self, bytes_by_dimension: Mapping[str, float], links: Mapping[str, GroupLinks]) -> float:
        """How long it takes to sum the gradients of a stage over each mesh dimension, if nothing hides it."""
        return sum(links[name].seconds("all_reduce", size) for name, size in bytes_by_dimension.items() if size)


def whole_part(graph: ModelGraph, *, differentiate: bool) -> ModelPart:
    """The whole model, for a mesh that cuts no axes."""
    return ModelPart(graph, find_cut_points(graph), graph_cost(graph, differentiate=differentiate), Mesh(()))


def cut_part(graph: ModelGraph, axes: Axes, cut: AxisCut, points: CutPoints, *, differentiate: bool) -> ModelPart:
    """The part of a rank under a cut.

    Args:
        points: of the graph.
        differentiate: whether there is a backward.
    """
    layouts = layouts_of_cut(graph, axes, cut)
    sizes = PartSizes(graph, axes, layouts, cut.rows, [name for name in cut.stored if name == "fsdp"])
    cost = graph_cost(graph, differentiate=differentiate, parts=sizes)
    sums = tuple(find_gradient_sums(layouts, cost.bytes, cost.gradients))
    part = ModelPart(graph, points, cost, cut.mesh, sums, layouts, axes, sizes)
    return dataclasses.replace(part, graph=dataclasses.replace(graph, batch_size=-(-graph.batch_size // part.n_row_parts)))


def axis_cut(cutting: Mesh, assigned: Mapping[str, tuple[int, ...]], batchnorm: str) -> AxisCut:
    """The cut of a mesh, from the axes that each of its dimensions cuts."""
    rows = tuple(name for name in cutting.names if name in ROWS)
    stored = tuple(name for name in cutting.names if name in STORED)
    return AxisCut(cutting, assigned, rows, stored, batchnorm == "local")
