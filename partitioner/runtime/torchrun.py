"""Run one rank in each process, as torchrun starts them. Only this file reads the environment."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stub lacks what it has

from partitioner.runtime.collectives.torch_distributed import as_bytes
from partitioner.runtime.executor import ProgramSet, Run
from partitioner.runtime.process.call_order import sample_of
from partitioner.runtime.process.failure import Failure, failure_of
from partitioner.runtime.process.groups import Connection
from partitioner.runtime.process.interruptible import Interruptible, InterruptibleStore
from partitioner.runtime.process.local_marks import LocalMarks
from partitioner.runtime.process.transport import DistributedTransport, PreparedTraffic, prepare_traffic
from partitioner.runtime.process.watch import NO_CONNECTION, Watch, lost_rank
from passes.ir.comm.backends import check_backend, default_backend
from passes.ir.errors import ConfigError

__all__ = ["TorchrunRuntime", "arrive", "is_launched", "local_world_size", "world_size"]

TIMEOUT = timedelta(seconds=300)
"""How long a wait may last, unless the caller or an existing process group says otherwise."""

_LONGEST_SILENCE = 60.0
"""Seconds after which a machine that does not answer counts as gone; half of the timeout, if that is less."""


def is_launched() -> bool:
    """Whether there are several processes, each to be one rank. A single process runs all ranks itself."""
    return world_size() > 1


def world_size() -> int:
    """How many processes there are: those of the default process group, if the script has made one, else those that torchrun started."""
    return dist.get_world_size() if _has_default_group() else int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """How many processes were started on this machine; all, if the environment does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or world_size()


def _has_default_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"  # a fake group has no other processes


def _own_rank() -> int:
    return dist.get_rank() if _has_default_group() else int(os.environ["RANK"])


class TorchrunRuntime:
    """Runs the program of one rank; the other ranks run theirs in their own processes.

    Takes the default process group of ``torch.distributed``, or makes it (and then destroys it when Python exits). All processes make
    their runtimes in the same order.

    Args:
        devices: for each rank, where it runs; ``cuda`` without a number is the one that torchrun chose for the process.
        timeout: how long any wait may last. None: that of the default process group when there is one, else 300 s.

    Raises:
        ConfigError: torch has no such backend, or the default process group has other processes than torchrun started.
    """

    def __init__(self, devices: Sequence[torch.device], timeout: timedelta | None = None) -> None:
        rank = _own_rank()
        self.n_ranks = len(devices)
        self.local_ranks: tuple[int, ...] = (rank,)
        self.devices = (*devices[:rank], _with_local_index(devices[rank]), *devices[rank + 1 :])
        self._rank = rank
        self._connection = _connect(self.devices[rank], timeout)
        self._number = self._connection.number_model()
        self._prepared: WeakKeyDictionary[ProgramSet, PreparedTraffic] = WeakKeyDictionary()

    def run(
        self,
        programs: ProgramSet,
        inputs: Mapping[int, Mapping[str, Any]],
        given: Mapping[str, Tensor] | None = None,
        optimizer_steps: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Run this rank's program; return ``{rank: result}``.

        Raises:
            CommunicationError: another rank has left, or did not answer in time; names the first failure of any rank.
            ConfigError: the ranks run different programs.
        """
        with self.failing_together() as connection, torch.no_grad():
            prepared = self._prepare(programs)
            connection.agreement.agree("program", f"{prepared.traffic.name} of model {self._number}", in_step=True)
            connection.agreement.go_on()
            samples = {name: sample_of(tensor) for name, tensor in (given or {}).items()}
            compared = {name: sample for name, sample in samples.items() if sample is not None}
            kind = prepared.traffic.name.rpartition(" ")[0]  # without the digest
            connection.begin_call(f"{kind} of model {self._number}", compared, optimizer_steps)
            connection.open(prepared.traffic)
            transport = DistributedTransport(connection, prepared)
            result = _result_of(programs.executables[self._rank].start(transport, inputs[self._rank]))
            transport.finish()
        return {self._rank: result}

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[Connection]:
        """Report an error raised inside to all ranks, and raise it with the first failure of any rank."""
        self._connection.check()
        try:
            yield self._connection
        except BaseException as error:
            raised = self._connection.fail(error)
            if raised is error:
                raise
            raise raised from error

    def agree(self, what: str, value: object, *, in_step: bool = False) -> str | None:
        """Raise ConfigError on every rank when ranks do not all say the same value; a rank that says None takes over what others say.

        A rank whose value is the one agreed on last does not wait for the others.
        """
        with self.failing_together() as connection:
            return connection.agreement.agree(what, value, in_step=in_step)

    def collect(self, owned: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the union of the tensors that processes own: gather all shapes and dtypes, then broadcast each tensor from its owner."""
        with self.failing_together() as connection, torch.no_grad(), connection.communicating("a gathering of what all ranks hold"):
            connection.agreement.go_on()
            group = connection.group(connection.everyone)
            own_kinds = {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in owned.items()}
            kinds_of_ranks: list[Any] = [None] * self.n_ranks
            dist.all_gather_object(kinds_of_ranks, own_kinds, group=group)
            return {
                name: None if kind is None else _broadcast(owned.get(name), kind, source, connection)
                for source, kinds in enumerate(kinds_of_ranks)
                for name, kind in kinds.items()
            }

    def reduce(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """Reduce a number over all processes."""
        with self.failing_together() as connection, connection.communicating("a reduction over all ranks"):
            connection.agreement.go_on()
            reduced = value.detach().clone()
            dist.all_reduce(reduced, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], connection.group(connection.everyone))
            return reduced

    def _prepare(self, programs: ProgramSet) -> PreparedTraffic:
        """Return what the programs communicate, read when they first run, and forgotten with them."""
        if programs not in self._prepared:
            self._prepared[programs] = prepare_traffic(programs.programs, self._rank)
        return self._prepared[programs]


def _result_of(run: Run) -> Any:
    """Run a program and return its result; it never yields, since waits block in this runtime."""
    try:
        next(run)
    except StopIteration as end:
        return end.value
    raise AssertionError("a wait that blocks is always ready")


def _broadcast(own: Tensor | None, shape_and_dtype: tuple[torch.Size, torch.dtype], source: int, connection: Connection) -> Tensor:
    """Return a tensor of rank ``source``, given there as ``own``, on every rank; it travels as bytes, since backends know few dtypes."""
    tensor = torch.empty(shape_and_dtype[0], dtype=shape_and_dtype[1], device=connection.device) if own is None else own
    if tensor.numel() > 0:
        dist.broadcast(as_bytes(tensor.detach().contiguous()), source, connection.group(connection.everyone))
    return tensor


# -- this process and the others -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Session:
    """The connection of this process with the others before there are process groups.

    Attributes:
        store: of all processes, for this attempt of torchrun.
        holder: of the store: ``"torchrun"`` or ``"rank 0"``.
        own_group: whether this package makes the default process group, not the script.
    """

    store: Store
    watch: Watch
    holder: str
    marks: LocalMarks
    own_group: bool


_session: _Session | None = None
_connections: dict[tuple[torch.device, timedelta], Connection] = {}
_connection_numbers = itertools.count()
_session_numbers = itertools.count()


def arrive(timeout: timedelta | None = None) -> _Session:
    """Announce this process to the others and watch them all: from here on they learn if it dies. Returns the process's one session.

    Raises:
        ConfigError: the environment lacks the address of rank 0, or the default process group has other processes than torchrun started.
        CommunicationError: the store of the processes cannot be reached.
    """
    global _session  # noqa: PLW0603  of the process, as its default group
    rank, size = _own_rank(), world_size()
    if _has_default_group():
        _check_default_group(rank, size)
    if _session is None or (_session.watch.rank, _session.watch.size) != (rank, size):
        limit = timeout or TIMEOUT
        world = dist.group.WORLD if _has_default_group() else None
        # A store that exists before the processes shows which have come; where rank 0 makes it, local marks do until then.
        run_name = None if world is not None or _held_by_torchrun() else ":".join(_store_address())
        marks = LocalMarks(run_name, rank, size)
        atexit.register(marks.remove)
        if world is None:
            shared = _own_store(rank, limit, marks)
        else:
            shared = world.get_group_store()
            limit = timeout or shared.timeout  # type: ignore[attr-defined]
        # An agent's store outlives its workers: keys of an earlier attempt must not be read.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"partitioner/attempt {attempt}/{next(_session_numbers)}", shared)
        silence = min(max(limit.total_seconds() / 2, 2.0), _LONGEST_SILENCE)
        watch = Watch(store, rank, size, os.environ.get("MASTER_ADDR"), silence)
        if _session is None:
            atexit.register(_end_session)
        else:
            _session.watch.close()
        _session = _Session(store, watch, "torchrun" if _held_by_torchrun() else "rank 0", marks, world is None)
    return _session


def _store_address() -> tuple[str, str]:
    """Return the host and the port of the store, from the environment.

    Raises:
        ConfigError: a variable is not set.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        lacking = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None]
        raise ConfigError(
            f"the processes cannot find each other: {' and '.join(lacking)} not set",
            remedy="start the script with torchrun --nproc-per-node N",
        )
    return host, port


def _own_store(rank: int, timeout: timedelta, marks: LocalMarks) -> Store:
    """Connect to the store at the address in the environment; rank 0 makes it if torchrun does not."""

    def death_of_rank_0() -> Failure | None:
        return lost_rank(0) if 0 in marks.dead() else None

    host, port = _store_address()
    serves = rank == 0 and not _held_by_torchrun()
    holder = "torchrun" if _held_by_torchrun() else "rank 0"
    # Not waiting for the workers: the watch reports those that do not come with a reason.
    return Interruptible(rank, death_of_rank_0, death_of_rank_0).run(
        f"reach the store of the processes at {host}:{port}, which {holder} holds",
        lambda: TCPStore(host, int(port), is_master=serves, wait_for_workers=False, timeout=timeout, multi_tenant=True),
    )


def _with_local_index(device: torch.device) -> torch.device:
    """Return this process's device; ``cuda`` without an index gets that of the environment's ``LOCAL_RANK``."""
    if device.type != "cuda" or device.index is not None:
        return device
    if "LOCAL_RANK" not in os.environ:
        raise ConfigError(
            "LOCAL_RANK is not set, which says on which accelerator of its machine this process runs",
            remedy='start the script with torchrun, or name the device of each rank: devices=["cuda:0", "cuda:1"]',
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _held_by_torchrun() -> bool:
    """Whether torchrun's agent process holds the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(device: torch.device, timeout: timedelta | None) -> Connection:
    """The connection of this process with all others, shared by all its runtimes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    session = arrive(timeout)
    _await_all_and_init(device, timeout, session)
    world = dist.group.WORLD
    assert world is not None
    key = device, timeout or world.get_group_store().timeout  # type: ignore[attr-defined]  # its stub lacks what it has
    known = _connections.get(key)
    if known is None or known.failure is not None or known.record.first() is not None or known.world is not world:
        _connections[key] = Connection(*key, next(_connection_numbers), session.watch, session.store, session.holder)
    return _connections[key]


def _await_all_and_init(device: torch.device, timeout: timedelta | None, session: _Session) -> None:
    """Wait until all processes have come, then make the default process group unless there is one."""
    backend = default_backend(device.type)
    check_backend(backend, device.type, "send_receive")
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise ConfigError(f"this build of torch has no {backend}, which {device.type} needs", remedy="install another build of torch")
    limit = timeout or TIMEOUT
    watch = session.watch
    blocking = Interruptible(watch.rank, lambda: watch.first(NO_CONNECTION), lambda: watch.await_first(NO_CONNECTION))
    session.watch.await_all(InterruptibleStore(session.store, blocking, limit.total_seconds(), session.holder), limit, session.marks.dead)
    session.marks.remove()
    if not dist.is_initialized():

        def initialize() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread has a current device of its own
            dist.init_process_group(backend, store=session.store, rank=watch.rank, world_size=watch.size, timeout=limit)

        blocking.run("connect with the other ranks", initialize)


def _check_default_group(rank: int, size: int) -> None:
    """Raise ConfigError where the script has made a group of other processes than torchrun has started."""
    started = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if started[0] > 1 and started != (size, rank):
        raise ConfigError(
            f"torch.distributed has this process as rank {rank} of {size}, torchrun as rank {started[1]} of {started[0]}",
            remedy="call init_process_group() without rank and world_size, or leave it to partition()",
        )


def _end_session() -> None:
    """At the exit of this process, tell the others how it ended, and destroy a process group that was made here."""
    assert _session is not None
    error = getattr(sys, "last_value", None)
    for connection in _connections.values():
        if error is not None and dist.is_initialized() and connection.world is dist.group.WORLD:
            connection.fail(error)
    if error is None:
        _session.watch.leave("has ended its script")
    elif not _connections:
        _session.watch.report(NO_CONNECTION, failure_of(_session.watch.rank, error))
    if _session.own_group and dist.is_initialized():
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
