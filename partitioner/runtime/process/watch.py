"""Whether the processes of all ranks are there, and what failed first: each process hears of it, whatever it is waiting for.

Rank 0 listens, and each other rank keeps one TCP connection to it, on which little is said. Where a process dies, its kernel closes the
connection at once; where a machine or a link goes down, the kernels find out by keepalive probes, which they answer for processes that are
busy, too. So nobody is taken for dead who is only slow:

    rank 0   listens ──┬──────────┬──────────┐
    rank 1   ──────────┘          │          │
    rank 2   ─────────────────────┘          │      killed: its connection closes, and rank 0 tells ranks 1 and 3
    rank 3   ────────────────────────────────┘

What the main thread is blocked in, waiting for others, is then ended from here (``on_failure``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import selectors
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from partitioner.runtime.process.call_order import CallTable, RankCall, rank_list
from partitioner.runtime.process.channel import Channel, connect, local_addresses
from partitioner.runtime.process.failure import Failure, Store
from passes.ir.errors import CommunicationError

__all__ = ["NO_CONNECTION", "ConnectionRecord", "Watch", "lost_rank"]

NO_CONNECTION = -1
"""The number under which failures are known that happen before there is a connection."""

_VERDICT = 2.0
"""Seconds that a rank whose communication has failed waits to hear the cause."""

_GRACE = 1.0
"""Seconds from a failure to the end of what this process is waiting for: what has been sent already may still arrive."""

_CONNECTING = 10.0
"""Seconds that a rank which has come to ``partition()`` may take to connect to rank 0. It tries for half of them."""

_PAUSE = 0.1
"""Seconds between two looks of rank 0 at who has come."""

_LOOK_THERE = "look at what that rank reports, or why its process ended"

_ENDED = "the process was killed, or ended without a word"


class Watch:
    """One process's part in watching all.

    Args:
        store: shared with the processes of all ranks, and with nothing else that writes these keys.
        rank, size: who this is, of how many.
        near: a host that all processes reach, by which rank 0 finds its own address; None: its host's name says it.
        silence: seconds after which a machine that does not answer counts as gone.
    """

    def __init__(self, store: Store, rank: int, size: int, near: str | None, silence: float) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._near = near
        self._silence = silence
        self._changed = threading.Condition(threading.RLock())
        self._failures: dict[int, Failure] = {}
        self._lost: dict[int, str] = {}
        self._loss: Failure | None = None
        self._left: dict[int, str] = {}
        self._calls_made: Counter[int] = Counter()
        self._calls_of: dict[int, dict[int, int]] = {}
        self._alone: set[int] = set()
        self._settled = threading.Event()
        self._ends: list[tuple[int, Callable[[], None]]] = []
        self._outbox: list[Mapping[str, Any]] = []
        self._channels: dict[int, Channel] = {}
        self._calls = CallTable(size)
        self._over = threading.Event()
        token = secrets.token_hex(8)
        listener = _listen() if rank == 0 and size > 1 else None
        at = None if listener is None else [local_addresses(near), listener.getsockname()[1], token]
        # Said first: from here on, a process that dies is missed.
        store.set(f"came {rank}", json.dumps(at))
        if size == 1:
            self._settled.set()
        else:
            work = (lambda: self._serve(listener, token)) if listener is not None else self._follow
            threading.Thread(target=work, name="partitioner watch", daemon=True).start()

    # -- what this process asks ----------------------------------------------------------------------------------------------------

    def first(self, number: int) -> Failure | None:
        """The first failure that concerns a connection: its own, or a process that is gone."""
        with self._changed:
            if number in self._failures:
                return self._failures[number]
            if self._lost and self._loss is None:
                rank, why = next(iter(self._lost.items()))  # those behind it may have ended because of it
                self._loss = Failure(rank, f"rank {rank} has left: {why}", lost=True)
            return self._loss

    def await_first(self, number: int) -> Failure | None:
        """The first failure, waiting a moment to hear of it."""
        with self._changed:
            self._changed.wait_for(lambda: self.first(number) is not None, _VERDICT)
            return self.first(number)

    def left(self) -> dict[int, str]:
        """The ranks whose scripts have ended, and how."""
        with self._changed:
            return dict(self._left)

    def calls_of(self, rank: int, number: int) -> int:
        """How many calls a rank whose script has ended had made on a connection."""
        with self._changed:
            return self._calls_of.get(rank, {}).get(number, 0)

    def await_all(self, store: Store, timeout: timedelta, dead: Callable[[], Sequence[int]]) -> None:
        """Wait until the processes of all ranks have come, and are watched as far as they can be.

        From then on no thread of this watch asks the store, which answers one question at a time: who waits in it keeps nothing from here.

        Args:
            store: the one that this was made with, waited for with a limit.
            timeout: how long they may take.
            dead: the ranks of which this machine knows otherwise that they have come and are gone.

        Raises:
            CommunicationError: naming those that did not, or that left.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        pause = 0.001
        while not store.check([f"came {rank}" for rank in range(self.size)]):
            missing = [rank for rank in range(self.size) if not store.check([f"came {rank}"])]
            why = None
            for rank in set(missing) & set(dead()):
                self.report(NO_CONNECTION, lost_rank(rank))
            if (failure := self.first(NO_CONNECTION)) is not None:
                why = failure.text
            elif gone := sorted(set(missing) & set(self.left())):
                why = f"{rank_list(gone)} {self.left()[gone[0]]}"
            elif missing and time.monotonic() > deadline:
                why = f"{rank_list(missing)} did not call partition() within {timeout.total_seconds():.0f} s"
            if why is not None:
                raise CommunicationError(f"rank {self.rank} waits in partition() for the other ranks: {why}", remedy=_LOOK_THERE)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE)
        settling = time.monotonic() + 2 * _CONNECTING
        while not self._settled.wait(_PAUSE) and self.first(NO_CONNECTION) is None and time.monotonic() < settling:
            pass  # who cannot connect gives up before
        if (failure := self.first(NO_CONNECTION)) is not None:
            raise CommunicationError(f"rank {self.rank} cannot connect with the other ranks: {failure.text}", remedy=_LOOK_THERE)

    # -- what this process says ----------------------------------------------------------------------------------------------------

    def report(self, number: int, failure: Failure) -> Failure:
        """Tell all of a failure, unless there is one; returns the first."""
        if self.rank == 0:
            self._note_failure(number, failure)
        elif self.first(number) is None:
            self._say({"failed": number, "failure": dataclasses.asdict(failure)})
            self.await_first(number)
        return self.first(number) or failure

    def announce(self, number: int, count: int, call: RankCall) -> None:
        """Tell rank 0 of a call that this process makes, to be compared with those of the others."""
        self._calls_made[number] = count
        if self.rank == 0:
            self._note_call(number, count, 0, call)
        else:
            self._say({"call": [number, count, call.what, call.given, call.optimizer_steps]})

    def leave(self, how: str) -> None:
        """Tell all that this process ends without a failure."""
        made = list(self._calls_made.items())
        if self.rank == 0:
            self._note_left(0, how, made)
        else:
            self._say({"left": self.rank, "how": how, "calls": made})

    def on_failure(self, number: int, end: Callable[[], None]) -> None:
        """Call a function a moment after a failure that concerns a connection becomes known: it ends what the main thread waits for."""
        with self._changed:
            self._ends.append((number, end))

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        with self._changed:
            if self.rank != 0:
                for channel in self._channels.values():
                    channel.shut_down()

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._changed:
            if 0 not in self._channels:
                self._outbox.append(message)
                return
        self._channels[0].send(message)

    # -- what becomes known --------------------------------------------------------------------------------------------------------

    def _note_failure(self, number: int, failure: Failure) -> None:
        with self._changed:
            if self.first(number) is not None:
                return
            self._failures[number] = failure
            self._tell({"failed": number, "failure": dataclasses.asdict(failure)})
            self._spread(number)

    def _note_lost(self, rank: int, why: str) -> None:
        with self._changed:
            if rank in self._left or rank in self._lost:
                return
            self._lost[rank] = why
            self._tell({"lost": rank, "why": why})
            self._spread(None)

    def _note_left(self, rank: int, how: str, calls: Sequence[tuple[int, int]]) -> None:
        with self._changed:
            self._left[rank] = how
            self._calls_of[rank] = dict(calls)
            self._tell({"left": rank, "how": how, "calls": calls})
            self._changed.notify_all()

    def _note_call(self, number: int, count: int, rank: int, call: RankCall) -> None:
        with self._changed:
            self._note_difference(number, self._calls.add(number, count, rank, call, time.monotonic()))

    def _note_difference(self, number: int, text: str | None) -> None:
        if text is not None:
            self._note_failure(number, Failure(self.rank, text, disagreement=True))

    def _spread(self, number: int | None) -> None:
        """Wake who waits for a failure here, and end what the main thread is blocked in."""
        self._changed.notify_all()
        ends = [end for other, end in self._ends if number in (None, other)]
        if ends:
            timer = threading.Timer(_GRACE, _call_all, [ends])
            timer.daemon = True
            timer.start()

    def _tell(self, message: Mapping[str, Any]) -> None:
        """Rank 0 tells all others."""
        if self.rank == 0:
            for channel in self._channels.values():
                channel.send(message)

    def _known(self) -> Iterator[Mapping[str, Any]]:
        """What a rank that comes late is told."""
        yield from ({"lost": rank, "why": why} for rank, why in self._lost.items())
        for rank, how in self._left.items():
            yield {"left": rank, "how": how, "calls": list(self._calls_of[rank].items())}
        yield from ({"failed": number, "failure": dataclasses.asdict(failure)} for number, failure in self._failures.items())

    def _hear(self, message: Mapping[str, Any], source: int) -> None:
        """Act on a message of another process."""
        if "failed" in message:
            self._note_failure(message["failed"], Failure(**message["failure"]))
        elif "lost" in message:
            self._note_lost(message["lost"], message["why"])
        elif "left" in message:
            self._note_left(message["left"], message["how"], message["calls"])
        elif "call" in message:
            number, count, what, given, steps = message["call"]
            self._note_call(number, count, source, RankCall(what, given, steps))

    # -- the threads ---------------------------------------------------------------------------------------------------------------

    def _serve(self, listener: socket.socket, token: str) -> None:
        """Rank 0: take connections, hear what their ranks say, and see them go."""
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        strangers: set[Channel] = set()
        absent: dict[int, float] = {}
        while not self._over.is_set():
            for key, _ in selector.select(_PAUSE):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        channel = Channel(listener.accept()[0], self._silence)
                        strangers.add(channel)
                        selector.register(channel.socket, selectors.EVENT_READ, channel)
                elif not self._served(key.data, strangers, token):
                    selector.unregister(key.fileobj)
                    key.data.close()
            if not self._settled.is_set():
                self._look_for_absent(absent)
            with self._changed:
                for number, count in self._calls.waiting():
                    self._note_difference(number, self._calls.overdue(time.monotonic(), number, count))
        selector.close()
        listener.close()
        for channel in (*strangers, *self._channels.values()):
            channel.close()

    def _served(self, channel: Channel, strangers: set[Channel], token: str) -> bool:
        """Take what a connection has brought; whether it goes on."""
        try:
            for message in channel.receive():
                if channel not in strangers:
                    self._hear(message, channel.rank)
                elif message.get("token") == token:
                    strangers.discard(channel)
                    self._welcome(channel, int(message["rank"]), token)
                else:
                    strangers.discard(channel)
                    return False
        except (OSError, EOFError, ValueError, KeyError) as error:
            if channel not in strangers:
                self._note_lost(channel.rank, _reason(error, self._silence))
            strangers.discard(channel)
            return False
        return True

    def _welcome(self, channel: Channel, rank: int, token: str) -> None:
        """Take in a rank, and tell it what it has missed."""
        with self._changed:
            channel.rank = rank
            for message in ({"welcome": token}, *self._known()):
                channel.send(message)
            self._channels[rank] = channel

    def _look_for_absent(self, absent: dict[int, float]) -> None:
        """A rank that has come and does not connect is gone, unless it says that it cannot."""
        now = time.monotonic()
        unknown = set(range(1, self.size)) - set(self._channels) - set(self._lost) - self._alone
        for rank in unknown:
            try:
                if not self._store.check([f"came {rank}"]):
                    continue
                if json.loads(self._store.get(f"came {rank}")) == "alone":
                    self._alone.add(rank)
                    self._calls.leave_out(rank)
                elif now > absent.setdefault(rank, now) + _CONNECTING:
                    self._note_lost(rank, _ENDED)
            except RuntimeError:
                return  # the store is gone: whoever needs it says so
        if not unknown:
            self._settled.set()

    def _follow(self) -> None:
        """Every other rank: connect to rank 0, hear what it says, and see it go."""
        try:
            channel = self._connect()
        except RuntimeError:
            channel = None  # the store is gone: whoever needs it says so
        self._settled.set()
        if channel is None:
            return
        with self._changed:
            self._channels[0] = channel
            outbox, self._outbox = self._outbox, []
            for message in outbox:
                channel.send(message)
        try:
            while True:
                for message in channel.receive():
                    self._hear(message, 0)
        except (OSError, EOFError) as error:
            if not self._over.is_set():
                self._note_lost(0, _reason(error, self._silence))
        channel.close()

    def _connect(self) -> Channel | None:
        """The connection to rank 0, when it has come; None where there can be none."""
        while not self._over.is_set() and not self._store.check(["came 0"]):
            time.sleep(_PAUSE / 10)
        deadline = time.monotonic() + _CONNECTING / 2
        refused: dict[str, bool] = {}
        found, port, token = json.loads(self._store.get("came 0"))
        addresses = dict.fromkeys([*found, *([self._near] if self._near else [])])
        while not self._over.is_set() and time.monotonic() < deadline:
            for address in addresses:
                if refused and time.monotonic() > deadline:
                    break
                try:
                    return connect(address, port, {"rank": self.rank, "token": token}, self._silence)
                except (OSError, EOFError, ValueError) as error:
                    refused[address] = isinstance(error, ConnectionRefusedError)
            time.sleep(_PAUSE)
        if self._over.is_set():
            return None
        if all(refused.values()):  # one alone may be of this machine, and rank 0 on another one
            self._note_lost(0, _ENDED)
            return None
        self._store.set(f"came {self.rank}", json.dumps("alone"))
        where = ", ".join(addresses)
        warnings.warn(
            f"rank {self.rank} cannot connect to rank 0 at {where}: that a process has died is then noticed only when a wait times out",
            stacklevel=1,
        )
        return None


@dataclasses.dataclass(frozen=True)
class ConnectionRecord:
    """What is watched, as one connection sees it."""

    watch: Watch
    number: int

    def report(self, failure: Failure) -> Failure:
        """Record a failure unless there is one; returns the first."""
        return self.watch.report(self.number, failure)

    def first(self) -> Failure | None:
        """The first failure that this process knows of."""
        return self.watch.first(self.number)

    def await_first(self) -> Failure | None:
        """The first failure, waiting a moment to hear of it."""
        return self.watch.await_first(self.number)

    def left(self) -> dict[int, str]:
        """The ranks whose scripts have ended, and how."""
        return self.watch.left()


def _listen() -> socket.socket:
    """A listening socket on a free port, for both families of addresses where there are both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def lost_rank(rank: int) -> Failure:
    """The failure of a process that is gone."""
    return Failure(rank, f"rank {rank} has left: {_ENDED}", lost=True)


def _reason(error: Exception, silence: float) -> str:
    """Why a connection has ended."""
    if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
        return _ENDED
    return f"nothing has been heard for {silence:.0f} s: the machine is down, or the link to it is cut"


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
