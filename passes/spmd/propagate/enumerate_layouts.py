"""Enumerate the layouts of every call for all choices of axes that a mesh dimension cuts: ``assign_layouts``, for all choices at once.

Each group of axes is cut or not; G groups make 2^G choices. But a call depends on few groups: those that it loops over, and those that
decide the layouts of its operands.

    linear (q, k, v)      {heads, head, hidden}      8 outcomes
    attention             {heads, head}              4
    linear (project)      {heads, head, hidden}      8
    add                   {hidden}                   2        reduced partial sums are replicated, whatever was cut

The layout of a call is computed for each choice of these groups. Groups on which the result does not depend are dropped for its readers.
Enumerations of one graph with other axes that are always cut ask for many of the same layouts: these are computed once (``LayoutFacts``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torch import fx

from passes.analysis.axes import Axes, returned_values
from passes.analysis.layout_facts import LayoutFacts
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Placement, Replicate, Shard
from passes.spmd.propagate.layouts import Cut
from passes.spmd.propagate.walk import LayoutWalk

_T = TypeVar("_T")

MOST = 2**12
"""The most choices that one call may depend on."""


class CallLayout(NamedTuple):
    """The layout of a call, along the mesh dimension, under one choice.

    Attributes:
        cut: the loop that is cut; None: no loop is.
        needs: the placement in which it reads each operand.
        gives: the placement of each result.
        changes: (value, its placement, the one needed) for each operand that is resharded for this call, and not for an earlier one.
    """

    cut: Cut | None
    needs: tuple[Placement, ...]
    gives: tuple[Placement, ...]
    changes: tuple[tuple[str, Placement, Placement], ...]


@dataclass(frozen=True)
class HeldLayout:
    """The layout of a parameter, buffer or constant under one choice.

    Attributes:
        stored: the placement in which ranks hold it.
        changes: (``stored``, the placement needed), once for each other placement in which it is read.
    """

    stored: Placement
    changes: tuple[tuple[Placement, Placement], ...]


@dataclass(frozen=True)
class Outcomes(Generic[_T]):
    """A result that depends on a choice of some groups, as a table.

    Attributes:
        scope: the groups, ascending.
        found: choice (for each group of the scope 1, it is cut, or 0) -> the result.
    """

    scope: tuple[int, ...]
    found: Mapping[tuple[int, ...], _T]

    def without(self, groups: Collection[int]) -> Outcomes[_T]:
        """Return the same table for the choices that cut none of some groups."""
        if not set(groups) & set(self.scope):
            return self
        places = [place for place, group in enumerate(self.scope) if group not in groups]
        never = [place for place, group in enumerate(self.scope) if group in groups]
        found = {
            tuple(choice[place] for place in places): outcome
            for choice, outcome in self.found.items()
            if not any(choice[place] for place in never)
        }
        return Outcomes(tuple(self.scope[place] for place in places), found)

    def renumbered(self, numbers: Mapping[int, int]) -> Outcomes[_T]:
        """Return the same table with other numbers of groups, in the same order."""
        return Outcomes(tuple(numbers[group] for group in self.scope), self.found)

    def at(self, scope: Sequence[int], choice: Sequence[int]) -> _T:
        """Return the result under a choice of a larger scope."""
        return self.within(scope)(choice)

    def within(self, scope: Sequence[int]) -> Callable[[Sequence[int]], _T]:
        """Return the function from choices of a larger scope to results."""
        places = [scope.index(group) for group in self.scope]
        return lambda choice: self.found[tuple([choice[place] for place in places])]

    def reduced(self) -> Outcomes[_T]:
        """Return the same table without the groups that make no difference."""
        scope, found = self.scope, dict(self.found)
        for group in self.scope:
            place = scope.index(group)
            if all(found[(*choice[:place], 0, *choice[place + 1 :])] == outcome for choice, outcome in found.items()):
                scope = (*scope[:place], *scope[place + 1 :])
                found = {(*choice[:place], *choice[place + 1 :]): outcome for choice, outcome in found.items() if not choice[place]}
        return Outcomes(scope, found)


@dataclass(frozen=True)
class LayoutChoices:
    """The layouts of all values, under all choices.

    Attributes:
        calls: call -> its layouts; ``"output"``: the reshards of results of the model.
        held: parameter, buffer or constant -> its layouts.
        groups: the groups to choose from, by their numbers among those that were asked for; tables number these anew.
    """

    calls: Mapping[str, Outcomes[CallLayout]]
    held: Mapping[str, Outcomes[HeldLayout]]
    groups: tuple[int, ...]

    def only(self, kept: Sequence[int]) -> LayoutChoices:
        """Return the layouts under the choices that cut none but these groups, ascending, by their numbers in ``groups``."""
        numbers = {group: number for number, group in enumerate(kept)}
        dropped = frozenset(range(len(self.groups))).difference(kept)
        calls = {name: outcomes.without(dropped).renumbered(numbers) for name, outcomes in self.calls.items()}
        held = {name: outcomes.without(dropped).renumbered(numbers) for name, outcomes in self.held.items()}
        return LayoutChoices(calls, held, tuple(self.groups[number] for number in kept))


class _State(NamedTuple):
    """A value during the walk.

    Attributes:
        current: the placement of each of its tensors for the next reader; None: no reader has decided it.
        gives: the placements as computed.
        reads: the placements in which earlier calls read it, if these need a reshard or if it is a weight.
    """

    current: tuple[Placement | None, ...]
    gives: tuple[Placement, ...]
    reads: tuple[Placement, ...] = ()


def layout_choices(
    graph: ModelGraph,
    axes: Axes,
    dimension: tuple[str, int],
    groups: Sequence[Sequence[int]],
    fixed: Sequence[int] = (),
    *,
    rows: bool = False,
    facts: LayoutFacts | None = None,
    narrowest: Callable[[Sequence[int]], Sequence[int]] = lambda groups: groups,
) -> LayoutChoices:
    """Return the layout of every call for every choice that it depends on.

    Args:
        dimension: name and size of the mesh dimension.
        groups: axes that are cut together or not at all, the most expensive first.
        fixed: axes that are always cut, more expensive than those of ``groups``.
        rows: whether the dimension cuts the batch, which is then among ``fixed``.
        facts: those of the graph and its axes, if it is walked often.
        narrowest: sorts groups by how little is lost without them: if one call depends on too many, the first half is cut by no choice.
    """
    # All axes that may be cut: the walk derives ``beside_rows`` from them once. Each visit then assigns the axes of its choice.
    may_be_cut = {dimension[0]: [*fixed, *(axis for group in groups for axis in group)]}
    of_rows = (dimension[0],) if rows else ()
    walk = LayoutWalk(facts or LayoutFacts(graph, axes), (dimension,), may_be_cut, of_rows, "rows")
    choices = _Choices(walk, groups, fixed, narrowest)
    for node in graph.graph.nodes:
        choices.visit(node)
    return choices.result()


class _Choices:
    """Runs a ``LayoutWalk`` over each node once for each choice that the node depends on."""

    def __init__(
        self,
        walk: LayoutWalk,
        groups: Sequence[Sequence[int]],
        fixed: Sequence[int],
        narrowest: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._walk, self._narrowest = walk, narrowest
        self._left = list(range(len(groups)))
        self._places = [dict.fromkeys(group, len(fixed) + number) for number, group in enumerate(groups)]
        self._fixed = {axis: place for place, axis in enumerate(fixed)}
        self._group_of = {axis: number for number, group in enumerate(groups) for axis in group}
        self._states: dict[str, Outcomes[_State]] = {}
        self._calls: dict[str, Outcomes[CallLayout]] = {}
        self._too_short: dict[str, frozenset[int]] = {}
        self._setting = tuple(name for name, _ in walk.mesh), tuple(walk.rows), *map(frozenset, walk.choice.beside_rows)

    def result(self) -> LayoutChoices:
        """Return the layouts after all nodes were visited, with the groups that are left numbered from 0."""
        numbers = {group: number for number, group in enumerate(self._left)}
        calls = {name: outcomes.renumbered(numbers) for name, outcomes in self._calls.items()}
        held = {name: self._held(name).renumbered(numbers) for name in self._walk.weights}
        return LayoutChoices(calls, held, tuple(self._left))

    def _scope(self, call_groups: Collection[int], read: Iterable[str]) -> tuple[int, ...]:
        """Return the groups that a call depends on: its own, and those of its operands; drop some if these are too many."""
        while True:
            scope = tuple(sorted({*call_groups}.intersection(self._left).union(*(self._states[name].scope for name in read))))
            if 2 ** len(scope) <= MOST:
                return scope
            dropped = frozenset(self._narrowest(scope)[: (len(scope) + 1) // 2])
            self._left = [group for group in self._left if group not in dropped]
            self._states = {name: outcomes.without(dropped).reduced() for name, outcomes in self._states.items()}
            self._calls = {name: outcomes.without(dropped) for name, outcomes in self._calls.items()}

    def visit(self, node: fx.Node) -> None:
        """Compute the layouts of one node, and the states after it of the values that it reads or gives."""
        walk = self._walk
        if node.op == "placeholder":
            walk.placeholder(node)
            if (node.name, 0) in walk.current:
                self._states[node.name] = Outcomes((), {(): self._state(node.name)})
            return
        operands = _operands(node, walk.axes)
        read = dict.fromkeys(operand.name for operand in operands if operand.name in self._states)
        call_axes = (*walk.axes.of_calls.get(node.name, ()), *walk.axes.slid_over.get(node.name, ()))
        call_groups = {self._group_of[axis] for axis in call_axes if axis in self._group_of}
        scope = self._scope(call_groups, read)
        layouts: dict[tuple[int, ...], CallLayout] = {}
        after: dict[str, dict[tuple[int, ...], _State]] = {name: {} for name in (*read, node.name)}
        cache: dict[object, tuple[CallLayout | None, dict[str, _State]]] = {}
        states = {name: self._states[name].within(scope) for name in read}
        own_places = [place for place, group in enumerate(scope) if group in call_groups]
        for choice in itertools.product((0, 1), repeat=len(scope)):
            before = {name: state(choice) for name, state in states.items()}
            key = (tuple([choice[place] for place in own_places]), tuple(before.values()))
            if key not in cache:
                cache[key] = self._known_outcome(node, operands, call_axes, {scope[place] for place in own_places if choice[place]}, before)
            layout, after_call = cache[key]
            if layout is not None:
                layouts[choice] = layout
            for name, state_after in after_call.items():
                after[name][choice] = state_after
        if layouts:
            self._calls[node.name] = Outcomes(scope, layouts)
        for name, table in after.items():
            if table:
                self._states[name] = Outcomes(scope, table).reduced()

    def _known_outcome(
        self, node: fx.Node, operands: Sequence[fx.Node], call_axes: Iterable[int], chosen: Iterable[int], before: Mapping[str, _State]
    ) -> tuple[CallLayout | None, dict[str, _State]]:
        """Return ``_outcome`` under a choice of groups: that of an earlier enumeration if it cuts the same axes of the call, in order.

        The number of ranks decides nothing but which axes are long enough.

        Args:
            call_axes: the axes that the call loops over, or slides over.
            chosen: the groups of such axes that are cut.
        """
        assigned = dict(self._fixed)
        for group in sorted(chosen):
            assigned.update(self._places[group])
        places = {axis: assigned[axis] for axis in call_axes if axis in assigned}
        ranks = {place: rank for rank, place in enumerate(sorted(set(places.values())))}
        if node.name not in self._too_short:
            self._too_short[node.name] = frozenset(axis for axis in call_axes if not self._walk.choice.fits(axis, 0))
        setting = (*self._setting, self._too_short[node.name])
        key = (node.name, setting, frozenset((axis, ranks[place]) for axis, place in places.items()), tuple(before.values()))
        known = self._walk.facts.outcomes
        if self._walk.is_routed(node):  # routes depend on axes of other calls
            return self._outcome(node, operands, assigned, before)
        if key not in known:
            known[key] = self._outcome(node, operands, assigned, before)
        outcome: tuple[CallLayout | None, dict[str, _State]] = known[key]
        return outcome

    def _outcome(
        self, node: fx.Node, operands: Sequence[fx.Node], assigned: dict[int, int], before: Mapping[str, _State]
    ) -> tuple[CallLayout | None, dict[str, _State]]:
        """Return the layout of a node with these axes cut, and the states after it of the values that it reads or gives.

        An item of a tuple has no layout of its own.

        Args:
            assigned: axis -> its priority, 0 for the most expensive; those that the node does not depend on may be missing.
        """
        walk = self._walk
        walk.choice.assigned[0] = assigned
        for name, state in before.items():
            for place, placement in enumerate(state.current):
                walk.current[name, place] = [placement]
            walk.results[name] = tuple((placement,) for placement in state.gives)
        (walk.output if node.op == "output" else walk.call)(node)
        needs = tuple(layout[0] for layout in walk.needs.get(node.name, ()))
        after, changes = self._read_by(operands, needs, before)
        if node.op != "output" and (node.name, 0) in walk.current:
            after[node.name] = self._state(node.name)
        cuts = walk.cuts.get(node.name, (None,))
        gives = tuple(layout[0] for layout in walk.results.get(node.name, ()))
        layout = CallLayout(cuts[0] if cuts else None, needs, gives, tuple(changes)) if node.name in walk.needs else None
        return layout, after

    def _read_by(
        self, operands: Sequence[fx.Node], needs: Sequence[Placement], before: Mapping[str, _State]
    ) -> tuple[dict[str, _State], list[tuple[str, Placement, Placement]]]:
        """Return the states of a call's operands after it, and the changes of layout that it needs first."""
        after = dict(before)
        changes: list[tuple[str, Placement, Placement]] = []
        for operand, need in zip(operands, needs, strict=False):
            if operand.name not in after:
                continue
            state = after[operand.name]
            current = tuple(self._walk.current[operand.name, place][0] for place in range(len(state.current)))
            if operand.name in self._walk.weights:
                after[operand.name] = _State(current, state.gives, (*state.reads, need))
                continue
            have = state.gives[0]
            key = Partial() if isinstance(have, Partial) else need  # a partial sum is reduced once, for all readers
            if have != need and not isinstance(need, Partial) and key not in state.reads:
                changes.append((operand.name, have, need))
                state = _State(current, state.gives, (*state.reads, key))
            after[operand.name] = _State(current, state.gives, state.reads)
        return after, changes

    def _state(self, name: str) -> _State:
        """Return the state of a value that the walk has just computed."""
        walk = self._walk
        gives = tuple(layout[0] for layout in walk.results.get(name, ()))
        keys = [(name, place) for place in range(max(len(gives), 1))]
        return _State(tuple(walk.current[key][0] if key in walk.current else None for key in keys), gives)

    def _held(self, name: str) -> Outcomes[HeldLayout]:
        """Return the layouts of a parameter, buffer or constant after all its readers were visited."""
        states = self._states.get(name)
        if states is None:
            return Outcomes((), {(): HeldLayout(Replicate(), ())})
        return Outcomes(states.scope, {choice: _held_layout(state) for choice, state in states.found.items()}).reduced()


def _held_layout(state: _State) -> HeldLayout:
    """Return the layout that is stored: the most frequent shard among the reads, or Replicate if there is none."""
    shards = [use for use in state.reads if isinstance(use, Shard)]
    stored = max(shards, key=shards.count) if shards else Replicate()
    return HeldLayout(stored, tuple((stored, use) for use in dict.fromkeys(state.reads) if use != stored))


def _operands(node: fx.Node, axes: Axes) -> Sequence[fx.Node]:
    """Return the tensors that a call, or the output, reads."""
    if node.op == "output":
        return list(returned_values(node))
    return axes.operands.get(node.name) or node.all_input_nodes
