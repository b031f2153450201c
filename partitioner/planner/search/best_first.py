"""Candidates of meshes, the most promising first; what cannot beat the best solution any more is left out.

    something closed    a bound of all that is in it    ->  opened: candidates of one mesh
    candidate           what its stages take at least   ->  cut stages, run the schedule on the clock
    solution            seconds of a step

The search ends when nothing is left that could be faster: the best solution is then the optimum of the space. Cut short, the lowest
bound that is left says how far from it the plan may be (Land, Doig, "An automatic method of solving discrete programming problems", 1960).
Equal inputs are searched in equal order: nothing depends on the clock on the wall. Who is told of each better solution may interrupt
(Ctrl-C) and take the best so far, with the gap that is proved by then.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from cost_models.hardware.units import format_seconds
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.search.describe import plan_words
from partitioner.planner.search.mesh_problem import MeshProblem, Promise, Solution
from partitioner.planner.sharding.model import MeshCut
from partitioner.schedules.catalog import SCHEDULES
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError

__all__ = ["Opened", "Option", "PlanSearch"]

_UNEVEN = 0.3
"""How long ranks are likely to wait for thin stages: units are not divided, so that a stage of few of them is not as long as others."""

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


@dataclass(frozen=True, eq=False)
class Option:
    """One candidate of a mesh.

    Attributes:
        problem: the mesh.
        cut: what it cuts; None: no axes.
        policy: what is computed again.
        candidate: the rest of what is open.
        promise: what is known of its cuts; None: nothing yet.
        axes: the axes that were named for it, in words; empty where the planner chose them.
    """

    problem: MeshProblem
    cut: MeshCut | None
    policy: Recompute
    candidate: Candidate
    promise: Promise | None = None
    axes: str = ""

    @property
    def idle(self) -> float:
        """The share of the time that its ranks are likely to wait for each other, or compute again, beyond what its bound tells."""
        candidate, problem = self.candidate, self.problem
        thin = _UNEVEN * (candidate.n_stages(problem.n_places) - 1) / len(problem.part.points.units)
        idle = thin + SCHEDULES[candidate.schedule].idle * (problem.n_places - 1) / candidate.n_microbatches
        if self.policy != "none":
            return idle + (_AGAIN if self.promise is None else 0.0)
        return idle + (_TIGHT if candidate.stages_per_rank > 1 and problem.is_tight("none", candidate) else 0.0)

    @property
    def words(self) -> str:
        """For reading."""
        words = plan_words(self.problem.mesh, self.candidate, self.policy, beside=self.cut is not None and self.cut.beside)
        return f"{words}, {self.axes}" if self.axes else words


Opened: TypeAlias = tuple[MeshProblem, MeshCut | None, Iterable[tuple[Recompute, Candidate]]]
"""A mesh, what it cuts, and its candidates."""


class Closed(Protocol):
    """Something to be opened: many candidates, with one bound."""

    @property
    def idle(self) -> float:
        """The share of the time that ranks are likely to wait for each other: a guess that orders the search."""


T = TypeVar("T", bound=Closed)


class PlanSearch(Generic[T]):
    """The search, with what it has found so far.

    Args:
        tell: called with what is known so far, whenever it changes; None: nobody looks on, and an interrupt ends everything.
        opened: opens what is closed: its mesh, what that cuts, and its candidates; None where the same is known already. Refers to no
            search, so that all that a search has found is freed with it.

    Attributes:
        best: the fastest solution.
        solutions: all that were worked out, in their order.
        meshes: those that were opened.
        refusals: why candidates were refused.
        bound: after ``prove``, seconds that no plan can beat.
        interrupted: whether somebody had enough of it.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, opened: Callable[[T], Opened | None] | None = None) -> None:
        self._tell, self._opened = tell, opened
        self.best: tuple[Option, Solution] | None = None
        self.solutions: list[tuple[Option, Solution]] = []
        self.meshes: list[MeshProblem] = []
        self.refusals: list[ConfigError] = []
        self.bound, self.interrupted = 0.0, False
        self._open: list[tuple[float, int, float, T | Option]] = []
        self._n_added = self._n_solved = self._n_actions = 0
        self._unproved: list[float] = []

    def add(self, bound: float, item: T | Option) -> None:
        """Remember what is still to be tried: the most promising first, whatever is proved by then."""
        if bound < np.inf:
            heapq.heappush(self._open, (bound * (1 + item.idle), self._n_added, bound, item))
            self._n_added += 1

    def add_mesh(
        self, problem: MeshProblem, cut: MeshCut | None, candidates: Iterable[tuple[Recompute, Candidate]], axes: str = ""
    ) -> None:
        """Add the candidates of a mesh; ``axes``: those that were named for it, in words."""
        self.meshes.append(problem)
        for policy, candidate in candidates:
            bound = problem.bound(policy, candidate) if policy == "none" else problem.bound_of_any(candidate)
            self.add(bound, Option(problem, cut, policy, candidate, axes=axes))

    def run(self) -> None:
        """Search until nothing that is left can be faster, or long enough."""
        while self._open and not self._has_searched_enough():
            _, _, bound, item = heapq.heappop(self._open)
            if self._is_beaten(bound):
                continue
            with self._interruptible(bound):
                if isinstance(item, Option):
                    self._solve(item, bound)
                else:
                    self.open(item)

    def prove(self) -> None:
        """Look closer at what is left, the lowest bound first, until that can be raised no more."""
        left = [(bound, number, item) for _, number, bound, item in self._open if not self._is_beaten(bound)]
        heapq.heapify(left)
        while left and left[0][0] < self._least_unproved and len(self.meshes) < _MOST_MESHES and not self.interrupted:
            bound, _, item = heapq.heappop(left)
            self._open = []
            if isinstance(item, Option) and item.promise is not None:
                heapq.heappush(left, (bound, -1, item))
                break
            with self._interruptible(bound):
                self._look_closer(item, bound)
            for _, number, known, each in self._open:
                if not self._is_beaten(known):
                    heapq.heappush(left, (max(bound, known), number, each))
        self.bound = min((self._least_unproved, *(bound for bound, _, _ in left)), default=np.inf)

    def _look_closer(self, item: T | Option, bound: float) -> None:
        """Open what is closed; ask what the cuts of a candidate promise."""
        if not isinstance(item, Option):
            self.open(item)
            return
        promised = self._promised(item)
        if promised is not None and promised.promise is not None:
            self.add(max(bound, promised.promise.bound), promised)

    @contextmanager
    def _interruptible(self, bound: float) -> Iterator[None]:
        """Work on something of which a bound is known; that is what is known of it if somebody interrupts, and has a plan to take."""
        try:
            yield
        except KeyboardInterrupt:
            if self.best is None or self._tell is None:
                raise
            self.interrupted = True
            self._unproved.append(bound)

    @property
    def gap(self) -> float:
        """How much faster, relatively, any plan could be than the best."""
        return max(0.0, 1 - self.bound / self._known) if self._known else 0.0

    def fastest(self, group: Callable[[Option], Hashable]) -> list[tuple[Option, Solution]]:
        """The fastest solution of each group, the chosen one first, then the fastest."""
        fastest: dict[Hashable, tuple[Option, Solution]] = {}
        for option, solution in (*([self.best] if self.best else []), *self.solutions):
            known = fastest.get(group(option))
            if known is None or solution.step_time < known[1].step_time * (1 - _TIE):
                fastest[group(option)] = (option, solution)
        return sorted(fastest.values(), key=lambda pair: (pair is not self.best, pair[1].step_time))

    @property
    def _least_unproved(self) -> float:
        """The least bound of what was worked out, or begun, and may hold better plans."""
        return min(self._unproved, default=np.inf)

    @property
    def _known(self) -> float:
        """Seconds of the best so far."""
        return np.inf if self.best is None else self.best[1].step_time

    def _is_beaten(self, bound: float) -> bool:
        return bound >= self._known

    def _has_searched_enough(self) -> bool:
        too_long = len(self.meshes) >= _MOST_MESHES or self._n_actions >= _MOST_ACTIONS
        return self.interrupted or (self.best is not None and too_long)

    def open(self, item: T) -> None:
        """Open what is closed."""
        assert self._opened is not None
        try:
            found = self._opened(item)
            if found is not None:
                self.add_mesh(*found)
        except ConfigError as refusal:
            self.refusals.append(refusal)

    def _promised(self, option: Option) -> Option | None:
        """A candidate with what its cuts promise; None where constraints refuse it."""
        try:
            return dataclasses.replace(option, promise=option.problem.promise(option.policy, option.candidate, self._known))
        except ConfigError as refusal:
            self.refusals.append(refusal)
            return None

    def _solve(self, option: Option, known: float) -> None:
        """Work one candidate out, if what its cuts promise is not worse than what was known of it; else it waits its turn."""
        promised = option if option.promise is not None else self._promised(option)
        if promised is None or promised.promise is None:
            return
        problem, candidate, promise = option.problem, option.candidate, promised.promise
        if option.promise is None and promise.bound > known * (1 + _TIE):
            self.add(promise.bound, promised)
            return
        self._n_solved += 1
        n_actions = candidate.n_stages(problem.n_places) * candidate.n_microbatches
        self._n_actions += n_actions if self.best is not None else 0
        n_cuts = math.comb(len(problem.part.points.units) - 1, candidate.n_stages(problem.n_places) - 1)
        few = n_cuts > _MANY_CUTS
        most = min(_FEW_CUTS if few else _MOST_CUTS, _MOST_CUT_ACTIONS // n_actions)
        within = self._known * _NEAR if few else math.inf
        solution, bound = problem.solve(option.policy, candidate, promise, most, within, thorough=self.best is None)
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
"""Relative differences of prices that are rounding."""
