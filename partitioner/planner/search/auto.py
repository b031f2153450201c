"""``mode="auto"``: the fastest plan over all meshes, recomputation policies, microbatch counts and schedules, proved by bounds.

    mesh            lower bound: the whole model's work over all ranks             ->  shard its axes, price one rank's shard
    candidate       lower bound over all stage cuts                                ->  cut stages, simulate the schedule
    solution        seconds of a step

``best_first`` is the search itself, also for a mesh that the user names (``plan_mesh``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from functools import partial

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.memory.optimizer_state import optimizer_states
from partitioner.planner.bounds.mesh_bounds import MeshBounds
from partitioner.planner.constraints.axes import check_dimensions, check_sharded
from partitioner.planner.costs.links import LinkTable, clock_rate_of, stages_length
from partitioner.planner.pipeline.candidates import microbatch_choices
from partitioner.planner.pipeline.problem import memory_limits
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.best_first import ClosedMesh, Opened, Option, PlanSearch
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.search.describe import pareto_front, searched_words
from partitioner.planner.search.infeasible import nothing_fits, nothing_of_trial
from partitioner.planner.search.make_plan import describe
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.search.plan_mesh import with_sharding
from partitioner.planner.search.space import (
    allowed_shapes,
    allowed_sharing,
    allowed_tiles,
    allowed_widths,
    candidates_of,
    replicas_of_few_rows,
    usual_meshes,
    without_equal_nestings,
)
from partitioner.planner.sharding.mesh_cut import MeshCut
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.sharding.shared_models import SharedModels
from partitioner.planner.sharding.spatial import Hardware
from partitioner.planner.sharding.stage_submeshes import submesh_parts
from partitioner.planner.sharding.tile_halos import cut_with_halos
from passes.graph.equivalence import weights_digest
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, SEQUENCE, STORED, TILES, Mesh
from passes.ir.plan import ATTENTION, Plan


@gc_paused()
def plans_auto(
    graph: ModelGraph,
    cluster: Cluster,
    request: PlanRequest,
    cost_model: CostModel | None = None,
    tell: Callable[[str], None] | None = None,
    models: SharedModels | None = None,
    deadline: Deadline | None = None,
    *,
    most: int = 1,
) -> list[Plan]:
    """Decide everything that the user left open; return the fastest plan, and nearly as fast ones of other mesh dimensions.

    Args:
        cluster: the hardware, at least as many devices as the request names.
        request: what the user said, its mode ``"auto"``.
        cost_model: prices work and messages; None: an analytic roofline.
        tell: called with the progress whenever it changes; an interrupt then keeps the best plan. None: an interrupt is raised.
        models: what plans of one graph share.
        deadline: of the search; None: it begins now.
        most: how many plans; one once the time is over.

    Raises:
        ConfigError: the request does not fit the model, the cluster or itself.
        InfeasiblePlanError: no plan fits the memory; says how much is missing and what would fit.
    """
    request.check(graph)
    known = (cost_model or Roofline(), tell, models or SharedModels(), deadline or Deadline.after(request.time_limit))
    search = _Auto(graph, cluster.first(len(request.devices)), request, *known)
    search.run()
    return search.plans(most)


class _Opener:
    """Shards the axes of a mesh and lists its candidates."""

    def __init__(self, model: CuttableModel, graph: ModelGraph, cluster: Cluster, request: PlanRequest, cost_model: CostModel) -> None:
        self._model, self._graph, self._cluster, self._request, self._cost_model = model, graph, cluster, request, cost_model
        self.links = LinkTable(cluster)
        self._largest_memory = max(memory_limits(cluster, request))

    def __call__(self, item: ClosedMesh) -> Opened | None:
        """Return the problem of a mesh, its sharding and its candidates; None if another item has the same sharding."""
        mesh, limit = item.mesh, self.parameter_limit(item.mesh)
        cut: MeshCut | None = None
        if mesh.cutting.size > 1:
            known = (self._model, mesh, self._cluster, self._request, self._cost_model)
            cut = cut_with_halos(*known, extra_axes=item.extra_axes, limit=limit, attention=item.attention)
            check_sharded(cut.axes, cut.names, mesh.cutting, self._request.constraints, cut.layouts)
            if item.extra_axes and self._has_no_extra_axes(item, cut, limit):
                return None
            if self._request.constraints.attention is not None:
                cut.check_attention()
            elif item.attention != ATTENTION[0] and not cut.shares_attention:
                return None
        part = self._model.whole if cut is None else cut.part
        of_one_size = part.graph.batch is None and self._graph.batch is not None
        mode = "auto" if stages_length(mesh) > 1 else "model" if of_one_size else "pipeline"
        request = dataclasses.replace(self._request, mode=mode, replicas=item.replicas)
        submeshes = None if cut is None or not mesh.widths else submesh_parts(cut, mesh, self._request.batchnorm, self.links)
        problem = MeshProblem(mesh, part, self._cluster, request, self._cost_model, self.links, submeshes)
        return problem, cut, candidates_of(problem, microbatch_choices(part.graph, request, problem.n_places))

    def _has_no_extra_axes(self, item: ClosedMesh, cut: MeshCut, limit: float) -> bool:
        """Return whether tile dimensions that may shard other axes than space shard the same as those that may not."""
        in_tiles = any(name in TILES for name in item.mesh.names)
        return in_tiles and cut.in_whole_model() == self._model.cut(item.mesh.cutting, limit=limit).in_whole_model()

    def parameter_limit(self, mesh: Mesh) -> float:
        """Return how many bytes of parameters fit a pipeline beside their gradients and optimizer state."""
        memory = self._largest_memory * stages_length(mesh)
        stored = math.prod(mesh.length(name) for name in mesh.names if name in STORED)
        return memory * stored / (2 + optimizer_states(self._request.optimizer) if self._graph.training else 1)


_NEARLY = 1.15
"""Relative time up to which plans of other mesh dimensions are nearly as fast as the best: about the error of prices."""

_MOST_KINDS = 8
"""How many kinds of usual meshes without stages are solved beside those that the search solved; each takes about a second."""

_MOST_REFINED = 12
"""Of how many meshes policies are chosen for each region before they are compared; each takes seconds for a large model."""

_DOUBLINGS = 4
"""So often must a device be doubled that a search has all of its limits: more devices have more meshes, and more stages."""


class _Auto:
    """The search over all meshes that the request allows."""

    def __init__(
        self,
        graph: ModelGraph,
        cluster: Cluster,
        request: PlanRequest,
        cost_model: CostModel,
        tell: Callable[[str], None] | None,
        models: SharedModels,
        deadline: Deadline,
    ) -> None:
        self._deadline = deadline
        self._graph, self._cluster, self._request, self._cost_model = graph, cluster, request, cost_model
        clock_rate, hardware = clock_rate_of(graph, cluster, asked=False), Hardware(cluster, cost_model)
        self._model = models.cuttable(graph, request, clock_rate, hardware)
        if not self._model.whole.points.units:
            raise ConfigError("the model computes nothing: there is nothing to divide", remedy="pass a model that computes something")
        self._opener = _Opener(self._model, graph, cluster, request, cost_model)
        breadth = min(1.0, math.log2(max(2, len(cluster.devices))) / _DOUBLINGS)
        self._new_search = partial(PlanSearch, tell, self._opener, breadth, deadline)
        self._search = self._new_search()
        self._kinds: dict[tuple[str, ...], list[tuple[float, ClosedMesh]]] = {}  # dimensions -> usual meshes without stages
        self._n_cuts = 0
        self._usual: list[Mesh] = []
        self._refusals: list[ConfigError] = []
        self._too_large: list[ClosedMesh] = []

    def run(self) -> None:
        """Search until the best plan is proved optimal, or a limit of the search is reached."""
        known = (self._model, self._graph, self._cluster, self._request)
        shapes = without_equal_nestings([*allowed_shapes(*known), *allowed_tiles(*known, tight=False)], self._opener.links)
        if not shapes:
            check_dimensions(self._request.constraints, Mesh((("pipeline", len(self._cluster.devices)),)))
        bounds = MeshBounds(self._model, self._cluster, self._request, self._cost_model, self._opener.links)
        pipeline = Mesh((("pipeline", len(self._cluster.devices)),))
        usual = self._usual = usual_meshes(shapes, self._cluster)
        staged = [mesh for mesh in shapes if stages_length(mesh) > 1 and mesh.cutting.size > 1]
        self._open_with_sharing([pipeline], bounds)
        self._search_meshes(usual, bounds)  # other products of dimensions are many, and the best of these beats most of them
        self._open_with_sharing(staged, bounds)
        for mesh in (pipeline, *staged):
            for submeshes, replicas in allowed_widths(self._graph, self._cluster, self._request, mesh):
                self._open_mesh(submeshes, bounds, replicas)
        others = [mesh for mesh in shapes if mesh not in usual]
        self._search_meshes([mesh for mesh in others if SEQUENCE not in mesh.names], bounds)
        self._search_meshes([mesh for mesh in others if SEQUENCE in mesh.names], bounds)  # many, in several ways to share attention
        if self._search.best is None:  # tiles need less memory than whole images
            self._search_meshes([mesh for mesh in allowed_tiles(*known, tight=True) if mesh not in shapes], bounds)
        if self._search.best is None:
            self._search_meshes([mesh for mesh in replicas_of_few_rows(*known) if mesh not in shapes], bounds)
        self._search.prove()

    def _open_with_sharing(self, meshes: Iterable[Mesh], bounds: MeshBounds) -> None:
        """Add meshes with stages that several ranks share."""
        for mesh in meshes:
            for replicas in allowed_sharing(self._graph, self._cluster, self._request, mesh):
                self._open_mesh(mesh, bounds, replicas)

    def _search_meshes(self, shapes: Iterable[Mesh], bounds: MeshBounds) -> None:
        """Add meshes, and search until none of their candidates can be faster than the best plan."""
        for mesh in shapes:
            if self._deadline.is_half_over and self._search.best is None:
                self._search.run(first=True)  # of the meshes so far: bounds of all others may take the rest of the time
            self._open_mesh(mesh, bounds)
        self._search.run()

    def _open_mesh(self, mesh: Mesh, bounds: MeshBounds, replicas: tuple[int, ...] = ()) -> None:
        """Add a mesh to the search with its lower bound; a second time with extra axes, if the model allows that.

        A mesh whose bound is infinite does not fit the memory: it is remembered for the error message of a failed search. Once the time is
        over, or the search is interrupted, a mesh is left out: the work of the model over all devices bounds its step.
        """
        if self._search.is_out_of_time or self._search.interrupted:
            self._search.leave_out(bounds.of_any_mesh)
            return
        try:
            uniform = not replicas and not mesh.widths
            extra = (False, True) if uniform and self._model.has_extra_axes(mesh) else (False,)
            for extra_axes, attention in itertools.product(extra, self._model.attention_choices(mesh)):
                limit = self._opener.parameter_limit(mesh)
                bound = bounds.step_bound(mesh, extra_axes=extra_axes, replicas=replicas, limit=limit, attention=attention)
                item = ClosedMesh(mesh, extra_axes, self._graph.batch_size, replicas, attention)
                self._n_cuts += 1
                self._search.add(bound, item)
                if uniform and stages_length(mesh) == 1 and mesh in self._usual:
                    self._kinds.setdefault(mesh.names, []).append((bound, item))
                if bound == math.inf:
                    self._too_large.append(item)
        except ConfigError as refusal:
            self._refusals.append(refusal)

    def plans(self, most: int) -> list[Plan]:
        """Return the best plan, and those of other dimensions that are nearly as fast; raise an error that says why if there is none.

        Prices err alike for meshes of the same dimensions, so that a comparison of those gains little, and nearly alike for those of one
        family: with or without stages, with or without sharded axes. Usual meshes of other dimensions, which the search need not solve if
        their bound is above the best step, are solved for it.
        """
        if self._search.best is None:
            raise self._search.out_of_time if self._deadline.is_over else self._failure()
        step_time = self._search.best[1].step_time
        near: dict[tuple[str, ...], tuple[PlanSearch, int]] = {}
        for place, names in self._nearly_best(step_time * _NEARLY):
            near.setdefault(names, (self._search, place))
        most = 1 if self._deadline.is_over else most
        if most > 1:
            near |= {names: (search, 0) for names, search in self._other_kinds(near, step_time * _NEARLY)}
        every = [(search.fastest(_of_mesh)[place], search, place) for search, place in near.values()]
        every[1:] = sorted(every[1:], key=lambda found: found[0][1].step_time)
        families = Counter[frozenset[str]]()
        order: list[tuple[int, int]] = []  # the best of each family first, then the second of each
        for index, ((option, _), _, _) in enumerate(every):
            family = frozenset("rows" if name in ROWS else name for name in option.problem.mesh.names)
            order.append((families[family], index))
            families[family] += 1
        taken = [every[index] for _, index in sorted(order)[:most]]
        return [self._described(search, place, option.cut) for (option, _), search, place in taken]

    def _nearly_best(self, slowest: float) -> list[tuple[int, tuple[str, ...]]]:
        """Return the places of the best solutions of meshes, with the mesh dimensions, by seconds with the regions recomputed that must be.

        The search compares one policy for all regions; of a mesh that just needs more memory, few regions may be left to recompute.
        """
        found: list[tuple[float, int, tuple[str, ...]]] = []
        for place, (option, solution) in enumerate(self._search.fastest(_of_mesh)):
            if place and solution.step_time > slowest:
                continue
            seconds = solution.step_time
            if not place or (place < _MOST_REFINED and not self._deadline.is_over and not self._search.interrupted):
                refined = self._search.with_regions(option, solution)
                seconds = refined.solution.step_time if refined is not None else seconds
            found.append((seconds, place, option.problem.mesh.names))
        return [(place, names) for _, place, names in sorted(found)]

    def _other_kinds(self, known: Collection[tuple[str, ...]], slowest: float) -> Iterator[tuple[tuple[str, ...], PlanSearch]]:
        """Yield searches of usual meshes of other dimensions, without stages, whose step is at most ``slowest``, the least bounds first.

        The end of the time of the search, or an interrupt, ends these as well.
        """
        bounds = {names: min(bound for bound, _ in meshes) for names, meshes in self._kinds.items() if names not in known}
        for names in sorted((names for names in bounds if bounds[names] <= slowest), key=bounds.__getitem__)[:_MOST_KINDS]:
            if self._search.interrupted:
                return
            search = self._new_search(is_optional=True)
            for bound, item in self._kinds[names]:
                search.add(bound, item)
            search.run()
            self._search.interrupted = search.interrupted
            if search.best is not None and search.best[1].step_time <= slowest:
                yield names, search

    def _described(self, search: PlanSearch, place: int, cut: MeshCut | None) -> Plan:
        """Return the plan of the mesh at a place among all of a search, the fastest at 0; the gap is that of the search of all meshes."""
        plan = describe(search, _of_mesh, place)
        if cut is not None:
            plan = with_sharding(plan, cut)
        whole = self._search
        assert whole.best is not None
        proved = whole.best[1].step_time * (1 - whole.gap)
        gap = (plan.gap or 0.0) if search is whole or not plan.step_time else max(0.0, 1 - proved / plan.step_time)
        searched = searched_words(len(whole.solutions), len(whole.meshes), self._n_cuts, gap, interrupted=whole.interrupted)
        front = pareto_front((option.words, solution) for option, solution in whole.solutions)
        return dataclasses.replace(plan.predicted(searched=searched, gap=gap, front=front), weights=weights_digest(self._graph))

    def _failure(self) -> PartitionError:
        """Return the error of a search without a plan: the least missing memory over all meshes, or the reasons of their refusal."""
        if self._request.is_trial:
            return nothing_of_trial()
        opened = self._search.meshes
        most = max(_LEAST_REMEDIES, _REMEDY_UNITS // len(self._model.whole.points.units)) if not self._deadline.is_over else _LEAST_REMEDIES
        for item in sorted(self._too_large, key=self._need)[: max(0, most - len(opened))]:
            self._search.open(item)
        return nothing_fits(sorted(opened, key=self._need)[:most], [*self._refusals, *self._search.refusals])

    def _need(self, item: ClosedMesh | MeshProblem) -> tuple[int, bool, bool]:
        """Return a key that orders meshes roughly by memory: few copies of parameters first, equal stages, usual ones."""
        mesh, replicas = item.mesh, item.replicas if isinstance(item, ClosedMesh) else item.request.replicas
        return mesh.length("data"), bool(replicas or mesh.widths), mesh not in self._usual


_REMEDY_UNITS, _LEAST_REMEDIES = 6_000, 8
"""Units of all meshes, and the least number of meshes, that an error of a search without a plan reads: each unit takes about 2 ms."""


def _of_mesh(option: Option) -> Hashable:
    """Return the key of the solutions that are compared as one mesh."""
    return id(option.problem)
