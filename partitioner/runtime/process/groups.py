"""The process groups of one run, with one rank in each process: of all processes, or of those of a device mesh, in its order.

Gloo matches messages by tag, so one group carries them all. NCCL has no tags and runs the messages of a communicator in the order in which
both sides start them, so two ranks that send to each other at the same time would deadlock. With NCCL, each direction between two ranks has
a communicator of its own:

    gloo     0 <═══> 1 <═══> 2         one group, tag = number of the message on its channel
    NCCL     0 ────> 1 ────> 2         a group a channel: first sent, first received
             0 <──── 1 <──── 2

``dist.new_group`` counts groups alike on all processes, sorts ranks, and waits for every process. It makes the groups of a model that all
processes run in their order; for any other model the members alone make groups, under keys of their own.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: defaults of its functions keep the group that is there at its import
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # its stub lacks what it has

from partitioner.runtime.collectives.torch_distributed import wait_for
from partitioner.runtime.process.agreement import Agreement
from partitioner.runtime.process.call_order import Given, RankCall
from partitioner.runtime.process.failure import DisagreementError, Failure, failure_of
from partitioner.runtime.process.interruptible import Interruptible, InterruptibleStore
from partitioner.runtime.process.traffic import Traffic
from partitioner.runtime.process.watch import ConnectionRecord, Watch
from passes.ir.comm.backends import default_backend
from passes.ir.errors import CommunicationError, ConfigError, PartitionError
from passes.ir.mesh import rank_list
from passes.ir.torch_private import process_group

Route = tuple[dist.ProcessGroup, int]
"""A process group, and the index of the other rank in it."""

_NEVER_SENT = 2**30
"""A tag that no message has."""

_groups_of_members: weakref.WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Default process group -> groups that members made; these end with it, as those of ``dist.new_group`` do."""


@dataclass(frozen=True)
class Members:
    """The processes of one model.

    Attributes:
        processes: the number of the process of each rank, in the default process group.
        own: the number of this process.
        world_size: how many processes there are.
    """

    processes: tuple[int, ...]
    own: int
    world_size: int

    def __post_init__(self) -> None:
        if self.own not in self.processes:
            raise ConfigError(
                f"the device mesh has the processes {self}, and this is process {self.own}",
                remedy="call partition() in the processes of the mesh alone: if mesh.get_coordinate() is not None: ...",
            )

    @property
    def rank(self) -> int:
        """Return the rank of this process in the model."""
        return self.processes.index(self.own)

    @property
    def size(self) -> int:
        return len(self.processes)

    @property
    def is_whole(self) -> bool:
        """Whether these are all processes, in their order."""
        return self.processes == tuple(range(self.world_size))

    def __str__(self) -> str:
        return ", ".join(map(str, self.processes))

    def explain(self, error: BaseException) -> None:
        """Add to an error of this package which processes its ranks are, unless the numbers are the same."""
        if self.is_whole or not isinstance(error, PartitionError) or _RANKS_ARE in error.problem:
            return
        pairs = ", ".join(f"{rank} is process {process}" for rank, process in enumerate(self.processes))
        error.problem = f"{error.problem}\n  {_RANKS_ARE} {pairs}"
        error.args = (error.problem,)


_RANKS_ARE = "ranks are those of the device mesh:"


class SharedStore:
    """Keys in a store of several processes, under a prefix.

    The store of the script's default process group is not kept here, but asked of the group: it ends with the group, since another group
    at the same address would find its keys.

    Args:
        base: the store, or the group that has it.
    """

    def __init__(self, base: Store | weakref.ref[dist.ProcessGroup], prefix: str) -> None:
        self._base = base
        self._prefix = prefix

    def under(self, prefix: str) -> SharedStore:
        """Return the keys under another prefix within this one."""
        return SharedStore(self._base, f"{self._prefix}/{prefix}" if self._prefix else prefix)

    def torch_store(self) -> Store:
        """Return the store as torch has it; do not keep it.

        Raises:
            RuntimeError: the group that had it was destroyed.
        """
        base = self._base
        if isinstance(base, weakref.ref):
            group = base()
            if group is None:
                raise RuntimeError("the default process group was destroyed")
            base = group.get_group_store()
        return PrefixStore(self._prefix, base) if self._prefix else base

    def set(self, key: str, value: str) -> None:
        self.torch_store().set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self.torch_store().get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self.torch_store().check(keys))


class Connection:
    """The process groups that connect this process with the others; all processes create and extend them together.

    Args:
        device: of this rank; a GPU uses NCCL.
        timeout: how long any wait may last.
        number: number of earlier connections of this process.
        store: shared by all processes.
        holder: of the store: ``"torchrun"`` or ``"rank 0"``.
        tagged: whether one group carries all messages by tag; False: one group for each channel; None: the choice for the backend.
        members: the processes; None: all, in their order.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: timedelta,
        number: int,
        watch: Watch,
        store: SharedStore,
        holder: str = "rank 0",
        *,
        tagged: bool | None = None,
        members: Members | None = None,
    ) -> None:
        assert dist.group.WORLD is not None
        self.rank = watch.rank
        self.size = watch.size
        self.device = device
        self.timeout = timeout
        # Weak, as are groups: the script may destroy them and make others, for which the store of these must be gone.
        self._world = weakref.ref(dist.group.WORLD)
        self.members = members or Members(tuple(range(self.size)), self.rank, self.size)
        self.failure: Failure | None = None
        self.record = ConnectionRecord(watch, number)
        self._number = number
        self._watch = watch
        self._n_calls = 0
        self._blocking = Interruptible(self.rank, self.record.first, self.record.await_first)
        self._store = store.under(f"connection {number}")
        agreement_store = InterruptibleStore(self._store, self._blocking, timeout.total_seconds(), holder)
        self.agreement = Agreement(agreement_store, self.rank, self.size, timeout, self.record)
        self.everyone = tuple(range(self.size))
        self._backend = default_backend(device.type)
        self.tagged = self._backend == "gloo" if tagged is None else tagged
        self._closing = threading.Lock()
        self._groups: weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = weakref.WeakValueDictionary()
        self._channels: weakref.WeakValueDictionary[tuple[int, int], dist.ProcessGroup] = weakref.WeakValueDictionary()
        self._opened: set[tuple[int, ...] | tuple[str, int, int]] = set()
        self._n_models = 0
        watch.on_failure(number, self._close_groups)
        self._open_group(self.everyone)

    @property
    def world(self) -> dist.ProcessGroup | None:
        """Return the default process group in which the groups were made; None if it is no more."""
        return self._world()

    def number_model(self) -> int:
        """Return the number of the next model on this connection, the same on every rank."""
        self._n_models += 1
        return self._n_models

    def open(self, traffic: Traffic) -> None:
        """Create the groups that programs need and that do not exist yet. All processes must call it in the same order."""
        for ranks in traffic.groups:
            if self._open_group(ranks):
                self._warm_up_group(self._groups[ranks])
        for channel in () if self.tagged else traffic.channels:
            if ("channel", *channel) not in self._opened:
                self._opened.add(("channel", *channel))
                group = self._new_group(sorted(channel))
                if group is not None:
                    self._channels[channel] = group
                    self._warm_up_channel(channel)

    def _open_group(self, ranks: tuple[int, ...]) -> bool:
        """Create the group of these ranks, unless it exists; return whether this rank is in one that is new."""
        if ranks in self._opened:
            return False
        self._opened.add(ranks)
        group = self._new_group(ranks)
        if group is not None:
            self._groups[ranks] = group
        return group is not None

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of a collective."""
        return self._groups[ranks]

    def route(self, source: int, destination: int) -> Route:
        """Return the group of a channel of this rank, and the index in it of the rank at the other end."""
        peer = destination if source == self.rank else source
        if self.tagged:
            return self._groups[self.everyone], peer
        return self._channels[source, destination], int(peer > self.rank)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Create a process group, unless a failure of another rank ends the waiting; return None if this rank is not in it."""

        def make() -> dist.ProcessGroup | None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread has a current device of its own
            if not self.members.is_whole:
                return self._group_of_members(ranks)
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self.timeout, backend=self._backend)
            return group if self.rank in ranks else None

        return self._blocking.run(f"connect with {rank_list(ranks)}", make)

    def _group_of_members(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Create a process group in the order of ``ranks`` without waiting for other processes; None if this rank is not in it."""
        world = self.world
        if self.rank not in ranks or world is None:
            return None
        store = self._store.under(f"group {len(self._opened)}").torch_store()
        group = process_group(self._backend, store, ranks.index(self.rank), len(ranks), self.timeout)
        _groups_of_members.setdefault(world, []).append(group)
        return group

    # NCCL creates a communicator at its first use (one for collectives, one for messages), for which its ranks wait for each other.
    # Programs use communicators in different orders, which could deadlock; here all ranks use them first in one order.

    def _warm_up_channel(self, channel: tuple[int, int]) -> None:
        group, peer = self.route(*channel)
        start = group.send if self.rank == channel[0] else group.recv
        start([torch.zeros(1, device=self.device)], peer, 0).wait()
        self._synchronize()

    def _warm_up_group(self, group: dist.ProcessGroup) -> None:
        wait_for(dist.all_reduce(torch.zeros(1, device=self.device), group=group, async_op=True))
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
        self.agreement.begin_call(self._n_calls, what)
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
        """Raise if a failure has ended the connection, or the script its process group."""
        if self.world is None or dist.group.WORLD is not self.world:
            raise CommunicationError(
                "the ranks are no longer connected: their process group was destroyed",
                remedy="call destroy_process_group() when all is done, or partition again on every rank",
            )
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
