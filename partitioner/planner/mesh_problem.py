"""One mesh with everything that is still open on it: recomputation, microbatches, schedule, stage cuts.

part of a rank, links   ->   units and prices for each policy   ->   candidates, each with a bound and a solution
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.hardware import Cluster
from partitioner.planner.candidates import Candidate
from partitioner.planner.mesh_links import LinkTable, places_of
from partitioner.planner.model_part import ModelPart
from partitioner.planner.pipeline_problem import PipelineProblems
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.staged_model import StagedModel, stage_model, summed_bytes
from passes.ir.mesh import Mesh, pipelines
from passes.recompute import Recompute

__all__ = ["MeshProblem", "Solution", "policies"]


@dataclass(frozen=True, eq=False)
class Solution:
    """One candidate of a mesh, worked out.

    Attributes:
        problems: the mesh under its recomputation policy.
        staged: its stages and their times.
        sums: seconds at the end of the step until all gradients are summed.
    """

    problems: PipelineProblems
    staged: StagedModel
    sums: float

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.staged.step.makespan + self.sums


class MeshProblem:
    """A mesh on a cluster.

    Args:
        mesh: all dimensions.
        part: what one rank has.
        cluster: of all ranks.
        request: what was asked for, its mode that of the stages.
        cost_model: prices work and messages.
        links: of the cluster, where they are known already.
    """

    def __init__(
        self,
        mesh: Mesh,
        part: ModelPart,
        cluster: Cluster,
        request: PlanRequest,
        cost_model: CostModel,
        links: LinkTable | None = None,
    ) -> None:
        self.mesh, self.part, self.cost_model = mesh, part, cost_model
        self.devices = request.devices
        self.links = (links or LinkTable(cluster)).of(mesh)
        self.places = places_of(mesh, cluster)
        ranks = pipelines(mesh)[0]
        self.request = dataclasses.replace(request, devices=tuple(request.devices[rank] for rank in ranks))
        self.kinds = tuple(dict.fromkeys(self.places.devices))
        self._problems: dict[Recompute, PipelineProblems] = {}
        self._seconds: dict[tuple[Recompute, int], tuple[float, float]] = {}

    @cached_property
    def n_places(self) -> int:
        """Ranks of a pipeline."""
        return len(self.places.devices)

    @property
    def differentiate(self) -> bool:
        """Whether a backward is planned for."""
        return self.part.graph.training or self.request.optimizer != "none"

    @property
    def batch_size(self) -> int:
        """Rows of the whole batch."""
        return self.part.graph.batch_size * self.part.n_row_parts

    @property
    def place_of_rank(self) -> tuple[int, ...]:
        """For each rank of the mesh, its place along the pipeline."""
        places = {rank: place for pipeline in pipelines(self.mesh) for place, rank in enumerate(pipeline)}
        return tuple(places[rank] for rank in range(self.mesh.size))

    def problems(self, policy: Recompute) -> PipelineProblems:
        """The stages to be cut, under a recomputation policy."""
        if policy not in self._problems:
            part, request = self.part, self.request
            prices = part.prices(self.kinds, self.cost_model, request.optimizer, policy, self.links)
            self._problems[policy] = PipelineProblems(part.graph, self.places, request, part.points, prices, self.cost_model)
        return self._problems[policy]

    def bound(self, policy: Recompute, candidate: Candidate) -> float:
        """Seconds that no cuts of a candidate can beat; inf where no cuts fit the memory.

        A rank computes at least its part of all microbatches, and one unit lies on one rank. With one stage on each rank and backwards in
        one piece, what precedes stage s takes part in the first microbatch before s starts, and in the last one after s ends:

            step >= t[0] + ... + t[s-1] + M t[s]    for every s    hence    step >= W / (1 - (1 - 1/M)^R)

        for M microbatches on R ranks, W the time of all stages: the right side is reached when all those terms are equal. Where
        backwards are split, only forwards precede: if they are at least the share f of the time of any unit,
        step >= f W / (1 - (1 - f/M)^R).
        """
        problems = self.problems(policy)
        if not self._could_fit(problems, candidate):
            return np.inf
        whole, largest = self._least_seconds(problems, problems.rows(candidate))
        count = candidate.n_microbatches
        step = max(whole, count * max(whole / self.n_places, largest))
        if candidate.stages_per_rank == 1 and candidate.schedule in _IN_ONE_PIECE:
            step = max(step, whole / (1 - (1 - 1 / count) ** self.n_places))
        elif candidate.stages_per_rank == 1 and count > 1:
            share = problems.prices.least_forward(problems.rows(candidate))
            step = max(step, whole * share / (1 - (1 - share / count) ** self.n_places) if share else 0.0)
        return step * (1 - _ROUNDING) + self._least_sums

    def is_tight(self, policy: Recompute, candidate: Candidate) -> bool:
        """Whether a rank that holds as many microbatches as there are ranks, of an equal share of the model, holds more than fits."""
        problems = self.problems(policy)
        kept = problems.prices.least_kept(problems.rows(candidate)) * min(1.0, candidate.n_microbatches / self.n_places)
        return bool(kept + problems.prices.fixed_bytes / self.n_places > max(problems.limits()))

    def _could_fit(self, problems: PipelineProblems, candidate: Candidate) -> bool:
        """Whether the stages together could hold the model, each with the whole memory of its rank.

        A stage that holds n microbatches at once fits if ``fixed + n kept <= limit``. Of all stages, with F fixed and K kept together:

            K <= sum of kept <= sum of (limit - fixed) / n <= limit sum of (1 / n) - F / max(n)
        """
        fixed, limit, places = problems.prices.fixed_bytes, max(problems.limits()), self.n_places
        if candidate.stages_per_rank > 1 or candidate.schedule not in _HOLDING or fixed > limit * places:
            return bool(fixed <= limit * places)
        count = candidate.n_microbatches
        held = [count if candidate.schedule == "GPipe" else min(count, places - place) for place in range(places)]
        kept = problems.prices.least_kept(problems.rows(candidate))
        return bool(kept <= (limit * sum(1 / number for number in held) - fixed / max(held)) * (1 + _ROUNDING))

    def _least_seconds(self, problems: PipelineProblems, rows: int) -> tuple[float, float]:
        """Of all units together, and of the slowest, for one microbatch on the devices that are fastest."""
        key = (problems.prices.recompute, rows)
        if key not in self._seconds:
            seconds = problems.prices.times(rows).min(axis=1)
            self._seconds[key] = float(seconds.sum()), float(seconds.max())
        return self._seconds[key]

    def solve(self, policy: Recompute, candidate: Candidate) -> Solution | None:
        """The best cuts of a candidate; None when none fit."""
        problems = self.problems(policy)
        schedule = problems.schedule(candidate)
        cuts = problems.solve(candidate, schedule)
        if cuts is None:
            return None
        return self.price(problems, stage_model(problems, candidate, schedule, cuts))

    def price(self, problems: PipelineProblems, staged: StagedModel) -> Solution:
        """A staged model with what the ranks of a stage sum at the end of a step."""
        ranks = summed_bytes(problems, staged, self.part.sums)
        return Solution(problems, staged, max(self.part.sum_seconds(each, self.links) for each in ranks))

    @cached_property
    def _least_sums(self) -> float:
        """Seconds that the fullest rank sums gradients at least: it has no less than the average; messages cost only their bytes."""
        totals: dict[str, float] = {}
        for each in self.part.sums:
            totals[each.dimension] = totals.get(each.dimension, 0.0) + each.size / self.n_places
        return sum(size * self.links[name].seconds("all_reduce", _LARGE) / _LARGE for name, size in totals.items()) * (1 - _ROUNDING)


_LARGE = 1e18
"""Bytes of a message whose latency is nothing beside them."""

_ROUNDING = 1e-6
"""Relative margin for the rounding of sums: a bound is never above what it bounds."""

_IN_ONE_PIECE = ("GPipe", "1F1B")
"""Schedules whose backwards are not split: a stage's gradient of the input is there when all of its backward is."""


_HOLDING = ("GPipe", "1F1B", "ZB1P")
"""Schedules of which it is known what stages hold at least: all microbatches, or one for each stage from there on."""


def policies(request: PlanRequest, *, differentiate: bool) -> Sequence[Recompute]:
    """What may be computed again: the policy asked for, or all of them, the least first."""
    if request.recompute is not None:
        return (cast(Recompute, request.recompute),)
    return ("none", "selective", "full") if differentiate else ("none",)
