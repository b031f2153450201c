"""The choice of axes for a mesh dimension as numbers: what every call and every parameter costs, for each choice that it depends on.

    a call          what its share of the work is worth, and what changes of layout move that are made for it
    a parameter     what changes of layout move, or the sum of its gradient; the bytes that a rank holds of it

At a known pace everything is in seconds. Where a cut was asked for, whatever it gains, it is in bytes: work that every rank does whole is
worth what is sent in its time, at least some messages; tables that every rank holds whole are worth a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import numpy as np
from torch import Tensor, fx

from partitioner.planner.choices import Term
from partitioner.planner.pace import Pace
from passes.axes import Axes
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Placement, Replicate, Shard, Varying
from passes.layout_choices import CallLayout, HeldLayout, LayoutChoices, Outcomes
from passes.layouts import ValueBytes

__all__ = ["axis_terms", "contractions_of"]

_T = TypeVar("_T")


def axis_terms(
    graph: ModelGraph,
    axes: Axes,
    choices: LayoutChoices,
    count: int,
    copies: Callable[[str], int],
    pace: Pace | None,
    value_bytes: ValueBytes,
    fixed: Collection[int] = (),
    kept: Collection[str] = (),
) -> list[Term]:
    """The tables.

    Args:
        axes: of the graph.
        choices: all outcomes.
        count: ranks of the mesh dimension.
        copies: how often something is there: a block that stands for others counts for them.
        pace: of the ranks; None: unknown, and a cut was asked for.
        value_bytes: of the graph.
        fixed: axes that are cut whatever it costs.
        kept: parameters that ranks hold cut by those: they must stay so.
    """
    price: _Paced | _Asked = _Asked(graph, axes, copies, value_bytes, pace)
    if pace is not None and not pace.asked:
        price = _Paced(graph, axes, pace, value_bytes)
    nodes = {node.name: node for node in graph.graph.nodes}
    terms = []
    for name, calls in choices.calls.items():

        def costing(found: CallLayout, name: str = name) -> float:
            return copies(name) * _call(price, nodes, axes, name, found, count)

        terms.append(_term(calls, costing, lambda _found: 0.0))
    for name, outcomes in choices.held.items():
        size = float(value_bytes.of(nodes[name])) if isinstance(nodes[name].meta.get("val"), Tensor) else 0.0

        def moving(found: HeldLayout, name: str = name, size: float = size) -> float:
            if name in kept and not (isinstance(found.stored, Shard) and found.stored.axis in fixed):
                return math.inf
            whole = price.whole(name) if not isinstance(found.stored, Shard) else 0.0
            return copies(name) * (whole + sum(price.change(have, need, size) for have, need in found.changes))

        def holding(found: HeldLayout, name: str = name, size: float = size) -> float:
            return copies(name) * size / (count if isinstance(found.stored, Shard) else 1)

        terms.append(_term(outcomes, moving, holding))
    return [term for term in terms if term.scope or term.bytes.any() or term.seconds.any()]


def _term(outcomes: Outcomes[_T], seconds: Callable[[_T], float], held: Callable[[_T], float]) -> Term:
    shape = (2,) * len(outcomes.scope)
    times, sizes = np.zeros(shape), np.zeros(shape)
    for choice, found in outcomes.found.items():
        times[choice], sizes[choice] = seconds(found), held(found)
    return Term(outcomes.scope, times, sizes)


def _call(price: _Paced | _Asked, nodes: Mapping[str, fx.Node], axes: Axes, name: str, found: CallLayout, count: int) -> float:
    """What one outcome of a call costs."""
    cost = price.work(name, count if found.cut is not None else 1)
    for operand, have, need in found.changes:
        cost += price.change(have, need, float(price.bytes.of(nodes[operand])))
    if found.cut is not None and axes.loops[name].factors[found.cut.factor].reduction == "whole":
        cost += MESSAGES_INSIDE * price.message
    return cost


class _Paced:
    """Seconds, at a known pace."""

    def __init__(self, graph: ModelGraph, axes: Axes, pace: Pace, value_bytes: ValueBytes) -> None:
        self.bytes, self.message, self._pace = value_bytes, pace.latency, pace
        self._runs = contractions_of(axes, graph.batch_size)
        self._passes = 3 if graph.training else 1

    def work(self, name: str, parts: int) -> float:
        """Of a call that is cut into parts."""
        arithmetic = 2 * self._runs.get(name, 0.0) / self._pace.flops
        return self._passes * arithmetic / parts

    def whole(self, _name: str) -> float:
        """Of a parameter that is not cut."""
        return 0.0

    def change(self, have: Placement, need: Placement, size: float) -> float:
        """Of a change of layout, forward and backward."""
        times, messages = _CHANGES.get((type(have), type(need)), (0.0, 0))
        return times * size / self._pace.bandwidth + messages * self.message


class _Asked:
    """Bytes, where a cut was asked for: work and parameters that are whole are worth messages."""

    message = 2.0**20
    """What a message costs whatever it moves, in bytes: a few microseconds of a fast link, as much as a millisecond of a slow one."""

    def __init__(
        self, graph: ModelGraph, axes: Axes, copies: Callable[[str], int], value_bytes: ValueBytes, pace: Pace | None = None
    ) -> None:
        self.bytes = value_bytes
        nodes = {node.name: node for node in graph.graph.nodes}
        runs = {name: each * copies(name) for name, each in contractions_of(axes, 1 if pace is None else graph.batch_size).items()}
        bytes_per_run = 0.0 if pace is None else (6 if graph.training else 2) / pace.flops * pace.bandwidth
        calls = sum(copies(name) for name in runs)
        worth = max(calls * WORTH * self.message, sum(runs.values()) * bytes_per_run)
        sizes = {name: float(nodes[name].meta["val"].numel()) * copies(name) for name in graph.parameters}
        self._work = {name: worth * each / copies(name) / max(sum(runs.values()), 1.0) for name, each in runs.items()}
        messages = calls * self.message
        # What contracts is worth its work; besides, tables are worth their size. Vectors are not: to cut them cuts what is between calls.
        tables = {name for name in sizes if nodes[name].meta["val"].dim() > 1}
        self._held = {name: messages * sizes[name] / copies(name) / max(sum(sizes.values()), 1.0) for name in tables}

    def work(self, name: str, parts: int) -> float:
        """Of a call that is cut into parts."""
        return self._work.get(name, 0.0) if parts == 1 else 0.0

    def whole(self, name: str) -> float:
        """Of a parameter that is not cut."""
        return self._held.get(name, 0.0)

    def change(self, have: Placement, need: Placement, size: float) -> float:
        """Of a change of layout, forward and backward."""
        times, messages = _CHANGES.get((type(have), type(need)), (0.0, 0))
        return times * size + messages * self.message


def contractions_of(axes: Axes, rows: int = 1) -> dict[str, float]:
    """The calls that multiply and add, and how often, for a batch of so many rows."""
    found = {}
    for name, loops in axes.loops.items():
        if len(loops.operands) > 1 and any(each.reduction == "sum" for each in loops.factors):
            found[name] = math.prod(float(factor.size) if isinstance(factor.size, int) else float(rows) for factor in loops.factors)
    return found


WORTH = 10
"""How many messages it is worth to cut one contraction: a hundredth of a model of a hundred contractions, ten."""

MESSAGES_INSIDE = 4
"""How many small messages an operation that reduces inside sends, forward and backward."""

_CHANGES: Mapping[tuple[type, type], tuple[float, int]] = {
    (Partial, Replicate): (2.0, 1),
    (Partial, Varying): (4.0, 2),
    (Partial, Shard): (2.0, 2),
    (Shard, Replicate): (1.0, 1),
    (Shard, Varying): (2.0, 2),
    (Shard, Shard): (1.0, 2),
    (Replicate, Shard): (1.0, 1),
    (Replicate, Varying): (2.0, 1),
}
"""How often a change of layout moves the value, forward and backward, for many ranks; and in how many messages."""
