"""Shard a model by a plan: once for all stages, or once for each shape of per-stage submeshes.

plan                                    of_places
pipeline 2 x tensor 2                   one model sharded over tensor 2, for both stages
pipeline 2 x tensor 2 + 1               a model sharded over tensor 2, for stage 0; an unsharded one, for stage 1

Each ``CutModel`` is of the whole model; a stage is taken from the one for its submesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from passes.analysis.axes import Axes
from passes.analysis.axis_names import axes_named, axis_names, has_axis
from passes.analysis.layout_facts import LayoutFacts
from passes.analysis.merge_axes import find_axes_to_cut
from passes.ir.comm.halo_strategy import ends_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph, Results
from passes.ir.layout import BATCH, Layout, Placement, Replicate, Shard
from passes.ir.mesh import ROWS, STORED, Mesh, pipelines
from passes.ir.plan import Plan
from passes.ir.tensor_spec import Size, numel
from passes.spmd.shard_graph import AxisCut, CutModel, cut_axes
from passes.spmd.shards import Block
from passes.stages.split import stage_of_nodes


@dataclass(frozen=True)
class StoredShard:
    """One dimension of a stored tensor, of which each rank has a part: what it has, whatever the axes of a graph are.

        (3 heads head), sharded by heads over 2 ranks        outer 3, size heads, inner head, ranks 2

    Attributes:
        dimension: of the tensor.
        outer: the number of blocks that the axes before the sharded one make.
        size: of the sharded axis.
        inner: the number of elements that each step of it has.
        ranks: how many share it.
        segments: of the innermost axis of the dimension (``Axes.segments``); none if the dimension is a product of axes.
    """

    dimension: int
    outer: Size
    size: Size
    inner: Size
    ranks: int
    segments: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: Sequence[Size], dimension: int, index: int, ranks: int, segments: tuple[int, ...] = ()) -> StoredShard:
        """Return the shard along one of the axes of a dimension, of these sizes."""
        return cls(dimension, numel(sizes[:index]), sizes[index], numel(sizes[index + 1 :]), ranks, segments)

    def index_in(self, sizes: Sequence[Size], segments: tuple[int, ...] = ()) -> int | None:
        """Return the index of the axis, among some of these sizes, by which ranks have the same elements; None if there is none."""
        others = (StoredShard.of(sizes, self.dimension, index, self.ranks, segments) for index in range(len(sizes)))
        return next((index for index, other in enumerate(others) if other == self or self._is_evenly(other)), None)

    def _is_evenly(self, other: StoredShard) -> bool:
        """Return whether another axis begins where this one does and ends there, and even parts of both are the same elements."""
        if (self.outer, self.segments) != (other.outer, other.segments):
            return False
        if not isinstance(self.size, int) or not isinstance(other.size, int):
            return False
        return self.size * self.inner == other.size * other.inner and self.size % self.ranks == other.size % self.ranks == 0


StoredShards: TypeAlias = tuple[StoredShard | None, ...]
"""For each mesh dimension, what it shards of a stored tensor; None: nothing."""


@dataclass(frozen=True, eq=False)
class StoredLayouts:
    """Layouts of stored tensors in terms of their elements: graphs have other axes, in other modes and for other sizes of the inputs.

    Attributes:
        of_places: for each pipeline position, parameter, buffer, constant or resident input -> how it is sharded, rows excepted.
        holders: parameter -> the pipeline positions that store it besides those that read it: all of them get its gradient.
    """

    of_places: tuple[Mapping[str, StoredShards], ...]
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def at(self, place: int, graph: ModelGraph, axes: Axes) -> dict[str, Layout]:
        """Return the layouts at a pipeline position of those stored tensors that a graph has.

        Raises:
            ConfigError: the graph has no axes by which a tensor could be sharded as its stored shard.
        """
        shards = self.of_places[place]
        names = (*graph.parameters, *graph.buffers, *graph.constants, *graph.resident)
        return {name: tuple(_placement(graph, axes, name, each) for each in shards[name]) for name in names if name in shards}


def _placement(graph: ModelGraph, axes: Axes, name: str, shard: StoredShard | None) -> Placement:
    """Return the placement of a stored tensor in a graph."""
    if shard is None:
        return Replicate()
    of_dimension = axes.of(name)[shard.dimension]
    index = shard.index_in([axes.sizes[axis] for axis in of_dimension], axes.segments_of(of_dimension))
    if index is None:
        sizes = ", ".join(f"{name} {size}" for name, size in graph.proven_sizes.items())
        raise ConfigError(
            f"{graph.weights.get(name, name)} is stored in parts of its dimension {shard.dimension} that "
            f"the model does not compute with for {sizes or 'these inputs'}",
            remedy="partition the model again with example inputs of these sizes, and load pm.full_state_dict() into it",
        )
    return Shard(of_dimension[index], shard.dimension)


@dataclass(frozen=True)
class StagedCut:
    """A model sharded for the stages of a plan.

    Attributes:
        mesh: the mesh of all ranks.
        of_places: for each pipeline position, the sharded model that its stages are taken from; equal ones are one object.
    """

    mesh: Mesh
    of_places: tuple[CutModel, ...]

    @property
    def widest(self) -> CutModel:
        """Return the model sharded over the largest submesh, all ranks of ``mesh.cutting``."""
        return max(self.of_places, key=lambda cut: cut.cut.mesh.size)

    @property
    def is_cut(self) -> bool:
        """Return whether the mesh shards any axes."""
        return self.mesh.cutting.size > 1

    @cached_property
    def stored(self) -> StoredLayouts:
        """Return how parameters, buffers, constants and resident inputs are sharded in storage."""
        return StoredLayouts(tuple(map(_stored_shards, self.of_places)))

    @cached_property
    def parts(self) -> tuple[tuple[ModelGraph, ...], ...]:
        """Return for each pipeline (``passes.ir.mesh.pipelines``) the sharded graphs of its ranks, by pipeline position."""
        return tuple(
            tuple(self.of_places[place].parts[self._rank_in_submesh(place, rank)] for place, rank in enumerate(ranks))
            for ranks in pipelines(self.mesh)
        )

    def blocks(self, place: int, rank: int) -> Mapping[str, Block]:
        """Return the block of each parameter, buffer and constant that a rank at a pipeline position stores."""
        return self.of_places[place].blocks[self._rank_in_submesh(place, rank)]

    def _rank_in_submesh(self, place: int, rank: int) -> int:
        """Return the rank within the submesh of its pipeline position."""
        return self.mesh.cutting_at(place).rank(self.mesh.coordinate(rank))


def _stored_shards(model: CutModel) -> dict[str, StoredShards]:
    """Return how each stored tensor of a sharded model is sharded; the shards of a resident input by rows are left out."""
    graph, axes, layouts = model.graph, model.axes, model.layouts
    names = (*graph.parameters, *graph.buffers, *graph.constants)
    stored = {name: layouts.stored[name] for name in names if name in layouts.stored}
    for name in graph.resident if layouts.mesh else ():
        pairs = zip(layouts.mesh, layouts.results[name][0], strict=True)
        stored[name] = tuple(Replicate() if dimension in model.cut.rows else place for (dimension, _), place in pairs)

    def shard(name: str, place: Placement, layout: Layout) -> StoredShard | None:
        if not isinstance(place, Shard):
            return None
        of_dimension = axes.of(name)[place.dimension]
        sharing = (ranks for (_, ranks), each in zip(model.cut.mesh.dimensions, layout, strict=True) if each == place)
        sizes = [axes.sizes[axis] for axis in of_dimension]
        index = of_dimension.index(place.axis)
        return StoredShard.of(sizes, place.dimension, index, math.prod(sharing), axes.segments_of(of_dimension))

    return {name: tuple(shard(name, place, layout) for place in layout) for name, layout in stored.items()}


def facts_to_cut(graph: ModelGraph, plan: Plan) -> LayoutFacts:
    """Return the facts about a model that all its cuts by a plan read, its axes first."""
    return LayoutFacts(graph, find_axes_to_cut(graph, plan.grid))


def cut_by_plan(
    facts: LayoutFacts, plan: Plan, results: Results = "rows", *, rows: bool = True, stored: StoredLayouts | None = None
) -> StagedCut:
    """Shard a model for the stages of a plan.

    Args:
        facts: of the model and its axes (``facts_to_cut``).
        results: whether ranks return whole results or those of their own rows.
        rows: False replicates the batch, if the mesh does not divide it.
        stored: layouts of tensors that ranks store already; those that are missing are chosen. None: all are.
    """
    mesh, graph, axes = plan.grid, facts.graph, facts.axes
    names, models = axis_names(graph, axes), dict[Mesh, CutModel]()
    wide, overlapped = ends_of(plan.halos, "recompute"), ends_of(plan.halos, "overlap")
    stages = stage_of_nodes(graph, plan.first_nodes) if len(plan.first_nodes) > 1 else None
    submeshes = [mesh.cutting_at(place) for place in range(len(pipelines(mesh)[0]))]
    for place, over in enumerate(submeshes):
        if over in models:
            continue
        assigned: dict[str, tuple[int, ...]] = dict.fromkeys(over.names, ())
        for name, dimension in plan.axes:
            if not has_axis(name, names) and stored is not None:
                continue  # the plan is of another trace: a length of one is no axis, and what would be sharded by it is replicated
            if dimension in assigned and (rows or dimension not in ROWS or not name.startswith(BATCH)):
                assigned[dimension] += axes_named(name, names)
        cut_rows = tuple(name for name in over.names if name in ROWS) if rows else ()
        stored_over = tuple(name for name in over.names if name in STORED)
        cut = AxisCut(over, assigned, cut_rows, stored_over, plan.batchnorm == "local", wide, overlapped, plan.attention, stages)
        stored_layouts = stored.at(place, graph, axes) if stored is not None and over.size > 1 else None
        models[over] = cut_axes(graph, axes, cut, results, stored_layouts, facts)
    return StagedCut(mesh, tuple(models[over] for over in submeshes))
