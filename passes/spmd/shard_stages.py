"""Shard a model by a plan: once for all stages, or once for each shape of per-stage submeshes.

plan                                    of_places
pipeline 2 x tensor 2                   one model sharded over tensor 2, for both stages
pipeline 2 x tensor 2 + 1               a model sharded over tensor 2, for stage 0; an unsharded one, for stage 1

Each ``CutModel`` is of the whole model; a stage is taken from the one for its submesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from passes.analysis.axis_names import axes_named, axis_names
from passes.analysis.merge_axes import find_axes_to_cut
from passes.ir.comm.halo_strategy import ends_of
from passes.ir.graph import ModelGraph, Results
from passes.ir.layout import BATCH
from passes.ir.mesh import ROWS, STORED, Mesh, pipelines
from passes.ir.plan import Plan
from passes.spmd.shard_graph import AxisCut, CutModel, cut_axes
from passes.spmd.shards import Block

__all__ = ["StagedCut", "cut_by_plan"]


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


def cut_by_plan(graph: ModelGraph, plan: Plan, results: Results = "rows", *, rows: bool = True, like: StagedCut | None = None) -> StagedCut:
    """Shard a model for the stages of a plan.

    Args:
        results: whether ranks return whole results or those of their own rows.
        rows: False replicates the batch, if the mesh does not divide it.
        like: the result for another graph of the same plan, whose layouts of parameters, buffers and constants are used; None: choose them.
    """
    mesh = plan.grid
    axes = find_axes_to_cut(graph, mesh)
    names, models = axis_names(graph, axes), dict[Mesh, CutModel]()
    wide, overlapped = ends_of(plan.halos, "recompute"), ends_of(plan.halos, "overlap")
    submeshes = [mesh.cutting_at(place) for place in range(len(pipelines(mesh)[0]))]
    for place, over in enumerate(submeshes):
        if over in models:
            continue
        assigned: dict[str, tuple[int, ...]] = dict.fromkeys(over.names, ())
        for name, dimension in plan.axes:
            if dimension in assigned and (rows or dimension not in ROWS or not name.startswith(BATCH)):
                assigned[dimension] += axes_named(name, names)
        cut_rows = tuple(name for name in over.names if name in ROWS) if rows else ()
        stored = tuple(name for name in over.names if name in STORED)
        cut = AxisCut(over, assigned, cut_rows, stored, plan.batchnorm == "local", wide, overlapped, plan.attention)
        stored_layouts = like.of_places[place].layouts.stored if like is not None and over.size > 1 else None
        models[over] = cut_axes(graph, axes, cut, results, stored_layouts)
    return StagedCut(mesh, tuple(models[over] for over in submeshes))
