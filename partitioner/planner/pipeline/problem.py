"""One candidate of a model on a cluster as a ``StageProblem``."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from cost_models.collectives.algorithms import GroupLinks, group_links
from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster, Link
from cost_models.hardware.units import parse_bytes
from partitioner.planner.constraints.stages import Restrictions, restrict
from partitioner.planner.costs.collectives import shares_of_bucket, sum_seconds
from partitioner.planner.costs.cut_points import CutPoints
from partitioner.planner.costs.p2p_times import MessageTimes
from partitioner.planner.costs.unit_costs import MicrobatchCosts, UnitCosts
from partitioner.planner.pipeline.candidates import Candidate, microbatch_size
from partitioner.planner.request import PlanRequest
from partitioner.planner.solvers.critical_paths import PathCosts
from partitioner.planner.solvers.min_max_dp import StageCuts, solve
from partitioner.planner.solvers.shared_rank_memory import fits_together
from partitioner.planner.solvers.stage_problem import Shared, StageProblem, Units, stages_of
from partitioner.schedules.clocks.order import Order, order_of
from partitioner.schedules.clocks.step_clock import StepClock, step_clock
from passes.emit.gradient_buckets import BUCKET_BYTES
from passes.ir.graph import ModelGraph

_SLACK = 0.02
"""Relative increase of the bottleneck that is accepted to send less or cut between modules: less than the error of prices."""

_LINEAR_TO = 2**24
"""Bytes of the message from which the seconds per byte of a link are computed."""


class PipelineProblems:
    """The stage-cutting problems of one model on one cluster, and caches of their solutions.

    Args:
        cluster: one device for each rank.

    Attributes:
        limits: bytes of each rank.
    """

    def __init__(
        self, graph: ModelGraph, cluster: Cluster, request: PlanRequest, points: CutPoints, prices: UnitCosts, cost_model: CostModel
    ) -> None:
        self.graph, self.cluster, self.request = graph, cluster, request
        self.points, self.prices, self.cost_model = points, prices, cost_model
        self.limits = memory_limits(cluster, request)
        self._units_with_replicas: dict[tuple[int, bool], Units] = {}
        self._kinds: dict[Candidate, tuple[int, ...]] = {}
        self._links_of_stages: dict[tuple[tuple[int, ...], ...], list[GroupLinks]] = {}
        self._messages: dict[tuple[tuple[tuple[int, ...], ...], int], MessageTimes] = {}
        self._unlimited: dict[tuple[tuple[int, ...], tuple[int, ...], int], StageCuts | None] = {}

    def clock(self, candidate: Candidate) -> StepClock:
        """Return the simulator of the candidate's schedule."""
        return step_clock(*self._order_key(candidate))

    def order(self, candidate: Candidate) -> Order:
        """Return the facts about the candidate's schedule that do not depend on times."""
        return order_of(*self._order_key(candidate))

    def _order_key(self, candidate: Candidate) -> tuple[str, int, int, int, tuple[int, ...]]:
        return candidate.schedule, len(self.cluster.devices), candidate.n_microbatches, candidate.stages_per_rank, candidate.replicas

    def rows(self, candidate: Candidate) -> int:
        """Return the samples of the candidate's largest microbatch."""
        return microbatch_size(self.graph.batch_size, candidate.n_microbatches)

    def problem(self, candidate: Candidate) -> StageProblem:
        """Return the candidate's stage-cutting problem; raise ConfigError if constraints do not fit it."""
        order = self.order(candidate)
        links, (forced, allowed) = self.links(order.stage_ranks), self.restrictions(candidate)
        return StageProblem(
            units=self.units(candidate),
            kind=self.kinds(candidate),
            rank=tuple(ranks[0] for ranks in order.stage_ranks),
            latency=np.array([self.cost_model.transfer_time(0, link) for link in links]),
            seconds_per_byte=np.array([self._seconds_per_byte(link) for link in links]),
            in_flight=order.in_flight,
            later=order.later,
            awaiting=order.awaiting,
            limit=self._limits_of(order.stage_ranks),
            forced=forced,
            allowed=allowed,
            replicas=candidate.replicas,
        )

    def costs(self, candidate: Candidate) -> MicrobatchCosts:
        """Return the costs of units in the candidate's schedule."""
        costs = self.prices.at(self.rows(candidate))
        return costs.split if self.order(candidate).splits else costs

    def units(self, candidate: Candidate, *, in_sweeps: bool = False) -> Units:
        """Return the candidate's units; replicas of stages have a second copy of a bucket of gradients while they sum it.

        Args:
            in_sweeps: of a step whose forwards all precede its backwards, which are whole (``schedules.forwards_first.in_sweeps``).
        """
        rows, is_split = self.rows(candidate), self.order(candidate).splits and not in_sweeps
        units = (self.prices.at(rows).split if is_split else self.prices.at(rows)).units
        if not candidate.replicas:
            return units
        if (rows, is_split) not in self._units_with_replicas:
            largest = float(units.gradient_uses.amount.max(initial=0.0))
            self._units_with_replicas[rows, is_split] = replace(units, summed=max(units.summed, BUCKET_BYTES + largest))
        return self._units_with_replicas[rows, is_split]

    def sum_seconds(self, candidate: Candidate, starts: Sequence[int]) -> float:
        """Return the seconds of gradient reduction over a stage's replicas, of the slowest stage, without overlap."""
        stage_ranks, units = self.order(candidate).stage_ranks, self.units(candidate)
        uses, stage_of, kinds = units.gradient_uses, stages_of(starts, len(units)), self.kinds(candidate)
        bucket_fractions = uses._replace(amount=shares_of_bucket(uses.amount))
        sizes = uses.per_stage(stage_of, len(stage_ranks), kinds).tolist()
        buckets = bucket_fractions.per_stage(stage_of, len(stage_ranks), kinds).tolist()
        if stage_ranks not in self._links_of_stages:
            self._links_of_stages[stage_ranks] = [group_links(ranks, self.cluster) for ranks in stage_ranks]
        links, largest = self._links_of_stages[stage_ranks], float(bucket_fractions.amount.max(initial=0.0))
        return max(sum_seconds(size, filled, largest, link).alone for link, size, filled in zip(links, sizes, buckets, strict=True))

    def shared_weight_seconds(self, candidate: Candidate, starts: Sequence[int]) -> float:
        """Return the seconds in which stages on several ranks sum the gradients of weights that they share, such as a tied embedding.

        Where ranks store parts of a weight, they scatter its gradients before, and sum these parts.
        """
        stage_ranks, kinds, sizes = self.order(candidate).stage_ranks, self.kinds(candidate), dict[tuple[int, ...], list[float]]()
        for item in self._shared_gradients:
            stages = {bisect_right(starts, unit) - 1 for unit in item.units}
            if len({stage_ranks[stage] for stage in stages}) > 1:
                ranks = tuple(sorted({rank for stage in stages for rank in stage_ranks[stage]}))
                sizes.setdefault(ranks, []).append(float(item.of_kind(kinds[min(stages)])))
        seconds = 0.0
        for ranks, of_group in sizes.items():
            filled = shares_of_bucket(np.array(of_group))
            seconds += sum_seconds(sum(of_group), float(filled.sum()), float(filled.max()), group_links(ranks, self.cluster)).alone
        return seconds

    @cached_property
    def _shared_gradients(self) -> tuple[Shared, ...]:
        """The gradients that several units compute, as they are stored."""
        return tuple(item for item in self.prices.gradients.every if len(item.units) > 1)

    def restrictions(self, candidate: Candidate) -> Restrictions:
        """Return the cuts that constraints force and allow; raise ConfigError if they do not fit the candidate."""
        stage_ranks = self.order(candidate).stage_ranks
        return restrict(self.request.constraints, self.graph, self.points, self.request.devices, stage_ranks, self.request.modules)

    def kinds(self, candidate: Candidate) -> tuple[int, ...]:
        """Return for each stage the index of its device among the kinds of the prices."""
        if candidate not in self._kinds:
            self._kinds[candidate] = tuple(map(self.kind_of, self.order(candidate).stage_ranks))
        return self._kinds[candidate]

    def kind_of(self, ranks: Sequence[int]) -> int:
        """Return the index of a stage's device among the kinds of the prices; if its ranks differ, that of the slowest for the model."""
        kinds = {self.prices.kinds.index(self.cluster.devices[rank]) for rank in ranks}
        return min(kinds) if len(kinds) == 1 else max(sorted(kinds), key=self._seconds_on)

    def _seconds_on(self, kind: int) -> float:
        return float(self.prices.times(self.graph.batch_size).seconds[:, kind].sum())

    def _limits_of(self, stage_ranks: Sequence[tuple[int, ...]]) -> tuple[float, ...]:
        """Return the memory limit of each rank; for the first rank of a replicated stage, the least of the stage's ranks."""
        ranks_of_first = {ranks[0]: ranks for ranks in stage_ranks}
        return tuple(min(self.limits[other] for other in ranks_of_first.get(rank, (rank,))) for rank in range(len(self.limits)))

    def links(self, stage_ranks: Sequence[tuple[int, ...]]) -> list[Link]:
        """Return the link from each stage to the next: the slowest between any of their ranks."""
        rank_pairs = (itertools.product(senders, receivers) for senders, receivers in itertools.pairwise(stage_ranks))
        return [max(itertools.starmap(self.cluster.link, pairs), key=self._seconds_per_byte) for pairs in rank_pairs]

    def messages(self, candidate: Candidate) -> MessageTimes:
        """Return the transfer times of the candidate's messages, cached."""
        key = (self.order(candidate).stage_ranks, self.rows(candidate))
        if key not in self._messages:
            self._messages[key] = MessageTimes(self.prices.at(key[1]).units, self.links(key[0]), self.cost_model)
        return self._messages[key]

    def hold(self, memory: Sequence[float]) -> bool:
        """Return whether the bytes of each rank are within its limit."""
        return all(size <= limit for size, limit in zip(memory, self.limits, strict=True))

    def paths(self, candidate: Candidate) -> PathCosts:
        """Return the lower bounds of a step by its stages; raise ConfigError if constraints do not fit the candidate."""
        return PathCosts(self.problem(candidate), self.costs(candidate).halves, self.order(candidate))

    def solve(self, candidate: Candidate) -> StageCuts | None:
        """Return the candidate's cuts with the least bottleneck, within ``_SLACK``; None if none fit the memory.

        Schedules with the same stages on the same ranks differ only in memory. So their problem without memory limits is solved once; only
        if that solution does not fit is the candidate's own problem solved.
        """
        cuts, problem = self.unlimited(candidate), self.problem(candidate)
        if cuts is None or fits_together(problem, cuts.starts):
            return cuts
        return solve(problem, _SLACK)

    def unlimited(self, candidate: Candidate) -> StageCuts | None:
        """Return the best cuts without a limit of memory; None if constraints allow none."""
        problem = self.problem(candidate)
        key = (problem.rank, problem.replicas, self.rows(candidate))
        if key not in self._unlimited:
            self._unlimited[key] = solve(replace(problem, limit=(np.inf,) * len(problem.limit)), _SLACK)
        return self._unlimited[key]

    def _seconds_per_byte(self, link: Link) -> float:
        return (self.cost_model.transfer_time(_LINEAR_TO, link) - self.cost_model.transfer_time(0, link)) / _LINEAR_TO


def memory_limits(cluster: Cluster, request: PlanRequest) -> tuple[float, ...]:
    """Return the memory limit of each device in bytes."""
    limit = request.memory_limit
    limits = (_USABLE * device.memory_bytes if limit is None else float(parse_bytes(limit)) for device in cluster.devices)
    return tuple(min(each, request.most_bytes) for each in limits)


_USABLE = 0.92
"""The fraction of a device's memory that plans use: a CUDA context, buffers of NCCL and fragmentation take the rest."""
