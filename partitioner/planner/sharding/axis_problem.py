"""Choose which axes a mesh dimension shards: exactly, for the costs of ``axis_costs``.

Candidates are the axes of the parameters. Axes that blocks repeat (the ffn of every block) are one candidate: they have the same name, size
and parameters but for the numbers in these. The layouts of every call under every choice are enumerated once
(``passes.spmd.propagate.enumerate_layouts``); the choice is a problem of numbers (``variable_elimination``). If its best solution exceeds
the memory, each axis is chosen on its own, starting from the best joint choice that fits.

A chain of linear layers a - b - c - d is sharded at b and at d: then every layer is sharded, and none needs a reshard of its input.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.planner.constraints.tile_grid import fits
from partitioner.planner.costs.links import ClockRate
from partitioner.planner.sharding.axis_costs import AxisPrices, axis_terms
from partitioner.planner.solvers.variable_elimination import ChoiceProblem, Choices, Term, choose
from passes.analysis.axes import Axes
from passes.analysis.axis_names import batch_axes
from passes.analysis.layout_facts import LayoutFacts
from passes.ir.graph import ModelGraph
from passes.ir.layout import Shard
from passes.spmd.propagate.call_along import cuttable_axes
from passes.spmd.propagate.enumerate_layouts import LayoutChoices, layout_choices

_NEVER_DROPPED = 2**20
"""The span of an axis that stays a candidate even if a call depends on too many."""


@dataclass(frozen=True)
class AxisGroup:
    """Axes that are sharded together or not at all.

    Attributes:
        span: number of parameter dimensions that contain one of them.
    """

    axes: tuple[int, ...]
    span: int


@dataclass(frozen=True)
class AxisChoice:
    """The axes that a mesh dimension shards.

    Attributes:
        axes: fixed ones first.
        gap: by which fraction another choice could cost less: 0 is proved optimal; None if there was nothing to choose.
    """

    axes: tuple[int, ...]
    gap: float | None = None


class AxisProblem:
    """The problem of choosing the axes that a mesh dimension shards; one serves all sizes of the dimension with the same candidates.

    Args:
        dimension: name and largest size of the mesh dimension.
        fixed: axes that are sharded whatever it costs.
        excluded: axes that are not: another mesh dimension shards them.
        clock_rate: clock rate of the ranks; None: unknown, and the user asked for sharding.
        copies: node name -> how many repeats of a folded block the node stands for.
        rows: whether the mesh dimension shards the batch, which is then ``fixed``.
        alone: candidates besides the axes of parameters, each its own group: axes of space, the batch.
        prices: None: derived from the clock rate.
        facts: those of the graph and its axes, if other problems share them.
        named: sets of fixed axes that the user named, each by one name: chosen axes must leave some call to each set.
    """

    def __init__(
        self,
        graph: ModelGraph,
        axes: Axes,
        dimension: tuple[str, int],
        fixed: Sequence[int] = (),
        excluded: Collection[int] = (),
        clock_rate: ClockRate | None = None,
        copies: Callable[[str], int] = lambda _name: 1,
        *,
        rows: bool = False,
        alone: Sequence[int] = (),
        prices: AxisPrices | None = None,
        facts: LayoutFacts | None = None,
        named: Sequence[Collection[int]] = (),
    ) -> None:
        self._graph, self._axes, self._dimension = graph, axes, dimension
        self._named = tuple(map(frozenset, named))
        self._fixed, self._clock_rate, self._copies = tuple(fixed), clock_rate, copies
        self._facts, self._rows, self._prices = facts or LayoutFacts(graph, axes), rows, prices
        groups = axis_groups(graph, axes, dimension[1], {*fixed, *excluded, *alone})
        groups += [AxisGroup((axis,), _NEVER_DROPPED) for axis in alone]
        self._kept = self._sharded_by_fixed() if fixed and not rows else frozenset[str]()
        self._choices, self._groups = self._enumerate(groups)
        self._is_complete = len(self._groups) == len(groups)
        self._unlimited: dict[int, tuple[ChoiceProblem, Choices | None]] = {}
        self._ungrouped: tuple[LayoutChoices, list[AxisGroup]] | None = None

    def for_more_ranks(self, count: int) -> AxisProblem | None:
        """Return the problem of a larger mesh dimension: the same layouts, without the axes that are too short for it.

        None if some candidate is lacking here, or if a fixed axis is too short.
        """
        fixed = [axis for axis in self._fixed if isinstance(self._axes.sizes[axis], int)]
        if not self._is_complete or not all(fits(self._axes, axis, count) for axis in fixed):
            return None
        kept = [number for number, group in enumerate(self._groups) if fits(self._axes, group.axes[0], count)]  # all of one size
        choices, groups = self._choices.only(kept), [self._groups[number] for number in kept]
        other, dimension = copy.copy(self), (self._dimension[0], count)
        vars(other).update(_dimension=dimension, _choices=choices, _groups=groups, _unlimited={}, _ungrouped=None)
        return other

    def solve(self, count: int, limit: float = math.inf) -> AxisChoice | None:
        """Return the axes that ``count`` ranks shard, the fixed ones first; None if no choice fits the limit.

        Repeated axes are chosen as one group. If that exceeds the limit, each axis becomes a group of its own.

        Args:
            limit: bytes of parameters that one pipeline (one rank of each stage) may store.
        """
        if count not in self._unlimited:
            problem = self._problem(self._choices, self._groups, count)
            self._unlimited[count] = problem, self._leaving_named(self._choices, self._groups, problem, choose(problem))
        problem, best = self._unlimited[count]
        if best is not None and best.bytes <= limit:
            return self._axis_choice(self._choices, self._groups, self._at_least_one(problem, best))
        if self._ungrouped is None:
            self._ungrouped = self._enumerate([AxisGroup((axis,), group.span) for group in self._groups for axis in group.axes])
        choices, single_axes = self._ungrouped
        group_of = {axis: number for number, group in enumerate(self._groups) for axis in group.axes}
        grouped = choose(dataclasses.replace(problem, limit=limit))
        known = [] if grouped is None else [tuple(grouped.options[group_of[group.axes[0]]] for group in single_axes)]
        limited = dataclasses.replace(self._problem(choices, single_axes, count), limit=limit)
        best = self._leaving_named(choices, single_axes, limited, choose(limited, known))
        return None if best is None else self._axis_choice(choices, single_axes, best)

    def _leaving_named(
        self, choices: LayoutChoices, groups: Sequence[AxisGroup], problem: ChoiceProblem, best: Choices | None
    ) -> Choices | None:
        """Return the best choice that leaves some call to each set of named axes: groups that take all of its calls are forbidden.

        One group at a time, the one without which the choice costs least; ``best`` if that does not help.
        """
        found = best
        while found is not None and (taken := self._lost(choices, groups, found.options)):
            solutions = list[tuple[Choices, ChoiceProblem]]()
            for number in (number for number, option in enumerate(found.options) if option):
                others = tuple(int(option and place != number) for place, option in enumerate(found.options))
                if len(self._lost(choices, groups, others)) < len(taken):
                    forbidden = Term((number,), np.array([0.0, np.inf]), np.zeros(2))
                    without = dataclasses.replace(problem, terms=(*problem.terms, forbidden))
                    solution = choose(without)
                    solutions += [] if solution is None or not math.isfinite(solution.seconds) else [(solution, without)]
            if not solutions:
                return best
            found, problem = min(solutions, key=lambda solution: solution[0].seconds)
        return found

    def _lost(self, choices: LayoutChoices, groups: Sequence[AxisGroup], options: Sequence[int]) -> list[frozenset[int]]:
        """Return the sets of named axes that shard nothing beside the chosen axes, and would alone."""
        chosen = self._chosen(groups, options)
        known = choices, groups
        return [named for named in self._named if not _shards_by(*known, chosen, named) and _shards_by(*known, self._fixed, named)]

    def _chosen(self, groups: Sequence[AxisGroup], options: Sequence[int]) -> tuple[int, ...]:
        """Return fixed and chosen axes."""
        return (*self._fixed, *(axis for group, option in zip(groups, options, strict=True) if option for axis in group.axes))

    def with_any(self, count: int, wanted: Collection[int], cheapest: AxisChoice) -> AxisChoice:
        """Return a choice that shards some call by one of the axes that the user asked for.

        If ``cheapest``, the choice of ``solve``, does not, all wanted axes are required and one other axis of ``alone`` at a time is
        forbidden: the cheapest of these choices that shards a call by a wanted axis; ``cheapest`` if none does.
        """
        if _shards_by(self._choices, self._groups, cheapest.axes, wanted):
            return cheapest
        problem, groups = self._problem(self._choices, self._groups, count), self._groups
        is_wanted = [not set(group.axes).isdisjoint(wanted) for group in groups]
        required = tuple(Term((number,), np.array([np.inf, 0.0]), np.zeros(2)) for number in range(len(groups)) if is_wanted[number])
        solutions = list[Choices]()
        for number, group in enumerate(groups):
            if group.span == _NEVER_DROPPED and not is_wanted[number]:
                forbidden = Term((number,), np.array([0.0, np.inf]), np.zeros(2))
                best = choose(dataclasses.replace(problem, terms=(*problem.terms, forbidden, *required)))
                solutions += [] if best is None or not math.isfinite(best.seconds) else [best]
        cheaper = (self._axis_choice(self._choices, groups, best) for best in sorted(solutions, key=lambda best: best.seconds))
        return next((choice for choice in cheaper if _shards_by(self._choices, groups, choice.axes, wanted)), cheapest)

    def _axis_choice(self, choices: LayoutChoices, groups: Sequence[AxisGroup], solution: Choices) -> AxisChoice:
        return AxisChoice(self._axes_of(choices, groups, solution.options), solution.gap if groups else None)

    def _at_least_one(self, problem: ChoiceProblem, best: Choices) -> Choices:
        """Return the best choice; if it shards nothing, the cheapest one that shards a single group, unless axes are fixed."""
        if any(best.options) or self._fixed or not self._groups:
            return best
        one_hot = [tuple(int(number == group) for number in range(len(self._groups))) for group in range(len(self._groups))]
        options = min(one_hot, key=lambda options: problem.totals(options)[0])
        return Choices(options, *problem.totals(options), best.seconds)

    def _axes_of(self, choices: LayoutChoices, groups: Sequence[AxisGroup], options: Sequence[int]) -> tuple[int, ...]:
        """Return fixed and chosen axes; only the fixed ones if the chosen ones (channels) would replace these (space) in every call."""
        fixed = self._fixed
        chosen = self._chosen(groups, options)
        known = choices, groups
        fixed_are_lost = bool(fixed) and not _shards_by(*known, chosen, fixed) and _shards_by(*known, fixed, fixed)
        return fixed if fixed_are_lost else chosen

    def _enumerate(self, groups: list[AxisGroup]) -> tuple[LayoutChoices, list[AxisGroup]]:
        """Enumerate the layouts of all calls; return them with the groups that remain candidates.

        If one call depends on too many groups, the half of these with the fewest parameter dimensions is dropped.
        """

        def narrowest(numbers: Sequence[int]) -> list[int]:
            return sorted(numbers, key=lambda number: (groups[number].span * len(groups[number].axes), number))

        choices = self._layout_choices([group.axes for group in groups], narrowest)
        return choices, [groups[number] for number in choices.groups]

    def _layout_choices(self, groups: Sequence[Sequence[int]], narrowest: Callable[[Sequence[int]], Sequence[int]]) -> LayoutChoices:
        known = (self._graph, self._axes, self._dimension, groups, self._fixed)
        return layout_choices(*known, rows=self._rows, facts=self._facts, narrowest=narrowest)

    def _problem(self, choices: LayoutChoices, groups: Sequence[AxisGroup], count: int) -> ChoiceProblem:
        known = (self._graph, self._axes, choices, count, self._copies, self._clock_rate, self._facts.bytes, self._fixed, self._kept)
        return ChoiceProblem((2,) * len(groups), tuple(axis_terms(*known, self._prices)))

    def _sharded_by_fixed(self) -> frozenset[str]:
        """Return the parameters that fixed axes shard: chosen axes must not replace these."""
        held = self._layout_choices([], list).held
        stored = {name: outcomes.found[()].stored for name, outcomes in held.items()}
        return frozenset(name for name, place in stored.items() if isinstance(place, Shard) and place.axis in self._fixed)


def _shards_by(choices: LayoutChoices, groups: Sequence[AxisGroup], chosen: Collection[int], wanted: Collection[int]) -> bool:
    """Return whether the choice of some axes shards a call or a stored parameter by one of the wanted ones."""
    every, options = range(len(groups)), [int(set(group.axes).issubset(chosen)) for group in groups]
    cuts = (outcomes.at(every, options).cut for outcomes in choices.calls.values())
    stored = (outcomes.at(every, options).stored for outcomes in choices.held.values())
    by_call = any(cut is not None and cut.axis in wanted for cut in cuts)
    return by_call or any(isinstance(place, Shard) and place.axis in wanted for place in stored)


def axis_groups(graph: ModelGraph, axes: Axes, count: int, decided: Collection[int]) -> list[AxisGroup]:
    """Group the axes of parameters by which ``count`` ranks could share some call: those that blocks repeat are one group.

    The signature of an axis is the dimensions of parameters that contain it, numbers in names replaced: ``"blocks.*.ffn.weight:0"``.
    """
    left_out, cuttable = batch_axes(graph, axes).union(decided), cuttable_axes(graph, axes)
    signatures: dict[int, list[str]] = {}
    for name, original in graph.parameters.items():
        for dimension, axes_of_dimension in enumerate(axes.of(name) if name in axes.tensors else ()):
            for axis in axes_of_dimension:
                signatures.setdefault(axis, []).append(f"{re.sub(r'[0-9]+', '*', original)}:{dimension}")
    groups: dict[tuple[object, ...], list[int]] = {}
    for axis, signature in signatures.items():
        if axis in cuttable and axis not in left_out and fits(axes, axis, count):
            groups.setdefault((axes.sizes[axis], tuple(sorted(set(signature)))), []).append(axis)
    return [AxisGroup(tuple(group), sum(len(signatures[axis]) for axis in group)) for group in groups.values()]
