"""Price the units of one rank's shard of a model: from formulas of its calls to the tables of ``unit_costs``."""

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
from partitioner.planner.costs.collectives import Exchange
from partitioner.planner.costs.cut_points import CutPoints
from partitioner.planner.costs.gathers_ahead import Message, waiting_for_gathers
from partitioner.planner.costs.memory.activation_memory import UnitMemory
from partitioner.planner.costs.unit_costs import LIMITS, Amounts, MicrobatchCosts, MicrobatchTimes, UnitCosts
from partitioner.planner.solvers.stage_problem import Floats, Shared, Units, Value
from passes.autograd.recompute import Recompute
from passes.ir.graph import ModelGraph
from passes.ir.mesh import GATHERED_ONCE, SCATTERED_ONCE
from passes.ir.plan import Region

__all__ = ["Triple", "UnitPricing"]

Triple = tuple[float, float, float]
"""Forward, input half and weight half of the backward."""


class UnitPricing:
    """Prices units at any microbatch size and on any links, with caches of all that does not depend on these.

    A graph traced for one batch size is priced as if all its work and bytes were proportional to the batch.

    Args:
        optimizer: its state is stored for every trained parameter.
        recompute: the recomputation policy of the backward.
        regions: of recomputation, of the whole model.
        known_seconds: cache of operations' seconds by device and microbatch size, shared by all shards with the same cost model.
        summed: the most bytes of gradients that exist twice while they are reduced: at the end of a step, and during the backward.
        is_cut: whether several ranks share a stage, and this is the shard of one.
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
        regions: Sequence[Region],
        known_seconds: dict[Hashable, Triple],
        summed: tuple[float, float],
        is_cut: bool,
    ) -> None:
        self.graph, self.cost, self.points, self.cost_model = graph, cost, points, cost_model
        self.kinds, self._recompute = tuple(kinds), recompute
        self.summed, self.is_cut = summed, is_cut
        self.policy: Recompute = recompute if cost.gradients else "none"  # a forward alone recomputes nothing
        self.memory = UnitMemory(graph, cost, points, optimizer, self.policy, regions)
        self.unit_of = points.unit_of
        self.distinct = tuple(dict.fromkeys(cost.nodes.values()))
        self.calls = self._count_calls(frozenset(cost.nodes))
        self.repeated_calls, self.recomputed_calls = (
            self._count_calls(each) if each else None for each in (self.memory.selected, self.memory.recomputed - self.memory.selected)
        )
        self.numbers, self._known_seconds = cache(Numbers), known_seconds
        self._known_operations: dict[tuple[int, float], Floats] = {}
        self._known_kept: dict[tuple[int, float, bool], tuple[Shared, ...]] = {}

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
            batch_size: samples of a rank.
            exchanges: the collectives of each microbatch, with the links between the ranks that share a stage.
            users, held_bytes: as in ``UnitCosts``, for one kind.
            adding: whether microbatches add their gradients to those of earlier ones.
            n_stages: number of stages; if several, each receives the results of a forward.
        """
        numbers, returned = self.numbers(batch_size), self.cost.returned if n_stages > 1 and not self.cost.gradients else ()
        size = float(sum(numbers[self.cost.allocation_bytes[key]] for key in returned))
        results = (Shared(size, tuple(range(len(self.points.units)))),) if size else ()
        fixed = (*self.memory.fixed, *self.memory.inputs(numbers))
        in_units = tuple(pair for pair in exchanges if pair[0].reader in self.unit_of)
        at = cache(lambda rows: _Microbatch(self, rows, batch_size, in_units, adding, (*fixed, *results)))
        return UnitCosts(
            kinds=self.kinds,
            recompute=self._recompute,
            users=users,
            held_bytes=(held_bytes,) * len(self.kinds),
            recomputed=(self.memory.selected,) * len(self.kinds),
            fixed=Amounts(fixed),
            results=results,
            gradients=Amounts(self.memory.gradients),
            starting=self.starting,
            times=lambda rows: at(rows).times,
            at=lambda rows: at(rows).costs,
            limits=lambda rows: at(rows).limits,
        )

    @cached_property
    def accumulation(self) -> Floats:
        """(N, K) seconds of adding parameter gradients to those of earlier microbatches: two are read, one is written."""
        size = np.zeros(len(self.points.units))
        for item in self.memory.added:
            size[list(item.units)] += item.most
        works = [Work(0, 3 * each, 0) for each in size.tolist()]
        return np.array([[self.cost_model.operation_time(work, kind, torch.float32) for kind in self.kinds] for work in works])

    def starting(self) -> Floats:
        """Return (N, K) seconds of launching the kernels of each unit."""
        seconds: Floats = self.calls @ self.operations(self.graph.batch_size, 0.0).sum(axis=2)
        return seconds

    def operations(self, rows: int, share: float) -> Floats:
        """Return (C, K, 3) seconds of each distinct operation: forward, input half and weight half (``share``: see ``UnitMemory.kept``)."""
        if (rows, share) not in self._known_operations:
            seconds = [[self._seconds(cost, kind, rows, share) for kind in self.kinds] for cost in self.distinct]
            self._known_operations[rows, share] = np.array(seconds)
        return self._known_operations[rows, share]

    def repeated(self, rows: int, share: float) -> Floats:
        """Return (C, K) seconds of each distinct operation in a backward that recomputes it, but for what it has communicated."""
        costs = [cost if cost.repeated is None else replace(cost, forward=cost.repeated) for cost in self.distinct]
        return np.array([[self._seconds(cost, kind, rows, share)[0] for kind in self.kinds] for cost in costs])

    def _seconds(self, cost: OperationCost, device: Device, rows: int, share: float) -> Triple:
        key = (cost, device, rows, share)
        if key not in self._known_seconds:
            self._known_seconds[key] = call_seconds(cost, device, self.cost_model, self.numbers(rows), share)
        return self._known_seconds[key]

    def kept(self, rows: int, share: float, *, alone: bool) -> tuple[Shared, ...]:
        """Return the saved activations of a microbatch; arguments as in ``operations``; ``alone``: whether it is the whole batch."""
        key = (rows, share, alone)
        if key not in self._known_kept:
            self._known_kept[key] = self.memory.kept(self.numbers(rows), share, alone=alone)
        return self._known_kept[key]

    @cached_property
    def casts(self) -> frozenset[str]:
        """The calls of units that cast a parameter, or a view of one, to a smaller type."""
        sizes = {node.name: node.meta["val"].dtype.itemsize for node in self.graph.graph.nodes if node.name in self.graph.parameters}
        found = set[str]()
        for node in self.graph.computing_nodes():
            source, value = [each.name for each in node.all_input_nodes], node.meta.get("val")
            if len(source) == 1 and source[0] in sizes and isinstance(value, torch.Tensor):
                sizes[node.name] = value.dtype.itemsize
                found |= {node.name} if sizes[node.name] < sizes[source[0]] else set()
        return frozenset(found & self.place_of.keys())

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Call of a unit -> its place among all, in order."""
        names = (name for unit in self.points.units for name in unit if name in self.cost.nodes)
        return {name: place for place, name in enumerate(names)}

    @cached_property
    def unit_of_calls(self) -> list[int]:
        """(P,) the unit of each call."""
        return [self.unit_of[name] for name in self.place_of]

    @cached_property
    def cost_of_calls(self) -> list[int]:
        """(P,) the number of each call's cost among the distinct ones."""
        column = {cost: index for index, cost in enumerate(self.distinct)}
        return [column[self.cost.nodes[name]] for name in self.place_of]

    @cached_property
    def is_selected(self) -> Floats:
        """(P,) 1 for each call that ``"selective"`` computes again, else 0."""
        return np.array([float(name in self.memory.selected) for name in self.place_of])

    @cached_property
    def is_recomputed(self) -> Floats:
        """(P,) 1 for each call that the backward computes again, with its messages, else 0."""
        return np.array([float(name in self.memory.recomputed - self.memory.selected) for name in self.place_of])

    def _count_calls(self, nodes: frozenset[str]) -> Floats:
        """Return (N, C) how many of the nodes are in each unit and have each distinct cost."""
        column = {cost: index for index, cost in enumerate(self.distinct)}
        calls = np.zeros((len(self.points.units), len(self.distinct)))
        for index, unit in enumerate(self.points.units):
            for name in unit:
                if name in nodes:
                    calls[index, column[self.cost.nodes[name]]] += 1
        return calls


@dataclass(frozen=True, eq=False)
class _Microbatch:
    """Prices units for one microbatch size, on some links; attributes as the arguments of ``UnitPricing.on``."""

    pricing: UnitPricing
    rows: int
    batch_size: int
    exchanges: tuple[tuple[Exchange, GroupLinks], ...]
    adding: bool
    fixed: tuple[Shared, ...]

    @cached_property
    def _numbers(self) -> Numbers:
        return self.pricing.numbers(self.rows)

    @cached_property
    def _share(self) -> float:
        """The factor of all formulas: 1, or this microbatch's fraction of the batch if the graph has a fixed batch size."""
        return 1.0 if self.pricing.graph.batch is not None else self.rows / self.batch_size

    @cached_property
    def _operations(self) -> Floats:
        return self.pricing.operations(self.rows, self._share)

    @cached_property
    def _repeated(self) -> Floats:
        return self.pricing.repeated(self.rows, self._share)

    @property
    def _is_alone(self) -> bool:
        """Whether the batch is one microbatch."""
        return self.rows >= self.batch_size

    @cached_property
    def times(self) -> MicrobatchTimes:
        """The seconds of units and their saved activations; recomputation is part of the input half of the backward."""
        pricing, (waiting, once, messages) = self.pricing, self._waiting()
        halves: Floats = np.einsum("nc,ckh->hnk", pricing.calls, self._operations)
        if pricing.recomputed_calls is not None:
            halves[1] += pricing.recomputed_calls @ self._operations[:, :, 0]
        if pricing.repeated_calls is not None:
            halves[1] += pricing.repeated_calls @ self._repeated
        waiting = waiting[:, :, None] + waiting_for_gathers(messages, pricing.unit_of_calls, self._seconds_of_calls, halves.shape[1])
        halves = halves + waiting
        if self.adding:
            halves[2] += pricing.accumulation * (1 - 1 / -(-self.batch_size // self.rows))  # the first microbatch adds to nothing
        kept = Amounts(tuple(item for item in pricing.kept(self.rows, self._share, alone=self._is_alone) if item.producer < 0))
        once = np.repeat(once[:, :, None], halves.shape[2], axis=2)
        casts, casts_once = self._casts(pricing.casts), self._casts(self._gathered_once)
        halves[0] -= casts_once
        halves[1] -= self._casts(self._gathered_once & pricing.memory.recomputed)
        once[0] += casts_once
        return MicrobatchTimes(halves, waiting, once, casts - casts_once, np.arange(halves.shape[1]), kept)

    def _casts(self, names: frozenset[str]) -> Floats:
        """Return (N, K) seconds of the forwards of some calls."""
        pricing = self.pricing
        seconds = np.zeros((len(pricing.points.units), len(pricing.kinds)))
        for name in names:
            seconds[pricing.unit_of[name]] += self._operations[pricing.cost_of_calls[pricing.place_of[name]], :, 0]
        return seconds

    @cached_property
    def _gathered_once(self) -> frozenset[str]:
        """The casts of parameters that ranks compute, and gather, before the first of several microbatches."""
        once = {each.value for each, _ in self.exchanges if each.is_stored and each.dimension in GATHERED_ONCE}
        return frozenset() if self._is_alone else self.pricing.casts & once

    @cached_property
    def _seconds_of_calls(self) -> Floats:
        """(2, P, K) seconds of the forward and the backward of each call of the units, in order; recomputation is part of the latter."""
        pricing = self.pricing
        each = self._operations[pricing.cost_of_calls]
        backward = each[:, :, 1:].sum(axis=2) + each[:, :, 0] * pricing.is_recomputed[:, None]
        backward += self._repeated[pricing.cost_of_calls] * pricing.is_selected[:, None]
        return np.stack([each[:, :, 0], backward])

    def _waiting(self) -> tuple[Floats, Floats, dict[int, Message]]:
        """Return (3, N) seconds that units wait for collectives of a microbatch, and (2, N) for those before all, and after all.

        The third are the collectives of stored parameters, which run while the ranks compute: place of the call that reads them -> seconds.
        Small parameters, which share a message, are waited for.

        A recomputed forward repeats the collectives that it needs: ``"selective"``, gathers alone.
        """
        pricing, numbers, share = self.pricing, self._numbers, self._share
        seconds, once = np.zeros((3, len(pricing.points.units))), np.zeros((2, len(pricing.points.units)))
        ahead: dict[int, Message] = {}
        known: dict[tuple[object, ...], tuple[float, float]] = {}
        for exchange, links in self.exchanges:
            kinds = exchange.forward, exchange.backward, exchange.regather
            key = (exchange.size, exchange.dimension, kinds, exchange.runs, exchange.is_stored, exchange.n_coalesced, exchange.wider)
            if key not in known:
                known[key] = exchange.seconds(numbers[exchange.size] * share, links, numbers[exchange.runs] * share)
            forward, backward = known[key]
            is_lost = exchange.forward == "all_gather" and pricing.memory.loses_gathers(exchange.reader)
            is_once = exchange.is_stored and exchange.dimension in GATHERED_ONCE
            is_repeated = exchange.reader in pricing.memory.recomputed
            if exchange.forward != "all_gather" and exchange.reader in pricing.memory.selected:
                is_repeated = False
            is_needed = not is_once and (is_lost or is_repeated)
            repeated = forward if is_needed and exchange.regather is None else 0.0
            is_scattered_once = is_once and exchange.dimension in SCATTERED_ONCE and exchange.forward == "all_gather"
            unit = pricing.unit_of[exchange.reader]
            runs_ahead = exchange.is_stored and not exchange.is_coalesced(numbers[exchange.size] * share, links)
            if runs_ahead and (self._is_alone or not is_once):
                regather = exchange.regathering(numbers[exchange.size] * share, links, numbers[exchange.runs] * share)
                message = Message(forward, regather + repeated, backward - regather, links.ring.host_share)
                place = pricing.place_of[exchange.reader]
                ahead[place] = ahead[place] + message if place in ahead else message
                continue
            (once if is_once and not self._is_alone else seconds)[0, unit] += forward
            if is_scattered_once and not self._is_alone:
                once[1, unit] += backward
                seconds[2, unit] += exchange.casting(numbers[exchange.size] * share, links)  # of each microbatch, to be added to others
            else:
                seconds[1, unit] += backward + repeated
        return seconds, once, ahead

    @cached_property
    def costs(self) -> MicrobatchCosts:
        """All costs of units, for the stage cutter."""
        pricing, numbers, share = self.pricing, self._numbers, self._share
        flops = np.array([numbers[cost.forward.flops] * share for cost in pricing.distinct])
        forward = dict(zip(pricing.distinct, self._operations[:, :, 0].tolist(), strict=True))
        replicated = ((tuple(forward[pricing.cost.nodes[name]]), units) for name, units in pricing.points.replicated.items() if units)
        alone = self._is_alone
        kept = pricing.kept(self.rows, share, alone=alone)
        working = pricing.memory.working(numbers, share, kept, alone=alone)
        summed_at_end, summed_in_backward = pricing.summed
        units = Units(
            time=self.times.halves.sum(axis=0),
            values=tuple(self._values()),
            replicated=tuple(replicated),
            fixed=self.fixed if alone else (*pricing.memory.gathered, *self.fixed),
            kept=kept,
            depth=np.array(pricing.points.depth, dtype=np.int64),
            gradients=pricing.memory.gradients if alone else pricing.memory.added,
            summed=summed_at_end,
            working=replace(working, summed=summed_in_backward),
        )
        return MicrobatchCosts(self.times.halves, pricing.calls @ flops, units)

    def _values(self) -> Iterator[Value]:
        """Yield the values that cross between units."""
        for value in self.pricing.points.values:
            size = round(self._numbers[self.pricing.cost.bytes[value.node]] * self._share)
            yield Value(value.producer, value.readers, size, size if value.node in self.pricing.cost.gradients else 0)

    @cached_property
    def limits(self) -> Floats:
        """(3, N, K) seconds of each unit's calls by their bottleneck, one of ``LIMITS``: that which takes longest alone."""
        pricing, numbers, share = self.pricing, self._numbers, self._share
        seconds = np.zeros((len(pricing.distinct), len(pricing.kinds), len(LIMITS)))
        for (index, cost), (kind, device) in itertools.product(enumerate(pricing.distinct), enumerate(pricing.kinds)):
            for work in (cost.forward, cost.backward_input, cost.backward_weight):
                arithmetic, traffic = numbers[work.flops] * share / device.flops(cost.dtype), numbers[work.bytes] * share / device.bandwidth
                by_limit = (arithmetic, traffic, work.launches * device.launch_overhead)
                seconds[index, kind, by_limit.index(max(by_limit))] += max(by_limit)
        limits: Floats = np.einsum("nc,ckl->lnk", pricing.calls, seconds)
        return limits
