"""How every call is cut under any choice of the axes that a mesh dimension cuts: the walk of ``assign_layouts``, for all choices at once.

Groups of axes are cut or not; G groups make 2^G choices. But a call depends on few of them: on those that it loops over, and on those that
decide how its operands lie.

    linear (q, k, v)      {heads, head, hidden}      8 outcomes
    attention             {heads, head}              4
    linear (project)      {heads, head, hidden}      8
    add                   {hidden}                   2        a sum is whole again whatever made it

A call is worked out for each choice of what it depends on. What a value turns out not to depend on is forgotten for its readers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import fx

from passes.analysis.axes import Axes, returned_values
from passes.graph.symbolic_sizes import ValueBytes
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Placement, Replicate, Shard
from passes.spmd.propagate import Cut, LayoutWalk

__all__ = ["CallLayout", "HeldLayout", "LayoutChoices", "Outcomes", "TooManyChoicesError", "layout_choices"]

_T = TypeVar("_T")

MOST = 2**12
"""Choices that one call may depend on."""


class TooManyChoicesError(ConfigError):
    """A call depends on too many groups.

    Attributes:
        groups: on which.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        super().__init__(f"an operation depends on {len(groups)} choices", remedy="leave groups out")
        self.groups = tuple(groups)


@dataclass(frozen=True)
class CallLayout:
    """One outcome of a call, along the mesh dimension.

    Attributes:
        cut: how it is cut; None: all ranks compute alike.
        needs: how it reads each operand.
        gives: how each result lies.
        changes: (value, how it lies, how it is read): what is done for this call and was not done for an earlier reader of the value.
    """

    cut: Cut | None
    needs: tuple[Placement, ...]
    gives: tuple[Placement, ...]
    changes: tuple[tuple[str, Placement, Placement], ...]


@dataclass(frozen=True)
class HeldLayout:
    """One outcome of a parameter, buffer or constant.

    Attributes:
        stored: how ranks hold it.
        changes: (how it is held, how it is read), one for each way in which it is read otherwise.
    """

    stored: Placement
    changes: tuple[tuple[Placement, Placement], ...]


@dataclass(frozen=True)
class Outcomes(Generic[_T]):
    """A function of some groups.

    Attributes:
        scope: the groups, ascending.
        found: for each choice (1: the group is cut) the outcome.
    """

    scope: tuple[int, ...]
    found: Mapping[tuple[int, ...], _T]

    def at(self, scope: Sequence[int], choice: Sequence[int]) -> _T:
        """The outcome under a choice for more groups."""
        return self.found[tuple(choice[scope.index(group)] for group in self.scope)]

    def reduced(self) -> Outcomes[_T]:
        """The same function, of the groups that it depends on alone."""
        scope, found = self.scope, dict(self.found)
        for group in self.scope:
            place = scope.index(group)
            if all(found[(*choice[:place], 0, *choice[place + 1 :])] == outcome for choice, outcome in found.items()):
                scope = (*scope[:place], *scope[place + 1 :])
                found = {(*choice[:place], *choice[place + 1 :]): outcome for choice, outcome in found.items() if not choice[place]}
        return Outcomes(scope, found)


@dataclass(frozen=True)
class LayoutChoices:
    """All outcomes.

    Attributes:
        calls: call -> its outcomes; ``"output"``: what is done for what the model returns.
        held: parameter, buffer or constant -> its outcomes.
    """

    calls: Mapping[str, Outcomes[CallLayout]]
    held: Mapping[str, Outcomes[HeldLayout]]


@dataclass(frozen=True)
class _State:
    """A value during the walk: the placements of its tensors for the next reader, as computed, and as read so far."""

    lies: tuple[Placement | None, ...]
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
    value_bytes: ValueBytes | None = None,
) -> LayoutChoices:
    """Work out every call for every choice that it depends on.

    Args:
        dimension: name and size of the mesh dimension.
        groups: axes that are cut together or not at all, dearest first.
        fixed: axes that are cut in any case, dearer than those.
        rows: whether the dimension cuts the batch, which is then among ``fixed``.
        value_bytes: of the graph, where they are known.

    Raises:
        TooManyChoicesError: a call depends on too many groups.
    """
    name = dimension[0]
    # All that may be cut: the walk looks at these once, for what lies beside rows. What is cut, each visit says anew.
    may_be_cut = {name: [*fixed, *(axis for group in groups for axis in group)]}
    of_rows = (name,) if rows else ()
    walk = LayoutWalk(graph, axes, (dimension,), may_be_cut, of_rows, "rows", None, value_bytes or ValueBytes(graph))
    choices = _Choices(walk, groups, fixed)
    for node in graph.graph.nodes:
        choices.visit(node)
    return LayoutChoices(choices.calls, {held: choices.held(held) for held in walk.held})


class _Choices:
    """The walk, with what is known so far."""

    def __init__(self, walk: LayoutWalk, groups: Sequence[Sequence[int]], fixed: Sequence[int]) -> None:
        self._walk = walk
        self._places = [dict.fromkeys(group, len(fixed) + number) for number, group in enumerate(groups)]
        self._fixed = {axis: place for place, axis in enumerate(fixed)}
        self._group_of = {axis: number for number, group in enumerate(groups) for axis in group}
        self._states: dict[str, Outcomes[_State]] = {}
        self.calls: dict[str, Outcomes[CallLayout]] = {}

    def visit(self, node: fx.Node) -> None:
        """Work one node out."""
        walk = self._walk
        if node.op == "placeholder":
            walk.placeholder(node)
            if (node.name, 0) in walk.lies:
                self._states[node.name] = Outcomes((), {(): self._state(node.name)})
            return
        operands = _read(node, walk.axes)
        touched = {operand.name: None for operand in operands if operand.name in self._states}
        read = (*walk.axes.of_calls.get(node.name, ()), *walk.axes.slid_over.get(node.name, ()))
        own = {self._group_of[axis] for axis in read if axis in self._group_of}
        scope = tuple(sorted(own.union(*(self._states[name].scope for name in touched))))
        if 2 ** len(scope) > MOST:
            raise TooManyChoicesError(scope)
        found: dict[tuple[int, ...], CallLayout] = {}
        after: dict[str, dict[tuple[int, ...], _State]] = {name: {} for name in (*touched, node.name)}
        known: dict[object, tuple[CallLayout, dict[str, _State]]] = {}
        for choice in itertools.product((0, 1), repeat=len(scope)):
            before = {name: self._states[name].at(scope, choice) for name in touched}
            alike = (tuple(chosen for group, chosen in zip(scope, choice, strict=True) if group in own), tuple(before.values()))
            if alike not in known:
                known[alike] = self._outcome(node, operands, scope, choice, before)
            found[choice], states = known[alike]
            for name, state in states.items():
                after[name][choice] = state
        if node.name in walk.needs:
            self.calls[node.name] = Outcomes(scope, found)
        for name, table in after.items():
            if table:
                self._states[name] = Outcomes(scope, table).reduced()

    def _outcome(
        self, node: fx.Node, operands: Sequence[fx.Node], scope: Sequence[int], choice: Sequence[int], before: Mapping[str, _State]
    ) -> tuple[CallLayout, dict[str, _State]]:
        """Return the layout of a node under one choice of cut groups, and the states after it of the values that it reads or gives."""
        walk = self._walk
        walk.assigned[0] = dict(self._fixed)
        for group, chosen in zip(scope, choice, strict=True):
            if chosen:
                walk.assigned[0].update(self._places[group])
        for name, state in before.items():
            for place, lies in enumerate(state.lies):
                walk.lies[name, place] = [lies]
            walk.results[name] = tuple((placement,) for placement in state.gives)
        (walk.output if node.op == "output" else walk.call)(node)
        needs = tuple(layout[0] for layout in walk.needs.get(node.name, ()))
        after, changes = self._read_by(operands, needs, before)
        if node.op != "output" and (node.name, 0) in walk.lies:
            after[node.name] = self._state(node.name)
        cuts = walk.cuts.get(node.name, (None,))
        gives = tuple(layout[0] for layout in walk.results.get(node.name, ()))
        return CallLayout(cuts[0] if cuts else None, needs, gives, tuple(changes)), after

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
            lies = tuple(self._walk.lies[operand.name, place][0] for place in range(len(state.lies)))
            if operand.name in self._walk.held:
                after[operand.name] = _State(lies, state.gives, (*state.reads, need))
                continue
            have = state.gives[0]
            key = Partial() if isinstance(have, Partial) else need
            if have != need and not isinstance(need, Partial) and key not in state.reads:
                changes.append((operand.name, have, need))
                state = _State(lies, state.gives, (*state.reads, key))
            after[operand.name] = _State(lies, state.gives, state.reads)
        return after, changes

    def _state(self, name: str) -> _State:
        walk = self._walk
        gives = tuple(layout[0] for layout in walk.results.get(name, ()))
        count = max(len(gives), 1)
        return _State(tuple(walk.lies[name, place][0] if (name, place) in walk.lies else None for place in range(count)), gives)

    def held(self, name: str) -> Outcomes[HeldLayout]:
        """How a parameter is held, now that all its readers are known."""
        states = self._states.get(name)
        if states is None:
            return Outcomes((), {(): HeldLayout(Replicate(), ())})
        return Outcomes(states.scope, {choice: _held(state) for choice, state in states.found.items()}).reduced()


def _held(state: _State) -> HeldLayout:
    shards = [use for use in state.reads if isinstance(use, Shard)]
    stored = max(shards, key=shards.count) if shards else Replicate()
    return HeldLayout(stored, tuple((stored, use) for use in dict.fromkeys(state.reads) if use != stored))


def _read(node: fx.Node, axes: Axes) -> Sequence[fx.Node]:
    if node.op == "output":
        return list(returned_values(node))
    return axes.operands.get(node.name) or node.all_input_nodes
