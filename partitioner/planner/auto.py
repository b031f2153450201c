"""``mode="auto"``: the fastest plan over all meshes, recomputation policies, microbatch counts and schedules, proved by bounds.

    most promising first; what cannot beat the best solution any more is left out

    mesh            what the whole model takes at least, on that many ranks        ->  cut its axes, price one rank's part
    candidate       what its stages take at least, whatever the cuts               ->  cut stages, run the schedule on the clock
    solution        seconds of a step

The search ends when nothing is left that could be faster: the best solution is then the optimum of the space. Cut short, the lowest
bound that is left says how far from it the plan may be (Land, Doig, "An automatic method of solving discrete programming problems", 1960).
Equal inputs are searched in equal order: nothing depends on the clock on the wall.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware import Cluster
from cost_models.memory import optimizer_states
from cost_models.units import format_seconds
from partitioner.planner.auto_space import allowed_shapes, allowed_tiles, candidates_of
from partitioner.planner.candidates import Candidate
from partitioner.planner.constrained_axes import check_dimensions, check_kept
from partitioner.planner.cuttable_model import CuttableModel, MeshCut
from partitioner.planner.describe import compared, contender, plan_words, searched_words
from partitioner.planner.infeasible import nothing_fits
from partitioner.planner.make_plan import describe_plan, differentiates
from partitioner.planner.mesh_bounds import MeshBounds
from partitioner.planner.mesh_links import LinkTable, stages_length
from partitioner.planner.mesh_problem import MeshProblem, Promise, Solution
from partitioner.planner.pace import pace_of
from partitioner.planner.pipeline_problem import memory_limits
from partitioner.planner.plan_mesh import cut_described
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.space_choice import Hardware
from partitioner.planner.tile_halos import with_paid_halos
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.halo_run import HaloRun
from passes.ir.mesh import ROWS, STORED, TILES, Mesh
from passes.ir.plan import Contender, Plan
from passes.recompute import Recompute
from passes.weights_digest import weights_digest

__all__ = ["plan_auto"]

_IDLE = {"GPipe": 0.05, "1F1B": 0.05, "ZBV": 0.15, "DualPipeV": 0.1, "ZB1P": 0.3}
"""Schedule -> how much of the bubble of 1F1B it is likely to leave, beyond what its bounds tell; half for all others."""

_UNEVEN = 0.3
"""The same for thin stages: units are not divided, so that a stage of few of them is not as long as others."""

_AGAIN = 0.1
"""The same for what is computed again, until it is priced."""

_TIGHT = 2.0
"""The same where stages that share ranks nearly fill them: few cuts fit then, and they are uneven."""

_MOST_ACTIONS = 60_000
"""Forwards of stages that schedules on the clock have, from the first solution on, before the search ends without a proof."""

_MANY_CUTS = 2_000
"""Cuts of one candidate from which on few are tried."""

_MOST_CUTS, _FEW_CUTS = 1_000, 8
"""Cuts of one candidate that are tried at most; where there are many."""

_NEAR = 1.1
"""How much slower than the best the most promising of many cuts may be for others to be tried: these are not often a tenth faster."""

_MOST_CUT_ACTIONS = 100_000
"""Forwards that these have together."""

_MOST_MESHES = 200
"""Meshes that are planned before the search ends without a proof."""


@dataclass(frozen=True)
class _Cut:
    """A mesh that is still to be cut, perhaps with the sequence beside its tensor dimension."""

    mesh: Mesh
    beside: bool
    rows: int

    @property
    def idle(self) -> float:
        """The share of the time that its ranks are likely to wait for each other: a guess that orders the search."""
        stages = stages_length(self.mesh)
        replicas = next((size for name, size in self.mesh.dimensions if name in ROWS), 1)
        return 0.5 * (stages - 1) / max(1, min(self.rows // replicas, 8 * stages))


@dataclass(frozen=True, eq=False)
class _Option:
    """One candidate of a mesh."""

    problem: MeshProblem
    cut: MeshCut | None
    policy: Recompute
    candidate: Candidate
    promise: Promise | None = None

    @property
    def idle(self) -> float:
        """The share of the time that its ranks are likely to wait for each other, or compute again, beyond what its bound tells."""
        candidate, problem = self.candidate, self.problem
        thin = _UNEVEN * (problem.n_places * candidate.stages_per_rank - 1) / len(problem.part.points.units)
        idle = thin + _IDLE.get(candidate.schedule, 0.5) * (problem.n_places - 1) / candidate.n_microbatches
        if self.policy != "none":
            return idle + (_AGAIN if self.promise is None else 0.0)
        return idle + (_TIGHT if candidate.stages_per_rank > 1 and problem.is_tight("none", candidate) else 0.0)

    @property
    def words(self) -> str:
        """For reading."""
        return plan_words(self.problem.mesh, self.candidate, self.policy, beside=self.cut is not None and self.cut.beside)


def plan_auto(
    graph: ModelGraph,
    cluster: Cluster,
    request: PlanRequest,
    cost_model: CostModel | None = None,
    tell: Callable[[str], None] | None = None,
) -> Plan:
    """Decide everything that the user left open.

    Args:
        graph: the model.
        cluster: the hardware, at least as many devices as the request names.
        request: what the user said, its mode ``"auto"``.
        cost_model: prices work and messages; None: an analytic roofline.
        tell: called with what is known so far, whenever it changes.

    Raises:
        ConfigError: the request does not fit the model, the cluster or itself.
        InfeasiblePlanError: no plan fits the memory; says what is missing and what would do.
    """
    request.check(graph)
    search = _Search(graph, cluster.first(len(request.devices)), request, cost_model or Roofline(), tell or (lambda _text: None))
    search.run()
    return search.plan()


class _Search:
    """The search, with what it has found so far."""

    def __init__(
        self, graph: ModelGraph, cluster: Cluster, request: PlanRequest, cost_model: CostModel, tell: Callable[[str], None]
    ) -> None:
        self._graph, self._cluster, self._request, self._cost_model, self._tell = graph, cluster, request, cost_model, tell
        trains, hardware = differentiates(graph, request), Hardware(cluster, cost_model)
        self._model = CuttableModel(graph, request, differentiate=trains, pace=pace_of(graph, cluster, asked=False), hardware=hardware)
        if not self._model.whole.points.units:
            raise ConfigError("the model computes nothing: there is nothing to divide", remedy="pass a model that computes something")
        self._open: list[tuple[float, int, float, _Cut | _Option]] = []
        self._n_added = 0
        self._n_cuts = 0
        self._n_solved = 0
        self._n_actions = 0
        self._solutions: list[tuple[_Option, Solution]] = []
        self._unproved: list[float] = []
        self._best: tuple[_Option, Solution] | None = None
        self._meshes: list[MeshProblem] = []
        self._refusals: list[ConfigError] = []
        self._too_large: list[_Cut] = []
        self._links = LinkTable(cluster)
        self._largest_memory = max(memory_limits(cluster, request))
        self._bound = 0.0

    def run(self) -> None:
        """Search until nothing that is left can be faster."""
        known = (self._model, self._graph, self._cluster, self._request)
        shapes = [*allowed_shapes(*known), *allowed_tiles(*known, tight=False)]
        if not shapes:
            check_dimensions(self._request.constraints, Mesh((("pipeline", len(self._cluster.devices)),)))
        bounds = MeshBounds(self._model, self._cluster, self._request, self._cost_model, self._links)
        self._search(shapes, bounds)
        if self._best is None:  # tiles hold less at once than rows of whole images
            self._search([mesh for mesh in allowed_tiles(*known, tight=True) if mesh not in shapes], bounds)
        self._prove()

    def _search(self, shapes: Iterable[Mesh], bounds: MeshBounds) -> None:
        """Look at meshes until nothing that is left of them can be faster."""
        for mesh in shapes:
            self._open_mesh(mesh, bounds)
        while self._open and not self._has_searched_enough():
            _, _, bound, item = heapq.heappop(self._open)
            if self._is_beaten(bound):
                continue
            if isinstance(item, _Cut):
                self._expand(item)
            else:
                self._solve(item, bound)

    def _prove(self) -> None:
        """Look closer at what is left, the lowest bound first, until that can be raised no more."""
        left = [(bound, number, item) for _, number, bound, item in self._open if not self._is_beaten(bound)]
        heapq.heapify(left)
        reached = min(self._unproved, default=np.inf)
        while left and left[0][0] < reached and len(self._meshes) < _MOST_MESHES:
            bound, _, item = heapq.heappop(left)
            self._open = []
            if isinstance(item, _Cut):
                self._expand(item)
            elif item.promise is None:
                promise = item.problem.promise(item.policy, item.candidate, self._known)
                self._add(max(bound, promise.bound), dataclasses.replace(item, promise=promise))
            else:
                heapq.heappush(left, (bound, -1, item))
                break
            for _, number, known, each in self._open:
                if not self._is_beaten(known):
                    heapq.heappush(left, (max(bound, known), number, each))
        self._left = left
        self._bound = min((reached, *(bound for bound, _, _ in left)), default=np.inf)

    @property
    def _known(self) -> float:
        """Seconds of the best so far."""
        return np.inf if self._best is None else self._best[1].step_time

    def _is_beaten(self, bound: float) -> bool:
        return bound >= self._known

    def _has_searched_enough(self) -> bool:
        return self._best is not None and (len(self._meshes) >= _MOST_MESHES or self._n_actions >= _MOST_ACTIONS)

    def _open_mesh(self, mesh: Mesh, bounds: MeshBounds) -> None:
        """Add a mesh, and the same with the sequence cut beside."""
        try:
            for beside in (False, True)[: 1 + self._model.can_cut_beside(mesh)]:
                bound = bounds.of(mesh, beside=beside)
                self._n_cuts += 1
                self._add(bound, _Cut(mesh, beside, self._graph.batch_size))
                if bound == np.inf:
                    self._too_large.append(_Cut(mesh, beside, self._graph.batch_size))
        except ConfigError as refusal:
            self._refusals.append(refusal)

    def plan(self) -> Plan:
        """The best plan that was found; raises when there is none."""
        if self._best is None:
            raise self._failure()
        option, solution = self._best
        plan = describe_plan(option.problem, solution, self._runner_up(option, solution), self._contenders())
        if option.cut is not None:
            plan = cut_described(plan, option.cut, self._request)
        gap = max(0.0, 1 - self._bound / solution.step_time) if solution.step_time else 0.0
        searched = searched_words(len(self._solutions), len(self._meshes), self._n_cuts, gap)
        notes = (*plan.notes, *self._notes())
        return dataclasses.replace(plan, gap=gap, searched=searched, notes=notes, weights=weights_digest(self._graph))

    def _add(self, bound: float, item: _Cut | _Option) -> None:
        """Remember what is still to be tried: the most promising first, whatever is proved by then."""
        if bound < np.inf:
            heapq.heappush(self._open, (bound * (1 + item.idle), self._n_added, bound, item))
            self._n_added += 1

    def _expand(self, item: _Cut) -> None:
        """Cut the axes of a mesh, and add its candidates."""
        mesh = item.mesh
        try:
            limit = self._parameter_limit(mesh)
            cut = self._cut(item, limit) if mesh.cutting.size > 1 else None
            if cut is not None:
                check_kept(cut.names, mesh.cutting, self._request.constraints, cut.layouts)
            if cut is not None and item.beside and self._is_known(item, cut, limit):
                return
            part = self._model.whole if cut is None else cut.part
            of_one_size = part.graph.batch is None and self._graph.batch is not None
            mode = "auto" if stages_length(mesh) > 1 else "model" if of_one_size else "pipeline"
            request = dataclasses.replace(self._request, mode=mode)
            problem = MeshProblem(mesh, part, self._cluster, request, self._cost_model, self._links)
            self._meshes.append(problem)
            for policy, candidate in candidates_of(problem):
                bound = problem.bound(policy, candidate) if policy == "none" else problem.bound_of_any(candidate)
                self._add(bound, _Option(problem, cut, policy, candidate))
        except ConfigError as refusal:
            self._refusals.append(refusal)

    def _is_known(self, item: _Cut, cut: MeshCut, limit: float) -> bool:
        """Whether tiles that could cut other axes than space cut none."""
        in_tiles = any(name in TILES for name in item.mesh.names)
        return in_tiles and cut.in_whole_model() == self._model.cut(item.mesh.cutting, limit=limit).in_whole_model()

    def _cut(self, item: _Cut, limit: float) -> MeshCut:
        def cut(halos: tuple[HaloRun, ...]) -> MeshCut:
            return self._model.cut(item.mesh.cutting, beside=item.beside, limit=limit, halos=halos)

        return with_paid_halos(cut, item.mesh, self._cluster, self._request, self._cost_model)

    def _parameter_limit(self, mesh: Mesh) -> float:
        """Bytes of parameters that the ranks of a pipeline can hold, with their gradients and the optimizer's state."""
        memory = self._largest_memory * stages_length(mesh)
        stored = math.prod(mesh.length(name) for name in mesh.names if name in STORED)
        trains = differentiates(self._graph, self._request)
        return memory * stored / (2 + optimizer_states(self._request.optimizer) if trains else 1)

    def _solve(self, option: _Option, known: float) -> None:
        """Work one candidate out, if what its cuts promise is not worse than what was known of it; else it waits its turn."""
        problem, candidate = option.problem, option.candidate
        try:
            promise = option.promise or problem.promise(option.policy, candidate, self._known)
        except ConfigError as refusal:
            self._refusals.append(refusal)
            return
        if option.promise is None and promise.bound > known * (1 + _TIE):
            self._add(promise.bound, dataclasses.replace(option, promise=promise))
            return
        self._n_solved += 1
        n_actions = problem.n_places * candidate.stages_per_rank * candidate.n_microbatches
        self._n_actions += n_actions if self._best is not None else 0
        n_cuts = math.comb(len(problem.part.points.units) - 1, problem.n_places * candidate.stages_per_rank - 1)
        few = n_cuts > _MANY_CUTS
        most = min(_FEW_CUTS if few else _MOST_CUTS, _MOST_CUT_ACTIONS // n_actions)
        within = self._known * _NEAR if few else math.inf
        solution, bound = problem.solve(option.policy, candidate, promise, most, within, thorough=self._best is None)
        if solution is None or bound < solution.step_time:
            self._unproved.append(bound)
        if solution is None:
            return
        self._solutions.append((option, solution))
        if self._best is None or solution.step_time < self._best[1].step_time * (1 - _TIE):
            self._best = (option, solution)
            self._tell(f"{self._n_solved} solved, best {format_seconds(solution.step_time)}: {option.words}")

    def _contenders(self) -> list[Contender]:
        """The fastest solution of each mesh, the fastest mesh first."""
        fastest: dict[int, tuple[_Option, Solution]] = {}
        for option, solution in (*([self._best] if self._best else []), *self._solutions):
            known = fastest.get(id(option.problem))
            if known is None or solution.step_time < known[1].step_time * (1 - _TIE):
                fastest[id(option.problem)] = (option, solution)
        ordered = sorted(fastest.values(), key=lambda pair: (pair is not self._best, pair[1].step_time))
        return [contender(option.words, solution) for option, solution in ordered]

    def _runner_up(self, chosen: _Option, solution: Solution) -> str:
        """The fastest solution of another mesh, or else of this one."""
        others = [pair for pair in self._solutions if pair[0] is not chosen]
        elsewhere = [pair for pair in others if pair[0].problem is not chosen.problem]
        if not others:
            return ""
        option, other = min(elsewhere or others, key=lambda pair: pair[1].step_time)
        return compared(option.words, other.step_time, solution.step_time)

    def _notes(self) -> Iterator[str]:
        if self._graph.microbatching and self._request.n_microbatches is None:
            yield "The batch is not cut into microbatches, because that would change the numbers: pass n_microbatches= to allow it."

    def _failure(self) -> PartitionError:
        """Why there is no plan: how much memory the mesh lacks that lacks least, or why no mesh could be planned at all."""
        for item in self._too_large:
            self._expand(item)
        return nothing_fits(self._meshes, self._refusals)


_TIE = 1e-9
"""Relative differences of prices that are rounding."""
