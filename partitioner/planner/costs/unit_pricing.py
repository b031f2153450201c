"""Price the units of one rank's part of a model: from formulas of its calls to the tables of ``unit_costs``."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch

from cost_models.collectives.algorithms import GroupLinks
from cost_models.cost_model import CostModel, call_seconds
from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from cost_models.hardware.clusters import Device
from cost_models.ops.cost import OperationCost
from cost_models.ops.work import Work
from partitioner.planner.costs.activation_memory import UnitMemory
from partitioner.planner.costs.collectives import Exchange
from partitioner.planner.costs.cut_points import CutPoints
from partitioner.planner.costs.unit_costs import LIMITS, Amounts, MicrobatchCosts, MicrobatchTimes, UnitCosts
from partitioner.planner.solvers.stage_problem import Floats, Shared, Units, Value
from passes.autograd.recompute import Recompute
from passes.ir.graph import ModelGraph

__all__ = ["Triple", "UnitPricing"]

Triple = tuple[float, float, float]
"""Forward, input half and weight half of the backward."""


class UnitPricing:
    """Prices units at any microbatch size and on any links; what does not depend on these is worked out once.

    A graph that serves one batch size alone is priced as if all its work and bytes were in proportion to the batch.

    Args:
        optimizer: whose state is held for every parameter that trains.
        recompute: what the backward computes again instead of keeping it.
        known_seconds: of operations on a kind of device, by microbatch size: shared by all parts that the same cost model prices.
        summed: bytes of gradients that are there twice at once, at most, when they are summed over ranks: at the end of a step, and while
            the backward goes on.
        is_cut: whether it is the part of one of several ranks that share a stage.
    """

    def __init__(
        self,
        graph: ModelGraph,
        cost: GraphCost,
        points: CutPoints,
        kinds: Sequence[Device],
        cost_model: CostModel,
        optimizer: str,
        recompute: Recompute,
        known_seconds: dict[Hashable, Triple],
        summed: tuple[float, float],
        is_cut: bool,
    ) -> None:
        self.graph, self.cost, self.points, self.cost_model = graph, cost, points, cost_model
        self.kinds, self._recompute = tuple(kinds), recompute
        self.summed, self.is_cut = summed, is_cut
        self.policy: Recompute = recompute if cost.gradients else "none"  # a forward alone computes nothing again
        self.memory = UnitMemory(graph, cost, points, optimizer, self.policy)
        self.unit_of = points.unit_of
        self.distinct = tuple(dict.fromkeys(cost.nodes.values()))
        self.calls = self._count_calls(frozenset(cost.nodes))
        self.calls_again = self._count_calls(self.memory.again) if self.memory.again else None
        self.numbers, self._known_seconds = cache(Numbers), known_seconds
        self._known_operations: dict[tuple[int, float], Floats] = {}
        self._known_kept: dict[tuple[int, float], tuple[Shared, ...]] = {}

    def on(
        self,
        batch_size: int,
        exchanges: Sequence[tuple[Exchange, GroupLinks]],
        users: Mapping[str, tuple[int, ...]],
        held_bytes: Mapping[str, int],
        *,
        adding: bool = True,
        n_stages: int = 1,
    ) -> UnitCosts:
        """Return the costs on some links.

        Args:
            batch_size: rows of a rank.
            exchanges: communication between the ranks that share a stage, of each microbatch, and the links between them.
            users, held_bytes: as ``UnitCosts`` has them, of any kind.
            adding: whether microbatches add their gradients to those of earlier ones.
            n_stages: how many stages the units are cut into: each receives the results of a forward.
        """
        numbers, returned = self.numbers(batch_size), self.cost.returned if n_stages > 1 and not self.cost.gradients else ()
        size = float(sum(numbers[self.cost.allocation_bytes[key]] for key in returned))
        results = (Shared(size, tuple(range(len(self.points.units)))),) if size else ()
        fixed = (*self.memory.fixed, *self.memory.given(numbers))
        mine = tuple(pair for pair in exchanges if pair[0].reader in self.unit_of)
        at = cache(lambda rows: _Microbatch(self, rows, batch_size, mine, adding, (*fixed, *results)))
        return UnitCosts(
            kinds=self.kinds,
            recompute=self._recompute,
            users=users,
            held_bytes=(held_bytes,) * len(self.kinds),
            fixed=Amounts(fixed),
            results=results,
            gradients=Amounts(self.memory.gradients),
            starting=self.starting,
            times=lambda rows: at(rows).times,
            at=lambda rows: at(rows).costs,
            limits=lambda rows: at(rows).limits,
        )

    @cached_property
    def adding(self) -> Floats:
        """(N, K) seconds that gradients of parameters are added to those of earlier microbatches: two are read, one is written."""
        size = np.zeros(len(self.points.units))
        for item in self.memory.gradients:
            size[list(item.units)] += item.most
        works = [Work(0, 3 * each, 0) for each in size.tolist()]
        return np.array([[self.cost_model.operation_time(work, kind, torch.float32) for kind in self.kinds] for work in works])

    def starting(self) -> Floats:
        """(N, K) seconds of kernels without work."""
        seconds: Floats = self.calls @ self.operations(self.graph.batch_size, 0.0).sum(axis=2)
        return seconds

    def operations(self, rows: int, share: float) -> Floats:
        """(C, K, 3) seconds of each distinct operation."""
        if (rows, share) not in self._known_operations:
            seconds = [[self._seconds(cost, kind, rows, share) for kind in self.kinds] for cost in self.distinct]
            self._known_operations[rows, share] = np.array(seconds)
        return self._known_operations[rows, share]

    def _seconds(self, cost: OperationCost, device: Device, rows: int, share: float) -> Triple:
        key = (cost, device, rows, share)
        if key not in self._known_seconds:
            self._known_seconds[key] = call_seconds(cost, device, self.cost_model, self.numbers(rows), share)
        return self._known_seconds[key]

    def kept(self, rows: int, share: float) -> tuple[Shared, ...]:
        """What is kept for a microbatch."""
        if (rows, share) not in self._known_kept:
            self._known_kept[rows, share] = self.memory.kept(self.numbers(rows), share)
        return self._known_kept[rows, share]

    def _count_calls(self, only: frozenset[str]) -> Floats:
        """(N, C) how often each unit holds an operation of each distinct price, of some nodes."""
        place = {cost: index for index, cost in enumerate(self.distinct)}
        calls = np.zeros((len(self.points.units), len(self.distinct)))
        for index, unit in enumerate(self.points.units):
            for name in unit:
                if name in only:
                    calls[index, place[self.cost.nodes[name]]] += 1
        return calls


@dataclass(frozen=True, eq=False)
class _Microbatch:
    """Prices units for one microbatch size, on some links."""

    of: UnitPricing
    rows: int
    batch_size: int
    exchanges: tuple[tuple[Exchange, GroupLinks], ...]
    adding: bool
    fixed: tuple[Shared, ...]

    @cached_property
    def _numbers(self) -> Numbers:
        return self.of.numbers(self.rows)

    @cached_property
    def _share(self) -> float:
        """Of what formulas say, that of a microbatch of so many rows."""
        return 1.0 if self.of.graph.batch is not None else self.rows / self.batch_size

    @cached_property
    def _operations(self) -> Floats:
        return self.of.operations(self.rows, self._share)

    @cached_property
    def times(self) -> MicrobatchTimes:
        """What bounds ask; the input half of a backward first computes again what was not kept."""
        of, waiting = self.of, self._waiting()
        halves: Floats = np.einsum("nc,ckh->hnk", of.calls, self._operations)
        if of.calls_again is not None:
            halves[1] += of.calls_again @ self._operations[:, :, 0]
        halves = halves + waiting[:, :, None]
        if self.adding:
            halves[2] += of.adding * (1 - 1 / -(-self.batch_size // self.rows))
        kept = Amounts(tuple(item for item in of.kept(self.rows, self._share) if item.producer < 0))
        return MicrobatchTimes(halves, np.broadcast_to(waiting[:, :, None], halves.shape), np.arange(halves.shape[1]), kept)

    def _waiting(self) -> Floats:
        """(3, N) seconds that units wait for the other ranks of their stage; recomputation exchanges once more what it needs."""
        of, numbers, share = self.of, self._numbers, self._share
        seconds = np.zeros((3, len(of.points.units)))
        known: dict[tuple[object, ...], tuple[float, float]] = {}
        for exchange, links in self.exchanges:
            kinds = exchange.forward, exchange.backward, exchange.again
            key = (exchange.size, exchange.dimension, kinds, exchange.runs, exchange.held, exchange.together)
            if key not in known:
                known[key] = exchange.seconds(numbers[exchange.size] * share, links, numbers[exchange.runs] * share)
            forward, backward = known[key]
            gathers = exchange.forward == "all_gather" and of.policy != "none"
            anew = exchange.again is None and (gathers or exchange.reader in of.memory.again)  # else the backward has it already
            again = forward if anew else 0.0
            seconds[0, of.unit_of[exchange.reader]] += forward
            seconds[1, of.unit_of[exchange.reader]] += backward + again
        return seconds

    @cached_property
    def costs(self) -> MicrobatchCosts:
        """All that the stage cutter asks."""
        of, numbers, share = self.of, self._numbers, self._share
        flops = np.array([numbers[cost.forward.flops] * share for cost in of.distinct])
        forward = dict(zip(of.distinct, self._operations[:, :, 0].tolist(), strict=True))
        replicated = ((tuple(forward[of.cost.nodes[name]]), units) for name, units in of.points.replicated.items() if units)
        kept, alone = of.kept(self.rows, share), self.rows >= self.batch_size
        # Stages that communicate are inlined in their programs, and so are the last backwards of those whose gradients are summed.
        called = not of.is_cut or not (alone or self.exchanges)
        summed, summed_meanwhile = of.summed
        units = Units(
            time=self.times.halves.sum(axis=0),
            values=tuple(self._values()),
            replicated=tuple(replicated),
            fixed=self.fixed,
            kept=kept,
            depth=np.array(of.points.depth, dtype=np.int64),
            gradients=of.memory.gradients,
            summed=summed,
            working=replace(of.memory.working(numbers, share, kept, alone=alone, called=called), summed=summed_meanwhile),
        )
        return MicrobatchCosts(self.times.halves, of.calls @ flops, units)

    def _values(self) -> Iterator[Value]:
        """What crosses between units."""
        for value in self.of.points.values:
            size = round(self._numbers[self.of.cost.bytes[value.node]] * self._share)
            yield Value(value.producer, value.readers, size, size if value.node in self.of.cost.gradients else 0)

    @cached_property
    def limits(self) -> Floats:
        """(3, N, K) seconds of calls that go into each of ``LIMITS`` most of all."""
        of, numbers, share = self.of, self._numbers, self._share
        seconds = np.zeros((len(of.distinct), len(of.kinds), len(LIMITS)))
        for (place, cost), (kind, device) in itertools.product(enumerate(of.distinct), enumerate(of.kinds)):
            for work in (cost.forward, cost.backward_input, cost.backward_weight):
                arithmetic, traffic = numbers[work.flops] * share / device.flops(cost.dtype), numbers[work.bytes] * share / device.bandwidth
                parts = (arithmetic, traffic, work.launches * device.launch_overhead)
                seconds[place, kind, parts.index(max(parts))] += max(parts)
        limits: Floats = np.einsum("nc,ckl->lnk", of.calls, seconds)
        return limits
