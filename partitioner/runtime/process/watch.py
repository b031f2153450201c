"""Watch the processes of all ranks: each learns of the death or first failure of another, also while it waits for others.

Rank 0 listens, and each other rank keeps one TCP connection to it. If a process dies, its kernel closes the connection at once; if a
machine or a link goes down, kernels notice by keepalive probes, which they answer for busy processes, too: a slow process is not dead.

    rank 0   listens ──┬──────────┬──────────┐
    rank 1   ──────────┘          │          │
    rank 2   ─────────────────────┘          │      killed: its connection closes, and rank 0 notifies ranks 1 and 3
    rank 3   ────────────────────────────────┘

Functions registered with ``on_failure`` then end the call in which the main thread waits for others.
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

from partitioner.runtime.process.call_order import CallTable, RankCall
from partitioner.runtime.process.channel import Channel, connect, local_addresses
from partitioner.runtime.process.failure import Failure, Store
from partitioner.runtime.process.interruptible import ThreadStore
from passes.ir.errors import CommunicationError
from passes.ir.mesh import rank_list

NO_CONNECTION = -1
"""The connection number of failures that happen before there is a connection."""

_CAUSE_TIMEOUT = 2.0
"""Seconds that a rank whose communication has failed waits to learn the cause."""

_GRACE = 1.0
"""Seconds from a failure until this process's waits are ended: messages that were sent before may still arrive."""

_CONNECTING = 10.0
"""Seconds within which a rank must connect to rank 0 after it has come to ``partition()``. It tries for half of them."""

_POLL_INTERVAL = 0.1
"""Seconds between two checks of rank 0 which ranks have come."""

_REMEDY = "look at what that rank reports, or why its process ended"

_DEATH = "the process was killed, or ended without a word"


class Watch:
    """Watches all processes, in one of them.

    Args:
        store: shared with the processes of all ranks; no one else writes its keys.
        rank, size: of this process; number of ranks.
        near: a host that all processes reach, by which rank 0 finds its own address; None: rank 0 uses its host name.
        silence: seconds after which a machine that does not answer counts as dead.
    """

    def __init__(self, store: Store, rank: int, size: int, near: str | None, silence: float) -> None:
        self.rank = rank
        self.size = size
        self._store = ThreadStore(store)
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
        # Set when the thread needs the store no more: this process has connected with rank 0, or cannot; on rank 0, no rank is awaited.
        self._settled = threading.Event()
        self._ends: list[tuple[int, Callable[[], None]]] = []
        self._outbox: list[Mapping[str, Any]] = []
        self._channels: dict[int, Channel] = {}
        self._calls = CallTable(size)
        self._over = threading.Event()
        token = secrets.token_hex(8)
        listener = _listen() if rank == 0 and size > 1 else None
        address = None if listener is None else [local_addresses(near), listener.getsockname()[1], token]
        # Before anything else: from here on, the death of this process is noticed.
        self._store.set(f"came {rank}", json.dumps(address))
        if size == 1:
            self._settled.set()
        else:
            watch = (lambda: self._serve(listener, token)) if listener is not None else self._follow
            threading.Thread(target=watch, name="partitioner watch", daemon=True).start()

    # -- queries of this process ---------------------------------------------------------------------------------------------------

    def first(self, number: int) -> Failure | None:
        """Return the first failure of a connection, or the death of a process, which concerns all connections."""
        with self._changed:
            if number in self._failures:
                return self._failures[number]
            if self._lost and self._loss is None:
                rank, why = next(iter(self._lost.items()))  # later deaths may be its consequences
                self._loss = Failure(rank, f"rank {rank} has left: {why}", lost=True)
            return self._loss

    def await_first(self, number: int) -> Failure | None:
        """Return the first failure; wait up to ``_CAUSE_TIMEOUT`` to learn of one."""
        with self._changed:
            self._changed.wait_for(lambda: self.first(number) is not None, _CAUSE_TIMEOUT)
            return self.first(number)

    def left(self) -> dict[int, str]:
        """Return rank whose script has ended -> how it ended, as text."""
        with self._changed:
            return dict(self._left)

    def calls_of(self, rank: int, number: int) -> int:
        """Return the number of calls on a connection of a rank whose script has ended."""
        with self._changed:
            return self._calls_of.get(rank, {}).get(number, 0)

    def await_all(self, store: Store, timeout: timedelta, dead: Callable[[], Sequence[int]]) -> None:
        """Wait until the processes of all ranks have come, and until the thread of this watch is done with the store.

        The store answers one request at a time: a long request of this process would keep the thread from watching the others.

        Args:
            store: the store that the watch has, through a client that Ctrl-C interrupts.
            timeout: how long the processes may take to come.
            dead: returns the ranks whose death this machine knows by other means (``LocalMarks``).

        Raises:
            CommunicationError: naming the ranks that did not come, or that left.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        pause = 0.001
        while not store.check([f"came {rank}" for rank in range(self.size)]):
            missing = [rank for rank in range(self.size) if not store.check([f"came {rank}"])]
            for rank in set(missing) & set(dead()):
                self.report(NO_CONNECTION, lost_rank(rank))
            why = self._why_not_all(missing)
            if why is None and missing and time.monotonic() > deadline:
                why = f"{rank_list(missing)} did not call partition() within {timeout.total_seconds():.0f} s"
            if why is not None:
                raise CommunicationError(f"rank {self.rank} waits in partition() for the other ranks: {why}", remedy=_REMEDY)
            time.sleep(pause)
            pause = min(2 * pause, _POLL_INTERVAL)
        settle_deadline = time.monotonic() + 2 * _CONNECTING  # a rank that cannot connect gives up before
        while not self._settled.wait(_POLL_INTERVAL) and self.first(NO_CONNECTION) is None and time.monotonic() < settle_deadline:
            pass
        if (failure := self.first(NO_CONNECTION)) is not None:
            raise CommunicationError(f"rank {self.rank} cannot connect with the other ranks: {failure.text}", remedy=_REMEDY)

    def _why_not_all(self, missing: Sequence[int]) -> str | None:
        """Return why the missing ranks will not come: a failure, or scripts that have ended; None if they may still come."""
        failure = self.first(NO_CONNECTION)
        if failure is not None:
            return failure.text
        left = self.left()
        ended = sorted(set(missing) & left.keys())
        return f"{rank_list(ended)} {left[ended[0]]}" if ended else None

    # -- reports of this process ---------------------------------------------------------------------------------------------------

    def report(self, number: int, failure: Failure) -> Failure:
        """Report a failure to all ranks unless there is one; return the first."""
        if self.rank == 0:
            self._note_failure(number, failure)
        elif self.first(number) is None:
            self._send_to_rank_0({"failed": number, "failure": dataclasses.asdict(failure)})
            self.await_first(number)
        return self.first(number) or failure

    def announce(self, number: int, count: int, call: RankCall) -> None:
        """Report a call of this process, number ``count`` on its connection, to rank 0, which compares it with those of the others."""
        self._calls_made[number] = count
        if self.rank == 0:
            self._note_call(number, count, 0, call)
        else:
            self._send_to_rank_0({"call": [number, count, call.what, call.given, call.optimizer_steps]})

    def leave(self, how: str) -> None:
        """Notify all ranks that this process ends without a failure."""
        n_calls = list(self._calls_made.items())
        if self.rank == 0:
            self._note_left(0, how, n_calls)
        else:
            self._send_to_rank_0({"left": self.rank, "how": how, "calls": n_calls})

    def on_failure(self, number: int, end: Callable[[], None]) -> None:
        """Call ``end`` shortly after a failure of a connection becomes known; it must end the waits of the main thread."""
        with self._changed:
            self._ends.append((number, end))

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        with self._changed:
            if self.rank != 0:
                for channel in self._channels.values():
                    channel.shut_down()

    def end_requests(self) -> None:
        """Let the thread of this watch make no further request to the store: Python is about to shut down."""
        self._store.end()

    def _send_to_rank_0(self, message: Mapping[str, Any]) -> None:
        """Send a message to rank 0; before this rank is connected, keep it for later."""
        with self._changed:
            if 0 not in self._channels:
                self._outbox.append(message)
                return
        self._channels[0].send(message)

    # -- events: note each, and on rank 0 pass it on -------------------------------------------------------------------------------

    def _note_failure(self, number: int, failure: Failure) -> None:
        with self._changed:
            if self.first(number) is not None:
                return
            self._failures[number] = failure
            self._broadcast({"failed": number, "failure": dataclasses.asdict(failure)})
            self._end_waits(number)

    def _note_lost(self, rank: int, why: str) -> None:
        """Note the death of a process that has not ended its script."""
        with self._changed:
            if rank in self._left or rank in self._lost:
                return
            self._lost[rank] = why
            self._broadcast({"lost": rank, "why": why})
            self._end_waits(None)

    def _note_left(self, rank: int, how: str, calls: Sequence[tuple[int, int]]) -> None:
        """Note that a rank has ended its script, after ``calls``: pairs of a connection and its number of calls."""
        with self._changed:
            self._left[rank] = how
            self._calls_of[rank] = dict(calls)
            self._broadcast({"left": rank, "how": how, "calls": calls})
            self._changed.notify_all()

    def _note_call(self, number: int, count: int, rank: int, call: RankCall) -> None:
        with self._changed:
            self._note_difference(number, self._calls.add(number, count, rank, call, time.monotonic()))

    def _note_difference(self, number: int, text: str | None) -> None:
        """Note that ranks make different calls, as a failure of all; None: they do not."""
        if text is not None:
            self._note_failure(number, Failure(self.rank, text, disagreement=True))

    def _end_waits(self, number: int | None) -> None:
        """After a failure of a connection (None: of all), wake threads that wait for it, and call the functions of ``on_failure``."""
        self._changed.notify_all()
        ends = [end for connection, end in self._ends if number in (None, connection)]
        if ends:
            timer = threading.Timer(_GRACE, _call_all, [ends])
            timer.daemon = True
            timer.start()

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        """Send a message from rank 0 to all others; do nothing on other ranks."""
        if self.rank == 0:
            for channel in self._channels.values():
                channel.send(message)

    def _past_events(self) -> Iterator[Mapping[str, Any]]:
        """Yield the messages that a rank has missed by connecting late."""
        yield from ({"lost": rank, "why": why} for rank, why in self._lost.items())
        for rank, how in self._left.items():
            yield {"left": rank, "how": how, "calls": list(self._calls_of[rank].items())}
        yield from ({"failed": number, "failure": dataclasses.asdict(failure)} for number, failure in self._failures.items())

    def _handle(self, message: Mapping[str, Any], source: int) -> None:
        """Note the event of a message from rank ``source``."""
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
        """Serve on rank 0: accept connections, handle their messages, and notice when they close.

        Report also a rank that has come and does not connect in time, and a call in which ranks differ and that others do not make in time.
        """
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        unidentified: set[Channel] = set()
        since: dict[int, float] = {}
        while not self._over.is_set():
            for key, _ in selector.select(_POLL_INTERVAL):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        channel = Channel(listener.accept()[0], self._silence)
                        unidentified.add(channel)
                        selector.register(channel.socket, selectors.EVENT_READ, channel)
                elif not self._receive(key.data, unidentified, token):
                    selector.unregister(key.fileobj)
                    key.data.close()
            if not self._settled.is_set():
                self._report_absent(since)
            with self._changed:
                for connection, call in self._calls.waiting():
                    self._note_difference(connection, self._calls.overdue(time.monotonic(), connection, call))
        selector.close()
        listener.close()
        for channel in (*unidentified, *self._channels.values()):
            channel.close()

    def _receive(self, channel: Channel, unidentified: set[Channel], token: str) -> bool:
        """Handle the messages of a connection, first rank and token if it is ``unidentified``; return whether it stays open."""
        try:
            for message in channel.receive():
                if channel not in unidentified:
                    self._handle(message, channel.rank)
                elif message.get("token") == token:
                    unidentified.discard(channel)
                    self._welcome(channel, int(message["rank"]), token)
                else:
                    unidentified.discard(channel)
                    return False
        except (OSError, EOFError, ValueError, KeyError) as error:
            if channel not in unidentified:
                self._note_lost(channel.rank, _reason(error, self._silence))
            unidentified.discard(channel)
            return False
        return True

    def _welcome(self, channel: Channel, rank: int, token: str) -> None:
        """Register the connection of a rank, and send it the events that it has missed."""
        with self._changed:
            channel.rank = rank
            for message in ({"welcome": token}, *self._past_events()):
                channel.send(message)
            self._channels[rank] = channel

    def _report_absent(self, since: dict[int, float]) -> None:
        """Note ranks as lost that have come, first seen at ``since[rank]``, but not connected in time nor said that they cannot."""
        now = time.monotonic()
        unknown = set(range(1, self.size)) - set(self._channels) - set(self._lost) - self._alone
        for rank in unknown:
            try:
                if not self._store.check([f"came {rank}"]):
                    continue
                if json.loads(self._store.get(f"came {rank}")) == "alone":
                    self._alone.add(rank)
                    self._calls.leave_out(rank)
                elif now > since.setdefault(rank, now) + _CONNECTING:
                    self._note_lost(rank, _DEATH)
            except RuntimeError:
                return  # the store is gone: the next use of it reports that
        if not unknown:
            self._settled.set()

    def _follow(self) -> None:
        """Follow on every other rank: connect to rank 0, handle its messages, and notice when it closes."""
        try:
            channel = self._connect()
        except RuntimeError:
            channel = None  # the store is gone: the next use of it reports that
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
                    self._handle(message, 0)
        except (OSError, EOFError) as error:
            if not self._over.is_set():
                self._note_lost(0, _reason(error, self._silence))
        channel.close()

    def _connect(self) -> Channel | None:
        """Connect to rank 0 when it has come; None if that fails, which is then noted or announced in the store as ``"alone"``."""
        while not self._over.is_set() and not self._store.check(["came 0"]):
            time.sleep(_POLL_INTERVAL / 10)
        deadline = time.monotonic() + _CONNECTING / 2
        refused: dict[str, bool] = {}
        reported, port, token = json.loads(self._store.get("came 0"))
        addresses = dict.fromkeys([*reported, *([self._near] if self._near else [])])
        while not self._over.is_set() and time.monotonic() < deadline:
            for address in addresses:
                if refused and time.monotonic() > deadline:
                    break
                try:
                    return connect(address, port, {"rank": self.rank, "token": token}, self._silence)
                except (OSError, EOFError, ValueError) as error:
                    refused[address] = isinstance(error, ConnectionRefusedError)
            time.sleep(_POLL_INTERVAL)
        if self._over.is_set():
            return None
        if all(refused.values()):  # by all addresses: a single one may be of this machine, and rank 0 on another
            self._note_lost(0, _DEATH)
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
    """The failures that concern one connection: calls the methods of ``watch`` with its number."""

    watch: Watch
    number: int

    def report(self, failure: Failure) -> Failure:
        return self.watch.report(self.number, failure)

    def first(self) -> Failure | None:
        return self.watch.first(self.number)

    def await_first(self) -> Failure | None:
        return self.watch.await_first(self.number)

    def left(self) -> dict[int, str]:
        return self.watch.left()


def _listen() -> socket.socket:
    """Return a listening socket on a free port, for IPv6 and IPv4 if the machine has both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def lost_rank(rank: int) -> Failure:
    """Return the failure of a process that has died."""
    return Failure(rank, f"rank {rank} has left: {_DEATH}", lost=True)


def _reason(error: Exception, silence: float) -> str:
    """Return why a connection has ended, as text."""
    if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
        return _DEATH
    return f"nothing has been heard for {silence:.0f} s: the machine is down, or the link to it is cut"


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
