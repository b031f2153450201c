"""What the units of a model cost at one microbatch size: the numbers of a ``StageProblem`` that do not depend on the schedule."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

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
from partitioner.planner.costs.time_fractions import TimeFractions
from partitioner.planner.solvers.boundaries import Gathered, Parted
from partitioner.planner.solvers.stage_problem import Floats, Integers, Shared, Units, Value, Working
from passes.autograd.recompute import Recompute
from passes.ir.graph import ModelGraph

__all__ = ["PriceList", "Prices", "Triple", "UnitPrices", "held_everywhere"]

Triple = tuple[float, float, float]
"""Forward, input half and weight half of the backward."""


@dataclass(frozen=True)
class UnitPrices:
    """N units, K kinds of stages, one microbatch.

    A kind is a device with how many ranks share a stage on it. Bytes are the same for all kinds, or one number for each (``Shared``).

    Attributes:
        halves: (3, N, K) seconds of the forward, and of the input and weight halves of the backward.
        replicated: (seconds of each kind, units), forward only.
        values: what crosses between units.
        fixed: bytes held all the time.
        kept: bytes held for each microbatch in flight.
        flops: (N,) of the forward; (N, K) where kinds differ.
        depth: (N,) how many modules a cut in front of each unit goes through.
        gradients: bytes held from the first backward on.
        summed: bytes of gradients that are there twice at once, at most.
        working: what units hold while they compute, one for each kind where these differ.
        gathered: what a stage makes whole before it sends it.
        parted: what it reads in parts, and makes the gradient whole of.
    """

    halves: Floats
    replicated: tuple[tuple[tuple[float, ...], tuple[int, ...]], ...]
    values: tuple[Value, ...]
    fixed: tuple[Shared, ...]
    kept: tuple[Shared, ...]
    flops: Floats
    depth: Integers
    gradients: tuple[Shared, ...]
    summed: float
    working: Working | tuple[Working, ...]
    gathered: tuple[Gathered, ...] = ()
    parted: tuple[Parted, ...] = ()

    @cached_property
    def units(self) -> Units:
        """The same for the stage cutter."""
        of_memory = (self.fixed, self.kept, self.depth, self.gradients, self.summed, self.working)
        return Units(self.halves.sum(axis=0), self.values, self.replicated, *of_memory, gathered=self.gathered, parted=self.parted)

    def flops_of(self, run: range, kind: int) -> float:
        """Of the forward of a run of units in a stage of a kind."""
        flops = self.flops if self.flops.ndim == 1 else self.flops[:, kind]
        return float(flops[run.start : run.stop].sum())


class Prices(Protocol):
    """Prices of the units of a model: ``PriceList``, or those of a folded model, repeated. A kind is a place in ``kinds``."""

    recompute: Recompute
    kinds: tuple[Device, ...]

    def at(self, microbatch_size: int) -> UnitPrices:
        """The prices for microbatches of so many rows."""

    def halves(self, microbatch_size: int) -> Floats:
        """(3, N, K) seconds of each unit for microbatches of so many rows, as ``UnitPrices`` has them."""

    def times(self, microbatch_size: int) -> Floats:
        """(N, K) the same, forward and backward together."""

    def least_shares(self, microbatch_size: int) -> TimeFractions:
        """What parts forward and backward have of the time of the units that take time."""

    def least_kept(self, microbatch_size: int) -> float:
        """Bytes that all stages together keep for a microbatch of so many rows, wherever they are cut."""

    def kept_alone(self, microbatch_size: int) -> Sequence[Shared]:
        """What is kept for a microbatch of so many rows, whether or not it is received."""

    @property
    def fixed(self) -> tuple[Shared, ...]:
        """What stages hold all the time."""

    @property
    def fixed_bytes(self) -> float:
        """Bytes that all stages together hold all the time, what they share once: at least, whatever their kinds are."""

    @property
    def gradients(self) -> tuple[Shared, ...]:
        """What stages hold from their first backward on."""

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients that all stages together hold at the end of a step, what they share once: at least."""

    def starting(self) -> Floats:
        """(N, K) seconds that it takes to start the kernels of each unit."""

    def users(self, placeholder: str) -> tuple[int, ...]:
        """The units that read a placeholder, in order."""

    def held_bytes(self, placeholder: str, kind: int = 0) -> int:
        """Bytes that a rank of a stage holds of a parameter, buffer or constant."""

    def limit_of(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> str:
        """What most of the time of some units goes into."""

    def exchanging(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> float:
        """Seconds that some units wait for the other ranks of their stage."""


def held_everywhere(size: float, n_units: int) -> tuple[Shared, ...]:
    """Return what every stage holds once, whatever its units."""
    return (Shared(size, tuple(range(n_units))),) if size else ()


class PriceList:
    """Prices the units of a model at any microbatch size.

    A graph that serves one batch size alone is priced as if all its work and bytes were in proportion to the batch.

    Args:
        graph: the model.
        cost: its formulas.
        points: its units.
        kinds: the kinds of devices.
        cost_model: turns work into seconds.
        optimizer: whose state is held for every parameter that trains.
        recompute: what the backward computes again instead of keeping it.
        exchanges: communication between the ranks that share a stage, of each microbatch, and the links between them.
        known_seconds: of operations on a kind of device, by microbatch size: shared with other lists of the same cost model.
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
        recompute: Recompute = "none",
        exchanges: Sequence[tuple[Exchange, GroupLinks]] = (),
        known_seconds: dict[Hashable, Triple] | None = None,
        summed: tuple[float, float] = (0.0, 0.0),
        is_cut: bool = False,
    ) -> None:
        self._graph, self._cost, self._points, self._cost_model = graph, cost, points, cost_model
        self.recompute: Recompute = recompute
        self.kinds = tuple(kinds)
        self._known: dict[int, UnitPrices] = {}
        self._known_times: dict[int, tuple[Floats, Floats]] = {}
        self._known_kept: dict[int, list[Shared]] = {}
        self._known_numbers: dict[int, Numbers] = {}
        self._known_operations: dict[tuple[int, float], Floats] = {}
        self._unit_of = points.unit_of
        self._policy: Recompute = recompute if cost.gradients else "none"  # a forward alone computes nothing again
        self._memory = UnitMemory(graph, cost, points, optimizer, self._policy)
        self._again = self._memory.again
        self._exchanges = tuple(pair for pair in exchanges if pair[0].reader in self._unit_of)
        self._known_seconds = {} if known_seconds is None else known_seconds
        self._value_sizes = {value.node: cost.bytes[value.node] for value in points.values}
        self._distinct = tuple(dict.fromkeys(cost.nodes.values()))
        self._calls = self._count_calls()
        self._summed, self._summed_meanwhile = summed
        self._is_cut = is_cut
        self._receives_results = False

    def on(
        self, graph: ModelGraph, exchanges: Sequence[tuple[Exchange, GroupLinks]], *, adding: bool = True, n_stages: int = 1
    ) -> PriceList:
        """Price a rank's part of another batch, on other links.

        Args:
            adding: whether microbatches add their gradients to those of earlier ones.
            n_stages: how many stages the units are cut into: each receives the results of a forward.
        """
        other = copy.copy(self)
        mine = tuple(pair for pair in exchanges if pair[0].reader in self._unit_of)
        vars(other).update(_graph=graph, _exchanges=mine, _known={}, _known_times={}, _receives_results=n_stages > 1)
        if not adding:
            vars(other).update(_adding=np.zeros((len(self._points.units), len(self.kinds))))
        return other

    def at(self, microbatch_size: int) -> UnitPrices:
        """The prices for microbatches of so many rows."""
        if microbatch_size not in self._known:
            self._known[microbatch_size] = self._priced(microbatch_size)
        return self._known[microbatch_size]

    def _numbers(self, microbatch_size: int) -> Numbers:
        """The formulas of the part, each worked out once for all links."""
        return self._known_numbers.setdefault(microbatch_size, Numbers(microbatch_size))

    def halves(self, microbatch_size: int) -> Floats:
        """(3, N, K) seconds of each unit, for microbatches of so many rows."""
        return self._timed(microbatch_size)[1]

    def times(self, microbatch_size: int) -> Floats:
        """(N, K) seconds of each unit, forward and backward, for microbatches of so many rows."""
        times: Floats = self.halves(microbatch_size).sum(axis=0)
        return times

    def least_shares(self, microbatch_size: int) -> TimeFractions:
        """What parts forward and backward have of the time of the units that take time."""
        return TimeFractions.of(self.halves(microbatch_size))

    def least_kept(self, microbatch_size: int) -> float:
        """Bytes that all stages together keep for a microbatch of so many rows, wherever they are cut."""
        return float(sum(item.least for item in self.kept_alone(microbatch_size)))

    def kept_alone(self, microbatch_size: int) -> list[Shared]:
        """What is kept for a microbatch of so many rows, whether or not it is received."""
        if microbatch_size not in self._known_kept:
            numbers, share = self._numbers(microbatch_size), self._share(microbatch_size)
            self._known_kept[microbatch_size] = [item for item in self._memory.kept(numbers, share) if item.producer < 0]
        return self._known_kept[microbatch_size]

    @property
    def fixed(self) -> tuple[Shared, ...]:
        """What stages hold all the time."""
        return (*self.fixed_apart, *held_everywhere(self.results_bytes, len(self._points.units)))

    @property
    def fixed_apart(self) -> tuple[Shared, ...]:
        """What stages hold all the time, but for the results that each of them has."""
        return (*self._memory.fixed, *self._memory.given(self._numbers(self._graph.batch_size)))

    @property
    def results_bytes(self) -> float:
        """Bytes of the results of a forward alone, which every stage of several receives for the whole batch."""
        if self._cost.gradients or not self._receives_results:
            return 0.0
        numbers = self._numbers(self._graph.batch_size)
        return float(sum(numbers[self._cost.allocation_bytes[key]] for key in self._cost.returned))

    @property
    def fixed_bytes(self) -> float:
        """Bytes that all stages together hold all the time, what they share once."""
        return float(sum(item.least for item in self.fixed))

    @property
    def gradients(self) -> tuple[Shared, ...]:
        """What stages hold from their first backward on."""
        return self._memory.gradients

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients that all stages together hold at the end of a step, what they share once."""
        return float(sum(item.least for item in self._memory.gradients))

    def _timed(self, microbatch_size: int) -> tuple[Floats, Floats]:
        """(C, K, 3) seconds of each distinct operation; (3, N, K) of each unit."""
        if microbatch_size not in self._known_times:
            numbers, share = self._numbers(microbatch_size), self._share(microbatch_size)
            seconds = self._operations(numbers, share)
            halves = self._halves(seconds) + self._exchanging(numbers, share)[:, :, None]
            halves[2] += self._adding * (1 - 1 / -(-self._graph.batch_size // microbatch_size))
            self._known_times[microbatch_size] = seconds, halves
        return self._known_times[microbatch_size]

    @cached_property
    def _adding(self) -> Floats:
        """(N, K) seconds that gradients of parameters are added to those of earlier microbatches: two are read, one is written."""
        size = np.zeros(len(self._points.units))
        for item in self._memory.gradients:
            size[list(item.units)] += item.most
        works = [Work(0, 3 * each, 0) for each in size.tolist()]
        return np.array([[self._cost_model.operation_time(work, kind, torch.float32) for kind in self.kinds] for work in works])

    def _operations(self, numbers: Numbers, share: float) -> Floats:
        """(C, K, 3) seconds of each distinct operation, worked out once for all links."""
        key = (numbers.batch_size, share)
        if key not in self._known_operations:
            seconds = [[self._seconds(cost, kind, numbers, share) for kind in self.kinds] for cost in self._distinct]
            self._known_operations[key] = np.array(seconds)
        return self._known_operations[key]

    def _priced(self, microbatch_size: int) -> UnitPrices:
        numbers, share = self._numbers(microbatch_size), self._share(microbatch_size)
        seconds, halves = self._timed(microbatch_size)
        flops = np.array([numbers[cost.forward.flops] * share for cost in self._distinct])
        forward = dict(zip(self._distinct, seconds[:, :, 0].tolist(), strict=True))
        kept, alone = self._memory.kept(numbers, share), microbatch_size >= self._graph.batch_size
        # Stages that communicate are written out in their programs, and so are the last backwards of those whose gradients are summed.
        called = not self._is_cut or not (alone or self._exchanges)
        return UnitPrices(
            halves=halves,
            replicated=tuple((tuple(forward[self._cost.nodes[name]]), units) for name, units in self._points.replicated.items() if units),
            values=self._values(numbers, share),
            fixed=self.fixed,
            kept=kept,
            flops=self._calls @ flops,
            depth=np.array(self._points.depth, dtype=np.int64),
            gradients=self._memory.gradients,
            summed=self._summed,
            working=replace(self._memory.working(numbers, share, kept, alone=alone, called=called), summed=self._summed_meanwhile),
        )

    def _halves(self, seconds: Floats) -> Floats:
        """(3, N, K) seconds; the input half of the backward first computes again what was not kept."""
        halves: Floats = np.einsum("nc,ckh->hnk", self._calls, seconds)
        if self._again:
            halves[1] += self._count_calls(self._again) @ seconds[:, :, 0]
        return halves

    def exchanging(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> float:
        """Seconds that some units wait for the other ranks of their stage, forward and backward."""
        seconds = self._exchanging(self._numbers(microbatch_size), self._share(microbatch_size))
        return float(seconds[:, list(units)].sum())

    def _exchanging(self, numbers: Numbers, share: float) -> Floats:
        """(3, N) seconds that units wait for the other ranks of their stage; recomputation exchanges once more what it needs."""
        seconds = np.zeros((3, len(self._points.units)))
        known: dict[tuple[object, ...], tuple[float, float]] = {}
        for exchange, links in self._exchanges:
            kinds = exchange.forward, exchange.backward, exchange.again
            key = (exchange.size, exchange.dimension, kinds, exchange.runs, exchange.held, exchange.together)
            if key not in known:
                known[key] = exchange.seconds(numbers[exchange.size] * share, links, numbers[exchange.runs] * share)
            forward, backward = known[key]
            gathers = exchange.forward == "all_gather" and self._policy != "none"
            anew = exchange.again is None and (gathers or exchange.reader in self._again)  # else the backward has it already
            again = forward if anew else 0.0
            seconds[0, self._unit_of[exchange.reader]] += forward
            seconds[1, self._unit_of[exchange.reader]] += backward + again
        return seconds

    def _count_calls(self, only: frozenset[str] | None = None) -> Floats:
        """(N, C) how often each unit holds an operation of each distinct price; of some nodes alone."""
        place = {cost: index for index, cost in enumerate(self._distinct)}
        calls = np.zeros((len(self._points.units), len(self._distinct)))
        for index, unit in enumerate(self._points.units):
            for name in unit:
                if only is None or name in only:
                    calls[index, place[self._cost.nodes[name]]] += 1
        return calls

    def users(self, placeholder: str) -> tuple[int, ...]:
        """The units that read a placeholder, in order."""
        return self._memory.users(placeholder)

    def starting(self) -> Floats:
        """(N, K) seconds that it takes to start the kernels of each unit, forward and backward, whatever their work."""
        sizes = self._numbers(self._graph.batch_size)
        seconds = [[sum(call_seconds(cost, kind, self._cost_model, sizes, share=0.0)) for kind in self.kinds] for cost in self._distinct]
        started: Floats = self._calls @ np.array(seconds)
        return started

    def held_bytes(self, placeholder: str, kind: int = 0) -> int:
        """Bytes that a rank holds of a parameter, buffer or constant."""
        return self._memory.held_bytes(placeholder)

    def limit_of(self, units: Iterable[int], microbatch_size: int, kind: int = 0) -> str:
        """What most of the time of some units goes into."""
        device = self.kinds[kind]
        values, share = self._numbers(microbatch_size), self._share(microbatch_size)
        seconds = {"arithmetic": 0.0, "memory traffic": 0.0, "starting kernels": 0.0}
        for cost in (self._cost.nodes[name] for unit in units for name in self._points.units[unit]):
            for work in (cost.forward, cost.backward_input, cost.backward_weight):
                parts = (
                    values[work.flops] * share / device.flops(cost.dtype),
                    values[work.bytes] * share / device.bandwidth,
                    work.launches * device.launch_overhead,
                )
                largest = max(range(len(parts)), key=lambda part: parts[part])
                seconds[list(seconds)[largest]] += parts[largest]
        return max(seconds, key=lambda name: seconds[name])

    def _share(self, microbatch_size: int) -> float:
        return 1.0 if self._graph.batch is not None else microbatch_size / self._graph.batch_size

    def _seconds(self, cost: OperationCost, device: Device, values: Numbers, share: float) -> Triple:
        key = (cost, device, values.batch_size, share)
        if key not in self._known_seconds:
            self._known_seconds[key] = call_seconds(cost, device, self._cost_model, values, share)
        return self._known_seconds[key]

    def _values(self, values: Numbers, share: float) -> tuple[Value, ...]:
        crossing = []
        for value in self._points.values:
            size = round(values[self._value_sizes[value.node]] * share)
            gradient = size if value.node in self._cost.gradients else 0
            crossing.append(Value(value.producer, value.readers, size, gradient))
        return tuple(crossing)
