"""Run the steps of all ranks on a clock: a computing stream for each, transfers that overlap with it and share links.

    rank 0   compute  | 0F0      | 0F1      |  wait    | 0B0 ...
             message             |=======|
    rank 1   compute     wait            | 1F0     | 1B0 ...

A transfer starts when all its ranks have come to it, and when the one before it between the same ranks is over; a rank goes on computing
until it waits for it. Where processors move data themselves (``Link.host_share``), what a rank computed meanwhile took that much longer:

    rank 0   compute  | 0F0      | 0F1      :  moved | 0B0 ...
             message             |=======|
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from cost_models.simulator.contention import Passage
from cost_models.simulator.read_program import RankWork
from cost_models.simulator.storages import Storage
from cost_models.simulator.tasks import Rise, Step, Transfer
from passes.ir.errors import VerificationError


@dataclass(frozen=True, slots=True)
class Slice:
    """One interval of a timeline.

    Attributes:
        rank: where.
        name: of the node.
        section: the action that it belongs to, or words.
        start, end: seconds.
        kind: what of.
        bytes: of a transfer.
    """

    rank: int
    name: str
    section: str
    start: float
    end: float
    kind: str
    bytes: int = 0


class Change(NamedTuple):
    """Memory allocated (or freed) at a time; ``rise``: the momentary need of merged steps."""

    time: float
    storage: Storage | None
    made: bool
    rise: Rise | None = None


@dataclass
class RankRun:
    """Timeline of one rank.

    Attributes:
        computed: slices of computing, in order.
        transferred: slices of communication, in order of their ends.
        changes: of its memory, in order.
        held: storages (by identity) that transfers read -> until when: the end of the transfer, or the rank's wait for it.
        busy: seconds of computing.
        finish: when its last step ended.
    """

    computed: list[Slice] = field(default_factory=list)
    transferred: list[Slice] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    held: dict[int, float] = field(default_factory=dict)
    busy: float = 0.0
    finish: float = 0.0

    def hold(self, transfer: Transfer, time: float) -> None:
        """Keep what a transfer reads in memory until a time."""
        self.held.update({id(storage): max(time, self.held.get(id(storage), 0.0)) for storage in transfer.inputs})


@dataclass(slots=True, eq=False)
class _Underway:
    """A transfer of all its ranks."""

    parts: dict[int, Transfer] = field(default_factory=dict)
    passage: Passage | None = None
    begun: float = 0.0
    remaining: float = 0.0
    rate: float = 0.0
    updated: float = 0.0
    version: int = 0
    end: float | None = None
    waiting: list[int] = field(default_factory=list)
    wanted: dict[int, float] = field(default_factory=dict)


Traffic: TypeAlias = dict[tuple[int, ...], dict[tuple[int, int], float]]
"""The ranks of transfers -> (source, destination) -> bytes that went there."""


def run_ranks(work: Sequence[RankWork], passage: Callable[[Transfer], Passage]) -> tuple[dict[int, RankRun], Traffic]:
    """Run ranks to their ends.

    Args:
        work: of the ranks that are run; transfers with others take as long as with these.
        passage: how a transfer goes over the links.

    Returns:
        The tasks of each rank, and the messages between ranks.

    Raises:
        VerificationError: the ranks wait for each other in a circle.
    """
    machine = _Machine(work, passage)
    machine.run()
    return machine.runs, machine.traffic


class _Machine:
    def __init__(self, work: Sequence[RankWork], passage: Callable[[Transfer], Passage]) -> None:
        self.runs = {each.rank: RankRun() for each in work}
        self.traffic: Traffic = {}
        self._steps = {each.rank: each.steps for each in work}
        self._position = dict.fromkeys(self.runs, 0)
        self._passage = passage
        self._events: list[tuple[float, int, str, Any, int]] = []
        self._number = itertools.count()
        self._underway: defaultdict[Any, _Underway] = defaultdict(_Underway)
        self._channels: defaultdict[Any, deque[_Underway]] = defaultdict(deque)
        self._using: defaultdict[Any, dict[_Underway, float]] = defaultdict(dict)

    def run(self) -> None:
        """Process events in the order of their times."""
        for each in self.runs:
            self._at(0.0, "rank", each)
        while self._events:
            time, _, kind, subject, version = heapq.heappop(self._events)
            if kind == "rank":
                self._communicate(subject, time)
            elif subject.version == version:
                if kind == "flow":
                    self._flow(subject, time)
                else:
                    self._finish(subject, time)
        stuck = {rank: self._steps[rank][position] for rank, position in self._position.items() if position < len(self._steps[rank])}
        if stuck:
            lines = "; ".join(f"rank {rank} at {step.name}" for rank, step in sorted(stuck.items()))
            raise VerificationError(f"the ranks wait for each other: {lines}", remedy="pm.verify() names the nodes that do not fit")

    def _at(self, time: float, kind: str, subject: Any, version: int = 0) -> None:
        heapq.heappush(self._events, (time, next(self._number), kind, subject, version))

    # -- ranks ---------------------------------------------------------------------------------------------------------------------

    def _advance(self, rank: int, time: float) -> None:
        """Compute up to the next communication, which is a separate event: other ranks may reach theirs earlier."""
        run, steps, position = self.runs[rank], self._steps[rank], self._position[rank]
        while position < len(steps) and steps[position].kind == "compute":
            time = _compute(rank, run, steps[position], time)
            position += 1
        self._position[rank] = position
        run.finish = max(run.finish, time)
        if position < len(steps):
            self._at(time, "rank", rank)

    def _communicate(self, rank: int, time: float) -> None:
        """Run the communication step that a rank has reached: start a transfer, or wait for one."""
        steps, position = self._steps[rank], self._position[rank]
        if position == len(steps):
            return
        step = steps[position]
        if step.kind == "compute":
            self._advance(rank, time)
            return
        assert step.transfer is not None
        underway = self._underway[step.transfer.key]
        if step.kind == "wait":
            wanted = underway.wanted.setdefault(rank, time)
            if underway.end is None or underway.end > time:
                underway.waiting.append(rank)
                return
            time += _host_delay(self.runs[rank], underway, wanted)
            self.runs[rank].hold(step.transfer, time)
        else:
            self._post(underway, rank, step.transfer, time)
        _change(self.runs[rank], step, time, time)
        self._position[rank] = position + 1
        self._advance(rank, time)

    # -- transfers -----------------------------------------------------------------------------------------------------------------

    def _post(self, underway: _Underway, rank: int, transfer: Transfer, time: float) -> None:
        underway.parts[rank] = transfer
        if all(member in underway.parts for member in transfer.group if member in self.runs):
            channel = self._channels[transfer.kind == "message", transfer.group]
            channel.append(underway)
            if len(channel) == 1:
                self._begin(underway, time)

    def _begin(self, underway: _Underway, time: float) -> None:
        transfer = next(iter(underway.parts.values()))
        underway.passage = self._passage(transfer)
        underway.begun, underway.remaining = time, underway.passage.seconds
        traffic = self.traffic.setdefault(transfer.group, {})
        for pair, size in underway.passage.traffic.items():
            traffic[pair] = traffic.get(pair, 0.0) + size
        self._at(time + underway.passage.latency, "flow", underway, underway.version)

    def _flow(self, underway: _Underway, time: float) -> None:
        """Let a transfer use its links, after its latency."""
        assert underway.passage is not None
        if underway.remaining <= 0:
            self._finish(underway, time)
            return
        underway.updated = time
        for port, load in underway.passage.ports.items():
            self._using[port][underway] = load
        self._share(underway, time)

    def _share(self, changed: _Underway, time: float) -> None:
        """Update the rates of all transfers that share a port with one that has begun or ended."""
        assert changed.passage is not None
        for other in {other: None for port in changed.passage.ports for other in self._using[port]}:
            assert other.passage is not None
            other.remaining -= (time - other.updated) * other.rate
            other.updated = time
            other.rate = 1.0 / max(1.0, *(sum(self._using[port].values()) for port in other.passage.ports))
            other.version += 1
            self._at(time + max(other.remaining, 0.0) / other.rate, "finish", other, other.version)

    def _finish(self, underway: _Underway, time: float) -> None:
        assert underway.passage is not None
        underway.end = time
        underway.version += 1
        for port in underway.passage.ports:
            self._using[port].pop(underway, None)
        self._share(underway, time)
        for rank, transfer in underway.parts.items():
            run = self.runs[rank]
            run.transferred.append(Slice(rank, transfer.name, "", underway.begun, time, transfer.kind, transfer.bytes))
            run.hold(transfer, time)
        transfer = next(iter(underway.parts.values()))
        channel = self._channels[transfer.kind == "message", transfer.group]
        channel.popleft()
        if channel:
            self._begin(channel[0], time)
        for rank in underway.waiting:
            self._at(time, "rank", rank)


def _host_delay(run: RankRun, underway: _Underway, wanted: float) -> float:
    """Return the seconds by which a transfer delayed its rank's compute: its processor does part of both."""
    assert underway.passage is not None
    if not underway.passage.host_share or underway.end is None:
        return 0.0
    begun, end, computed = underway.begun, min(underway.end, wanted), 0.0
    for each in reversed(run.computed):
        if each.end <= begun:
            break
        computed += max(0.0, min(each.end, end) - max(each.start, begun))
    return underway.passage.host_share * computed


def _compute(rank: int, run: RankRun, step: Step, time: float) -> float:
    end = time + step.seconds
    if step.rise is not None:
        run.changes.append(Change(time + step.rise.offset, None, made=True, rise=step.rise))
    _change(run, step, time if step.rise is None else end, end)
    if step.seconds:
        run.busy += step.seconds
        run.computed.append(Slice(rank, step.name, step.section, time, end, "compute"))
    return end


def _change(run: RankRun, step: Step, begin: float, end: float) -> None:
    """Record that a step makes memory when it begins and frees memory when it ends.

    A wait frees its buffer before it makes its result. Of merged steps, ``rise`` has the peak: what they free is free before they end.
    """
    made = [Change(begin, storage, made=True) for storage in step.made]
    dropped = [Change(end, storage, made=False) for storage in step.dropped]
    run.changes += dropped + made if step.kind == "wait" or step.rise is not None else made + dropped
