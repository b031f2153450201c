"""One rank a process, as torchrun starts them. The one file that reads the environment."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.connection import Connection
from partitioner.runtime.distributed_collectives import as_bytes
from partitioner.runtime.distributed_transport import DistributedTransport, PreparedTraffic, prepare_traffic
from partitioner.runtime.executor import ProgramSet, Run
from passes.ir.backends import check_backend, default_backend
from passes.ir.errors import ConfigError

__all__ = ["TorchrunRuntime", "is_launched", "local_world_size", "world_size"]

TIMEOUT = timedelta(seconds=300)
"""How long a wait may last, unless the caller or an existing process group says otherwise."""


def is_launched() -> bool:
    """Whether several processes were started, each to be one rank. A single process runs all ranks itself."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def world_size() -> int:
    """How many processes were started."""
    return int(os.environ["WORLD_SIZE"])


def local_world_size() -> int:
    """How many of them were started on this machine; all, if nobody says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


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
        rank = int(os.environ["RANK"])
        self.n_ranks = len(devices)
        self.local_ranks: tuple[int, ...] = (rank,)
        self.backward_anywhere = False
        self.devices = (*devices[:rank], _own(devices[rank]), *devices[rank + 1 :])
        self._rank = rank
        self._connection = _connect(self.devices[rank], timeout)
        self._number = self._connection.number_model()
        self._prepared: dict[int, tuple[ProgramSet, PreparedTraffic]] = {}

    def run(self, programs: ProgramSet, inputs: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """Run this rank's program; returns its result.

        Raises:
            CommunicationError: another rank has left, or did not answer in time; names the first failure of any rank.
            ConfigError: the ranks run different programs.
        """
        with self.failing_together() as connection, torch.no_grad():
            prepared = self._prepare(programs)
            connection.agreement.agree("program", f"{prepared.traffic.name} of model {self._number}", in_step=True)
            connection.agreement.go_on()
            connection.open(prepared.traffic)
            transport = DistributedTransport(connection, prepared)
            result = _run_to_the_end(programs.executables[self._rank].start(transport, inputs[self._rank]))
            transport.finish()
        return {self._rank: result}

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[Connection]:
        """Whatever goes wrong inside is told to all ranks; what others told before is part of the error here."""
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

        A rank that says a value waits for nobody while it stays as it was.
        """
        with self.failing_together() as connection:
            return connection.agreement.agree(what, value, in_step=in_step)

    def collect(self, owned: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The union of what the processes own, on every process: first what there is, then each tensor from its owner."""
        with self.failing_together() as connection, torch.no_grad():
            group = connection.group(connection.everyone)
            kinds = {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in owned.items()}
            kinds_of: list[Any] = [None] * self.n_ranks
            dist.all_gather_object(kinds_of, kinds, group=group)
            return {
                name: None if kind is None else _broadcast(owned.get(name), kind, source, connection)
                for source, theirs in enumerate(kinds_of)
                for name, kind in theirs.items()
            }

    def reduce(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """A number reduced over all processes."""
        with self.failing_together() as connection:
            reduced = value.detach().clone()
            dist.all_reduce(reduced, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], connection.group(connection.everyone))
            return reduced

    def _prepare(self, programs: ProgramSet) -> PreparedTraffic:
        """What programs communicate, read when they first run. They are kept, so that no others get their identity."""
        if id(programs) not in self._prepared:
            self._prepared[id(programs)] = programs, prepare_traffic(programs.programs, self._rank)
        return self._prepared[id(programs)][1]


def _run_to_the_end(run: Run) -> Any:
    """A program's result; it never yields here, since its waits block."""
    try:
        next(run)
    except StopIteration as end:
        return end.value
    raise AssertionError("a wait that blocks is always ready")


def _broadcast(own: Tensor | None, kind: tuple[torch.Size, torch.dtype], source: int, connection: Connection) -> Tensor:
    """A tensor of one rank, on every rank. It travels as bytes: backends know few dtypes."""
    tensor = torch.empty(kind[0], dtype=kind[1], device=connection.device) if own is None else own
    if tensor.numel() > 0:
        dist.broadcast(as_bytes(tensor.detach().contiguous()), source, connection.group(connection.everyone))
    return tensor


# -- this process and the others -----------------------------------------------------------------------------------------------------


_connections: dict[tuple[torch.device, timedelta], Connection] = {}
_count = itertools.count()


def _own(device: torch.device) -> torch.device:
    """The device of this process: ``cuda`` without a number is the one that torchrun means for it."""
    if device.type != "cuda" or device.index is not None:
        return device
    if "LOCAL_RANK" not in os.environ:
        raise ConfigError(
            "LOCAL_RANK is not set, which says on which accelerator of its machine this process runs",
            remedy='start the script with torchrun, or name the device of each rank: devices=["cuda:0", "cuda:1"]',
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _connect(device: torch.device, timeout: timedelta | None) -> Connection:
    """The connection of this process with all others, shared by all its runtimes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _join(device, timeout)
    world = dist.group.WORLD
    assert world is not None
    key = device, timeout or world.get_group_store().timeout  # type: ignore[attr-defined]  # its stub lacks what it has
    if not _connections:
        atexit.register(_report_last_error)
    if key not in _connections or _connections[key].failure is not None or _connections[key].world is not world:
        _connections[key] = Connection(*key, next(_count))
    return _connections[key]


def _join(device: torch.device, timeout: timedelta | None) -> None:
    """See to the default process group."""
    backend = default_backend(device.type)
    check_backend(backend, device.type, "send_receive")
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise ConfigError(f"this build of torch has no {backend}, which {device.type} needs", remedy="install another build of torch")
    if not dist.is_initialized():
        try:
            dist.init_process_group(backend, timeout=timeout or TIMEOUT)
        except ValueError as error:
            raise ConfigError(
                f"the processes cannot find each other: {error}", remedy="start the script with torchrun --nproc-per-node N"
            ) from error
        atexit.register(_destroy)
    rank, size = int(os.environ["RANK"]), world_size()
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ConfigError(
            f"torch.distributed has this process as rank {dist.get_rank()} of {dist.get_world_size()}, torchrun as rank {rank} of {size}",
            remedy="call init_process_group() without rank and world_size, or leave it to partition()",
        )


def _report_last_error() -> None:
    """When an error of the script ends this process, the others learn which."""
    error = getattr(sys, "last_value", None)
    for connection in _connections.values():
        if error is not None and dist.is_initialized() and connection.world is dist.group.WORLD:
            connection.fail(error)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
