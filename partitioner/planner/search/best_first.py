"""Best-first branch and bound over the candidates of all meshes.

After Land, Doig, "An automatic method of solving discrete programming problems", 1960:

    closed mesh     one lower bound of all its candidates   ->  opened: the candidates of the mesh
    candidate       lower bound over all stage cuts         ->  cut stages, simulate the schedule
    solution        seconds of a step

The search ends when no lower bound is below the best solution, which is then optimal. If it ends earlier, the lowest bound left gives the
gap. The order depends on the inputs alone, and so does the end, unless the caller limits the time. With a progress display, Ctrl-C ends the
search and keeps the best plan.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cost_models.hardware.units import format_seconds
from partitioner.planner.costs.links import stages_length
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.search.describe import plan_words
from partitioner.planner.search.mesh_problem import LowerBounds, MeshProblem, Solution
from partitioner.planner.search.recomputed_regions import ChosenRegions, keep_what_fits
from partitioner.planner.sharding.mesh_cut import MeshCut
from partitioner.schedules.catalog import find_schedule
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError
from passes.ir.mesh import ROWS, Mesh
from passes.ir.plan import ATTENTION

_UNEVEN = 0.3
"""Expected idle fraction from imbalance, for one unit a stage: units are indivisible, so stages of few units differ in length."""

_RECOMPUTED = 0.1
"""Expected extra fraction for recomputation, until it is priced."""

_TIGHT = 2.0
"""Expected idle fraction where several stages nearly fill their rank's memory: few cuts fit, and these are unbalanced."""

_LAST = 1e3
"""That of candidates whose balanced cuts do not fit: all others are solved before these."""

_MOST_ACTIONS = 60_000
"""Limit of the search: forwards (stages times microbatches) of all candidates solved after the first solution."""

_MANY_CUTS = 2_000
"""Possible cuts of a candidate above which only ``_FEW_CUTS`` of them are simulated."""

_MOST_CUTS, _FEW_CUTS = 1_000, 8
"""Limits of simulated cuts per candidate: of few possible cuts, and of many."""

_NEAR = 1.1
"""Of many cuts, cuts besides the most balanced are simulated only if that is at most this much slower than the best plan: they seldom gain
10 %."""

_MOST_CUT_ACTIONS = 100_000
"""Limit of the forwards in all simulated cuts of one candidate."""

_MOST_MESHES = 200
"""Limit of the search: meshes opened."""

_MOST_UNITS = 12_000
"""Limit of the search once there is a solution: units of all opened meshes, those of repeated blocks once. To shard and price
one takes about 0.2 ms."""

_MOST_RUNS = 100_000_000
"""Limit of the search once there is a solution: runs of such units in tables of stages, of which one takes about 15 ns."""


@dataclass(frozen=True, eq=False)
class Option:
    """One candidate of a mesh.

    Attributes:
        cut: its sharded axes; None: no axes.
        bounds: lower bounds over its stage cuts; None: not computed yet.
        axes: the axes that the user named for it, in words; empty if the planner chose them.
        is_left: whether its balanced cuts exceed the memory: others are looked for if nothing else fits.
    """

    problem: MeshProblem
    cut: MeshCut | None
    policy: Recompute
    candidate: Candidate
    bounds: LowerBounds | None = None
    axes: str = ""
    is_left: bool = False

    @property
    def idle(self) -> float:
        """A guess that orders the search: the fraction by which a step exceeds its lower bound (idle ranks, recomputation)."""
        candidate, problem = self.candidate, self.problem
        if self.is_left:
            return _LAST
        imbalance = _UNEVEN * (candidate.n_stages(problem.n_places) - 1) / len(problem.part.points.units)
        idle = imbalance + find_schedule(candidate.schedule).idle * (problem.n_places - 1) / candidate.n_microbatches
        if self.policy != "none" and self.bounds is None:  # its prices are not known yet
            return idle + _RECOMPUTED
        return idle + (_TIGHT if candidate.stages_per_rank > 1 and problem.is_tight(self.policy, candidate) else 0.0)

    @property
    def words(self) -> str:
        """Describe the candidate in words, for progress and reports."""
        return self.words_with(self.policy)

    def words_with(self, policy: str) -> str:
        """Describe the candidate with another policy of recomputation, in words."""
        extra_axes, attention = (False, ATTENTION[0]) if self.cut is None else (self.cut.extra_axes, self.cut.attention)
        words = plan_words(self.problem.mesh, self.candidate, policy, extra_axes=extra_axes, attention=attention)
        return f"{words}, {self.axes}" if self.axes else words


Opened: TypeAlias = tuple[MeshProblem, MeshCut | None, Iterable[tuple[Recompute, Candidate]]]
"""A mesh, its sharded axes (None: no axes), and its candidates."""


@dataclass(frozen=True)
class ClosedMesh:
    """A mesh whose axes are not sharded yet: many candidates, with one bound.

    Attributes:
        mesh: all dimensions.
        extra_axes: whether it shards more than the usual axes (``MeshCut``).
        rows: samples of the whole batch.
        replicas: for each stage, its number of round-robin ranks; empty: one each.
        attention: how the ranks of a sequence dimension share attention (``Plan.attention``).
    """

    mesh: Mesh
    extra_axes: bool
    rows: int
    replicas: tuple[int, ...] = ()
    attention: str = ATTENTION[0]

    @property
    def idle(self) -> float:
        """A guess that orders the search: half the bubble's fraction of a step."""
        stages = stages_length(self.mesh)
        replicas = next((size for name, size in self.mesh.dimensions if name in ROWS), 1)
        return 0.5 * (stages - 1) / max(1, min(self.rows // replicas, 8 * stages))


class PlanSearch:
    """The search, with its results so far.

    Args:
        tell: called with the progress whenever it changes; an interrupt then keeps the best plan. None: an interrupt is raised.
        open_mesh: opens a closed mesh: returns it with its sharding and candidates, or None if an equal one is known. It must not refer to
            the search, so that the solutions are freed with the search.
        breadth: the share of the limits of units and runs that this search has.
        deadline: ends the search, instead of limits of work; None: these do.
        is_optional: whether the search may end without a plan, beside another one that has a plan.

    Attributes:
        best: the fastest solution.
        solutions: all solutions, in the order of the search.
        meshes: the opened meshes.
        refusals: why candidates were refused.
        bound: after ``prove``, a lower bound of the seconds of all plans.
        interrupted: whether an interrupt ended the search.
    """

    def __init__(
        self,
        tell: Callable[[str], None] | None = None,
        open_mesh: Callable[[ClosedMesh], Opened | None] | None = None,
        breadth: float = 1.0,
        deadline: Deadline | None = None,
        *,
        is_optional: bool = False,
    ) -> None:
        self._tell, self._open_mesh, self._breadth, self._is_optional = tell, open_mesh, breadth, is_optional
        self._deadline = deadline or Deadline.after(None)
        self.best: tuple[Option, Solution] | None = None
        self.solutions: list[tuple[Option, Solution]] = []
        self.meshes: list[MeshProblem] = []
        self.refusals: list[ConfigError] = []
        self.bound, self.interrupted = 0.0, False
        self._queue: list[tuple[float, int, float, ClosedMesh | Option]] = []  # (expected time, number, lower bound, item)
        self._n_added = self._n_solved = self._n_actions = self._n_units = self._n_runs = 0
        self._unproved: list[float] = []
        self._with_regions: dict[int, ChosenRegions | None] = {}

    def add(self, bound: float, item: ClosedMesh | Option) -> None:
        """Queue a closed mesh or a candidate by its expected time: its lower bound, increased by the expected idle fraction."""
        if bound < np.inf:
            heapq.heappush(self._queue, (bound * (1 + item.idle), self._n_added, bound, item))
            self._n_added += 1

    def add_mesh(
        self, problem: MeshProblem, cut: MeshCut | None, candidates: Iterable[tuple[Recompute, Candidate]], axes: str = ""
    ) -> None:
        """Queue the candidates of a mesh; ``axes``: the axes that the user named for it, in words."""
        self.meshes.append(problem)
        self._n_units += len(problem.part.source.points.units)
        for policy, candidate in candidates:
            bound = problem.bound(policy, candidate) if policy == "none" else problem.bound_of_any(candidate)
            self.add(bound, Option(problem, cut, policy, candidate, axes=axes))

    def run(self, *, first: bool = False) -> None:
        """Search until no candidate left can beat the best solution, or a limit is reached; with ``first``, until there is a solution."""
        while self._queue and not self._has_searched_enough() and not (first and self.best is not None):
            _, _, bound, item = heapq.heappop(self._queue)
            if self._is_beaten(bound):
                continue
            with self._interruptible(bound):
                if isinstance(item, Option):
                    self._solve(item, bound)
                else:
                    self.open(item)

    def prove(self) -> None:
        """Set ``bound``: tighten the bounds of the items left, lowest first, until the lowest is tight or that of a simulated candidate."""
        left = [(bound, number, item) for _, number, bound, item in self._queue if not self._is_beaten(bound)]
        heapq.heapify(left)
        while left and left[0][0] < self._least_unproved and not self._is_too_long and not self.interrupted:
            bound, _, item = heapq.heappop(left)
            self._queue = []
            if isinstance(item, Option) and item.bounds is not None:  # cannot be tightened further
                heapq.heappush(left, (bound, -1, item))
                break
            with self._interruptible(bound):
                self._tighten(item, bound)
            for _, number, added_bound, added in self._queue:
                if not self._is_beaten(added_bound):
                    heapq.heappush(left, (max(bound, added_bound), number, added))
        self.bound = min((self._least_unproved, *(bound for bound, _, _ in left)), default=np.inf)

    def _tighten(self, item: ClosedMesh | Option, bound: float) -> None:
        """Queue what replaces an item with a tighter bound: a mesh's candidates, or a candidate bounded over its stage cuts."""
        if not isinstance(item, Option):
            self.open(item)
            return
        bounded = self._with_bounds(item)
        if bounded is not None and bounded.bounds is not None:
            self.add(max(bound, bounded.bounds.bound), bounded)

    @contextmanager
    def _interruptible(self, bound: float) -> Iterator[None]:
        """Let an interrupt end the search if there is a plan, with ``bound`` for the item that was being worked on."""
        try:
            yield
        except KeyboardInterrupt:
            if not self._may_end or self._tell is None:
                raise
            self.interrupted = True
            self._unproved.append(bound)

    @property
    def gap(self) -> float:
        """The fraction of the best plan's time by which any plan could be faster; 0 is proved optimal."""
        return max(0.0, 1 - self.bound / self._best_seconds) if self._best_seconds else 0.0

    def fastest(self, group: Callable[[Option], Hashable]) -> list[tuple[Option, Solution]]:
        """Return the fastest solution of each group, ``best`` first, then by time."""
        fastest: dict[Hashable, tuple[Option, Solution]] = {}
        for option, solution in (*([self.best] if self.best else []), *self.solutions):
            known = fastest.get(group(option))
            if known is None or solution.step_time < known[1].step_time * (1 - _TIE):
                fastest[group(option)] = (option, solution)
        return sorted(fastest.values(), key=lambda pair: (pair is not self.best, pair[1].step_time))

    def with_regions(self, option: Option, solution: Solution) -> ChosenRegions | None:
        """Return ``keep_what_fits`` of a solution, cached."""
        if id(solution) not in self._with_regions:
            self._with_regions[id(solution)] = keep_what_fits(option.problem, solution)
        return self._with_regions[id(solution)]

    @property
    def _least_unproved(self) -> float:
        """The lowest bound of items that were simulated in part, and may contain a better plan."""
        return min(self._unproved, default=np.inf)

    @property
    def _best_seconds(self) -> float:
        return np.inf if self.best is None else self.best[1].step_time

    def _is_beaten(self, bound: float) -> bool:
        """Return whether no plan with this lower bound can beat the best one."""
        return bound >= self._best_seconds

    def leave_out(self, bound: float) -> None:
        """Leave out plans with this lower bound, which stay unproved."""
        self._unproved.append(bound)

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time is over; with a plan, whether what is left of it is reserved for simulations."""
        return self._deadline.is_reserve_left if self._may_end else self._deadline.is_over

    @property
    def out_of_time(self) -> ConfigError:
        """The error of a search that has no plan when its time is over."""
        n_meshes = f"{len(self.meshes)} mesh{'es' if len(self.meshes) != 1 else ''}"
        return ConfigError(
            f"no plan was found within time_limit={self._deadline.seconds:g} seconds, in which {n_meshes} could be looked at",
            remedy='allow more seconds, or name the mesh, as in mode={"pipeline": 2, "tensor": 8}',
        )

    def _has_searched_enough(self) -> bool:
        """Return whether the search ends with the best solution so far; raise ConfigError if its time is over, and it has none."""
        if not self._may_end and self._deadline.is_over:
            raise self.out_of_time
        is_much = self._deadline.seconds is None and self._n_actions >= _MOST_ACTIONS
        return self.interrupted or (self._may_end and (self._is_too_long or is_much))

    @property
    def _may_end(self) -> bool:
        """Return whether this search has found a plan, or may end without one since another search has."""
        return self.best is not None or self._is_optional

    @property
    def _is_too_long(self) -> bool:
        """Whether so much was opened and bounded, or so much time is over, that the search ends with the best solution so far."""
        if self._deadline.seconds is not None:
            return self.is_out_of_time
        is_too_much = self._n_units >= _MOST_UNITS * self._breadth or self._n_runs >= _MOST_RUNS * self._breadth**2
        return is_too_much or len(self.meshes) >= _MOST_MESHES

    def open(self, item: ClosedMesh) -> None:
        """Open a closed mesh: shard its axes and queue its candidates."""
        assert self._open_mesh is not None
        try:
            opened = self._open_mesh(item)
            if opened is not None:
                self.add_mesh(*opened)
        except ConfigError as refusal:
            self.refusals.append(refusal)

    def _with_bounds(self, option: Option) -> Option | None:
        """Return a candidate with its bounds over stage cuts; None if constraints refuse it."""
        try:
            bounds = option.problem.lower_bounds(option.policy, option.candidate, self._best_seconds)
            if bounds.costs is not None or bounds.longest_path == math.inf:
                self._count_runs(option)
            return dataclasses.replace(option, bounds=bounds)
        except ConfigError as refusal:
            self.refusals.append(refusal)
            return None

    def _count_runs(self, option: Option) -> None:
        """Count the runs of units that a table of a candidate's stages has."""
        self._n_runs += len(option.problem.part.source.points.units) ** 2 * option.candidate.n_stages(option.problem.n_places)

    def _solve(self, option: Option, known: float) -> None:
        """Cut a candidate into stages and record the solution.

        The first time, compute its bound over stage cuts; if that exceeds the bound by which it was chosen (``known``), queue it again.
        """
        bounded = option if option.bounds is not None else self._with_bounds(option)
        if bounded is None or bounded.bounds is None:
            return
        if option.is_left and self.best is not None:
            self._unproved.append(known)
            return
        problem, candidate = option.problem, option.candidate
        if option.bounds is None and bounded.bounds.bound > known * (1 + _TIE):
            self.add(bounded.bounds.bound, bounded)
            return
        self._n_solved += 1
        self._count_runs(option)
        n_stages = candidate.n_stages(problem.n_places)
        n_actions = n_stages * candidate.n_microbatches
        self._n_actions += n_actions if self.best is not None else 0
        is_one_of_several = problem.request.most_bytes < math.inf  # searches for the least memory
        is_sampled = is_one_of_several or math.comb(len(problem.part.points.units) - 1, n_stages - 1) > _MANY_CUTS
        most = min(_FEW_CUTS if is_sampled else _MOST_CUTS, _MOST_CUT_ACTIONS // n_actions)
        within = self._best_seconds * _NEAR if is_sampled else math.inf
        solution, bound = problem.solve(option.policy, candidate, bounded.bounds, most, within, thorough=option.is_left)
        if solution is None and self.best is None and not (option.is_left or is_one_of_several):
            self.add(bound, dataclasses.replace(bounded, is_left=True))
            return
        if solution is None or bound < solution.step_time:
            self._unproved.append(bound)
        if solution is None:
            return
        self.solutions.append((option, solution))
        if self.best is None or solution.step_time < self.best[1].step_time * (1 - _TIE):
            self.best = (option, solution)
            if self._tell is not None:
                self._tell(f"{self._n_solved} solved, best {format_seconds(solution.step_time)} (Ctrl-C takes it): {option.words}")


_TIE = 1e-9
"""Relative difference of times below which they count as equal."""
