"""Messages of a step of one rank, of parameters, their gradients, and values, in the order of its calls."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from cost_models.collectives.algorithms import Collective, GroupLinks
from cost_models.simulator.contention import Passage
from cost_models.simulator.tasks import Transfer
from passes.emit.coalesce_collectives import ALONE_BYTES, BUNDLE_BYTES, bytes_of_bundle
from passes.emit.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES


class Repeat(NamedTuple):
    """The calls of a folded model's repeated block, and how many blocks follow each other that are all like it.

    Attributes:
        start, stop: the first place of the block, and the place after its last.
        n_copies: how many copies it stands for.
        is_run_whole: whether all copies are run, not a few of them.
    """

    start: int
    stop: int
    n_copies: int
    is_run_whole: bool = False


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
        kind: what gathers can share: the type of an element.
        is_there: whether it is gathered before all microbatches, so that only its gradient is sent.
        width: what scatters can share: the bytes of an element of the gradient.
        is_uneven: what both can share: whether ranks store parts of different sizes.
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
    width: float = 4.0
    is_uneven: bool = False


@dataclass(frozen=True)
class Regather:
    """A repeated gather, of a value that a backward reads.

    Attributes:
        place: of the call that waits for it: the last one of those whose weight halves read the value, or the one that is computed again.
        size: bytes of the value.
        copies: copies of the message that a rank makes.
        maker: place of the call whose recomputation makes the shard for a call after ``place``: it starts then; ``place`` itself: the shard
            is made, and gathered, right before its use; None: the shard is saved, and gathered one message ahead of its use.
        is_recomputed: whether the call is computed again from the value; else its weight half reads it.
    """

    place: int
    size: float
    copies: int = 0
    maker: int | None = None
    is_recomputed: bool = False


@dataclass(frozen=True)
class Activation:
    """Collectives of values: in a forward, sent once they are made, and waited for by the first reader; in a backward, at once.

    Attributes:
        place: of the call that reads the value.
        dimension: mesh dimension whose ranks communicate.
        forward, backward: seconds.
        links: along the dimension.
        is_beside: whether the backward sends it while the weight half of its call is computed.
        regather: how the backward gathers the value again; None: it does not.
        maker: place of the call that makes the value; None: it is not known, and the value is sent by its reader.
    """

    place: int
    dimension: str
    forward: float
    backward: float
    links: GroupLinks
    is_beside: bool = False
    regather: Regather | None = None
    maker: int | None = None


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
class Message:
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
    awaits: list[Message] = field(default_factory=list)
    following: Message | None = None
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
        return passage_of(seconds, min(self.links.seconds(self.kind, 0.0), seconds), self.links)


def passage_of(seconds: float, latency: float, links: GroupLinks) -> Passage:
    """Return how a message of a group goes over links; of a group in several nodes, over those inside with a part of their bandwidth."""
    ring = links.ring
    ports = {link.name: min(1.0, ring.bandwidth / link.bandwidth) for _, link in links.levels} or {ring.name: 1.0}
    return Passage(latency, seconds - latency, ports, {}, ring.host_share)


def calls_in_order(n_calls: int, repeat: Repeat | None) -> Iterator[tuple[int, float]]:
    """Yield (place of a call, fraction of its waits that this copy of it stands for), with copies of the repeated block."""
    if repeat is None:
        yield from ((place, 1.0) for place in range(n_calls))
        return
    yield from ((place, 1.0) for place in range(repeat.start))
    block = range(repeat.start, repeat.stop)
    n_few = min(repeat.n_copies, max(_LEAST_COPIES, _CALLS_OF_COPIES // len(block)))
    n_run = repeat.n_copies if repeat.is_run_whole else n_few
    n_alike = (repeat.n_copies - 2) / (n_run - 2) if n_run > 2 else 1.0  # all but the first and the last
    for copy in range(n_run):
        share = (n_alike if 0 < copy < n_run - 1 else 1.0) / repeat.n_copies
        yield from ((place, share) for place in block)
    yield from ((place, 1.0) for place in range(repeat.stop, n_calls))


_LEAST_COPIES = 3
"""Copies of a repeated block that are run if there are as many: a first, a last, and one whose waits are those of all others."""

_CALLS_OF_COPIES = 240
"""Of small blocks, of which several share a message, as many copies as have so many calls are run."""


def backward_order(order: Sequence[tuple[int, float]], recomputed: Sequence[float], needed: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield (index in the order of the forward, whether it is computed again) for each call of a backward.

    Args:
        recomputed: seconds in which each call is computed again; 0: it is not.
        needed: the place of the call before whose backward that happens.
    """
    before = dict[int, list[int]]()
    for index, (place, _) in enumerate(order):
        if recomputed[place]:
            before.setdefault(min(index + needed[place] - place, len(order) - 1), []).append(index)
    for index in reversed(range(len(order))):
        yield from ((earlier, True) for earlier in before.get(index, ()))
        yield index, False


def gathers_of(
    stored: Sequence[Stored], order: Sequence[tuple[int, float]], indices: Sequence[int], chain: list[Message], *, again: bool
) -> dict[int, list[Message]]:
    """Return number of a call in a pass -> the gathers of parameters that it is the first to read; small ones share messages.

    Args:
        indices: of the calls of the pass, as they follow each other, in the order of the forward.
        chain: the gathers before those of the pass, of which each starts the next one; those of the pass are appended.
        again: whether the pass is a backward.
    """
    found: dict[int, list[Message]] = {}
    stored_at, bundles, seen = by_place(stored), dict[Hashable, Message](), set[int]()
    for number, index in enumerate(indices):
        parameters = () if index in seen else stored_at.get(order[index][0], ())
        seen.add(index)
        for each in parameters:
            if each.is_there or (again and not each.again):
                continue
            given, key = each.size / each.links.n_ranks, (each.dimension, each.kind, each.is_uneven)
            message, most = bundles.get(key), bytes_of_bundle(each.links.n_ranks)
            if message is None or given >= ALONE_BYTES or message.size / each.links.n_ranks + given > most:
                message = Message("all_gather", each.dimension, each.links, each.copies)
                if chain:
                    chain[-1].following = message
                chain.append(message)
                if given < ALONE_BYTES:
                    bundles[key] = message
            message.add(each.size)
            found.setdefault(number, []).append(message)
    return found


class Regathers(NamedTuple):
    """Repeated gathers of a backward, by the index of the call that they belong to.

    Attributes:
        recomputed: those that its recomputation waits for.
        awaited: those that its weight half waits for.
        started: those that start after its recomputation, or before its weight half.
    """

    recomputed: dict[int, list[Message]]
    awaited: dict[int, list[Message]]
    started: dict[int, list[Message]]


def regathers_of(
    activations: Sequence[Activation],
    order: Sequence[tuple[int, float]],
    backwards: Sequence[tuple[int, bool]],
    stage_of: Sequence[int],
    late: Collection[int],
) -> Regathers:
    """Return the repeated gathers. Each of saved shards starts the next one of its stage; one that is computed again leaves after that.

    Args:
        backwards: as ``backward_order``.
        stage_of: index of a call -> its stage.
        late: indices of calls whose weight halves come after all input halves, which recompute: for them recomputed shards are as if
            saved, and the first of a stage starts with its weight halves.
    """
    found, values, ahead = Regathers({}, {}, {}), by_place(activations), list[tuple[tuple[bool, int], int, Message]]()
    position = {each: number for number, each in enumerate(backwards)}
    for index in reversed(range(len(order))):
        for each in values.get(order[index][0], ()):
            regather = each.regather
            if regather is None:
                continue
            message = Message("all_gather", each.dimension, each.links, regather.copies)
            message.add(regather.size)
            reader = min(index + regather.place - each.place, len(order) - 1)
            is_recomputed = regather.is_recomputed and (reader, True) in position  # what takes no time has no recomputation
            (found.recomputed if is_recomputed else found.awaited).setdefault(reader, []).append(message)
            is_late = not is_recomputed and reader in late
            if regather.maker is not None and not is_late:
                found.started.setdefault(max(index + regather.maker - each.place, 0), []).append(message)
            else:
                ahead.append(((is_late, position[reader, is_recomputed]), index, message))
    before: dict[tuple[bool, int], Message] = {}
    for (is_late, _), index, message in sorted(ahead, key=lambda each: each[0]):
        key = is_late, stage_of[index]
        if key in before:
            before[key].following = message
        elif is_late:
            found.started.setdefault(bisect.bisect_right(stage_of, stage_of[index]) - 1, []).append(message)
        before[key] = message
    return found


def stages_of_calls(order: Sequence[tuple[int, float]], seconds: Sequence[float], n_stages: int) -> list[int]:
    """Return for each call the stage that its middle is in, if all take equal times; ``seconds``: of the call at each place."""
    own = [seconds[place] for place, _ in order]
    ends, total = itertools.accumulate(own), sum(own)
    return [min(int(n_stages * (end - each / 2) / total), n_stages - 1) if total else 0 for end, each in zip(ends, own, strict=True)]


def reductions_of(
    stored: Sequence[Stored], sums: Sequence[GradientOfCall], order: Sequence[tuple[int, float]], stage_of: Sequence[int]
) -> dict[int, list[Message]]:
    """Return index of a call -> the scatters and sums of gradients that its backward completes; small ones of a stage share messages.

    Args:
        stage_of: index of a call -> its stage.
    """
    found: dict[int, list[Message]] = {}
    stored_at, sums_at = by_place(stored), by_place(sums)
    bundles, buckets = dict[Hashable, tuple[int, Message]](), dict[Hashable, tuple[int, Message]]()
    n_buckets, scatters, small = Counter[Hashable](), dict[str, list[Message]](), set[str]()

    def close(started: tuple[int, Message]) -> None:
        found.setdefault(started[0], []).append(started[1])

    for index in reversed(range(len(order))):
        place = order[index][0]
        scatters.update((each.parameter, []) for each in stored_at.get(place, ()))
        for each in stored_at.get(place, ()):
            if not each.sent:
                continue
            key: Hashable = (each.dimension, each.width, each.is_uneven, stage_of[index])
            message = Message("reduce_scatter", each.dimension, each.links, each.copies)
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
                bucket = index, Message("all_reduce", gradient.dimension, gradient.links, 1)
            bucket[1].add(gradient.size)
            bucket[1].held += gradient.held
            bucket[1].awaits += scatters.get(gradient.parameter, ())
            buckets[key] = index, bucket[1]
    for started in (*bundles.values(), *buckets.values()):
        close(started)
    return found


_Place = TypeVar("_Place", Stored, Activation, GradientOfCall)


def by_place(items: Sequence[_Place]) -> dict[int, list[_Place]]:
    """Return place of a call -> the items around it."""
    found: dict[int, list[_Place]] = {}
    for each in items:
        found.setdefault(each.place, []).append(each)
    return found
