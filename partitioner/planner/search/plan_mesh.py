"""Plan a mesh: which axes its dimensions cut, then the stages of what one rank is left with.

mesh {"data": 2, "pipeline": 2, "tensor": 2}
  data      batch
  tensor    heads, ffn, vocab                     planner.axis_choice
  pipeline  stages of one rank's part             planner.make_plan
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware.clusters import Cluster
from partitioner.options.constraints import TENSOR, Constraints
from partitioner.planner.constraints.axes import check_dimensions, check_kept, named_dimensions
from partitioner.planner.costs.links import LinkTable, clock_rate_of, stages_length
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.axis_contenders import contending_axes
from partitioner.planner.search.make_plan import Way, make_plan, plan_ways
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.sharding.axis_costs import contractions_of
from partitioner.planner.sharding.model import CuttableModel, MeshCut
from partitioner.planner.sharding.spatial import Hardware
from partitioner.planner.sharding.stage_submeshes import submesh_parts
from partitioner.planner.sharding.tile_halos import with_paid_halos
from passes.analysis.axis_names import axes_named, batch_axes, short_names
from passes.graph.fingerprint import weights_digest
from passes.graph.lazy_graph_module import gc_paused
from passes.graph.provenance import module_path
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import STAGES, TILE, TILES, Mesh
from passes.ir.plan import Plan

__all__ = ["cut_described", "plan_mesh", "stages_mode"]


@gc_paused()
def plan_mesh(graph: ModelGraph, cluster: Cluster, request: PlanRequest, cost_model: CostModel | None, mesh: Mesh) -> Plan:
    """Plan for a mesh that the user asked for.

    Args:
        cluster: the hardware, at least as many devices as the mesh has ranks.
        cost_model: prices; None: an analytic roofline.

    Raises:
        ConfigError: the mesh cannot cut this model.
        InfeasiblePlanError: no plan fits the memory.
    """
    check_dimensions(request.constraints, mesh)
    if mesh.cutting.size == 1:
        return dataclasses.replace(make_plan(graph, cluster, request, cost_model), weights=weights_digest(graph))
    model_prices, pace = cost_model or Roofline(), clock_rate_of(graph, cluster, asked=True)
    hardware = Hardware(cluster, model_prices)
    model = CuttableModel(graph, request, pace=pace, hardware=hardware)
    mesh = model.with_grid(mesh)
    opener = _Opener(model, cluster.first(mesh.size), request, model_prices, mesh)
    ways = opener.ways(model, request)
    contenders = opener.contenders(ways)

    def may_take(seconds: float) -> bool:
        return seconds < _seconds_without(graph, cluster, request, cost_model, mesh)

    plan, chosen = plan_ways(ways, contenders, may_take)
    assert chosen is not None
    return dataclasses.replace(cut_described(plan, chosen), weights=weights_digest(graph))


class _Opener:
    """Cuts the axes of a mesh in the ways that it could be cut in."""

    def __init__(self, model: CuttableModel, cluster: Cluster, request: PlanRequest, cost_model: CostModel, mesh: Mesh) -> None:
        self._model, self._cluster, self._request, self._cost_model, self._mesh = model, cluster, request, cost_model, mesh
        self._links = LinkTable(cluster)

    def ways(self, model: CuttableModel, request: PlanRequest) -> list[Way]:
        """Return the mesh with the axes that are best by the prices of their choice, with others beside them and without."""
        return [self._way(model, request, beside=beside) for beside in _besides(model, self._mesh, request)]

    def contenders(self, ways: Sequence[Way]) -> list[Way]:
        """Return the mesh with other axes that a user could name, but for those that are cut in one of some ways already."""
        known, found = [way.cut for way in ways], list[Way]()
        for constraints, is_of_mode in contending_axes(self._model, self._mesh, self._request.constraints):
            named = dataclasses.replace(self._request, constraints=constraints)
            words = " and ".join(f"{', '.join(names)} over {dimension}" for dimension, names in _by_dimension(constraints).items())
            with contextlib.suppress(ConfigError):  # nothing could be cut by these
                for way in self.ways(self._model.constrained(constraints), named):
                    if not any(way.cut is each for each in known):
                        known.append(way.cut)
                        found.append(dataclasses.replace(way, axes=words, is_of_mode=is_of_mode))
        return found

    def _way(self, model: CuttableModel, request: PlanRequest, *, beside: bool) -> Way:
        mesh = self._mesh
        cut = with_paid_halos(model, mesh, self._cluster, request, self._cost_model, beside=beside)
        check_kept(cut.names, mesh.cutting, request.constraints, cut.layouts)
        unlike = submesh_parts(cut, mesh, request.batchnorm, self._links) if mesh.widths else None
        of_stages = dataclasses.replace(self._request, mode=stages_mode(mesh, request.n_microbatches))
        return Way(MeshProblem(mesh, cut.part, self._cluster, of_stages, self._cost_model, self._links, unlike), cut)


def _by_dimension(constraints: Constraints) -> dict[str, list[str]]:
    """Mesh dimension -> the names of axes that are tied to it."""
    found: dict[str, list[str]] = {}
    for name, dimension in (constraints.axes or {}).items():
        found.setdefault(dimension, []).append(name)
    return found


def _besides(model: CuttableModel, mesh: Mesh, request: PlanRequest) -> tuple[bool, ...]:
    """Return whether tiles cut other axes than space, or a tensor dimension the sequence too; both are planned where nobody says so."""
    in_tiles = any(name in TILES for name in mesh.names)
    if mesh.widths or (in_tiles and stages_length(mesh) > 1) or not (in_tiles or TENSOR in mesh.names):
        return (False,)
    if (request.constraints.tp_plan and not in_tiles) or not model.can_cut_beside(mesh, alone=True):
        return (False,)
    return (True,) if in_tiles and TILE in named_dimensions(request.constraints) else (False, True)


def _seconds_without(graph: ModelGraph, cluster: Cluster, request: PlanRequest, cost_model: CostModel | None, mesh: Mesh) -> float:
    """Return the seconds of a step on a mesh without its tensor dimension; inf where it has none, or the model does not fit what is left.

    Where cutting axes of parameters gains nothing, most of them are cut all the same, because that was asked for.
    """
    if TENSOR not in mesh.names:
        return math.inf
    left = tuple(each for each in mesh.dimensions if each[0] != TENSOR) or (("pipeline", 1),)
    alone = Mesh(left)
    fewer = dataclasses.replace(request, devices=request.devices[: alone.size])
    try:
        return plan_mesh(graph, cluster.first(alone.size), fewer, cost_model, alone).step_time
    except PartitionError:
        return math.inf


def stages_mode(mesh: Mesh, n_microbatches: int | None) -> str:
    """Return the mode of the stages of a mesh: without a dimension of stages, several microbatches make its one stage a pipeline."""
    return next((name for name in mesh.names if name in STAGES), "pipeline" if (n_microbatches or 1) > 1 else "model")


def cut_described(plan: Plan, cut: MeshCut) -> Plan:
    """The plan, with what is cut by its mesh."""
    found = plan.prediction
    axes_gap = cut.gap if found.axes_gap is None else found.axes_gap
    described = plan.predicted(notes=(*found.notes, *_notes(cut), *_whole_work(cut)), axes_gap=axes_gap)
    return dataclasses.replace(described, axes=cut.in_whole_model(), halos=cut.halos)


def _notes(cut: MeshCut) -> Iterator[str]:
    """What the user should know of the cut."""
    axes, cutting = cut.axes, cut.part.cutting
    unruled = sorted(set(axes.unruled.values()))
    if unruled:
        yield f"Computed whole on every rank, because no rule says how they could be cut: {', '.join(unruled)}."
    if any(set(chosen) & batch_axes(cut.part.of.graph, axes) for name, chosen in cut.assigned.items() if name in TILES):
        yield "The batch is cut over tiles like any other axis, into parts of any size: programs are written anew for every batch size."
    for dimension, chosen in cut.assigned.items():
        count = cutting.length(dimension)
        sizes = {axis: size for axis in chosen if isinstance(size := axes.sizes[axis], int)}
        for name, each in _sizes_by_name([axis for axis, size in sizes.items() if size > count and size % count], cut, sizes):
            yield f"{name} ({each}) does not divide into {count} equal parts over {dimension}: some ranks hold one more."
        if dimension in TILES:
            for name, each in _sizes_by_name([axis for axis, size in sizes.items() if size < count], cut, sizes):
                yield f"{name} ({each}) is too short for {count} parts over {dimension}: every rank has it whole there."


def _sizes_by_name(chosen: Sequence[int], cut: MeshCut, sizes: Mapping[int, int]) -> Iterator[tuple[str, str]]:
    """Axes by name, with the sizes that they have."""
    for name in dict.fromkeys(name.partition("[")[0] for name in short_names(chosen, cut.names)):
        found = sorted({sizes[axis] for axis in axes_named(name, cut.names) if axis in chosen})
        yield name, ", ".join(map(str, found))


def _whole_work(cut: MeshCut) -> Iterator[str]:
    """What every rank of a tensor or sequence dimension computes whole: axes that are too short for it, or not worth a message."""
    contractions = {name: runs * len(cut.part.of.copies(name)) for name, runs in contractions_of(cut.axes).items()}
    work = sum(contractions.values())
    nodes = {node.name: node for node in cut.part.of.graph.graph.nodes}
    for index, dimension in enumerate(cut.part.cutting.names):
        whole = [name for name in contractions if cut.layouts.cuts[name][index] is None] if dimension in ("tensor", "sequence") else []
        share = sum(contractions[name] for name in whole) / max(work, 1.0)
        if share >= _WORTH_SAYING:
            modules = list(dict.fromkeys(module_path(nodes[name]) or name for name in whole))
            more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            yield f"Every rank of {dimension} computes {share:.0%} of the multiply-adds whole: {', '.join(modules[:3])}{more}."


_WORTH_SAYING = 0.01
"""A share of the work that is worth a note."""
