"""One candidate of a model on a cluster as a ``StageProblem``."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.hardware import Cluster, Link
from cost_models.units import parse_bytes
from partitioner.planner.candidates import Candidate, microbatch_size
from partitioner.planner.constrained_cuts import restrict
from partitioner.planner.cut_points import CutPoints
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.shared_memory import fits_together
from partitioner.planner.stage_cuts import StageCuts, solve
from partitioner.planner.stage_problem import StageProblem
from partitioner.planner.unit_prices import Prices
from partitioner.schedules.catalog import make_schedule
from partitioner.schedules.in_flight import peak_in_flight
from passes.ir.graph import ModelGraph
from passes.ir.schedule import Schedule

__all__ = ["PipelineProblems", "memory_limits"]

_SLACK = 0.02
"""A stage may be slower than the best by less than the prices can be wrong, if that sends less or cuts between modules."""

_LINEAR_TO = 2**24
"""Bytes up to which the price of a message is taken to be linear."""


class PipelineProblems:
    """The problems of one model on one cluster, and their solutions.

    Args:
        graph: the model.
        cluster: one device for each rank.
        request: what was asked for.
        points: the units of the graph.
        prices: their prices.
        cost_model: prices messages.
    """

    def __init__(
        self, graph: ModelGraph, cluster: Cluster, request: PlanRequest, points: CutPoints, prices: Prices, cost_model: CostModel
    ) -> None:
        self.graph, self.cluster, self.request = graph, cluster, request
        self.points, self.prices, self.cost_model = points, prices, cost_model
        self._unlimited: dict[tuple[tuple[int, ...], int], StageCuts | None] = {}

    def schedule(self, candidate: Candidate) -> Schedule:
        """The candidate's schedule."""
        return self._scheduled(candidate)[0]

    def _scheduled(self, candidate: Candidate) -> tuple[Schedule, tuple[int, ...]]:
        return _schedule(candidate.schedule, len(self.cluster.devices), candidate.n_microbatches, candidate.stages_per_rank)

    def rows(self, candidate: Candidate) -> int:
        """Rows of the candidate's largest microbatch."""
        return microbatch_size(self.graph.batch_size, candidate.n_microbatches)

    def problem(self, candidate: Candidate, schedule: Schedule) -> StageProblem:
        """The candidate's stage-cutting problem; raises ConfigError when constraints do not fit it."""
        prices = self.prices.at(self.rows(candidate))
        rank = schedule.stage_rank
        links = [self.cluster.link(one, other) for one, other in itertools.pairwise(rank)]
        limits = restrict(self.request.constraints, self.graph, self.points, self.request.devices, rank, self.request.modules)
        return StageProblem(
            units=prices.units,
            kind=tuple(self.prices.kinds.index(self.cluster.devices[each]) for each in rank),
            rank=rank,
            latency=np.array([self.cost_model.transfer_time(0, link) for link in links]),
            seconds_per_byte=np.array([self._slope(link) for link in links]),
            in_flight=self._scheduled(candidate)[1],
            limit=self.limits(),
            forced=limits.forced,
            allowed=limits.allowed,
        )

    def limits(self) -> tuple[float, ...]:
        """Bytes of each rank."""
        return memory_limits(self.cluster, self.request)

    def solve(self, candidate: Candidate, schedule: Schedule) -> StageCuts | None:
        """The candidate's best cuts; None when nothing fits.

        Schedules with the same stages on the same ranks differ only in what they hold. So memory is left aside first, once for all of
        them; only where that solution does not fit is the candidate solved by itself.
        """
        problem = self.problem(candidate, schedule)
        key = (schedule.stage_rank, self.rows(candidate))
        if key not in self._unlimited:
            self._unlimited[key] = solve(replace(problem, limit=(np.inf,) * len(problem.limit)), _SLACK)
        found = self._unlimited[key]
        if found is None or fits_together(problem, found.starts):
            return found
        return solve(problem, _SLACK)

    def _slope(self, link: Link) -> float:
        return (self.cost_model.transfer_time(_LINEAR_TO, link) - self.cost_model.transfer_time(0, link)) / _LINEAR_TO


@lru_cache(maxsize=8)
def _schedule(name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int) -> tuple[Schedule, tuple[int, ...]]:
    """A schedule and what its stages hold in flight: meshes that differ in what they cut beside stages have the same."""
    schedule = make_schedule(name, n_ranks, n_microbatches, stages_per_rank)
    return schedule, peak_in_flight(schedule)


def memory_limits(cluster: Cluster, request: PlanRequest) -> tuple[float, ...]:
    """Bytes that each device may hold."""
    limit = request.memory_limit
    return tuple(float(device.memory_bytes if limit is None else parse_bytes(limit)) for device in cluster.devices)
