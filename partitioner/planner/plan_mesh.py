"""Plan a mesh: which axes its dimensions cut, then the stages of what one rank is left with.

mesh {"data": 2, "pipeline": 2, "tensor": 2}
  data      batch
  tensor    heads, ffn, vocab                     planner.axis_choice
  pipeline  stages of one rank's part             planner.make_plan
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware import Cluster
from partitioner.planner.axis_terms import contractions_of
from partitioner.planner.constrained_axes import check_dimensions, check_kept, named_dimensions
from partitioner.planner.cuttable_model import CuttableModel
from partitioner.planner.make_plan import make_plan, plan_ways
from partitioner.planner.mesh_cut import MeshCut
from partitioner.planner.mesh_links import LinkTable, stages_length
from partitioner.planner.mesh_problem import MeshProblem
from partitioner.planner.pace import pace_of
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.space_choice import Hardware
from partitioner.planner.tile_halos import with_paid_halos
from partitioner.planner.unlike_part import unlike_part
from passes.axis_names import axes_named, batch_axes, shortened
from passes.garbage import nothing_collected
from passes.ir.graph import ModelGraph
from passes.ir.halo_run import HaloRun
from passes.ir.mesh import STAGES, TILE, TILES, Mesh
from passes.ir.plan import Plan
from passes.provenance import module_path
from passes.weights_digest import weights_digest

__all__ = ["cut_described", "plan_mesh", "stages_mode"]


@nothing_collected()
def plan_mesh(graph: ModelGraph, cluster: Cluster, request: PlanRequest, cost_model: CostModel | None, mesh: Mesh) -> Plan:
    """Plan for a mesh that the user asked for.

    Args:
        graph: the model.
        cluster: the hardware, at least as many devices as the mesh has ranks.
        request: what the user said.
        cost_model: prices; None: an analytic roofline.
        mesh: its dimensions.

    Raises:
        ConfigError: the mesh cannot cut this model.
        InfeasiblePlanError: no plan fits the memory.
    """
    check_dimensions(request.constraints, mesh)
    if mesh.cutting.size == 1:
        return dataclasses.replace(make_plan(graph, cluster, request, cost_model), weights=weights_digest(graph))
    model_prices, pace = cost_model or Roofline(), pace_of(graph, cluster, asked=True)
    hardware = Hardware(cluster, model_prices)
    model = CuttableModel(graph, request, differentiate=graph.training, pace=pace, hardware=hardware)
    mesh = model.with_grid(mesh)
    of_stages = dataclasses.replace(request, mode=stages_mode(mesh, request.n_microbatches))
    ways = list[tuple[MeshProblem, MeshCut | None]]()
    for beside in _ways(model, mesh, request):
        cut = with_paid_halos(functools.partial(_cut, model, mesh, beside), mesh, cluster, request, model_prices)
        check_kept(cut.names, mesh.cutting, request.constraints, cut.layouts)
        links = LinkTable(cluster.first(mesh.size))
        unlike = unlike_part(cut, mesh, request.batchnorm, links, differentiate=graph.training) if mesh.widths else None
        ways.append((MeshProblem(mesh, cut.part, cluster.first(mesh.size), of_stages, model_prices, links, unlike), cut))
    plan, chosen = plan_ways(ways)
    assert chosen is not None
    return dataclasses.replace(cut_described(plan, chosen), weights=weights_digest(graph))


def _ways(model: CuttableModel, mesh: Mesh, request: PlanRequest) -> tuple[bool, ...]:
    """Whether tiles cut space alone, or other axes beside it: both are planned where nobody says so."""
    if not any(name in TILES for name in mesh.names) or stages_length(mesh) > 1 or not model.can_cut_beside(mesh):
        return (False,)
    return (True,) if TILE in named_dimensions(request.constraints) else (False, True)


def _cut(model: CuttableModel, mesh: Mesh, beside: bool, halos: tuple[HaloRun, ...]) -> MeshCut:
    return model.cut(mesh.cutting, beside=beside, halos=halos)


def stages_mode(mesh: Mesh, n_microbatches: int | None) -> str:
    """Return the mode of the stages of a mesh: without a dimension of stages, several microbatches make its one stage a pipeline."""
    return next((name for name in mesh.names if name in STAGES), "pipeline" if (n_microbatches or 1) > 1 else "model")


def cut_described(plan: Plan, cut: MeshCut) -> Plan:
    """The plan, with what is cut by its mesh."""
    return dataclasses.replace(
        plan,
        notes=(*plan.notes, *_notes(cut), *_whole_work(cut)),
        axes=cut.in_whole_model(),
        axes_gap=cut.gap,
        halos=cut.halos,
    )


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
    for name in dict.fromkeys(name.partition("[")[0] for name in shortened(chosen, cut.names)):
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
