"""A model that meshes can cut: its axes, which of them each mesh dimension cuts, and the part of a rank; each found once for all meshes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from partitioner.planner.axis_choice import choose_axes
from partitioner.planner.constrained_axes import constrained_axes
from partitioner.planner.cut_points import CutPoints, find_cut_points
from partitioner.planner.model_part import ModelPart, axis_cut, cut_part, whole_part
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.tile_grid import tile_axes, with_grid
from passes.axes import Axes
from passes.axis_names import axes_named, axis_names, batch_axes
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, TILE, TILES, Mesh
from passes.layouts import Layouts
from passes.loss_totals import with_totals
from passes.merge_axes import find_axes_to_cut
from passes.split_randomness import split_randomness

__all__ = ["CuttableModel", "MeshCut"]

TENSOR = "tensor"
"""The mesh dimension that cuts axes of the parameters."""


@dataclass(frozen=True, eq=False)
class MeshCut:
    """A model under the dimensions of a mesh that cut axes.

    Attributes:
        part: of one rank.
        axes: of the model.
        names: of the axes.
        assigned: mesh dimension -> the axes that it cuts.
        layouts: how every value lies.
        beside: whether the tensor dimension cuts the sequence, too, where it cuts nothing else (Korthikanti et al., "Reducing activation
            recomputation in large transformer models", 2022).
    """

    part: ModelPart
    axes: Axes
    names: tuple[str, ...]
    assigned: Mapping[str, tuple[int, ...]]
    layouts: Layouts
    beside: bool = False


class CuttableModel:
    """A model and what was found out about it.

    Args:
        graph: the model.
        request: what the user said.
        differentiate: whether there is a backward.
    """

    def __init__(self, graph: ModelGraph, request: PlanRequest, *, differentiate: bool) -> None:
        self._graph, self._request, self._differentiate = graph, request, differentiate
        self._graphs: dict[bool, tuple[ModelGraph, CutPoints]] = {}
        self._axes: dict[object, tuple[Axes, tuple[str, ...]]] = {}
        self._chosen: dict[object, tuple[int, ...]] = {}
        self._cuts: dict[tuple[Mesh, bool], MeshCut] = {}

    @cached_property
    def whole(self) -> ModelPart:
        """The model for a mesh that cuts no axes."""
        return whole_part(self._graph, differentiate=self._differentiate)

    def cut(self, cutting: Mesh, *, beside: bool = False) -> MeshCut:
        """The model under the dimensions of a mesh that cut axes; raises ConfigError where they cannot.

        Args:
            beside: whether the tensor dimension cuts the sequence, too.
        """
        key = (cutting, beside)
        if key not in self._cuts:
            graph, points = self._prepared(any(name in ROWS for name in cutting.names))
            axes, names = self._find_axes(graph, cutting)
            graph = _with_divisible_batch(graph, cutting)
            fixed = constrained_axes(graph, axes, names, cutting, self._request.constraints)
            assigned = {name: self._assigned(graph, axes, names, cutting, name, fixed) for name in cutting.names}
            if beside:
                assigned[TENSOR] = (*_sequence(axes, names, cutting, assigned), *assigned[TENSOR])
            cut = axis_cut(cutting, assigned, self._request.batchnorm)
            part = cut_part(graph, axes, cut, points, differentiate=self._differentiate)
            assert part.layouts is not None
            self._cuts[key] = MeshCut(part, axes, names, assigned, part.layouts, beside)
        return self._cuts[key]

    def with_grid(self, mesh: Mesh) -> Mesh:
        """A mesh whose tiles, if it has any, make a grid."""
        if TILE not in mesh.names:
            return mesh
        graph, _ = self._prepared(any(name in ROWS for name in mesh.names))
        return with_grid(self._find_axes(graph, mesh.cutting)[0], mesh)

    def cuts(self, cutting: Mesh) -> list[MeshCut]:
        """All that there is to choose from: the cut, and the same with the sequence beside its tensor dimension."""
        plain = self.cut(cutting)
        if TENSOR not in cutting.names or "sequence" in cutting.names or not _sequence(plain.axes, plain.names, cutting, plain.assigned):
            return [plain]
        return [plain, self.cut(cutting, beside=True)]

    def _prepared(self, by_rows: bool) -> tuple[ModelGraph, CutPoints]:
        """The graph as it is cut, and where stages of it may begin."""
        if by_rows not in self._graphs:
            graph = split_randomness(with_totals(self._graph) if by_rows else self._graph)
            names = frozenset(node.name for node in self._graph.graph.nodes)
            self._graphs[by_rows] = graph, find_cut_points(graph, names)
        return self._graphs[by_rows]

    def _find_axes(self, graph: ModelGraph, cutting: Mesh) -> tuple[Axes, tuple[str, ...]]:
        key = _axes_key(cutting)
        if key not in self._axes:
            axes = find_axes_to_cut(graph, cutting)
            self._axes[key] = axes, axis_names(graph, axes)
        return self._axes[key]

    def _assigned(
        self,
        graph: ModelGraph,
        axes: Axes,
        names: tuple[str, ...],
        cutting: Mesh,
        dimension: str,
        fixed: Mapping[str, tuple[int, ...]],
    ) -> tuple[int, ...]:
        """The axes that one mesh dimension cuts: those that the user fixed, and those that follow from what it is."""
        elsewhere = {axis for other, each in fixed.items() if other != dimension for axis in each}
        if dimension in ROWS:
            found = tuple(sorted(batch_axes(graph, axes)))
            if not found:
                raise ConfigError(
                    f'the model has no batch that mode "{dimension}" could cut', remedy="pass inputs whose first dimension is the batch"
                )
            return (*found, *(axis for axis in fixed[dimension] if axis not in found))
        if dimension in TILES:
            return tile_axes(axes, cutting, dimension)
        if dimension == "sequence":
            along = set(axes_named("sequence", names))
            rest = () if along & set(fixed[dimension]) else tuple(axis for axis in sorted(along) if axis not in elsewhere)
            if not (*fixed[dimension], *rest):
                raise ConfigError(
                    'nothing is left for the mesh dimension "sequence": constraints cut the sequence over another',
                    remedy="leave the dimension out, or the constraint",
                )
            return (*fixed[dimension], *rest)
        count = cutting.length(dimension)
        key = (_axes_key(cutting), dimension, count, fixed[dimension], tuple(sorted(elsewhere)))
        if key not in self._chosen:
            self._chosen[key] = choose_axes(graph, axes, dimension, count, fixed[dimension], elsewhere)
        if not self._chosen[key]:
            raise ConfigError(
                f"no axis of the model's parameters can be cut into {count} parts",
                remedy="use fewer devices for this mesh dimension, or another mode",
            )
        return self._chosen[key]


def _sequence(axes: Axes, names: tuple[str, ...], cutting: Mesh, assigned: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The sequence axes that a tensor dimension could cut besides: long enough, and cut by nothing yet."""
    taken = {axis for each in assigned.values() for axis in each}
    along = [axis for axis, name in enumerate(names) if name.startswith("sequence[") and axis not in taken]
    return tuple(axis for axis in along if isinstance(size := axes.sizes[axis], int) and size >= cutting.length(TENSOR))


def _axes_key(cutting: Mesh) -> tuple[bool, tuple[tuple[str, int], ...]]:
    """What the axes of a model depend on: whether rows are cut, and the lengths of all other dimensions."""
    others = tuple(dimension for dimension in cutting.dimensions if dimension[0] not in ROWS)
    return len(others) < len(cutting.dimensions), others


def _with_divisible_batch(graph: ModelGraph, cutting: Mesh) -> ModelGraph:
    """The graph with a batch that the mesh divides, to plan for: an open batch is rounded up, a fixed one must fit."""
    parts = math.prod(cutting.length(name) for name in cutting.names if name in ROWS)
    rows = graph.batch_size
    if rows % parts == 0:
        return graph
    if graph.batch is None:
        raise ConfigError(
            f"a batch of {rows} rows cannot be cut into {parts} equal parts, and this model was traced for that size alone",
            remedy=f"pass example inputs with a multiple of {parts} rows",
        )
    return dataclasses.replace(graph, batch_size=rows + -rows % parts)
