"""Plan a mesh: the axes that its dimensions shard, then the stages of one rank's shard.

mesh {"data": 2, "pipeline": 2, "tensor": 2}
  data      batch
  tensor    heads, ffn, vocab                     sharding.axis_problem
  pipeline  stages of one rank's shard            search.make_plan
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware.clusters import Cluster
from partitioner.options.constraints import TENSOR
from partitioner.planner.bounds.mesh_bounds import MeshBounds
from partitioner.planner.constraints.axes import check_dimensions, check_sharded, named_dimensions
from partitioner.planner.costs.links import LinkTable, clock_rate_of, stages_length
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.axis_contenders import contending_axes, n_sets_of_axes
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.search.make_plan import Sharding, make_plan, plan_shardings
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.sharding.mesh_cut import MeshCut
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.sharding.replicated_work import replicated_work
from partitioner.planner.sharding.shared_models import SharedModels
from partitioner.planner.sharding.spatial import Hardware
from partitioner.planner.sharding.stage_submeshes import submesh_parts
from partitioner.planner.sharding.tile_halos import cut_with_halos
from passes.analysis.axis_names import axes_named, batch_axes, short_names
from passes.graph.equivalence import weights_digest
from passes.graph.lazy_graph_module import gc_paused
from passes.graph.provenance import module_path
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import SEQUENCE, STAGES, TILE, TILES, Mesh
from passes.ir.plan import ATTENTION, Plan

_MOST_OPERATIONS = 6400
"""Operations of all contenders together: each costs about 1 ms, to choose axes beside the named ones, to shard it and to price it."""

_OF_A_TILE = 8
"""As many operations without halos one operation of a tile costs."""


@gc_paused()
def plan_mesh(
    graph: ModelGraph,
    cluster: Cluster,
    request: PlanRequest,
    cost_model: CostModel | None,
    mesh: Mesh,
    models: SharedModels | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """Plan for a mesh that the user named.

    Args:
        cluster: the hardware, at least as many devices as the mesh has ranks.
        cost_model: prices; None: an analytic roofline.
        models: what plans of one graph share.
        deadline: of the search; None: it begins now.

    Raises:
        ConfigError: the mesh cannot cut this model.
        InfeasiblePlanError: no plan fits the memory.
    """
    check_dimensions(request.constraints, mesh)
    models, deadline = models or SharedModels(), deadline or Deadline.after(request.time_limit)
    if mesh.cutting.size == 1:
        return dataclasses.replace(make_plan(graph, cluster, request, cost_model, models, deadline), weights=weights_digest(graph))
    model_prices, clock_rate = cost_model or Roofline(), clock_rate_of(graph, cluster, asked=True)
    hardware = Hardware(cluster, model_prices)
    model = models.cuttable(graph, request, clock_rate, hardware)
    mesh = model.with_grid(mesh)
    sharder = _Sharder(model, cluster.first(mesh.size), request, model_prices, mesh)
    shardings = [*sharder.shardings(model, request), *sharder.with_attention()]
    contenders, n_left_out = sharder.contenders(shardings, deadline)
    if TENSOR in mesh.names:
        every = _sharding_parameters([*shardings, *contenders])
        shardings, contenders = every[: len(shardings)], every[len(shardings) :]

    def may_take(seconds: float) -> bool:
        return deadline.is_over or seconds < _seconds_without(graph, cluster, request, cost_model, mesh, models, deadline)

    bounds = MeshBounds(model, cluster.first(mesh.size), request, model_prices) if n_left_out else None
    bound_left_out = math.inf if bounds is None else bounds.of_any_axes(mesh)
    plan, chosen = plan_shardings(shardings, contenders, may_take, n_left_out, bound_left_out, deadline)
    assert chosen is not None
    return dataclasses.replace(with_sharding(plan, chosen), weights=weights_digest(graph))


class _Sharder:
    """Shards a model by a mesh, with different choices of axes."""

    def __init__(self, model: CuttableModel, cluster: Cluster, request: PlanRequest, cost_model: CostModel, mesh: Mesh) -> None:
        self._model, self._cluster, self._request, self._cost_model, self._mesh = model, cluster, request, cost_model, mesh
        self._links = LinkTable(cluster)

    def shardings(self, model: CuttableModel, request: PlanRequest) -> list[Sharding]:
        """Return the mesh with the cheapest axes of the model's choice, without and with extra axes (``CuttableModel.cut``).

        Attention is shared in the first of the ways to choose from (``with_attention``).
        """
        attention, choices = model.attention_choices(self._mesh)[0], _extra_axes_choices(model, self._mesh, request)
        return [self._shard(model, request, extra_axes=extra_axes, attention=attention) for extra_axes in choices]

    def with_attention(self) -> list[Sharding]:
        """Return the mesh with the planner's axes and attention shared in each other way, if the model allows that."""
        others = self._model.attention_choices(self._mesh)[1:]
        shardings = [self._shard(self._model, self._request, extra_axes=False, attention=attention) for attention in others]
        return [sharding for sharding in shardings if sharding.cut is not None and sharding.cut.shares_attention]

    def contenders(self, known: Sequence[Sharding], deadline: Deadline) -> tuple[list[Sharding], int]:
        """Return the mesh with other axes that a user could name, without the cuts of the known shardings, and how many are left out.

        Those that are what the mode means come first, with as many axes as possible; of a model of many operations the others are left out,
        and once the time is over all that are left.
        Beside axes that the user named, every other set that could be named as well counts as left out.
        """
        cuts, contenders = [sharding.cut for sharding in known], list[Sharding]()
        given = self._request.constraints
        named_axes = [*contending_axes(self._model, self._mesh, given)]
        named_axes.sort(key=lambda named: (not named[2], -len(named[0])))
        n_priced = 0
        for names, dimension, is_of_mode in named_axes[: self._most_contenders()]:
            if deadline.is_over:
                break
            n_priced += 1
            constraints = dataclasses.replace(given, axes={**(given.axes or {}), **dict.fromkeys(names, dimension)})
            named = dataclasses.replace(self._request, constraints=constraints)
            words = f"{', '.join(names)} over {dimension}"
            try:
                shardings = self.shardings(self._model.constrained(constraints), named)
            except ConfigError:  # no operation can be sharded by these axes
                continue
            for sharding in shardings:
                if not any(sharding.cut is cut for cut in cuts):
                    cuts.append(sharding.cut)
                    contenders.append(dataclasses.replace(sharding, axes=words, is_of_mode=is_of_mode))
        n_sets = n_sets_of_axes(self._model, self._mesh, given) if given.axes else len(named_axes)
        return contenders, n_sets - n_priced

    def _most_contenders(self) -> int:
        """Return how many contenders are priced."""
        in_tiles = any(name in TILES for name in self._mesh.names)
        return _MOST_OPERATIONS // max(self._model.n_operations(self._mesh.cutting) * (_OF_A_TILE if in_tiles else 1), 1)

    def _shard(self, model: CuttableModel, request: PlanRequest, *, extra_axes: bool, attention: str) -> Sharding:
        mesh = self._mesh
        cut = cut_with_halos(model, mesh, self._cluster, request, self._cost_model, extra_axes=extra_axes, attention=attention)
        if request.constraints.attention is not None:
            cut.check_attention()
        check_sharded(cut.axes, cut.names, mesh.cutting, request.constraints, cut.layouts)
        submeshes = submesh_parts(cut, mesh, request.batchnorm, self._links) if mesh.widths else None
        of_stages = dataclasses.replace(self._request, mode=stages_mode(mesh, request.n_microbatches))
        return Sharding(MeshProblem(mesh, cut.part, self._cluster, of_stages, self._cost_model, self._links, submeshes), cut)


def _sharding_parameters(shardings: Sequence[Sharding]) -> list[Sharding]:
    """Return the shardings, of which those that shard the sequence over a tensor dimension instead of parameters are not of the mode.

    Ranks that compute a part of the sequence each, with the same weights, send no activations, and are often faster. But tensor parallelism
    is asked for so that ranks hold a part of the weights, and Megatron's sequence parallelism shards the sequence besides (Korthikanti et
    al. 2022). ``mode="auto"`` finds the other plan as a mesh with a sequence dimension.
    """
    copied = [0.0 if sharding.cut is None else sharding.cut.copied_share(TENSOR) for sharding in shardings]
    most = min(copied) + _MORE_COPIED
    return [
        dataclasses.replace(sharding, is_of_mode=sharding.is_of_mode and (share <= most or not _shards_sequence(sharding.cut)))
        for sharding, share in zip(shardings, copied, strict=True)
    ]


def _shards_sequence(cut: MeshCut | None) -> bool:
    """Tell whether the tensor dimension shards the sequence."""
    return cut is not None and any(cut.names[axis].partition("[")[0] == SEQUENCE for axis in cut.assigned[TENSOR])


_MORE_COPIED = 0.1
"""How much more of the parameters a choice of axes may copy, as a fraction of all, than that which copies the fewest."""


def _extra_axes_choices(model: CuttableModel, mesh: Mesh, request: PlanRequest) -> tuple[bool, ...]:
    """Return the values of ``extra_axes`` (``CuttableModel.cut``) to plan: both, unless constraints or the model decide it."""
    in_tiles = any(name in TILES for name in mesh.names)
    if mesh.widths or (in_tiles and stages_length(mesh) > 1) or not (in_tiles or TENSOR in mesh.names):
        return (False,)
    if (request.constraints.tp_plan and not in_tiles) or not model.has_extra_axes(mesh, alone=True):
        return (False,)
    return (True,) if in_tiles and TILE in named_dimensions(request.constraints) else (False, True)


def _seconds_without(
    graph: ModelGraph,
    cluster: Cluster,
    request: PlanRequest,
    cost_model: CostModel | None,
    mesh: Mesh,
    models: SharedModels,
    deadline: Deadline,
) -> float:
    """Return the seconds of a step on the mesh without its tensor dimension; inf if it has none, or there is no such plan.

    Contenders may only be taken if they beat it: a request of tensor parallelism that gains nothing gets the usual axes.
    """
    if TENSOR not in mesh.names:
        return math.inf
    smaller = Mesh(tuple(dimension for dimension in mesh.dimensions if dimension[0] != TENSOR) or (("pipeline", 1),))
    request = dataclasses.replace(request, devices=request.devices[: smaller.size], is_trial=True)
    try:
        return plan_mesh(graph, cluster.first(smaller.size), request, cost_model, smaller, models, deadline).step_time
    except PartitionError:
        return math.inf


def stages_mode(mesh: Mesh, n_microbatches: int | None) -> str:
    """Return the mode of the stages of a mesh: without a dimension of stages, several microbatches make its one stage a pipeline."""
    return next((name for name in mesh.names if name in STAGES), "pipeline" if (n_microbatches or 1) > 1 else "model")


def with_sharding(plan: Plan, cut: MeshCut) -> Plan:
    """Return the plan with its sharded axes, halo strategies and the notes on these."""
    prediction = plan.prediction
    axes_gap = cut.gap if prediction.axes_gap is None else prediction.axes_gap
    plan = plan.predicted(notes=(*prediction.notes, *_notes(cut), *_gathered_attention(cut), *replicated_work(cut)), axes_gap=axes_gap)
    return dataclasses.replace(plan, axes=cut.in_whole_model(), halos=cut.halos, attention=cut.attention)


def _notes(cut: MeshCut) -> Iterator[str]:
    """Yield notes on a sharding: replicated ops, uneven shards, axes that are too short."""
    axes, cutting = cut.axes, cut.part.cutting
    unruled = sorted(set(axes.unruled.values()))
    if unruled:
        yield f"Computed whole on every rank, because no rule says how they could be cut: {', '.join(unruled)}."
    if any(set(chosen) & batch_axes(cut.part.source.graph, axes) for name, chosen in cut.assigned.items() if name in TILES):
        yield "The batch is cut over tiles like any other axis, into parts of any size: programs are written anew for every batch size."
    for dimension, chosen in cut.assigned.items():
        count = cutting.length(dimension)
        sizes = {axis: size for axis, size in ((axis, axes.sizes[axis]) for axis in chosen) if isinstance(size, int)}
        for name, each in _sizes_by_name([axis for axis, size in sizes.items() if size > count and size % count], cut, sizes):
            yield f"{name} ({each}) does not divide into {count} equal parts over {dimension}: some ranks hold one more."
        if dimension in TILES:
            for name, each in _sizes_by_name([axis for axis, size in sizes.items() if size < count], cut, sizes):
                yield f"{name} ({each}) is too short for {count} parts over {dimension}: every rank has it whole there."


def _gathered_attention(cut: MeshCut) -> Iterator[str]:
    """Yield a note on attention that gathers keys and values, as it cannot be shared in the way of the plan."""
    gathered = cut.gathered_attention if cut.attention != ATTENTION[0] else ()
    if gathered:
        nodes = {node.name: node for node in cut.part.source.graph.graph.nodes}
        modules = list(dict.fromkeys(module_path(nodes[name]) or name for name in gathered))
        more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
        yield f"Attention that is no {cut.attention}, and gathers keys and values: {', '.join(modules[:3])}{more}."


def _sizes_by_name(chosen: Sequence[int], cut: MeshCut, sizes: Mapping[int, int]) -> Iterator[tuple[str, str]]:
    """Yield (name, sizes) of axes by the name without its number: ("ffn", "64, 128")."""
    for name in dict.fromkeys(name.partition("[")[0] for name in short_names(chosen, cut.names)):
        of_name = sorted({sizes[axis] for axis in axes_named(name, cut.names) if axis in chosen})
        yield name, ", ".join(map(str, of_name))
