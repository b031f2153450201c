"""Cost tables for choosing the axes that a mesh dimension shards: one table for each call and each parameter.

    a call          its work on one rank, and the reshards of its operands
    a parameter     its reshards, or the sum of its gradient; the bytes that a rank stores of it

With a known clock rate, costs are seconds (``_TimeCosts``). If the user asked for sharding whatever it gains, costs are bytes sent
(``_ByteCosts``): replicated work costs the bytes that links could send in its time, at least some messages; a replicated weight, a few.
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
from passes.spmd.propagate.enumerate_layouts import CallLayout, HeldLayout, LayoutChoices, Outcomes

_T = TypeVar("_T")


class AxisPrices(Protocol):
    """The costs of one choice of axes, all in one unit: seconds or bytes."""

    message: float
    """Cost of a message of next to no bytes."""

    def work(self, name: str, layout: CallLayout) -> float:
        """Return the cost of a call under a layout: one rank's compute, and its halos."""

    def replicate(self, name: str) -> float:
        """Return the cost of replicating a parameter."""

    def reshard(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Return the cost of a reshard, forward and backward; ``size``: bytes of the whole value."""


def axis_terms(
    graph: ModelGraph,
    axes: Axes,
    choices: LayoutChoices,
    count: int,
    copies: Callable[[str], int],
    clock_rate: ClockRate | None,
    value_bytes: ValueBytes,
    fixed: Collection[int] = (),
    kept: Collection[str] = (),
    prices: AxisPrices | None = None,
) -> list[Term]:
    """Return the cost tables, with an entry for each combination of sharded and unsharded axis groups.

    Args:
        choices: the possible layouts of each call and each parameter.
        count: ranks of the mesh dimension.
        copies: node name -> how many repeats of a folded block the node stands for.
        clock_rate: clock rate of the ranks; None: unknown, and the user asked for sharding.
        fixed: axes that are sharded whatever it costs.
        kept: parameters sharded by fixed axes, which must stay so.
        prices: None: derived from the clock rate.
    """
    price = prices or _default_prices(graph, axes, count, copies, clock_rate)
    nodes = {node.name: node for node in graph.graph.nodes}
    terms = []

    def size_of(name: str) -> float:
        return float(value_bytes.of(nodes[name]))

    for name, calls in choices.calls.items():

        def call_cost(layout: CallLayout, name: str = name) -> float:
            return copies(name) * _call_cost(price, size_of, axes, name, layout)

        terms.append(_term(calls, call_cost, lambda _layout: 0.0))
    for name, outcomes in choices.held.items():
        size = size_of(name) if isinstance(nodes[name].meta.get("val"), Tensor) else 0.0

        def parameter_cost(layout: HeldLayout, name: str = name, size: float = size) -> float:
            if name in kept and not (isinstance(layout.stored, Shard) and layout.stored.axis in fixed):
                return math.inf
            whole = price.replicate(name) if not isinstance(layout.stored, Shard) else 0.0
            return copies(name) * (whole + sum(price.reshard(name, have, need, size) for have, need in layout.changes))

        def stored_bytes(layout: HeldLayout, name: str = name, size: float = size) -> float:
            return copies(name) * size / (count if isinstance(layout.stored, Shard) else 1)

        terms.append(_term(outcomes, parameter_cost, stored_bytes))
    return [term for term in terms if term.scope or term.bytes.any() or term.seconds.any()]


def _term(outcomes: Outcomes[_T], cost_of: Callable[[_T], float], bytes_of: Callable[[_T], float]) -> Term:
    """Tabulate cost and stored bytes: a dimension of length 2 (unsharded, sharded) for each axis group of the scope."""
    shape = (2,) * len(outcomes.scope)
    costs, sizes = np.zeros(shape), np.zeros(shape)
    for choice, layout in outcomes.found.items():
        costs[choice], sizes[choice] = cost_of(layout), bytes_of(layout)
    return Term(outcomes.scope, costs, sizes)


def _call_cost(price: AxisPrices, size_of: Callable[[str], float], axes: Axes, name: str, layout: CallLayout) -> float:
    """Return the cost of a call under a layout: its work, reshards of operands, and messages inside a decomposed reduction."""
    cost = price.work(name, layout)
    for operand, have, need in layout.changes:
        cost += price.reshard(operand, have, need, size_of(operand))
    if layout.cut is not None and axes.loops[name].factors[layout.cut.factor].reduction == "whole":
        cost += MESSAGES_INSIDE * price.message
    return cost


def _default_prices(graph: ModelGraph, axes: Axes, count: int, copies: Callable[[str], int], clock_rate: ClockRate | None) -> AxisPrices:
    if clock_rate is not None and not clock_rate.asked:
        return _TimeCosts(graph, axes, count, clock_rate)
    return _ByteCosts(graph, axes, count, copies, clock_rate)


class _TimeCosts:
    """Costs in seconds, at a known clock rate."""

    def __init__(self, graph: ModelGraph, axes: Axes, count: int, clock_rate: ClockRate) -> None:
        self.message, self._count, self._clock_rate = clock_rate.latency, count, clock_rate
        self._multiply_adds, self._differentiable = contractions_of(axes, graph.batch_size), _differentiable_values(graph)
        self._values = {node.name: node.meta.get("val") for node in graph.graph.nodes}
        self._passes = 3 if graph.training else 1

    def work(self, name: str, layout: CallLayout) -> float:
        """Return the seconds of a contraction's arithmetic on one rank, in the forward and in training the two backward passes."""
        arithmetic = 2 * self._multiply_adds.get(name, 0.0) / self._clock_rate.flops
        return self._passes * arithmetic / (1 if layout.cut is None else self._count)

    def replicate(self, _name: str) -> float:
        return 0.0  # replicating a parameter takes no time

    def reshard(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Return the seconds of a reshard, forward and backward: bandwidth, latency, and copies to and from buffers."""
        times, messages = _traffic(have, need, self._count, has_gradient=value in self._differentiable)
        copies = messages if self._is_copied(value, have, need) else 0
        return times * size / self._clock_rate.bandwidth + messages * self.message + copies * size * self._clock_rate.copying

    def _is_copied(self, value: str, have: Placement, need: Placement) -> bool:
        """Return whether messages are copied: those of an all_reduce, and shards that are not contiguous, even of a single row."""
        shard = next((placement for placement in (need, have) if isinstance(placement, Shard)), None)
        if shard is None:
            return True
        return any(isinstance(size, int) and size > 1 for size in self._values[value].shape[: shard.dimension])


class _ByteCosts:
    """Costs in bytes, if the user asked for sharding: replicated work and parameters cost as much as some messages."""

    message = 2.0**20
    """Cost of a message of any size, in bytes: a few microseconds of a fast link, as much as a millisecond of a slow one."""

    def __init__(
        self, graph: ModelGraph, axes: Axes, count: int, copies: Callable[[str], int], clock_rate: ClockRate | None = None
    ) -> None:
        self._count, self._differentiable = count, _differentiable_values(graph)
        nodes = {node.name: node for node in graph.graph.nodes}
        multiply_adds = contractions_of(axes, 1 if clock_rate is None else graph.batch_size)
        work = {name: number * copies(name) for name, number in multiply_adds.items()}
        # Bytes that a link sends in the time of a multiply-add (2 FLOP), in training also of the two of its backward.
        bytes_per_multiply_add = 0.0 if clock_rate is None else (6 if graph.training else 2) / clock_rate.flops * clock_rate.bandwidth
        calls = sum(copies(name) for name in work)
        replicated_work = max(calls * WORTH * self.message, sum(work.values()) * bytes_per_multiply_add)
        sizes = {name: float(nodes[name].meta["val"].numel()) * copies(name) for name in graph.parameters}
        self._work = {name: replicated_work * number / copies(name) / max(sum(work.values()), 1.0) for name, number in work.items()}
        messages = calls * self.message
        # Matrices cost their size besides the work of their contractions. Vectors do not: sharding them shards only elementwise calls.
        matrices = {name for name in sizes if nodes[name].meta["val"].dim() > 1}
        self._replicated = {name: messages * sizes[name] / copies(name) / max(sum(sizes.values()), 1.0) for name in matrices}

    def work(self, name: str, layout: CallLayout) -> float:
        """Return the cost of a contraction that every rank computes whole; 0 for a sharded one."""
        return self._work.get(name, 0.0) if layout.cut is None else 0.0

    def replicate(self, name: str) -> float:
        """Return the cost of replicating a parameter."""
        return self._replicated.get(name, 0.0)

    def reshard(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Return the bytes of a reshard, forward and backward, and those that its messages cost."""
        times, messages = _traffic(have, need, self._count, has_gradient=value in self._differentiable)
        return times * size + messages * self.message


def _differentiable_values(graph: ModelGraph) -> frozenset[str]:
    """Return the values that may have a gradient: masks, indices and sizes have none."""
    return frozenset(node.name for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor) and is_differentiable(node))


def _traffic(have: Placement, need: Placement, count: int, *, has_gradient: bool) -> tuple[float, int]:
    """Return the traffic of a reshard, forward and backward, and its number of messages.

    Traffic is a multiple of the value's bytes, without the factor (k-1)/k that all collectives of k ranks have. That of an all_to_all
    is 1/k: a rank has 1/k of the value, and sends each element of it once.

    Args:
        count: k, the ranks of the mesh dimension.
        has_gradient: whether the backward reshards the value's gradient.
    """
    moved = {**_MOVED, "all_to_all": 1 / count}
    forward, backward = collectives_between(have, need)
    sent = [moved[collective] for collective in (forward, backward if has_gradient else None) if collective is not None]
    return sum(sent), len(sent)


def contractions_of(axes: Axes, rows: int = 1) -> dict[str, float]:
    """Count the multiply-adds of each contraction, for a batch of ``rows`` samples: call name -> number.

    The size of a loop over flattened rows is a formula: ``128 * batch`` if sequences of 128 were flattened into the batch.
    """
    multiply_adds, numbers = {}, Numbers(rows)
    for name, loops in axes.loops.items():
        if len(loops.operands) > 1 and any(factor.reduction == "sum" for factor in loops.factors):
            multiply_adds[name] = math.prod(float(numbers[factor.size]) for factor in loops.factors)
    return multiply_adds


WORTH = 10
"""Messages that sharding a contraction of average size may cost, if the user asked for sharding."""

MESSAGES_INSIDE = 4
"""Small messages of a decomposed reduction (softmax, layer norm), forward and backward."""

_MOVED: Mapping[Collective, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Traffic of the collectives for which it does not depend on the number of ranks (``_traffic``)."""
