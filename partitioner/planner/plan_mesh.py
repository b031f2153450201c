"""Plan a mesh: which axes its dimensions cut, then the stages of what one rank is left with.

mesh {"data": 2, "pipeline": 2, "tensor": 2}
  data      batch
  tensor    heads, ffn, vocab                     planner.axis_choice
  pipeline  stages of one rank's part             planner.make_plan
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from cost_models.cost_model import CostModel
from cost_models.hardware import Cluster
from cost_models.units import format_seconds
from partitioner.planner.axis_choice import choose_axes, contractions_of
from partitioner.planner.collective_time import collective_seconds
from partitioner.planner.constrained_axes import check_dimensions, check_kept, constrained_axes
from partitioner.planner.make_plan import make_plan
from partitioner.planner.plan_request import PlanRequest
from passes.axes import Axes
from passes.axis_names import axes_named, axis_names, batch_axes, shortened
from passes.cut_axes import AxisCut, cut_axes
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, STAGES, STORED, Mesh, pipelines
from passes.ir.plan import Plan
from passes.layouts import Layouts
from passes.loss_totals import with_totals
from passes.merge_axes import find_axes_to_cut
from passes.provenance import module_path
from passes.split_randomness import split_randomness

__all__ = ["plan_mesh"]


def plan_mesh(graph: ModelGraph, cluster: Cluster, mesh: Mesh | None, request: PlanRequest, cost_model: CostModel | None = None) -> Plan:
    """Plan for a mesh.

    Args:
        graph: the model.
        cluster: the hardware, at least as many devices as the mesh has ranks.
        mesh: what the user asked for; None: the better of a pipeline and a placement of layers.
        request: what the user said.
        cost_model: prices; None: an analytic roofline.

    Raises:
        ConfigError: the mesh cannot cut this model.
        InfeasiblePlanError: no plan fits the memory.
    """
    check_dimensions(request.constraints, mesh)
    if mesh is None or mesh.cutting.size == 1:
        return make_plan(graph, cluster, request, cost_model)
    cutting = mesh.cutting
    if any(name in ROWS for name in cutting.names):
        graph = with_totals(graph)
    graph = split_randomness(graph)
    axes = find_axes_to_cut(graph, mesh)
    names = axis_names(graph, axes)
    graph = _with_divisible_batch(graph, cutting)
    fixed = constrained_axes(graph, axes, names, cutting, request.constraints)
    assigned = {name: _assigned(graph, axes, names, cutting, name, fixed) for name in cutting.names}
    rows = tuple(name for name in cutting.names if name in ROWS)
    stored = tuple(name for name in cutting.names if name in STORED)
    cut = cut_axes(graph, axes, AxisCut(cutting, assigned, rows, stored, request.batchnorm == "local"))
    check_kept(names, cutting, request.constraints, cut.layouts)
    ranks = pipelines(mesh)[0]
    mode = next((name for name in mesh.names if name in STAGES), "pipeline" if (request.n_microbatches or 1) > 1 else "model")
    of_one = dataclasses.replace(request, mode=mode, devices=tuple(request.devices[rank] for rank in ranks))
    plan = make_plan(cut.parts[0], cluster.first(len(ranks)), of_one, cost_model)
    communication = collective_seconds(cut.parts[0], mesh, cluster, plan.n_microbatches)
    places = {rank: place for pipeline in pipelines(mesh) for place, rank in enumerate(pipeline)}
    return dataclasses.replace(
        plan,
        mesh=mesh.dimensions,
        devices=request.devices,
        batch_size=graph.batch_size,
        step_time=plan.step_time + communication,
        memory=tuple(plan.memory[places[rank]] for rank in range(mesh.size)),
        bound_by=_bound_by(plan, communication),
        notes=(*plan.notes, *_notes(axes, names, cutting, assigned), *_whole_work(graph, axes, cutting, cut.layouts)),
        axes=tuple((axis, name) for name in cutting.names for axis in shortened(assigned[name], names)),
        batchnorm=request.batchnorm,
    )


def _bound_by(plan: Plan, communication: float) -> str:
    if communication <= plan.step_time:
        return plan.bound_by
    return f"communication between the ranks that cut axes: {format_seconds(communication)} of the step, if compute hides none of it"


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


def _assigned(
    graph: ModelGraph, axes: Axes, names: tuple[str, ...], cutting: Mesh, dimension: str, fixed: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The axes that one mesh dimension cuts: those that the user fixed, and those that follow from what it is."""
    elsewhere = {axis for other, each in fixed.items() if other != dimension for axis in each}
    if dimension in ROWS:
        found = tuple(sorted(batch_axes(graph, axes)))
        if not found:
            raise ConfigError(
                f'the model has no batch that mode "{dimension}" could cut', remedy="pass inputs whose first dimension is the batch"
            )
        return found
    if dimension == "sequence":
        along = set(axes_named("sequence", names))
        rest = () if along & set(fixed[dimension]) else tuple(axis for axis in sorted(along) if axis not in elsewhere)
        if not (*fixed[dimension], *rest):
            raise ConfigError(
                'nothing is left for the mesh dimension "sequence": constraints cut the sequence over another',
                remedy="leave the dimension out, or the constraint",
            )
        return (*fixed[dimension], *rest)
    chosen = choose_axes(graph, axes, dimension, cutting.length(dimension), fixed[dimension], elsewhere)
    if not chosen:
        raise ConfigError(
            f"no axis of the model's parameters can be cut into {cutting.length(dimension)} parts",
            remedy="use fewer devices for this mesh dimension, or another mode",
        )
    return chosen


def _notes(axes: Axes, names: tuple[str, ...], cutting: Mesh, assigned: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """What the user should know of the cut."""
    unruled = sorted(set(axes.unruled.values()))
    if unruled:
        yield f"Computed whole on every rank, because no rule says how they could be cut: {', '.join(unruled)}."
    for dimension, chosen in assigned.items():
        count = cutting.length(dimension)
        uneven = [axis for axis in chosen if isinstance(size := axes.sizes[axis], int) and size % count]
        for name in shortened(uneven, names):
            sizes = sorted({str(axes.sizes[axis]) for axis in axes_named(name, names) if axis in uneven})
            yield f"{name} ({', '.join(sizes)}) does not divide into {count} equal parts over {dimension}: some ranks hold one more."


def _whole_work(graph: ModelGraph, axes: Axes, cutting: Mesh, layouts: Layouts) -> Iterator[str]:
    """What every rank of a tensor or sequence dimension computes whole: axes that are too short for it, or not worth a message."""
    contractions = contractions_of(axes)
    work = sum(contractions.values())
    nodes = {node.name: node for node in graph.graph.nodes}
    for index, dimension in enumerate(cutting.names):
        whole = [name for name in contractions if layouts.cuts[name][index] is None] if dimension in ("tensor", "sequence") else []
        share = sum(contractions[name] for name in whole) / max(work, 1.0)
        if share >= _WORTH_SAYING:
            modules = list(dict.fromkeys(module_path(nodes[name]) or name for name in whole))
            more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            yield f"Every rank of {dimension} computes {share:.0%} of the multiply-adds whole: {', '.join(modules[:3])}{more}."


_WORTH_SAYING = 0.01
