"""Recompute no more regions than a plan must: of a plan that recomputes all, keep those whose activations fit.

    block      0      1      2      3           4      5      6      7      memory
    full       full   full   full   full        full   full   full   full   31 GiB of 80 GiB
    chosen     full   full   full   selective   none   none   none   none   79 GiB

The search compares one policy for all regions: ``"none"``, ``"selective"``, ``"full"``. Where the model does not fit without recomputation,
each rank of the best plan then gets the cheapest policies of the regions of its stages that fit its memory (``solvers.region_policies``),
with the cuts and the schedule of that plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from partitioner.planner.costs.mixed_policies import mixed
from partitioner.planner.search.mesh_problem import MeshProblem, Solution
from partitioner.planner.solvers.region_policies import RegionCosts, cheapest_policies
from partitioner.planner.solvers.stage_memory import Floats, Integers
from partitioner.planner.solvers.stage_problem import stages_of
from passes.autograd.recompute import Recompute
from passes.ir.plan import Region

_POLICIES: tuple[Recompute, ...] = ("none", "selective", "full")
"""Policies chosen for each region; ``"selective"`` recomputes none of the values that enter a region."""

_ATTEMPTS = 6
"""How many choices are tried. The sum over regions counts values that several share once each, so the exact memory may exceed the limit."""


@dataclass(frozen=True, eq=False)
class ChosenRegions:
    """A plan with a policy for each region.

    Attributes:
        solution: its simulated step.
        regions: of the whole model.
    """

    solution: Solution
    regions: tuple[Region, ...]


def keep_what_fits(problem: MeshProblem, solution: Solution) -> ChosenRegions | None:
    """Return the plan with the fewest regions recomputed; None if policies are given, or nothing can be kept.

    Args:
        solution: of any policy of recomputation.
    """
    candidate = solution.staged.candidate
    is_given = problem.policies != ("none", "selective", "full") or problem.submeshes is not None
    if is_given or solution.staged.problems.prices.recompute == "none" or candidate.replicas:
        return None
    choice = _Choice(problem, solution)
    return choice.run() if len(choice.starts) > 2 else None


class _Choice:
    """The choice for one plan: stages of units, each cut into pieces of one region."""

    def __init__(self, problem: MeshProblem, solution: Solution) -> None:
        self._problem, self._seconds = problem, solution.step_time
        self._staged = staged = solution.staged
        tables = [problem.problems_in_regions(policy) if policy == "selective" else problem.problems(policy) for policy in _POLICIES]
        self._problems, self._tables = tables[0], [each.prices for each in tables]
        self._units = [each.units(staged.candidate) for each in tables]
        self._first_nodes = self._problems.points.starts
        place = {name: unit for unit, name in enumerate(self._first_nodes)}
        regions = problem.part.source.regions("full", ())
        self._in_regions = sorted({place[region.first_node] for region in regions if region.first_node in place})
        stages = [run.start for run in staged.runs]
        self.starts = sorted({0, *stages, *self._in_regions})
        self._ends = [*self.starts[1:], len(self._first_nodes)]

    def run(self) -> ChosenRegions | None:
        """Choose and compute the exact memory; ranks that exceed their limit then choose again, with so many bytes less than they took."""
        limits = np.array(self._problems.limits)
        lowered = np.zeros(len(limits))
        for _ in range(_ATTEMPTS):
            chosen = self._policies(limits - lowered)
            if chosen is None:
                return None
            policies, spare = chosen
            if all(policies):
                return None
            solution = self._solution(self._choice_of_units(policies))
            if solution is None:
                return None
            excess = np.maximum(0.0, np.array(solution.staged.memory) - limits)
            if not excess.any():
                return ChosenRegions(solution, tuple(self._regions(policies))) if solution.step_time < self._seconds else None
            lowered += np.where(excess > 0.0, excess + spare, 0.0)
        return None

    def _policies(self, limits: Floats) -> tuple[list[int], list[float]] | None:
        """Return the policy of each piece, and each rank's spare bytes; None if the stages of a rank cannot fit its limit."""
        order = self._problems.order(self._staged.candidate)
        costs, runs, found = self._costs, self._staged.runs, dict[int, int]()
        spare = list[float]()
        stage_of = [next(stage for stage, run in enumerate(runs) if start in run) for start in self.starts]
        for rank, limit in enumerate(limits.tolist()):
            stages = [stage for stage, ranks in enumerate(order.stage_ranks) if ranks[0] == rank]
            pieces = [piece for piece, stage in enumerate(stage_of) if stage in stages]
            room = limit - sum(self._fixed[stage] for stage in stages)
            gradients = sum(costs[piece].gradients for piece in pieces)
            counts = [[held[stage_of[piece]] for piece in pieces] for held in (order.in_flight, order.later)]
            pairs = [pair for pair in zip(counts, (room, room - gradients), strict=True) if any(pair[0])]
            chosen = cheapest_policies([costs[piece] for piece in pieces], pairs)
            if chosen is None:
                return None
            found.update(zip(pieces, chosen.choice, strict=True))
            spare.append(chosen.spare)
        return [found[piece] for piece in range(len(self.starts))], spare

    @cached_property
    def _fixed(self) -> list[float]:
        """Bytes that each stage holds all the time."""
        stage_of = stages_of([run.start for run in self._staged.runs], len(self._first_nodes))
        kinds = self._problems.kinds(self._staged.candidate)
        fixed: list[float] = self._units[0].fixed_uses.per_stage(stage_of, len(self._staged.runs), kinds).tolist()
        return fixed

    @cached_property
    def _costs(self) -> list[RegionCosts]:
        """The costs of each piece; a piece before the first region is never recomputed."""
        rows, kinds = self._problems.rows(self._staged.candidate), self._problems.kinds(self._staged.candidate)
        stage_of = np.repeat(np.arange(len(self._staged.runs)), [len(run) for run in self._staged.runs])
        first_region = min(self._in_regions, default=len(self._first_nodes))
        halves = [table.at(rows).halves for table in self._tables]
        workings = [units.workings[0] for units in self._units]
        working = [table.of_stages(self.starts) for table in workings]
        costs = []
        for piece, (start, end) in enumerate(zip(self.starts, self._ends, strict=True)):
            kind = kinds[stage_of[start]]
            time = tuple(float(each[:, start:end, kind].sum()) for each in halves)
            saved = tuple(float(table.saved[start:end].sum()) for table in workings)
            choices = slice(None) if start >= first_region else slice(1)
            gradients = float(workings[0].gradients[start:end].sum())
            costs.append(RegionCosts(time[choices], saved[choices], tuple(float(each[piece]) for each in working)[choices], gradients))
        return costs

    def _choice_of_units(self, policies: Sequence[int]) -> Integers:
        lengths = [end - start for start, end in zip(self.starts, self._ends, strict=True)]
        choice: Integers = np.repeat(np.array(policies, np.int64), lengths)
        return choice

    def _solution(self, choice: Integers) -> Solution | None:
        prices = replace(mixed(self._tables, choice), recomputed=tuple(self._selected(choice)))
        starts = tuple(run.start for run in self._staged.runs)
        return self._problem.simulate(self._problem.with_prices(prices), self._staged.candidate, starts)

    def _selected(self, choice: Integers) -> Iterator[frozenset[str]]:
        """Yield for each kind of stage the nodes that regions with ``"selective"`` recompute."""
        selective, unit_of = _POLICIES.index("selective"), self._problems.points.unit_of
        for names in self._tables[selective].recomputed:
            yield frozenset(name for name in names if choice[unit_of[name]] == selective)

    def _regions(self, policies: Sequence[int]) -> Iterator[Region]:
        for start, policy in zip(self.starts, policies, strict=True):
            yield Region(self._first_nodes[start], _POLICIES[policy])
