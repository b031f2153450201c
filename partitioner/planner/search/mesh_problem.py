"""The planning problem of one mesh: choose recomputation, microbatches, schedule and stage cuts.

one rank's shard, links   ->   units and costs for each policy   ->   candidates, each with a bound and a solution
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from partitioner.planner.bounds.schedule_bounds import least_load, least_shared_step, least_step, shared_load
from partitioner.planner.costs.links import LinkTable
from partitioner.planner.costs.memory.named_regions import has_checkpoints
from partitioner.planner.costs.unit_costs import UnitCosts
from partitioner.planner.pipeline.candidate import StagedModel, StageSums, seconds_once, stage_model
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.pipeline.problem import PipelineProblems
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.rank_shard import ModelPart
from partitioner.planner.sharding.stage_submeshes import SubmeshParts
from partitioner.planner.solvers.branch_and_bound import fastest_cuts, promising_cuts
from partitioner.planner.solvers.critical_paths import PathCosts
from partitioner.planner.solvers.stage_tables import best_bottleneck, bottleneck_table
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh, pipelines


@dataclass(frozen=True, eq=False)
class Solution:
    """A candidate with its stage cuts and its simulated schedule.

    Attributes:
        sums: seconds at the end of the step until all gradients are summed, and of collectives once a step that the schedule does not hide.
    """

    staged: StagedModel
    sums: float

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.staged.makespan + self.sums


@dataclass(frozen=True, eq=False)
class LowerBounds:
    """Lower bounds of a candidate, computed before its cuts are searched.

    Attributes:
        costs: costs of all runs of units that may be a stage; None if they are too many.
        longest_path: the shortest, over all cuts, of the longest path through the schedule in seconds; inf if no cuts fit.
        bound: lower bound of the step seconds over all cuts.
    """

    costs: PathCosts | None
    longest_path: float
    bound: float


class MeshProblem:
    """A mesh on a cluster: prices, bounds and solves its candidates.

    Args:
        part: one rank's shard of the model.
        cluster: of all ranks.
        request: the user's request; its mode is that of the stages.
        links: of the cluster, to share their cache.
        submeshes: the shards of stages with a tensor-parallel degree each; ``part`` is then that of the widest.
    """

    def __init__(
        self,
        mesh: Mesh,
        part: ModelPart,
        cluster: Cluster,
        request: PlanRequest,
        cost_model: CostModel,
        links: LinkTable | None = None,
        submeshes: SubmeshParts | None = None,
    ) -> None:
        self.mesh, self.part, self.cost_model, self.submeshes = mesh, part, cost_model, submeshes
        self.devices = request.devices
        links = links or LinkTable(cluster)
        all_talk = bool(request.replicas) or part.source.shares_weights
        self.links, self.places = links.of(mesh), links.places(mesh, all_talk=all_talk)
        ranks = pipelines(mesh)[0]
        self.request = dataclasses.replace(request, devices=tuple(request.devices[rank] for rank in ranks))
        self.kinds = tuple(dict.fromkeys(self.places.devices))
        self._refusals: list[ConfigError] = []
        self._n_priced = 0
        self._problems: dict[Recompute, PipelineProblems] = {}
        self._least_steps: dict[tuple[Recompute, Candidate], float] = {}
        self._loads: dict[tuple[Recompute, int, int, int], float] = {}
        self._shared_loads: dict[tuple[Recompute, int], float] = {}

    @cached_property
    def n_places(self) -> int:
        """Ranks of a pipeline."""
        return len(self.places.devices)

    @property
    def policies(self) -> Sequence[Recompute]:
        """The recomputation policies to try: the requested one, the model's own, or all, the one that recomputes least first."""
        if self.request.patterns:
            return ("by region",)
        if self.request.recompute is not None:
            return (cast(Recompute, self.request.recompute),)
        if not self.part.graph.training:
            return ("none",)
        return ("by region",) if has_checkpoints(self.part.source.whole) else ("none", "selective", "full")

    @property
    def batch_size(self) -> int:
        """Samples of the whole batch."""
        return self.part.graph.batch_size * self.part.cutting.n_row_parts

    @property
    def place_of_rank(self) -> tuple[int, ...]:
        """The pipeline position of each rank of the mesh."""
        places = {rank: place for pipeline in pipelines(self.mesh) for place, rank in enumerate(pipeline)}
        return tuple(places[rank] for rank in range(self.mesh.size))

    @property
    def refusal(self) -> ConfigError | None:
        """The error of the first refused cuts; None if any cuts were priced: these were at most too large for the memory."""
        return self._refusals[0] if self._refusals and not self._n_priced else None

    def problems(self, policy: Recompute) -> PipelineProblems:
        """Return the problem of cutting stages under a recomputation policy, cached."""
        if policy not in self._problems:
            self._problems[policy] = self.with_prices(self._prices(policy))
        return self._problems[policy]

    def problems_in_regions(self, policy: Recompute) -> PipelineProblems:
        """Return ``problems(policy)`` with the values that enter a region saved, as where each region has its own policy. Not cached."""
        assert self.submeshes is None
        prices = self.part.prices(
            self.kinds,
            self.cost_model,
            self.request.optimizer,
            policy,
            self.links,
            patterns=self.request.patterns,
            in_regions=True,
            n_stages=self.n_places,
            is_run_whole=self.request.names_mesh,
        )
        return self.with_prices(prices)

    def with_prices(self, prices: UnitCosts) -> PipelineProblems:
        """Return the problem of cutting stages of units with these prices."""
        return PipelineProblems(self.part.graph, self.places, self.request, self.part.points, prices, self.cost_model)

    def _prices(self, policy: Recompute) -> UnitCosts:
        asked = (self.request.optimizer, policy)
        patterns = self.request.patterns
        if self.submeshes is None:
            of_stages = (self.kinds, self.cost_model, *asked, self.links)
            return self.part.prices(*of_stages, patterns=patterns, n_stages=self.n_places, is_run_whole=self.request.names_mesh)
        prices = self.submeshes.prices(self.kinds, self.places.devices, self.cost_model, *asked, patterns)
        self.submeshes.check(prices)
        return prices

    def bound(self, policy: Recompute, candidate: Candidate, *, whole_units: bool = False) -> float:
        """Return a lower bound of the step seconds over all cuts (``schedule_bounds``); inf if no cuts fit the memory.

        Args:
            whole_units: whether to account for units being indivisible: tighter, but slower.
        """
        problems = self.problems(policy)
        if len(problems.points.units) < candidate.n_stages(self.n_places) or not self._could_fit(problems, candidate):
            return np.inf
        return self._least_step(problems, candidate, whole_units=True) if whole_units else self._cached_least_step(problems, candidate)

    def bound_of_any(self, candidate: Candidate) -> float:
        """Return the lower bound over all recomputation policies, ignoring memory: a backward without recomputation is the shortest."""
        if len(self.part.points.units) < candidate.n_stages(self.n_places):
            return np.inf
        return self._cached_least_step(self.problems("none"), candidate)

    def _cached_least_step(self, problems: PipelineProblems, candidate: Candidate) -> float:
        key = (problems.prices.recompute, candidate)
        if key not in self._least_steps:
            self._least_steps[key] = self._least_step(problems, candidate)
        return self._least_steps[key]

    def _least_step(self, problems: PipelineProblems, candidate: Candidate, *, whole_units: bool = False) -> float:
        """Return a lower bound of the step seconds, gradient reduction included, without regard to memory; arguments as in ``bound``."""
        n_ranks, n_stages = self.n_places, candidate.n_stages(self.n_places)
        rows = problems.rows(candidate)
        times = problems.prices.times(rows)
        whole, longest, shares = float(times.least.sum()), float(times.least.max()), times.fractions
        if candidate.replicas:
            return least_shared_step(candidate, whole, longest, shares) * (1 - _ROUNDING) + self._least_sums
        if whole_units:
            load = self._least_load(problems, rows, n_ranks, n_stages // n_ranks)
            slowest = self._least_load(problems, rows, n_stages, 1)
        else:
            load, slowest = max(whole / n_ranks, longest), max(whole / n_stages, longest)
        load = max(load, self._shared_load(problems, rows))
        step = least_step(candidate, n_ranks, whole, load, slowest, shares)
        return step * (1 - _ROUNDING) + self._least_sums

    def is_tight(self, policy: Recompute, candidate: Candidate) -> bool:
        """Return whether an evenly divided model exceeds the memory of its ranks, with one microbatch in flight for each rank.

        Few cuts fit then, so that the search looks at such a candidate later. Each of n ranks has 1/n of parameters, gradients and
        optimizer state, and n times 1/n of the activations of a microbatch.
        """
        problems = self.problems(policy)
        activations = problems.prices.times(problems.rows(candidate)).kept.least * min(1.0, candidate.n_microbatches / self.n_places)
        fixed = problems.prices.fixed_bytes + problems.prices.gradients.least
        return bool(activations + fixed / self.n_places > max(problems.limits))

    def _could_fit(self, problems: PipelineProblems, candidate: Candidate) -> bool:
        """Return whether the stages together could store the model, each with the whole memory of its rank.

        A stage with n microbatches in flight fits if ``fixed + n kept <= limit``. Over all stages, with totals F fixed and K kept:

            K <= sum of kept <= sum of (limit - fixed) / n <= limit sum of (1 / n) - F / max(n)

        This is tested before there are gradients, and after, with gradients in F, if all stages still have microbatches in flight.
        """
        fixed, limit, places = problems.prices.fixed_bytes, max(problems.limits), self.n_places
        with_gradients = fixed + problems.prices.gradients.least
        if candidate.stages_per_rank > 1 or with_gradients > limit * places:
            return bool(with_gradients <= limit * places)
        order, kept = problems.order(candidate), problems.prices.times(problems.rows(candidate)).kept.least
        for in_flight, permanent in ((order.in_flight, fixed), (order.later, with_gradients)):
            room = limit * sum(1 / count for count in in_flight) - permanent / max(in_flight) if min(in_flight) else np.inf
            if kept > room * (1 + _ROUNDING):
                return False
        return True

    def _least_load(self, problems: PipelineProblems, rows: int, n_parts: int, n_runs: int) -> float:
        """Return ``schedule_bounds.least_load`` of the units for a microbatch of ``rows`` samples, cached."""
        key = (problems.prices.recompute, rows, n_parts, n_runs)
        if key not in self._loads:
            self._loads[key] = least_load(problems.prices.times(rows).least, n_parts, n_runs)
        return self._loads[key]

    def _shared_load(self, problems: PipelineProblems, rows: int) -> float:
        """Return ``schedule_bounds.shared_load`` for a microbatch of ``rows`` samples, cached; 0 if all places are of one kind."""
        if len(self.kinds) == 1:
            return 0.0
        key = (problems.prices.recompute, rows)
        if key not in self._shared_loads:
            kinds = [problems.prices.kinds.index(device) for device in self.places.devices]
            self._shared_loads[key] = shared_load(problems.prices.times(rows).seconds, kinds)
        return self._shared_loads[key]

    def lower_bounds(self, policy: Recompute, candidate: Candidate, below: float) -> LowerBounds:
        """Return lower bounds of a candidate over all cuts whose stages fit the memory.

        Args:
            below: seconds of the best plan so far: a candidate that cannot beat them is not bounded further.
        """
        bound = self.bound(policy, candidate, whole_units=True)
        problems, n_stages = self.problems(policy), candidate.n_stages(self.n_places)
        if bound >= below or (candidate.stages_per_rank > 1 and n_stages * len(problems.points.units) > _MOST_RUNS):
            return LowerBounds(None, bound, bound)
        costs, most = problems.paths(candidate), below - self._least_sums
        longest_path = best_bottleneck(costs) if most == math.inf else float(bottleneck_table(costs, most)[0, 0])
        if longest_path > most:
            return LowerBounds(None, math.inf, below)
        return LowerBounds(costs, longest_path, max(longest_path * (1 - _ROUNDING) + self._least_sums, bound))

    def solve(
        self, policy: Recompute, candidate: Candidate, lower: LowerBounds, most: int, within: float = math.inf, *, thorough: bool = True
    ) -> tuple[Solution | None, float]:
        """Return the fastest cuts of a candidate that fit the memory, None if none of those simulated does; and a lower bound of all.

        1. Too many runs to bound each, or ``mode="model"``: the cuts with the best balance alone.
        2. Else start from the cuts of the shortest critical path; with several stages a rank, or one microbatch, from balanced ones if
           these are faster.
        3. Branch and bound over cuts from there (``fastest_cuts``).

        Args:
            lower: the candidate's lower bounds.
            most: limit of simulated cuts, without the first.
            within: simulate no others if the first cuts are slower than these seconds.
            thorough: in case 1, look for other cuts if balanced ones exceed the memory.
        """
        if lower.bound == math.inf:
            return None, math.inf
        problems, known, fastest = self.problems(policy), dict[tuple[int, ...], Solution](), math.inf

        def seconds(starts: tuple[int, ...]) -> float:
            """Simulate a step with stages of these first units; inf if the cuts are refused or exceed the memory."""
            nonlocal fastest
            if starts not in known:
                solution = self.simulate(problems, candidate, starts)
                if solution is None:
                    return math.inf
                if solution.step_time > fastest * (1 + _EQUAL):  # too slow: skip the check of memory
                    return solution.step_time
                if not problems.hold(solution.staged.memory):
                    return math.inf
                known[starts], fastest = solution, min(solution.step_time, fastest)
            return known[starts].step_time

        balanced_only = self.request.mode == "model" and self.n_places > 1  # the user wants a share for each device, not a short step
        if lower.costs is None or balanced_only:
            cuts = problems.unlimited(candidate)
            if cuts is not None and (thorough or balanced_only) and seconds(cuts.starts) == math.inf:
                cuts = problems.solve(candidate)
            if cuts is None or seconds(cuts.starts) == math.inf:
                return None, lower.bound
            return known[cuts.starts], min(seconds(cuts.starts), lower.bound)
        first = promising_cuts(lower.costs, lower.longest_path)
        if candidate.stages_per_rank > 1 or candidate.n_microbatches == 1:  # the longest path ignores most waiting, and shared ranks
            cuts = problems.solve(candidate) if seconds(first) == math.inf else problems.unlimited(candidate)
            tolerance = 1 + _EQUAL if candidate.n_microbatches == 1 else 1 - _EQUAL
            if cuts is not None and seconds(cuts.starts) <= seconds(first) * tolerance:
                first = cuts.starts
        best = fastest_cuts(lower.costs, lower.longest_path, self._least_sums, seconds, first, most, within)
        bound = best.bound if best.bound == best.seconds else min(best.seconds, lower.bound)
        return (None if best.starts is None else known[best.starts]), bound

    def simulate(self, problems: PipelineProblems, candidate: Candidate, starts: tuple[int, ...]) -> Solution | None:
        """Simulate a step with stages of these first units; None, with the error recorded, if a shared parameter rules the cuts out."""
        if self.submeshes is not None:
            refusal = self.submeshes.sharing_error(problems.prices, starts, problems.order(candidate).stage_ranks)
            if refusal is not None:
                self._refusals.append(refusal)
                return None
        self._n_priced += 1
        staged = stage_model(problems, candidate, starts)
        return Solution(staged, self._sum_seconds(problems, staged) + seconds_once(problems, staged))

    def _sum_seconds(self, problems: PipelineProblems, staged: StagedModel) -> float:
        """Return the seconds at the end of a step until the ranks of all stages have summed their gradients.

        One stage sums while its backward computes; those of a pipeline end at other times, and sum in what is left.
        """
        starts, stage_ranks = [run.start for run in staged.runs], staged.schedule.stage_ranks
        between_stages = problems.sum_seconds(staged.candidate, starts) if staged.candidate.replicas else 0.0
        between_stages += (
            problems.shared_weight_seconds(staged.candidate, starts) if len(stage_ranks) > 1 and self.submeshes is None else 0.0
        )
        if not self.part.sums:
            return between_stages
        if self.submeshes is not None:
            return between_stages + self.submeshes.sum_seconds(self._submesh_sums, starts, stage_ranks)
        by_dimension = self._stage_sums.of_ranks(starts, stage_ranks)
        # For each rank, (bytes, buckets) by mesh dimension; ranks with equal ones are priced once.
        of_ranks = set(zip(*(map(tuple, sizes.tolist()) for sizes in by_dimension.values()), strict=True))
        priced = [self.part.sum_seconds(dict(zip(by_dimension, sizes, strict=True)), self.links) for sizes in of_ranks]
        if self.n_places == 1 and staged.candidate.n_microbatches == 1:
            return float(problems.prices.summing(problems.rows(staged.candidate))[:, 0].sum())
        return between_stages + max(sum(each.alone for each in seconds.values()) for seconds in priced)

    @cached_property
    def _submesh_sums(self) -> dict[int, StageSums]:
        assert self.submeshes is not None
        return self.submeshes.stage_sums(next(iter(self._problems.values())).prices)

    @cached_property
    def _stage_sums(self) -> StageSums:
        return StageSums(next(iter(self._problems.values())).prices, self.part.sums)

    @cached_property
    def _least_sums(self) -> float:
        """Lower bound of ``_sum_seconds``: the rank with most gradients has at least the average, and latency is ignored.

        It is 0 for stages of unequal degrees: their sums depend on which stage has which parameter. Sums beside a backward take the
        fraction in which processors compute nothing.
        """
        if self.submeshes is not None:
            return 0.0
        shares = [(self.links[name], size / self.n_places) for name, size in self.part.bytes_summed.items()]
        seconds = ((link, size * link.seconds("all_reduce", _LARGE) / _LARGE) for link, size in shares)
        return sum(each * (link.ring.host_share if self.n_places == 1 else 1.0) for link, each in seconds) * (1 - _ROUNDING)


_LARGE = 1e18
"""Bytes of a message for which latency is negligible."""

_EQUAL = 1e-9
"""Relative differences of seconds that are rounding."""

_ROUNDING = 1e-6
"""Relative margin for the rounding of sums: a bound is never above what it bounds."""

_MOST_RUNS = 2_000
"""Limit of units times stages for which runs are bounded one by one if stages share ranks: their bounds are too weak to be worth more."""
