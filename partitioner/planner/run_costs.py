"""Cost, memory and sends of runs in stages: arrays over (stage, start, length) for all runs that start in one block of units."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from partitioner.planner.run_sums import Runs, run_table
from partitioner.planner.stage_memory import Held
from partitioner.planner.stage_problem import Floats, Integers, StageProblem

__all__ = ["RunCosts"]

_ROUNDING = 1e-9
"""Relative margin by which a bound is widened, so that no run is lost to the rounding of sums."""


class RunCosts:
    """What a problem says about runs.

    Args:
        problem: the problem.
        stage_limit: (S,) bytes that each stage may hold; None: each the whole limit of its rank.

    Attributes:
        least_bottleneck: seconds that no run of the best cuts can be below, all of them together.
        most: seconds of a run of all units, messages aside.
    """

    def __init__(self, problem: StageProblem, stage_limit: Floats | None = None) -> None:
        self.problem = problem
        self._kind = np.array(problem.kind)
        self._next = np.array([[*problem.latency, 0.0], [*problem.seconds_per_byte, 0.0]]).T
        self._previous = np.array([[0.0, *problem.latency], [0.0, *problem.seconds_per_byte]]).T
        self._in_flight, self._later = (np.array(held, dtype=float) for held in (problem.in_flight, problem.later))
        self._awaiting = np.array(problem.awaiting, dtype=float)
        self.stage_limit = np.array([problem.limit[rank] for rank in problem.rank]) if stage_limit is None else stage_limit
        self._reach = _reach(problem)
        fastest = problem.units.time.min(axis=1)
        self._turns = problem.taking_turns
        self._elapsed = np.concatenate([[0.0], np.cumsum(fastest)])
        self.least_bottleneck = max(float(self._elapsed[-1]) / int(self._turns.sum()), float(fastest.max()) / int(self._turns.max()))
        self.most = float(problem.units.time.max(axis=1).sum())

    def blocks(self, longest: Integers) -> Iterator[Runs]:
        """All runs, the last block first; see ``RunTable``."""
        return run_table(self.problem.units).blocks(longest)

    def longest(self, bound: float) -> Integers:
        """For each unit, how many units a run from there can have if it computes for no longer than the bound."""
        n, bound = self.problem.n_units, bound * int(self._turns.max())
        ends = np.searchsorted(self._elapsed, self._elapsed[:-1] + bound * (1 + _ROUNDING), side="right") - 1
        lengths: Integers = np.maximum(np.minimum(ends - np.arange(n), self._reach.max(axis=1)), 0)
        return lengths

    def stages(self, runs: Runs, bound: float) -> slice:
        """The stages that can start in a block if none computes for longer than the bound."""
        starts = runs.starts
        return slice(self._stages(starts.start, bound).start, self._stages(starts.stop - 1, bound).stop)

    def _stages(self, start: int, bound: float) -> slice:
        """The stages that can start at a unit."""
        n, n_stages = self.problem.n_units, self.problem.n_stages
        low, high = max(0, n_stages - (n - start)), min(n_stages - 1, start)
        bound *= int(self._turns.max())
        if np.isfinite(bound) and bound > 0:
            before, after = self._elapsed[start], self._elapsed[-1] - self._elapsed[start]
            low = max(low, int(np.ceil(before / bound - n_stages * _ROUNDING)))
            high = min(high, int(np.floor(n_stages - after / bound + n_stages * _ROUNDING)))
        return slice(low, high + 1)

    def affordable(self, runs: Runs, excess: float = 0.0) -> Runs:
        """The lengths of which some run fits the roomiest stage of its kind, or exceeds it by no more than so many bytes."""
        alike = len(runs.fixed) == len(runs.kept) == len(runs.gradients) == 1
        groups = [(0, slice(None))] if alike else [(kind, np.flatnonzero(self._kind == kind)) for kind in set(self.problem.kind)]
        return runs.first(max(self._longest_fitting(runs, kind, stages, excess) for kind, stages in groups))

    def _longest_fitting(self, runs: Runs, kind: int, stages: slice | Integers, excess: float) -> int:
        """Units of the longest run that fits the roomiest of some stages, all of one kind."""
        fixed, kept, gradients = (each[min(kind, len(each) - 1)] for each in (runs.fixed, runs.kept, runs.gradients))
        least = np.maximum(self._in_flight[stages].min() * kept, self._later[stages].min() * kept + gradients)
        fits = fixed + least <= self.stage_limit[stages].max() + excess
        return int(fits.sum(axis=1).max(initial=0))

    def cost(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) seconds of a run with what it sends, of which ranks that take turns have a part each."""
        seconds: Floats = runs.time[self._kind[stages]] + self.sending(runs, stages) + self.sending_back(runs, stages)
        return seconds / self._turns[stages, None, None] if self.problem.replicas else seconds

    def sending(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) seconds that what leaves a run is on its way to the next stage."""
        return _seconds(self._next[stages], runs.leaving)

    def sending_back(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) the same of the gradients of what enters it."""
        return _seconds(self._previous[stages], runs.entering)

    def memory(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) bytes that the stage holds."""
        return self.fixed(runs, stages) + self.held(runs, stages).most

    def fixed(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) what it holds all the time; (1, C, width) where all kinds are alike."""
        return self._of_kinds(runs.fixed, stages)

    def _of_kinds(self, each: Floats, stages: slice) -> Floats:
        """Of the kind of each stage; as it is where all kinds are alike."""
        return each[self._kind[stages]] if len(each) > 1 else each

    def held(self, runs: Runs, stages: slice) -> Held:
        """(stages, C, width) what it holds beside what it holds all the time."""
        in_flight, later = (held[stages, None, None] for held in (self._in_flight, self._later))
        comes = list(zip(self._awaiting[:, stages, None, None], np.repeat([runs.entering[1], runs.leaving[1]], 2, axis=0), strict=True))
        kept, gradients, working = (self._of_kinds(each, stages) for each in (runs.kept, runs.gradients, runs.working))
        return Held(in_flight, later, kept, gradients, working, comes[::2], comes[1::2], self.problem.units.summed)

    def fits(self, runs: Runs, stages: slice) -> NDArray[np.bool_]:
        """(stages, C, width) whether the stage alone has the memory, and may hold the units."""
        return (self.memory(runs, stages) <= self.stage_limit[stages, None, None]) & self.permitted(runs, stages)

    def permitted(self, runs: Runs, stages: slice) -> NDArray[np.bool_]:
        """(stages, C, width) whether the stage may hold the units."""
        allowed: NDArray[np.bool_] = np.arange(runs.width) < self._reach[runs.starts, stages].T[:, :, None]
        return allowed

    def price(self, runs: Runs) -> Integers:
        """(C, width) bytes sent, and below them the modules cut: what ties are broken by."""
        depth = np.append(self.problem.units.depth, 0)[runs.behind]
        sent = np.rint(runs.leaving[1] + runs.entering[1]).astype(np.int64)
        price: Integers = sent * (int(self.problem.units.depth.max(initial=0)) * self.problem.n_stages + 1) + depth
        return price


def _seconds(links: Floats, messages: Floats) -> Floats:
    """(stages, C, width) seconds of messages, counted and in bytes, over the link of each stage."""
    latency, slope = links[:, :1, None], links[:, 1:, None]
    seconds: Floats = latency * messages[0] + slope * messages[1]
    return seconds


def _reach(problem: StageProblem) -> Integers:
    """(N, S) how many units a run from each unit may have in each stage: up to a forced cut, or a unit not allowed there."""
    n, n_stages = problem.n_units, problem.n_stages
    if problem.allowed is None and not problem.forced:
        return np.repeat(np.arange(n, 0, -1)[:, None], n_stages, axis=1)
    allowed = np.ones((n, n_stages), dtype=bool) if problem.allowed is None else problem.allowed
    reach = np.zeros((n + 1, n_stages), dtype=np.int64)
    for unit in range(n - 1, -1, -1):
        after = 0 if unit + 1 in problem.forced else reach[unit + 1]
        reach[unit] = np.where(allowed[unit], 1 + after, 0)
    return reach[:n]
