"""Price the units of one rank's shard of a model: from formulas of its calls to the tables of ``unit_costs``."""

from __future__ import annotations

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
from partitioner.planner.costs.collectives import Exchange, GradientSum
from partitioner.planner.costs.cut_points import CutPoints, Expansion
from partitioner.planner.costs.memory.activation_memory import UnitMemory
from partitioner.planner.costs.overlap.call_order import CallOrder
from partitioner.planner.costs.overlap.messages import Activation, GradientOfCall, Repeat, Stored
from partitioner.planner.costs.overlap.waits import CallSeconds, waiting_for_messages
from partitioner.planner.costs.unit_costs import Amounts, MicrobatchCosts, MicrobatchTimes, UnitCosts, seconds_by_limit
from partitioner.planner.solvers.stage_memory import Floats
from partitioner.planner.solvers.stage_problem import Shared, Units, Value
from passes.autograd.recompute import Recompute
from passes.ir.graph import ModelGraph
from passes.ir.mesh import GATHERED_ONCE, SCATTERED_ONCE
from passes.ir.plan import Region

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
        expansion: how the units repeat; None: the graph is not folded.
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
        expansion: Expansion | None = None,
    ) -> None:
        self.graph, self.cost, self.points, self.cost_model = graph, cost, points, cost_model
        self.kinds, self._recompute = tuple(kinds), recompute
        self.summed, self.is_cut = summed, is_cut
        self.policy: Recompute = recompute if cost.gradients else "none"  # a forward alone recomputes nothing
        self.memory = UnitMemory(graph, cost, points, optimizer, self.policy, regions)
        self.unit_of, self.order = points.unit_of, CallOrder(graph, cost, points, self.memory, expansion)
        self.recomputed = {name: self._recomputed_cost(name) for name in cost.nodes if name in self.memory.recomputed}
        self.distinct = tuple(dict.fromkeys((*cost.nodes.values(), *self.recomputed.values())))
        self._column = {cost: index for index, cost in enumerate(self.distinct)}
        self.calls = self._count_calls(cost.nodes)
        self.recomputed_calls = self._count_calls(self.recomputed) if self.recomputed else None
        self.numbers, self._known_seconds, self.expansion = cache(Numbers), known_seconds, expansion
        self._known_operations: dict[tuple[int, float], Floats] = {}
        self._known_kept: dict[tuple[int, float, bool], tuple[Shared, ...]] = {}

    def on(
        self,
        batch_size: int,
        exchanges: Sequence[tuple[Exchange, GroupLinks]],
        users: Mapping[str, tuple[int, ...]],
        held_bytes: Mapping[str, int],
        *,
        sums: Sequence[tuple[GradientSum, GroupLinks]] = (),
        adding: bool = True,
        n_stages: int = 1,
        is_run_whole: bool = False,
    ) -> UnitCosts:
        """Return the costs on some links.

        Args:
            batch_size: samples of a rank.
            exchanges: the collectives of each microbatch, with the links between the ranks that share a stage.
            users, held_bytes: as in ``UnitCosts``, for one kind.
            sums: the gradients that are summed once a step, with the links between the ranks that sum them.
            adding: whether microbatches add their gradients to those of earlier ones.
            n_stages: number of stages; if several, each receives the results of a forward.
            is_run_whole: whether calls wait as in all copies of a repeated block: exact, but a few copies take less time.
        """
        numbers, returned = self.numbers(batch_size), self.cost.returned if n_stages > 1 and not self.cost.gradients else ()
        size = float(sum(numbers[self.cost.allocation_bytes[key]] for key in returned))
        results = (Shared(size, tuple(range(len(self.points.units)))),) if size else ()
        fixed = (*self.memory.fixed, *self.memory.inputs(numbers))
        in_units = tuple(pair for pair in exchanges if pair[0].reader in self.unit_of)
        once = tuple(sums) if n_stages == 1 else ()
        repeat = self.order.repeat
        copies = None if repeat is None else repeat._replace(is_run_whole=is_run_whole)
        at = cache(lambda rows: _Microbatch(self, rows, batch_size, in_units, once, adding, (*fixed, *results), n_stages, copies))
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
            summing=lambda rows: at(rows).summing,
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
    def cost_of_calls(self) -> list[int]:
        """(P,) the number of each call's cost among the distinct ones."""
        return [self._column[self.cost.nodes[name]] for name in self.order.place_of]

    @cached_property
    def cost_of_recomputed_calls(self) -> dict[int, int]:
        """Place of a call that the backward computes again -> the number of that cost among the distinct ones."""
        return {place: self._column[self.recomputed[name]] for name, place in self.order.place_of.items() if name in self.recomputed}

    def _recomputed_cost(self, name: str) -> OperationCost:
        """Return the cost of a call whose forward is what the backward computes again."""
        cost = self.cost.nodes[name]
        if cost.repeated is None:
            return cost
        if name in self.memory.selected:
            return replace(cost, forward=cost.repeated.result)
        return replace(cost, forward=cost.repeated.statistics if name in self.memory.unread else cost.repeated.both)

    def _count_calls(self, costs: Mapping[str, OperationCost]) -> Floats:
        """Return (N, C) how many of the nodes are in each unit and have each distinct cost."""
        calls = np.zeros((len(self.points.units), len(self.distinct)))
        for index, unit in enumerate(self.points.units):
            for name in unit:
                if name in costs:
                    calls[index, self._column[costs[name]]] += 1
        return calls


@dataclass(frozen=True, eq=False)
class _Microbatch:
    """Prices units for one microbatch size, on some links; attributes as the arguments of ``UnitPricing.on``."""

    pricing: UnitPricing
    rows: int
    batch_size: int
    exchanges: tuple[tuple[Exchange, GroupLinks], ...]
    sums: tuple[tuple[GradientSum, GroupLinks], ...]
    adding: bool
    fixed: tuple[Shared, ...]
    n_stages: int
    repeat: Repeat | None

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

    @property
    def _is_alone(self) -> bool:
        """Whether the batch is one microbatch."""
        return self.rows >= self.batch_size

    @cached_property
    def times(self) -> MicrobatchTimes:
        """The seconds of units and their saved activations; recomputation is part of the input half of the backward."""
        pricing, (waiting, once, _) = self.pricing, self._messages
        halves: Floats = np.einsum("nc,ckh->hnk", pricing.calls, self._operations)
        if pricing.recomputed_calls is not None:
            halves[1] += pricing.recomputed_calls @ self._operations[:, :, 0]
        waiting = waiting[:, :, None] + self._waits
        halves = halves + waiting
        expansion = pricing.expansion
        halves[1, -1] += self._loss / (expansion.count if expansion is not None and expansion.stop == len(pricing.points.units) else 1)
        for place, each in self._casting.items():
            halves[2, pricing.order.unit_of_calls[place]] += each
        if self.adding:
            halves[2] += pricing.accumulation * (1 - 1 / -(-self.batch_size // self.rows))  # the first microbatch adds to nothing
        kept = Amounts(tuple(item for item in pricing.kept(self.rows, self._share, alone=self._is_alone) if item.producer < 0))
        once = np.repeat(once[:, :, None], halves.shape[2], axis=2)
        casts, casts_once = self._casts(pricing.order.casts), self._casts(self._gathered_once)
        halves[0] -= casts_once
        halves[1] -= self._casts(self._gathered_once & pricing.memory.recomputed)
        once[0] += casts_once
        return MicrobatchTimes(halves, waiting, once, casts - casts_once, np.arange(halves.shape[1]), kept)

    @property
    def _loss(self) -> Floats:
        """(K,) seconds of a loss function, which reads the results and writes their gradients; none in a forward alone."""
        pricing, results = self.pricing, [node.name for node in self.pricing.graph.graph.output_node().all_input_nodes]
        differentiated = [name for name in results if name in pricing.cost.gradients]
        if not differentiated:
            return np.zeros(len(pricing.kinds))
        moved = sum(self._numbers[pricing.cost.bytes[name]] for name in (*results, *differentiated)) * self._share
        work, dtype = Work(0, moved, 1 + len(differentiated)), pricing.order.dtypes.get(results[0], torch.float32)
        return np.array([pricing.cost_model.operation_time(work, kind, dtype) for kind in pricing.kinds])

    def _casts(self, names: frozenset[str]) -> Floats:
        """Return (N, K) seconds of the forwards of some calls."""
        pricing = self.pricing
        seconds = np.zeros((len(pricing.points.units), len(pricing.kinds)))
        for name in names:
            seconds[pricing.unit_of[name]] += self._operations[pricing.cost_of_calls[pricing.order.place_of[name]], :, 0]
        return seconds

    @cached_property
    def _gathered_once(self) -> frozenset[str]:
        """The casts of parameters that ranks compute, and gather, before the first of several microbatches."""
        once = {each.value for each, _ in self.exchanges if each.is_stored and each.dimension in GATHERED_ONCE}
        return frozenset() if self._is_alone else self.pricing.order.casts & once

    @cached_property
    def summing(self) -> Floats:
        """(N, K) seconds by which units wait longer because gradients are summed while the backward of the only microbatch computes."""
        pricing = self.pricing
        sums = [
            GradientOfCall(pricing.order.first_readers[each.parameter], each.parameter, each.dimension, each.size, each.held, links)
            for each, links in self.sums
            if each.parameter in pricing.order.first_readers
        ]
        longer: Floats = (self._waiting(sums) - self._waits).sum(axis=0)
        return longer

    @cached_property
    def _waits(self) -> Floats:
        return self._waiting(())

    def _waiting(self, sums: Sequence[GradientOfCall], *, is_split: bool = False) -> Floats:
        """Return (3, N, K) seconds that units wait for collectives which run while ranks compute, in the halves of ``times``.

        Unless backwards are split, an input half waits for both.
        """
        pricing, (_, _, (stored, activations)) = self.pricing, self._messages
        count = -(-self.batch_size // self.rows)
        is_run = bool(stored or activations or sums)
        waiting = np.zeros((3, len(pricing.points.units), len(pricing.kinds)))
        each, casting = self._operations[pricing.cost_of_calls], np.zeros((len(pricing.order.place_of), len(pricing.kinds)))
        again = np.zeros_like(casting)
        for place, column in pricing.cost_of_recomputed_calls.items():
            again[place] = self._operations[column, :, 0]
        for place, seconds in self._casting.items():
            casting[place] = seconds
        for kind in range(len(pricing.kinds)) if is_run else ():
            columns = (*np.moveaxis(each[:, kind], 1, 0), casting[:, kind], again[:, kind])
            seconds_of_calls = CallSeconds(*(column.tolist() for column in columns))
            rest = (seconds_of_calls, pricing.order.first_halves, pricing.order.needed, self.repeat)
            of_calls = waiting_for_messages(
                stored, activations, sums, *rest, n_microbatches=count, n_stages=self.n_stages, is_split=is_split
            )
            for half, of_half in enumerate(of_calls):
                np.add.at(waiting[half, :, kind], pricing.order.unit_of_calls, of_half)
        return waiting

    @cached_property
    def _casting(self) -> dict[int, Floats]:
        """Place of a call -> (K,) seconds in which the gradients of its parameters are cast to the type in which ranks sum them."""
        pricing, found = self.pricing, dict[int, Floats]()
        for exchange, _ in self.exchanges:
            if exchange.is_stored and exchange.forward == "all_gather" and exchange.backward is not None and exchange.wider != 1.0:
                work = Work(0, self._numbers[exchange.size] * self._share * (1 + exchange.wider), 1)
                seconds = [pricing.cost_model.operation_time(work, kind, torch.float32) for kind in pricing.kinds]
                place = pricing.order.place_of[exchange.reader]
                found[place] = found.get(place, 0.0) + np.array(seconds)
        return found

    @cached_property
    def _messages(self) -> tuple[Floats, Floats, tuple[list[Stored], list[Activation]]]:
        """The collectives of a microbatch: seconds in which nothing else happens, and those that run while ranks compute.

        The first are (3, N) seconds of units; the second (2, N) those before all microbatches, and after all. Of several stages, the small
        parameters of each share messages, which are waited for; those of their gradients are not.

        A recomputed forward repeats the collectives that it needs: ``"selective"``, gathers alone.
        """
        pricing, numbers, share = self.pricing, self._numbers, self._share
        seconds, once = np.zeros((3, len(pricing.points.units))), np.zeros((2, len(pricing.points.units)))
        stored, activations = list[Stored](), list[Activation]()
        for exchange, links in self.exchanges:
            size, runs = numbers[exchange.size] * share, numbers[exchange.runs] * share
            forward, backward = exchange.seconds(size, links, runs)
            unit = pricing.unit_of[exchange.reader]
            is_once = exchange.is_stored and exchange.dimension in GATHERED_ONCE
            if exchange.forward == "all_gather":
                is_recomputed = exchange.reader in pricing.memory.recomputed
            else:
                is_recomputed = pricing.memory.is_received_again(exchange.value, exchange.reader)
            is_repeated = is_recomputed and not (is_once or exchange.is_returned)
            is_of_step = is_once and not self._is_alone
            is_small = exchange.is_stored and exchange.is_coalesced(size, links)
            if not exchange.is_stored or exchange.forward != "all_gather":
                regather = pricing.order.regather(exchange, size, int(runs > 1), is_recomputed=is_repeated)
                backward += 0.0 if regather is not None else is_repeated * forward
                place, maker = pricing.order.place_of[exchange.reader], pricing.order.maker_of(exchange)
                activations.append(Activation(place, exchange.dimension, forward, backward, links, exchange.is_beside, regather, maker))
            elif is_of_step and exchange.dimension in SCATTERED_ONCE:
                once[:, unit] += forward, backward
            else:
                is_waited = is_small and not is_of_step and self.n_stages > 1
                if is_waited:
                    seconds[0, unit] += forward
                    seconds[1, unit] += exchange.regathering(size, links, runs) + (is_repeated and exchange.regather is None) * forward
                messages = size, links, int(runs > 1)
                stored.append(pricing.order.stored(exchange, *messages, again=is_repeated, is_there=is_of_step or is_waited))
                once[0, unit] += is_of_step * forward
        return seconds, once, (stored, activations)

    @cached_property
    def costs(self) -> MicrobatchCosts:
        """All costs of units, for the stage cutter."""
        pricing, numbers, share = self.pricing, self._numbers, self._share
        flops = np.array([numbers[cost.forward.flops] * share for cost in pricing.distinct])
        forward = dict(zip(pricing.distinct, self._operations[:, :, 0].tolist(), strict=True))
        replicated = ((tuple(forward[pricing.cost.nodes[name]]), units) for name, units in pricing.points.replicated.items() if units)
        alone = self._is_alone
        kept = pricing.kept(self.rows, share, alone=alone)
        working = pricing.memory.working(numbers, share, kept, alone=alone, n_stages=self.n_stages)
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
        apart = self._waiting((), is_split=True)[1:] - self._waits[1:] if self.n_stages > 1 else np.zeros_like(self._waits[1:])
        return MicrobatchCosts(self.times.halves, pricing.calls @ flops, units, apart)

    def _values(self) -> Iterator[Value]:
        """Yield the values that cross between units."""
        for value in self.pricing.points.values:
            size = round(self._numbers[self.pricing.cost.bytes[value.node]] * self._share)
            yield Value(value.producer, value.readers, size, size if value.node in self.pricing.cost.gradients else 0)

    @cached_property
    def limits(self) -> Floats:
        """(3, N, K) seconds of each unit's calls by their bottleneck, one of ``LIMITS``: that which takes longest alone."""
        pricing, facts = self.pricing, (self._numbers, self._share)
        seconds = np.array([[seconds_by_limit(cost, device, *facts) for device in pricing.kinds] for cost in pricing.distinct])
        limits: Floats = np.einsum("nc,ckl->lnk", pricing.calls, seconds)
        return limits
