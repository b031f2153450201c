"""The processes that run one model, and how this one reaches the others before there are process groups.

    mp.spawn, a group of 4            members (0, 1, 2, 3)      ranks 0, 1, 2, 3 of the model
    DeviceMesh [[3, 1], [2, 0]]       members (3, 1, 2, 0)      rank 0 of the model is process 3
    DeviceMesh [2, 3], part of 4      members (2, 3)            processes 0 and 1 take no part, and may run another model meanwhile

Everything that ranks share is that of their session: its store keys, its watch, its connections.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # its stub lacks what it has

from partitioner.runtime.process import launcher
from partitioner.runtime.process.failure import Failure, failure_of
from partitioner.runtime.process.groups import Connection, Members, SharedStore
from partitioner.runtime.process.interruptible import Interruptible, InterruptibleStore
from partitioner.runtime.process.local_marks import LocalMarks
from partitioner.runtime.process.watch import NO_CONNECTION, Watch, lost_rank
from passes.ir.comm.backends import check_backend, default_backend
from passes.ir.errors import ConfigError, PartitionError

TIMEOUT = timedelta(seconds=300)
"""How long a wait may last, unless the caller or an existing process group says otherwise."""

_LONGEST_SILENCE = 60.0
"""Seconds after which a machine that does not answer counts as gone; half of the timeout, if that is less."""


@dataclass
class Session:
    """The connection of this process with the others of a model.

    Attributes:
        members: the processes.
        store: of these, for this attempt of torchrun.
        watch: of these.
        holder: of the store: ``"torchrun"`` or ``"rank 0"``.
        marks: of processes that have come before there was a store.
        world: the default process group that gives ``members`` their numbers; None: there is none yet.
        own_group: whether this package makes the default process group, not the script.
        connections: by device and timeout.
    """

    members: Members
    store: SharedStore
    watch: Watch
    holder: str
    marks: LocalMarks
    world: weakref.ref[dist.ProcessGroup] | None
    own_group: bool
    connections: dict[tuple[torch.device, timedelta], Connection] = field(default_factory=dict)
    n_connections: int = 0
    n_groups: int = 0

    def is_of(self, world: dist.ProcessGroup | None) -> bool:
        """Return whether the session can go on with this default process group; None: there is none."""
        if world is None:
            return self.own_group  # it makes another
        return self.world is not None and self.world() is world

    def next_connection(self) -> int:
        """Return the number of the next connection, the same on all members."""
        self.n_connections += 1
        return self.n_connections - 1


_sessions: dict[tuple[int, ...], Session] = {}
"""The sessions of this process by their processes."""

_session_numbers: Counter[tuple[int, ...]] = Counter()


def has_default_group() -> bool:
    """Return whether a default process group of real processes exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"  # a fake group has no other processes


def world_size() -> int:
    """Return the number of processes: those of the script's default process group, else those that were launched."""
    return dist.get_world_size() if has_default_group() else launcher.launch().size


def members_of(processes: Sequence[int] | None = None) -> Members:
    """Return the processes of a model as seen by this one: all, or those of a device mesh, in its order.

    Raises:
        ConfigError: this process is none of them.
    """
    size = world_size()
    own = dist.get_rank() if has_default_group() else launcher.launch().rank
    return Members(tuple(range(size)) if processes is None else tuple(processes), own, size)


def arrive(processes: Sequence[int] | None = None) -> Session:
    """Announce this process to the others and watch them all: from here on they learn if it dies. Returns the session of the members.

    Raises:
        ConfigError: the environment lacks the address of rank 0, or the default process group has other processes than were launched.
        CommunicationError: the store of the processes cannot be reached.
    """
    members = members_of(processes)
    world = dist.group.WORLD if has_default_group() else None
    if world is not None:
        _check_default_group(members)
    known = _sessions.get(members.processes)
    if known is None or known.members != members or not known.is_of(world):
        if world is None and members.size < members.world_size:
            raise ConfigError(
                "the process group of the device mesh was destroyed",
                remedy="partition before destroy_process_group(), or make another mesh",
            )
        _forget_sessions_of_other_groups(world)
        _sessions[members.processes] = _new_session(members, world)
        _end_sessions_at_exit()
    return _sessions[members.processes]


def _new_session(members: Members, world: dist.ProcessGroup | None) -> Session:
    limit = TIMEOUT
    # A store that exists before the processes shows which have come; where rank 0 makes it, local marks do until then.
    has_store = world is not None or launcher.held_by_torchrun()
    marks = LocalMarks(None if has_store else _address(), members.rank, members.size)
    atexit.register(marks.remove)
    if world is None:
        shared = SharedStore(_own_store(members.own, limit, marks), "")
    else:
        shared = SharedStore(weakref.ref(world), "")
        limit = shared.torch_store().timeout  # type: ignore[attr-defined]
    # An agent's store outlives its workers: keys of an earlier attempt must not be read.
    number = _session_numbers[members.processes]
    _session_numbers[members.processes] += 1
    of_part = "" if members.is_whole else f"/processes {members}"
    store = shared.under(f"partitioner/attempt {launcher.attempt()}/{number}{of_part}")
    silence = min(max(limit.total_seconds() / 2, 2.0), _LONGEST_SILENCE)
    watch = Watch(store, members.rank, members.size, launcher.store_host(), silence)
    holder = "torchrun" if launcher.held_by_torchrun() else "rank 0"
    return Session(members, store, watch, holder, marks, None if world is None else weakref.ref(world), world is None)


def _address() -> str:
    """Return the address of the store, which names the run."""
    return ":".join(map(str, launcher.store_address(launcher.launch())))


def _forget_sessions_of_other_groups(world: dist.ProcessGroup | None) -> None:
    """End the sessions whose default process group was destroyed: their processes may have other numbers now."""
    for processes, session in list(_sessions.items()):
        if not session.is_of(world):
            session.watch.leave("has destroyed the process group")
            session.watch.close()
            del _sessions[processes]


def _own_store(rank: int, timeout: timedelta, marks: LocalMarks) -> Store:
    """Connect to the store at the address in the environment; rank 0 makes it if torchrun does not."""

    def death_of_rank_0() -> Failure | None:
        return lost_rank(0) if 0 in marks.dead() else None

    host, port = launcher.store_address(launcher.launch())
    serves = rank == 0 and not launcher.held_by_torchrun()
    holder = "torchrun" if launcher.held_by_torchrun() else "rank 0"
    # Not waiting for the workers: the watch reports those that do not come with a reason.
    return Interruptible(rank, death_of_rank_0, death_of_rank_0).run(
        f"reach the store of the processes at {host}:{port}, which {holder} holds",
        lambda: TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=timeout, multi_tenant=True),
    )


def connect(session: Session, device: torch.device) -> Connection:
    """Return the connection of this process with the other members, shared by all runtimes of the session."""
    try:
        return _connect(session, device)
    except PartitionError as error:
        session.members.explain(error)
        raise


def _connect(session: Session, device: torch.device) -> Connection:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _await_all_and_init(device, session)
    world = dist.group.WORLD
    assert world is not None
    key = device, world.get_group_store().timeout  # type: ignore[attr-defined]  # its stub lacks what it has
    known = session.connections.get(key)
    if known is None or known.failure is not None or known.record.first() is not None or known.world is not world:
        number = session.next_connection()
        session.connections[key] = Connection(*key, number, session.watch, session.store, session.holder, members=session.members)
    return session.connections[key]


def _await_all_and_init(device: torch.device, session: Session) -> None:
    """Wait until all members have come, then make the default process group unless there is one."""
    backend = default_backend(device.type)
    check_backend(backend, device.type, "send_receive")
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise ConfigError(f"this build of torch has no {backend}, which {device.type} needs", remedy="install another build of torch")
    watch, members = session.watch, session.members
    blocking = Interruptible(watch.rank, lambda: watch.first(NO_CONNECTION), lambda: watch.await_first(NO_CONNECTION))
    store = InterruptibleStore(session.store, blocking, TIMEOUT.total_seconds(), session.holder)
    watch.await_all(store, TIMEOUT, session.marks.dead)
    session.marks.remove()
    if dist.is_initialized():
        return
    session.n_groups += 1
    of_group = session.store.under(f"group {session.n_groups}").torch_store()  # a group that was destroyed has left its keys

    def initialize() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread has a current device of its own
        dist.init_process_group(backend, store=of_group, rank=members.own, world_size=members.world_size, timeout=TIMEOUT)

    blocking.run("connect with the other ranks", initialize)
    assert dist.group.WORLD is not None
    session.world = weakref.ref(dist.group.WORLD)


def _check_default_group(members: Members) -> None:
    """Raise ConfigError where the script has made a group of other processes than torchrun has started, or one without a store."""
    launched = launcher.numbers_of_torchrun()
    if launched is not None and launched[1] > 1 and launched != (members.own, members.world_size):
        raise ConfigError(
            f"torch.distributed has this process as rank {members.own} of {members.world_size}, "
            f"torchrun as rank {launched[0]} of {launched[1]}",
            remedy="call init_process_group() without rank and world_size, or leave it to partition()",
        )
    if dist.get_backend() == "mpi":
        raise ConfigError(
            "the default process group has the backend mpi, which has no store, and processes cannot connect without one",
            remedy='call init_process_group("gloo") with an address, the rank and the number of processes: init_method="tcp://HOST:PORT"',
        )


@functools.cache
def _end_sessions_at_exit() -> None:
    atexit.register(_end_sessions)


def _end_sessions() -> None:
    """Report the exit of this process to the other ranks, and destroy a process group that was made here."""
    error = getattr(sys, "last_value", None)
    for session in _sessions.values():
        for connection in session.connections.values():
            if error is not None and dist.is_initialized() and connection.world is dist.group.WORLD:
                connection.fail(error)
        if error is None:
            session.watch.leave("has ended its script")
        elif not session.connections:
            session.watch.report(NO_CONNECTION, failure_of(session.watch.rank, error))
        session.watch.end_requests()
    made_here = any(session.own_group and session.is_of(dist.group.WORLD) for session in _sessions.values())
    if made_here and dist.is_initialized():
        dist.destroy_process_group()
    if error is not None:
        _skip_final_collection()


def _skip_final_collection() -> None:
    """Skip Python's last cycle collection, which takes seconds with torch loaded, and a restart of all ranks waits for it.

    Open files are flushed first, since those that only cycles hold would no longer be.
    """
    for candidate in gc.get_objects():
        if type(candidate) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(ValueError, OSError):
                candidate.flush()
    gc.freeze()
