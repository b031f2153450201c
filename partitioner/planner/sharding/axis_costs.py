"""The choice of axes for a mesh dimension as numbers: what every call and every parameter costs, for each choice that it depends on.

    a call          what its share of the work is worth, and what changes of layout move that are made for it
    a parameter     what changes of layout move, or the sum of its gradient; the bytes that a rank holds of it

At a known pace everything is in seconds. Where a cut was asked for, whatever it gains, it is in bytes: work that every rank does whole is
worth what is sent in its time, at least some messages; tables that every rank holds whole are worth a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from cost_models.collectives.algorithms import Collective
from cost_models.formulas.symbols import Numbers
from partitioner.planner.costs.collectives import collectives_between
from partitioner.planner.costs.links import ClockRate
from partitioner.planner.solvers.variable_elimination import Term
from passes.analysis.axes import Axes
from passes.graph.dependencies import is_differentiable
from passes.graph.symbolic_sizes import ValueBytes
from passes.ir.graph import ModelGraph
from passes.ir.layout import Placement, Shard
from passes.spmd.enumerate_layouts import CallLayout, HeldLayout, LayoutChoices, Outcomes

__all__ = ["WORTH", "AxisPrices", "axis_terms", "contractions_of"]

_T = TypeVar("_T")


class AxisPrices(Protocol):
    """What choices of axes are priced by, in one unit."""

    message: float
    """A message that moves next to nothing."""

    def work(self, name: str, found: CallLayout) -> float:
        """Of a call under an outcome: what a rank computes, and what it reads of neighbours."""

    def whole(self, name: str) -> float:
        """Of a parameter that is not cut."""

    def change(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Of a change of layout of so many bytes, the whole value, forward and backward."""


def axis_terms(
    graph: ModelGraph,
    axes: Axes,
    choices: LayoutChoices,
    count: int,
    copies: Callable[[str], int],
    pace: ClockRate | None,
    value_bytes: ValueBytes,
    fixed: Collection[int] = (),
    kept: Collection[str] = (),
    prices: AxisPrices | None = None,
) -> list[Term]:
    """The tables.

    Args:
        count: ranks of the mesh dimension.
        copies: how often something is there: a block that stands for others counts for them.
        pace: of the ranks; None: unknown, and a cut was asked for.
        fixed: axes that are cut whatever it costs.
        kept: parameters that ranks hold cut by those: they must stay so.
        prices: None: by the pace.
    """
    price = prices or _by_pace(graph, axes, count, copies, pace)
    nodes = {node.name: node for node in graph.graph.nodes}
    terms = []

    def size_of(name: str) -> float:
        return float(value_bytes.of(nodes[name]))

    for name, calls in choices.calls.items():

        def costing(found: CallLayout, name: str = name) -> float:
            return copies(name) * _call(price, size_of, axes, name, found)

        terms.append(_term(calls, costing, lambda _found: 0.0))
    for name, outcomes in choices.held.items():
        size = size_of(name) if isinstance(nodes[name].meta.get("val"), Tensor) else 0.0

        def moving(found: HeldLayout, name: str = name, size: float = size) -> float:
            if name in kept and not (isinstance(found.stored, Shard) and found.stored.axis in fixed):
                return math.inf
            whole = price.whole(name) if not isinstance(found.stored, Shard) else 0.0
            return copies(name) * (whole + sum(price.change(name, have, need, size) for have, need in found.changes))

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


def _call(price: AxisPrices, size_of: Callable[[str], float], axes: Axes, name: str, found: CallLayout) -> float:
    """What one outcome of a call costs."""
    cost = price.work(name, found)
    for operand, have, need in found.changes:
        cost += price.change(operand, have, need, size_of(operand))
    if found.cut is not None and axes.loops[name].factors[found.cut.factor].reduction == "whole":
        cost += MESSAGES_INSIDE * price.message
    return cost


def _by_pace(graph: ModelGraph, axes: Axes, count: int, copies: Callable[[str], int], pace: ClockRate | None) -> AxisPrices:
    if pace is not None and not pace.asked:
        return _Paced(graph, axes, count, pace)
    return _Asked(graph, axes, count, copies, pace)


class _Paced:
    """Seconds, at a known pace."""

    def __init__(self, graph: ModelGraph, axes: Axes, count: int, pace: ClockRate) -> None:
        self.message, self._count, self._pace = pace.latency, count, pace
        self._runs, self._flowing = contractions_of(axes, graph.batch_size), _floating(graph)
        self._values = {node.name: node.meta.get("val") for node in graph.graph.nodes}
        self._passes = 3 if graph.training else 1

    def work(self, name: str, found: CallLayout) -> float:
        """The arithmetic of a call."""
        arithmetic = 2 * self._runs.get(name, 0.0) / self._pace.flops
        return self._passes * arithmetic / (1 if found.cut is None else self._count)

    def whole(self, _name: str) -> float:
        """Of a parameter that is not cut."""
        return 0.0

    def change(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Of a change of layout, forward and backward."""
        times, messages = _moved(have, need, self._count, flows=value in self._flowing)
        copies = messages if self._is_copied(value, have, need) else 0
        return times * size / self._pace.bandwidth + messages * self.message + copies * size * self._pace.copying

    def _is_copied(self, value: str, have: Placement, need: Placement) -> bool:
        """Whether what is sent is a copy: what is summed on all ranks is, and parts that are no runs of memory, even of a single row."""
        cut = next((each for each in (need, have) if isinstance(each, Shard)), None)
        if cut is None:
            return True
        return any(isinstance(size, int) and size > 1 for size in self._values[value].shape[: cut.dimension])


class _Asked:
    """Bytes, where a cut was asked for: work and parameters that are whole are worth messages."""

    message = 2.0**20
    """What a message costs whatever it moves, in bytes: a few microseconds of a fast link, as much as a millisecond of a slow one."""

    def __init__(self, graph: ModelGraph, axes: Axes, count: int, copies: Callable[[str], int], pace: ClockRate | None = None) -> None:
        self._count, self._flowing = count, _floating(graph)
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

    def work(self, name: str, found: CallLayout) -> float:
        """Of a call that every rank computes whole."""
        return self._work.get(name, 0.0) if found.cut is None else 0.0

    def whole(self, name: str) -> float:
        """Of a parameter that is not cut."""
        return self._held.get(name, 0.0)

    def change(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Of a change of layout, forward and backward."""
        times, messages = _moved(have, need, self._count, flows=value in self._flowing)
        return times * size + messages * self.message


def _floating(graph: ModelGraph) -> frozenset[str]:
    """The values that may have a gradient: masks, indices and sizes have none."""
    return frozenset(node.name for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor) and is_differentiable(node))


def _moved(have: Placement, need: Placement, count: int, *, flows: bool) -> tuple[float, int]:
    """How often a change of layout moves the value, and its gradient where one flows, and in how many messages.

    Between two parts of a value a rank keeps what is in both.
    """
    forward, backward = collectives_between(have, need)
    moved = [_MOVED[each] for each in (forward, backward if flows else None) if each is not None]
    return sum(moved) * (2 / count if isinstance(have, Shard) and isinstance(need, Shard) else 1.0), len(moved)


def contractions_of(axes: Axes, rows: int = 1) -> dict[str, float]:
    """Count the multiply-adds of each call that sums products, for a batch of so many rows.

    A loop over flattened rows has a formula for its size: ``128 * batch`` where sequences of 128 were flattened into the batch.
    """
    found, numbers = {}, Numbers(rows)
    for name, loops in axes.loops.items():
        if len(loops.operands) > 1 and any(each.reduction == "sum" for each in loops.factors):
            found[name] = math.prod(float(numbers[factor.size]) for factor in loops.factors)
    return found


WORTH = 10
"""How many messages it is worth to cut one contraction: a hundredth of a model of a hundred contractions, ten."""

MESSAGES_INSIDE = 4
"""How many small messages an operation that reduces inside sends, forward and backward."""

_MOVED: Mapping[Collective, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 0.5}
"""How often a collective moves the value, in a message; all_to_all, for two ranks."""
