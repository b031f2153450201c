"""Seconds that calls wait for collectives which run while ranks compute: by the clock of the simulator, one rank's microbatch.

forward     links        gather w1 ====  gather w2 ====     gather w3 =====
            computing                   call 1 ########     call 2 ###     call 3 #######
                                                                      |---|  call 3 waits: its gather began with call 2

backward    links        gather w2 ====  scatter dw3 ====  gather w1 ====  scatter dw2 ====
            computing    call 3 ########  call 2 ##########               call 1 ########
                                                                 |-------|

The order is that of programs (``overlap_collectives`` and ``coalesce_collectives`` in ``passes.emit``): parameters are gathered one message
ahead of their use; a scatter or a sum starts when its last gradient is there, and at most two are under way; a gradient that is scattered
over one mesh dimension is summed over another one after that; small parameters share messages. Messages of one mesh dimension follow each
other, those of several share links. A matrix product computes each gradient by a kernel of its own, and messages run beside the second:

    y = x w       dw | dx      dw is scattered while dx is computed; w is gathered for dx
    y = x w + b   dx | dw      dx is reduced while dw is computed

A folded model has a repeated block once: it is run three times or more, so that the waits of its copies are those of a long model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from cost_models.collectives.algorithms import Collective, GroupLinks
from cost_models.simulator.contention import Passage
from cost_models.simulator.events import run_ranks
from cost_models.simulator.read_program import RankWork
from cost_models.simulator.tasks import Step, Transfer
from partitioner.planner.solvers.stage_memory import Floats
from passes.emit.coalesce_collectives import ALONE_BYTES, BUNDLE_BYTES, bytes_of_bundle
from passes.emit.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from passes.emit.overlap_collectives import MOST_UNDER_WAY

__all__ = ["Activation", "CallSeconds", "FirstHalf", "GradientOfCall", "Repeat", "Stored", "waiting_for_messages"]


FirstHalf: TypeAlias = Literal["", "activation", "weight"]
"""``OperationCost.first_half``."""


class CallSeconds(NamedTuple):
    """Seconds of P calls, (P,) each.

    Attributes:
        forward: of the forward.
        of_input, of_weight: of the halves of the backward.
        casting: of casts of gradients of parameters to the type in which ranks sum them.
        again: of the recomputation.
    """

    forward: Sequence[float]
    of_input: Sequence[float]
    of_weight: Sequence[float]
    casting: Sequence[float]
    again: Sequence[float]


class Repeat(NamedTuple):
    """The calls of a folded model's repeated block, and how many blocks follow each other that are all like it.

    Attributes:
        start, stop: the first place of the block, and the place after its last.
        n_copies: how many copies it stands for.
    """

    start: int
    stop: int
    n_copies: int


@dataclass(frozen=True)
class Stored:
    """The collectives of one parameter that is stored in parts, around the first call that reads it.

    Attributes:
        place: of the call.
        parameter: its name.
        dimension: mesh dimension over which it is stored.
        size: bytes of the parameter, as it is gathered.
        sent: bytes of the gradient, as it is scattered; 0: it has none.
        links: along the dimension.
        copies: copies of the message that a rank makes.
        again: whether the backward gathers it, too.
        kind: what messages can share: the type of an element.
        is_there: whether it is gathered before all microbatches, so that only its gradient is sent.
    """

    place: int
    parameter: str
    dimension: str
    size: float
    sent: float
    links: GroupLinks
    copies: int
    again: bool
    kind: object
    is_there: bool = False


@dataclass(frozen=True)
class Activation:
    """Collectives of values, which are waited for at once.

    Attributes:
        place: of the call that reads the value.
        dimension: mesh dimension whose ranks communicate.
        forward, backward: seconds.
        links: along the dimension.
        is_beside: whether the backward sends it while the weight half of its call is computed.
    """

    place: int
    dimension: str
    forward: float
    backward: float
    links: GroupLinks
    is_beside: bool = False


@dataclass(frozen=True)
class GradientOfCall:
    """The gradient of a parameter that ranks sum once a step.

    Attributes:
        place: of the first call that reads the parameter.
        parameter: its name.
        dimension: mesh dimension over which it is summed.
        size: bytes, as it is sent.
        held: bytes, as it is stored.
        links: along the dimension.
    """

    place: int
    parameter: str
    dimension: str
    size: float
    held: float
    links: GroupLinks


@dataclass(eq=False)
class _Message:
    """A message of a step: of one value or of several small ones.

    Attributes:
        kind: of collective.
        copies: copies that a rank makes of a message of one value.
        size: bytes of all values, as they are sent.
        n_values: how many values there are.
        held: bytes of the gradients that it sums, as they are stored.
        awaits: the scatters whose results it sums.
        following: the gather that starts when this one is waited for.
        transfer: the message, once it has started.
        is_awaited: whether the program has waited for it.
    """

    kind: Collective
    dimension: str
    links: GroupLinks
    copies: int
    size: float = 0.0
    n_values: int = 0
    held: float = 0.0
    awaits: list[_Message] = field(default_factory=list)
    following: _Message | None = None
    transfer: Transfer | None = None
    is_awaited: bool = False

    def add(self, size: float) -> None:
        """Add a value of ``size`` bytes."""
        self.size += size
        self.n_values += 1

    @property
    def copying(self) -> float:
        """Seconds of the rank's own processor for copies of the message."""
        return (1 if self.n_values > 1 else self.copies) * self.links.copying(self.size)

    @property
    def passage(self) -> Passage:
        """How it goes over the links."""
        seconds = self.links.seconds(self.kind, self.size)
        return _passage(seconds, min(self.links.seconds(self.kind, 0.0), seconds), self.links)


def _passage(seconds: float, latency: float, links: GroupLinks) -> Passage:
    """Return how a message of a group goes over links; of a group in several nodes, over those inside with a part of their bandwidth."""
    ring = links.ring
    ports = {link.name: min(1.0, ring.bandwidth / link.bandwidth) for _, link in links.levels} or {ring.name: 1.0}
    return Passage(latency, seconds - latency, ports, {}, ring.host_share)


def waiting_for_messages(
    stored: Sequence[Stored],
    activations: Sequence[Activation],
    sums: Sequence[GradientOfCall],
    seconds: CallSeconds,
    first: Sequence[FirstHalf],
    regions: Sequence[int],
    repeat: Repeat | None,
    *,
    is_alone: bool,
) -> Floats:
    """Return (2, P) seconds that calls wait for collectives, in the forward and in the backward.

    Args:
        sums: gradients that are summed while the backward computes.
        first: the half of each call's backward that is computed first.
        regions: the places at which regions of recomputation begin.
        repeat: the repeated block; None: the model is not folded.
        is_alone: whether there is one microbatch; of several, the waits are those of the second.
    """
    n_calls = len(seconds.forward)
    order, program = list(_order(n_calls, repeat)), _Program(activations)
    chain = list[_Message]()  # the forward of a microbatch starts the first gather of the next one
    of_microbatches = [
        (weight, _gathers(stored, order, range(len(order)), chain, again=False)) for weight in ((1.0,) if is_alone else (0.0, 1.0))
    ]
    for weight, ahead in of_microbatches:
        for number, (place, share) in enumerate(order):
            program.gather(ahead.get(number, ()))
            program.exchange(place, 0)
            program.compute(place, 0, seconds.forward[place], weight * share)
        backwards = list(_backward_order(order, seconds.again, set(regions)))
        gathers = _gathers(stored, order, [index for index, _ in backwards], [], again=True)
        reductions = _reductions(stored, sums, order)
        for number, (index, is_recomputation) in enumerate(backwards):
            place, share = order[index]
            if is_recomputation:
                program.gather(gathers.get(number, ()))
                program.compute(place, 1, seconds.again[place], weight * share)
            else:
                messages = gathers.get(number, ()), reductions.get(index, ())
                _differentiate(program, place, seconds, first[place], *messages, weight * share)
        program.finish()
    return program.waiting(n_calls)


def _differentiate(
    program: _Program,
    place: int,
    seconds: CallSeconds,
    first: FirstHalf,
    gathers: Sequence[_Message],
    reductions: Sequence[_Message],
    weight: float,
) -> None:
    """Append the backward of a call: its halves, each after the messages that it waits for, and the messages that it completes."""
    of_weight, casting = seconds.of_weight[place], seconds.casting[place]
    if first == "weight" and of_weight:
        program.compute(place, 1, of_weight, weight)
        early = () if casting else reductions
        program.reduce_all(early)
        program.gather(gathers)
        program.compute(place, 1, seconds.of_input[place], weight)
        program.exchange(place, 1)
        program.compute(place, 1, casting, weight)
        program.reduce_all(() if early else reductions)
        return

    def second() -> None:
        program.compute(place, 1, of_weight + casting, weight)
        program.reduce_all(reductions)

    program.gather(gathers)
    program.compute(place, 1, seconds.of_input[place], weight)
    if first == "activation":
        program.exchange(place, 1, beside=second)
    else:
        program.compute(place, 1, of_weight + casting, weight)
        program.exchange(place, 1)
        program.reduce_all(reductions)


# -- what is sent when -------------------------------------------------------------------------------------------------------------


def _order(n_calls: int, repeat: Repeat | None) -> Iterator[tuple[int, float]]:
    """Yield (place of a call, fraction of its waits that this copy of it stands for), with some copies of the repeated block."""
    if repeat is None:
        yield from ((place, 1.0) for place in range(n_calls))
        return
    yield from ((place, 1.0) for place in range(repeat.start))
    block = range(repeat.start, repeat.stop)
    n_run = min(repeat.n_copies, max(_LEAST_COPIES, _CALLS_OF_COPIES // len(block)))
    n_alike = (repeat.n_copies - 2) / (n_run - 2) if n_run > 2 else 1.0  # all but the first and the last
    for copy in range(n_run):
        share = (n_alike if 0 < copy < n_run - 1 else 1.0) / repeat.n_copies
        yield from ((place, share) for place in block)
    yield from ((place, 1.0) for place in range(repeat.stop, n_calls))


_LEAST_COPIES = 3
"""Copies of a repeated block that are run if there are as many: a first, a last, and one whose waits are those of all others."""

_CALLS_OF_COPIES = 240
"""Of small blocks, of which several share a message, as many copies as have so many calls are run."""


def _backward_order(
    order: Sequence[tuple[int, float]], recomputed: Sequence[float], regions: Collection[int]
) -> Iterator[tuple[int, bool]]:
    """Yield (index in the order of the forward, whether it is computed again) for each call of a backward: a region is recomputed first."""
    begins = [index for index, (place, _) in enumerate(order) if place in regions] if regions else [*range(len(order))]
    begins = sorted({0, *begins})
    for begin, end in reversed([*itertools.pairwise([*begins, len(order)])]):
        yield from ((index, True) for index in range(begin, end) if recomputed[order[index][0]])
        yield from ((index, False) for index in reversed(range(begin, end)))


def _gathers(
    stored: Sequence[Stored], order: Sequence[tuple[int, float]], indices: Sequence[int], chain: list[_Message], *, again: bool
) -> dict[int, list[_Message]]:
    """Return number of a call in a pass -> the gathers of parameters that it is the first to read; small ones share messages.

    Args:
        indices: of the calls of the pass, as they follow each other, in the order of the forward.
        chain: the gathers before those of the pass, of which each starts the next one; those of the pass are appended.
        again: whether the pass is a backward.
    """
    found: dict[int, list[_Message]] = {}
    by_place, bundles, seen = _by_place(stored), dict[Hashable, _Message](), set[int]()
    for number, index in enumerate(indices):
        parameters = () if index in seen else by_place.get(order[index][0], ())
        seen.add(index)
        for each in parameters:
            if each.is_there or (again and not each.again):
                continue
            given, key = each.size / each.links.n_ranks, (each.dimension, each.kind)
            message, most = bundles.get(key), bytes_of_bundle(each.links.n_ranks)
            if message is None or given >= ALONE_BYTES or message.size / each.links.n_ranks + given > most:
                message = _Message("all_gather", each.dimension, each.links, each.copies)
                if chain:
                    chain[-1].following = message
                chain.append(message)
                if given < ALONE_BYTES:
                    bundles[key] = message
            message.add(each.size)
            found.setdefault(number, []).append(message)
    return found


def _reductions(stored: Sequence[Stored], sums: Sequence[GradientOfCall], order: Sequence[tuple[int, float]]) -> dict[int, list[_Message]]:
    """Return index of a call -> the scatters and sums of gradients that its backward completes; small gradients share messages."""
    found: dict[int, list[_Message]] = {}
    stored_at, sums_at = _by_place(stored), _by_place(sums)
    bundles, buckets = dict[Hashable, tuple[int, _Message]](), dict[Hashable, tuple[int, _Message]]()
    n_buckets, scatters, small = Counter[Hashable](), dict[str, list[_Message]](), set[str]()

    def close(started: tuple[int, _Message]) -> None:
        found.setdefault(started[0], []).append(started[1])

    for index in reversed(range(len(order))):
        place = order[index][0]
        scatters.update((each.parameter, []) for each in stored_at.get(place, ()))
        for each in stored_at.get(place, ()):
            if not each.sent:
                continue
            key, message = (each.dimension, each.kind), _Message("reduce_scatter", each.dimension, each.links, each.copies)
            if each.sent < ALONE_BYTES:
                small.add(each.parameter)
                if key in bundles and bundles[key][1].size < BUNDLE_BYTES:
                    message = bundles[key][1]
                elif key in bundles:
                    close(bundles[key])
                bundles[key] = index, message
            else:
                close((index, message))
            message.add(each.sent)
            scatters[each.parameter].append(message)
        for gradient in sums_at.get(place, ()):
            key = gradient.dimension, gradient.parameter in small
            bucket = buckets.get(key)
            if bucket is not None and bucket[1].held >= (BUCKET_BYTES if n_buckets[key] > 1 else FIRST_BUCKET_BYTES):
                close(bucket)
                bucket = None
            if bucket is None:
                n_buckets[key] += 1
                bucket = index, _Message("all_reduce", gradient.dimension, gradient.links, 1)
            bucket[1].add(gradient.size)
            bucket[1].held += gradient.held
            bucket[1].awaits += scatters.get(gradient.parameter, ())
            buckets[key] = index, bucket[1]
    for started in (*bundles.values(), *buckets.values()):
        close(started)
    return found


_Place = TypeVar("_Place", Stored, Activation, GradientOfCall)


def _by_place(items: Sequence[_Place]) -> dict[int, list[_Place]]:
    found: dict[int, list[_Place]] = {}
    for each in items:
        found.setdefault(each.place, []).append(each)
    return found


# -- the program -------------------------------------------------------------------------------------------------------------------


class _Program:
    """The steps of one rank, as they are written, and the seconds that calls wait in them; ``activations``: as above."""

    def __init__(self, activations: Sequence[Activation]) -> None:
        self._activations = _by_place(activations)
        self._steps: list[Step] = []
        self._passages: list[Passage] = []
        self._owners: list[tuple[int, int, float]] = []
        self._under_way: dict[bool, list[_Message]] = {False: [], True: []}
        self._copies: list[tuple[int, int, float, float]] = []
        self._chained: list[_Message] = []
        self._dimensions: dict[str, int] = {}

    def compute(self, place: int, direction: int, seconds: float, weight: float) -> None:
        """Append what a call computes in the forward (direction 0) or the backward; ``weight``: how much its waits count."""
        if seconds > 0 and self._steps and self._steps[-1].kind == "compute":
            self._steps[-1].seconds += seconds
        elif seconds > 0:
            self._steps.append(Step("compute", str(len(self._owners)), "", seconds))
            self._owners.append((place, direction, weight))

    def exchange(self, place: int, direction: int, beside: Callable[[], None] | None = None) -> None:
        """Append the collectives of values that a call waits for, or that its backward sends.

        Args:
            beside: appends what is computed while the first of them runs.
        """
        for each in self._activations.get(place, ()):
            seconds = (each.forward, each.backward)[direction]
            if seconds:
                transfer = self._transfer(_passage(seconds, 0.0, each.links), each.dimension)
                if beside is not None and not each.is_beside:
                    beside()
                    beside = None
                self._steps.append(Step("start", "", "", transfer=transfer))
                if beside is not None:
                    beside()
                    beside = None
                self._steps.append(Step("wait", "", "", transfer=transfer))
        if beside is not None:
            beside()

    def gather(self, messages: Iterable[_Message]) -> None:
        """Append the waits for gathers, each after the start of the next one."""
        for message in messages:
            if message.transfer is None:
                self._start(message)
            if message.following is not None and not message.is_awaited:
                self._start(message.following)
            self._wait(message)

    def reduce_all(self, messages: Iterable[_Message]) -> None:
        """Append the starts of scatters and sums."""
        for message in messages:
            self.reduce(message)

    def reduce(self, message: _Message) -> None:
        """Append the start of a scatter or a sum, and the waits for earlier ones of which too many are under way."""
        if not all(each.is_awaited for each in message.awaits):
            self._chained.append(message)
            return
        self._start(message)
        under_way = self._under_way[bool(message.awaits)]
        under_way.append(message)
        while len(under_way) > MOST_UNDER_WAY:
            self._wait_for_reduction(under_way.pop(0))

    def finish(self) -> None:
        """Append the waits for all that is under way."""
        for under_way in self._under_way.values():
            while under_way:
                self._wait_for_reduction(under_way.pop(0))

    def waiting(self, n_calls: int) -> Floats:
        """Return (2, P) seconds that calls wait on the clock of the simulator."""
        run = run_ranks([RankWork(0, tuple(self._steps), (), ())], lambda transfer: self._passages[transfer.key])[0][0]
        waiting, end = np.zeros((2, n_calls)), 0.0
        for place, direction, weight, seconds in self._copies:
            waiting[direction, place] += weight * seconds
        for each in run.computed:
            place, direction, weight = self._owners[int(each.name)]
            waiting[direction, place] += weight * (each.start - end)
            end = each.end
        if self._owners:
            place, direction, weight = self._owners[-1]
            waiting[direction, place] += weight * max(run.finish - end, 0.0)
        return waiting

    def _wait_for_reduction(self, message: _Message) -> None:
        self._wait(message)
        ready = [each for each in self._chained if all(scatter.is_awaited for scatter in each.awaits)]
        self._chained = [each for each in self._chained if each not in ready]
        for each in ready:
            self.reduce(each)

    def _start(self, message: _Message) -> None:
        if message.transfer is None:
            place, direction, weight = self._owners[-1] if self._owners else (0, 0, 1.0)
            self.compute(place, direction, message.copying, weight)
            self._copies.append((place, direction, weight, message.copying))
            message.transfer = self._transfer(message.passage, message.dimension)
            self._steps.append(Step("start", "", "", transfer=message.transfer))

    def _wait(self, message: _Message) -> None:
        if not message.is_awaited:
            message.is_awaited = True
            self._steps.append(Step("wait", "", "", transfer=message.transfer))

    def _transfer(self, passage: Passage, dimension: str) -> Transfer:
        self._passages.append(passage)
        group = -1 - self._dimensions.setdefault(dimension, len(self._dimensions))  # no rank: it waits for no others
        return Transfer(dimension, "collective", (group,), len(self._passages) - 1, 0)
