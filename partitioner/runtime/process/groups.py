"""The process groups of one run, with one rank in each process.

Gloo matches messages by tag, so one group carries them all. NCCL has no tags and runs the messages of a communicator in the order in which
both sides start them, so two ranks that send to each other at the same time would deadlock. With NCCL, each direction between two ranks has
a communicator of its own:

    gloo     0 <═══> 1 <═══> 2         one group, tag = number of the message on its channel
    NCCL     0 ────> 1 ────> 2         a group a channel: first sent, first received
             0 <──── 1 <──── 2
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # its stub lacks what it has

from partitioner.runtime.process.agreement import Agreement
from partitioner.runtime.process.call_order import Given, RankCall, rank_list
from partitioner.runtime.process.failure import DisagreementError, Failure, failure_of
from partitioner.runtime.process.interruptible import Interruptible, InterruptibleStore
from partitioner.runtime.process.traffic import Traffic
from partitioner.runtime.process.watch import ConnectionRecord, Watch
from passes.ir.comm.backends import default_backend
from passes.ir.errors import CommunicationError

__all__ = ["Connection"]

Route = tuple[dist.ProcessGroup, int]
"""A process group, and the index of the other rank in it."""

_NEVER_SENT = 2**30
"""A tag that no message has."""


class Connection:
    """The process groups that connect this process with the others; all processes create and extend them together.

    Args:
        device: of this rank; a GPU uses NCCL.
        timeout: how long any wait may last.
        number: number of earlier connections of this process.
        store: shared by all processes.
        holder: of the store: ``"torchrun"`` or ``"rank 0"``.
        tagged: whether one group carries all messages by tag; False: one group for each channel; None: the choice for the backend.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: timedelta,
        number: int,
        watch: Watch,
        store: Store,
        holder: str = "rank 0",
        *,
        tagged: bool | None = None,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.rank = watch.rank
        self.size = watch.size
        self.device = device
        self.timeout = timeout
        self.world = world
        self.failure: Failure | None = None
        self.record = ConnectionRecord(watch, number)
        self._number = number
        self._watch = watch
        self._n_calls = 0
        self._blocking = Interruptible(self.rank, self.record.first, self.record.await_first)
        agreement_store = InterruptibleStore(PrefixStore(f"connection {number}", store), self._blocking, timeout.total_seconds(), holder)
        self.agreement = Agreement(agreement_store, self.rank, self.size, timeout, self.record)
        self.everyone = tuple(range(self.size))
        self._backend = default_backend(device.type)
        self.tagged = self._backend == "gloo" if tagged is None else tagged
        self._closing = threading.Lock()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._n_models = 0
        watch.on_failure(number, self._close_groups)
        self._groups[self.everyone] = self._new_group(self.everyone)

    def number_model(self) -> int:
        """Return the number of the next model on this connection, the same on every rank."""
        self._n_models += 1
        return self._n_models

    def open(self, traffic: Traffic) -> None:
        """Create the groups that programs need and that do not exist yet. All processes must call it in the same order."""
        for ranks in traffic.groups:
            if ranks not in self._groups:
                self._groups[ranks] = self._new_group(ranks)
                if self.rank in ranks:
                    self._warm_up_group(self._groups[ranks])
        for channel in () if self.tagged else traffic.channels:
            if channel not in self._channels:
                self._channels[channel] = self._new_group(sorted(channel))
                if self.rank in channel:
                    self._warm_up_channel(channel)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of a collective."""
        return self._groups[ranks]

    def route(self, source: int, destination: int) -> Route:
        """Return the group of a channel of this rank, and the index in it of the rank at the other end."""
        peer = destination if source == self.rank else source
        if self.tagged:
            return self._groups[self.everyone], peer
        return self._channels[source, destination], int(peer > self.rank)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create a process group, unless a failure of another rank ends the waiting."""

        def make() -> dist.ProcessGroup:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread has a current device of its own
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self.timeout, backend=self._backend)
            return group

        return self._blocking.run(f"connect with {rank_list(ranks)}", make)

    # NCCL creates a communicator at its first use (one for collectives, one for messages), for which its ranks wait for each other.
    # Programs use communicators in different orders, which could deadlock; here all ranks use them first in one order.

    def _warm_up_channel(self, channel: tuple[int, int]) -> None:
        group, peer = self.route(*channel)
        start = group.send if self.rank == channel[0] else group.recv
        start([torch.zeros(1, device=self.device)], peer, 0).wait()
        self._synchronize()

    def _warm_up_group(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- the same calls on all ranks -----------------------------------------------------------------------------------------------

    def begin_call(self, what: str, given: Mapping[str, Given] | None = None, optimizer_steps: Sequence[int] = ()) -> None:
        """Announce this rank's next call, which rank 0 compares with those of the others; a difference raises here or in a later call.

        Raises:
            CommunicationError: a rank has ended its script before this call.
        """
        self._n_calls += 1
        ended = self.record.left()
        gone = [rank for rank in ended if self._watch.calls_of(rank, self._number) < self._n_calls]
        if gone:
            raise CommunicationError(
                f"rank {self.rank} cannot make call {self._n_calls} ({what}) with rank {gone[0]}: rank {gone[0]} {ended[gone[0]]}",
                remedy="make the same calls on every rank",
            )
        self._watch.announce(self._number, self._n_calls, RankCall(what, given or {}, optimizer_steps))

    @contextlib.contextmanager
    def communicating(self, what: str) -> Iterator[None]:
        """Return the context of a call without a program that communicates with all ranks; errors inside become a CommunicationError."""
        self.begin_call(what)
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            why = self.reason([rank for rank in self.everyone if rank != self.rank], start)
            raise CommunicationError(
                f"rank {self.rank} could not finish {what}{why}", remedy="look at what the other ranks report"
            ) from error

    # -- failing together ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a failure has ended the connection."""
        failure = self.failure or self.record.first()
        if failure is not None and failure.disagreement and self.failure is None:
            raise self.fail(DisagreementError(failure.text))
        if failure is not None:
            raise CommunicationError(
                f"the ranks are no longer connected: {failure.text}",
                remedy="start the processes again, or partition again on every rank",
            )

    def reason(self, peers: Sequence[int], start: float | None) -> str:
        """Return why communication with ``peers`` has failed, as the end of a sentence; empty if ``error_on`` adds the first failure.

        Args:
            start: when this rank began to wait, on the monotonic clock; None: it did not wait.
        """
        limit = self.timeout.total_seconds()
        timed_out = start is not None and time.monotonic() - start >= limit
        failure = self.record.first() if timed_out else self.record.await_first()
        if failure is not None:
            return f": {failure.text}" if failure.lost else ""
        if timed_out:
            return f": nothing happened for {limit:.0f} s"
        ended = self.record.left()
        for rank in peers:
            if rank in ended:
                return f": rank {rank} {ended[rank]}"
        subject = f"rank {peers[0]}" if len(peers) == 1 else "one"
        return f": {subject} has left: its process died, or closed its connections"

    def fail(self, error: BaseException) -> BaseException:
        """Report an error to the others, end the connection, and return the error to raise here, with the first failure of any rank."""
        if self.failure is not None:
            return error
        return self.end(failure_of(self.rank, error)).error_on(self.rank, error)

    def end(self, failure: Failure) -> Failure:
        """Report a failure and close, so that no rank waits for this one; return the first failure of any rank."""
        # Reported before closing: ranks that closing wakes look for it.
        self.failure = self.record.report(failure)
        self._close_groups()
        with self._closing:
            self._groups.clear()
            self._channels.clear()
        return self.failure

    def _close_groups(self) -> None:
        """Close all groups, so that waits for other ranks fail."""
        with self._closing:
            if dist.group.WORLD is not self.world:
                return  # the script has destroyed them
            for group in (*self._groups.values(), *self._channels.values()):
                if dist.get_rank(group) < 0:
                    continue  # this process is no member
                if self._backend == "nccl":
                    group.abort()
                else:
                    _close_gloo(group)


def _close_gloo(group: dist.ProcessGroup) -> None:
    """Close a gloo group by a wait that times out, which closes its connections: there is no other way while works are under way."""
    for peer in set(range(group.size())) - {group.rank()}:
        # One peer would be enough, but a receive from a dead one fails at once, without closing the others.
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
