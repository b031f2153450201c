"""Choose which axes a mesh dimension cuts: exactly, for the prices of ``axis_terms``.

Candidates are the axes of the parameters. Axes that blocks repeat (the ffn of every block) are one candidate: they have the same name, size
and parameters but for the numbers in these. What every call does under every choice is worked out once (``passes.spmd.enumerate_layouts``);
the choice itself is a problem of numbers (``choices``). Where its best solution holds more than fits, the blocks decide each by itself,
from what they would do together: memory may force unlike layers.

A chain of linear layers a - b - c - d is cut at b and at d: then every layer is cut and none reads what another cut does not give.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.planner.costs.links import ClockRate
from partitioner.planner.sharding.axis_costs import AxisPrices, axis_terms
from partitioner.planner.solvers.variable_elimination import ChoiceProblem, Choices, Term, choose
from partitioner.planner.tile_grid import fits
from passes.analysis.axes import Axes
from passes.analysis.axis_names import batch_axes
from passes.graph.symbolic_sizes import ValueBytes
from passes.ir.graph import ModelGraph
from passes.ir.layout import Shard
from passes.spmd.enumerate_layouts import LayoutChoices, TooManyChoicesError, layout_choices
from passes.spmd.propagate import assign_layouts

__all__ = ["AxisChoice", "AxisGroup", "AxisProblem", "axis_groups"]

_NEVER_DROPPED = 2**20
"""The span of an axis that stays a candidate where calls depend on too many."""


@dataclass(frozen=True)
class AxisGroup:
    """Axes that are cut together.

    Attributes:
        span: in how many dimensions of parameters they occur.
    """

    axes: tuple[int, ...]
    span: int


@dataclass(frozen=True)
class AxisChoice:
    """What a mesh dimension cuts.

    Attributes:
        axes: those that were fixed first.
        gap: how much less, relatively, another choice could cost by the same prices: 0 is proved; None where nothing was to choose.
    """

    axes: tuple[int, ...]
    gap: float | None = None


class AxisProblem:
    """Which axes a mesh dimension cuts, for any number of ranks that can cut the same ones.

    Args:
        dimension: name of the mesh dimension, and the ranks that it has at most.
        fixed: axes that are cut whatever it costs.
        excluded: axes that are not: another mesh dimension cuts them.
        pace: of the ranks; None: unknown, and a cut was asked for.
        copies: how often a node is there: one of a block that stands for others counts for them.
        rows: whether the mesh dimension cuts the batch, which is then what is fixed.
        alone: axes that may be cut besides those of parameters, each by itself: of space, the batch.
        prices: None: by the pace.
    """

    def __init__(
        self,
        graph: ModelGraph,
        axes: Axes,
        dimension: tuple[str, int],
        fixed: Sequence[int] = (),
        excluded: Collection[int] = (),
        pace: ClockRate | None = None,
        copies: Callable[[str], int] = lambda _name: 1,
        *,
        rows: bool = False,
        alone: Sequence[int] = (),
        prices: AxisPrices | None = None,
    ) -> None:
        self._graph, self._axes, self._dimension = graph, axes, dimension
        self._fixed, self._pace, self._copies = tuple(fixed), pace, copies
        self._bytes, self._rows, self._prices = ValueBytes(graph), rows, prices
        together = axis_groups(graph, axes, dimension[1], {*fixed, *excluded, *alone})
        together += [AxisGroup((axis,), _NEVER_DROPPED) for axis in alone]
        self._kept = self._held_by_fixed() if fixed and not rows else frozenset[str]()
        self._choices, self._groups = self._worked_out(together)
        self._unlimited: dict[int, tuple[ChoiceProblem, Choices | None]] = {}
        self._alone: tuple[LayoutChoices, list[AxisGroup]] | None = None

    def solve(self, count: int, limit: float = math.inf) -> AxisChoice | None:
        """The axes that so many ranks cut, the fixed ones first; None where parameters do not fit so many bytes.

        Args:
            limit: bytes of parameters that all ranks of a pipeline hold together, one of each stage.
        """
        if count not in self._unlimited:
            problem = self._problem(self._choices, self._groups, count)
            self._unlimited[count] = problem, choose(problem)
        problem, best = self._unlimited[count]
        if best is not None and best.bytes <= limit:
            return self._chosen(self._groups, self._asked_for(problem, best))
        if self._alone is None:
            self._alone = self._worked_out([AxisGroup((axis,), group.span) for group in self._groups for axis in group.axes])
        choices, alone = self._alone
        group_of = {axis: number for number, group in enumerate(self._groups) for axis in group.axes}
        limited = choose(dataclasses.replace(problem, limit=limit))
        known = [] if limited is None else [tuple(limited.options[group_of[group.axes[0]]] for group in alone)]
        found = choose(dataclasses.replace(self._problem(choices, alone, count), limit=limit), known)
        return None if found is None else self._chosen(alone, found)

    def with_any(self, count: int, wanted: Collection[int], found: AxisChoice) -> AxisChoice:
        """A choice under which some call is cut by one of several axes: the one found, or else the cheapest without one more axis.

        Args:
            wanted: axes that somebody asked for.
            found: the best choice of all.
        """
        if self._cuts(found.axes, wanted):
            return found
        problem, groups = self._problem(self._choices, self._groups, count), self._groups
        tried = []
        for left_out in (
            number for number, group in enumerate(groups) if group.span == _NEVER_DROPPED and not set(group.axes) & set(wanted)
        ):
            terms = (*problem.terms, Term((left_out,), np.array([0.0, np.inf]), np.zeros(2)))
            terms += tuple(
                Term((number,), np.array([np.inf, 0.0]), np.zeros(2)) for number, each in enumerate(groups) if set(each.axes) & set(wanted)
            )
            best = choose(dataclasses.replace(problem, terms=terms))
            tried += [] if best is None or not math.isfinite(best.seconds) else [best]
        choices = (self._chosen(groups, best) for best in sorted(tried, key=lambda each: each.seconds))
        return next((each for each in choices if self._cuts(each.axes, wanted)), found)

    def _chosen(self, groups: Sequence[AxisGroup], found: Choices) -> AxisChoice:
        return AxisChoice(self._axes_of(groups, found.options), found.gap if groups else None)

    def _asked_for(self, problem: ChoiceProblem, found: Choices) -> Choices:
        """The choice; where nothing is worth its messages, but a cut was asked for, the single one that costs least."""
        if any(found.options) or self._fixed or not self._groups:
            return found
        ones = [tuple(int(number == place) for number in range(len(self._groups))) for place in range(len(self._groups))]
        options = min(ones, key=lambda each: problem.totals(each)[0])
        return Choices(options, *problem.totals(options), found.seconds)

    def _axes_of(self, groups: Sequence[AxisGroup], options: Sequence[int]) -> tuple[int, ...]:
        """The axes of a choice; the fixed ones alone, where no call would be left for these: space, where channels could be cut as well."""
        chosen = (*self._fixed, *(axis for group, option in zip(groups, options, strict=True) if option for axis in group.axes))
        fixed = self._fixed
        return chosen if not fixed or self._cuts(chosen, fixed) or not self._cuts(fixed, fixed) else fixed

    def _cuts(self, chosen: Sequence[int], wanted: Collection[int]) -> bool:
        """Whether a call is cut, or a parameter held, by one of some axes."""
        mesh, assigned = (self._dimension,), {self._dimension[0]: chosen}
        rows = (self._dimension[0],) if self._rows else ()
        layouts = assign_layouts(self._graph, self._axes, mesh, assigned, rows, value_bytes=self._bytes)
        cuts = any(cut is not None and cut.axis in wanted for each in layouts.cuts.values() for cut in each)
        return cuts or any(isinstance(place, Shard) and place.axis in wanted for each in layouts.stored.values() for place in each)

    def _worked_out(self, groups: Sequence[AxisGroup]) -> tuple[LayoutChoices, list[AxisGroup]]:
        """All outcomes, and the groups that are left: of those that one call depends on too many, the narrowest are not cut."""
        left = list(groups)
        while True:
            try:
                return self._outcomes([group.axes for group in left]), left
            except TooManyChoicesError as many:
                narrow = sorted(many.groups, key=lambda number: (left[number].span * len(left[number].axes), number))
                dropped = narrow[: (len(narrow) + 1) // 2]
                left = [group for number, group in enumerate(left) if number not in dropped]

    def _outcomes(self, groups: Sequence[Sequence[int]]) -> LayoutChoices:
        return layout_choices(self._graph, self._axes, self._dimension, groups, self._fixed, rows=self._rows, value_bytes=self._bytes)

    def _problem(self, choices: LayoutChoices, groups: Sequence[AxisGroup], count: int) -> ChoiceProblem:
        known = (self._graph, self._axes, choices, count, self._copies, self._pace, self._bytes, self._fixed, self._kept)
        return ChoiceProblem((2,) * len(groups), tuple(axis_terms(*known, self._prices)))

    def _held_by_fixed(self) -> frozenset[str]:
        """The parameters that ranks hold cut by fixed axes: what else is cut must not take their place."""
        held = self._outcomes([]).held
        stored = {name: outcomes.found[()].stored for name, outcomes in held.items()}
        return frozenset(name for name, place in stored.items() if isinstance(place, Shard) and place.axis in self._fixed)


def axis_groups(graph: ModelGraph, axes: Axes, count: int, decided: Collection[int]) -> list[AxisGroup]:
    """The axes of parameters that so many ranks could cut, what blocks repeat together."""
    batch = batch_axes(graph, axes)
    signatures: dict[int, list[str]] = {}
    for name, original in graph.parameters.items():
        for dimension, each in enumerate(axes.of(name) if name in axes.tensors else ()):
            for axis in each:
                signatures.setdefault(axis, []).append(f"{re.sub(r'[0-9]+', '*', original)}:{dimension}")
    groups: dict[tuple[object, ...], list[int]] = {}
    for axis, signature in signatures.items():
        if axis not in batch and axis not in decided and fits(axes, axis, count):
            groups.setdefault((axes.sizes[axis], tuple(sorted(set(signature)))), []).append(axis)
    return [AxisGroup(tuple(group), sum(len(signatures[axis]) for axis in group)) for group in groups.values()]
