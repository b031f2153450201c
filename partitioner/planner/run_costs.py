"""Cost, memory and sends of runs in stages: matrices over (stage, end) for all runs that start at one unit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from partitioner.planner.run_sums import Row, row_table
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
        self._in_flight = np.array(problem.in_flight, dtype=float)
        self.stage_limit = np.array([problem.limit[rank] for rank in problem.rank]) if stage_limit is None else stage_limit
        self._reach = _reach(problem)
        fastest = problem.units.time.min(axis=1)
        self._elapsed = np.concatenate([[0.0], np.cumsum(fastest)])
        self.least_bottleneck = max(float(self._elapsed[-1]) / problem.n_stages, float(fastest.max()))
        self.most = float(problem.units.time.max(axis=1).sum())

    def rows(self, longest: Integers) -> Iterator[Row]:
        """The rows of all units, last unit first; see ``RowTable``."""
        return row_table(self.problem.units).rows(longest)

    def longest(self, bound: float) -> Integers:
        """For each unit, how many units a run from there can have if it computes for no longer than the bound."""
        n = self.problem.n_units
        ends = np.searchsorted(self._elapsed, self._elapsed[:-1] + bound * (1 + _ROUNDING), side="right") - 1
        lengths: Integers = np.maximum(np.minimum(ends - np.arange(n), self._reach.max(axis=1)), 0)
        return lengths

    def stages(self, start: int, bound: float) -> slice:
        """The stages that can start at a unit if none computes for longer than the bound."""
        n, n_stages = self.problem.n_units, self.problem.n_stages
        low, high = max(0, n_stages - (n - start)), min(n_stages - 1, start)
        if np.isfinite(bound) and bound > 0:
            before, after = self._elapsed[start], self._elapsed[-1] - self._elapsed[start]
            low = max(low, int(np.ceil(before / bound - n_stages * _ROUNDING)))
            high = min(high, int(np.floor(n_stages - after / bound + n_stages * _ROUNDING)))
        return slice(low, high + 1)

    def affordable(self, row: Row, excess: float = 0.0) -> Row:
        """The part of a row whose runs fit the roomiest stage, or exceed it by no more than so many bytes."""
        least = row.fixed + self._in_flight.min() * row.kept
        return row.first(int(np.searchsorted(least, self.stage_limit.max() + excess, side="right")))

    def cost(self, row: Row, stages: slice) -> Floats:
        """(stages, width) seconds of a run with what it sends."""
        forward = self._next[stages] @ row.leaving
        backward = self._previous[stages] @ row.entering
        seconds: Floats = row.time[self._kind[stages]] + forward + backward
        return seconds

    def memory(self, row: Row, stages: slice) -> Floats:
        """(stages, width) bytes that the stage holds."""
        held: Floats = row.fixed + self._in_flight[stages, None] * row.kept
        return held

    def fits(self, row: Row, stages: slice) -> NDArray[np.bool_]:
        """(stages, width) whether the stage alone has the memory, and may hold the units."""
        return (self.memory(row, stages) <= self.stage_limit[stages, None]) & self.permitted(row, stages)

    def permitted(self, row: Row, stages: slice) -> NDArray[np.bool_]:
        """(stages, width) whether the stage may hold the units."""
        allowed: NDArray[np.bool_] = np.arange(row.width) < self._reach[row.start, stages, None]
        return allowed

    def price(self, row: Row) -> Integers:
        """(width,) bytes sent, and below them the modules cut: what ties are broken by."""
        ends = row.start + 1 + np.arange(row.width)
        depth = np.append(self.problem.units.depth, 0)[ends]
        sent = np.rint(row.leaving[1] + row.entering[1]).astype(np.int64)
        price: Integers = sent * (int(self.problem.units.depth.max(initial=0)) * self.problem.n_stages + 1) + depth
        return price


def _reach(problem: StageProblem) -> Integers:
    """(N, S) how many units a run from each unit may have in each stage: up to a forced cut, or a unit not allowed there."""
    n, n_stages = problem.n_units, problem.n_stages
    allowed = np.ones((n, n_stages), dtype=bool) if problem.allowed is None else problem.allowed
    reach = np.zeros((n + 1, n_stages), dtype=np.int64)
    for unit in range(n - 1, -1, -1):
        after = 0 if unit + 1 in problem.forced else reach[unit + 1]
        reach[unit] = np.where(allowed[unit], 1 + after, 0)
    return reach[:n]
