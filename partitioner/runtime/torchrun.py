"""Run one rank in each process, as torchrun, srun and mpirun start them, or the script itself (``mp.spawn``)."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.collectives.random_stream import RandomStream
from partitioner.runtime.collectives.torch_distributed import all_gather_single, as_bytes, wait_for
from partitioner.runtime.collectives.transfers import Exchanged, Transfer, exchange
from partitioner.runtime.executor import Executable, ProgramSet, raise_with_place
from partitioner.runtime.process import launcher
from partitioner.runtime.process.call_order import sample_of
from partitioner.runtime.process.groups import Connection, Members
from partitioner.runtime.process.session import arrive, connect, members_of, world_size
from partitioner.runtime.process.transport import DistributedTransport, PreparedTraffic, prepare_traffic
from passes.ir.errors import ConfigError, PartitionError

__all__ = ["TorchrunRuntime", "arrive", "is_launched", "join_group", "local_rank", "local_world_size", "rank", "world_size"]


def is_launched() -> bool:
    """Return whether there are several processes, one for each rank. A single process runs all ranks itself."""
    return world_size() > 1


def local_world_size() -> int:
    """Return the number of processes on this machine; all, if the environment does not say."""
    return launcher.local_size(world_size()) or world_size()


def rank() -> int:
    """Return the rank of this process; 0 where it is the only one."""
    return members_of().own


def local_rank() -> int:
    """Return the index of this process among those of its machine; its rank, if the environment does not say."""
    members = members_of()
    found = launcher.local_rank(members.own, members.world_size)
    return members.own if found is None else found


def join_group(device: torch.device) -> None:
    """Make the default process group, unless the script has made one. All processes must call it.

    Args:
        device: of this process; a GPU uses NCCL.
    """
    connect(arrive(), device)


class TorchrunRuntime:
    """Runs the program of one rank; the other ranks run theirs in their own processes.

    Takes the default process group of ``torch.distributed``, or makes it (and then destroys it when Python exits). All processes of a model
    make their runtimes in the same order. No wait is longer than the timeout of the default process group, 300 s if the script makes none.

    Args:
        devices: for each rank, where it runs; ``cuda`` without a number is the one that torchrun chose for the process.
        processes: for each rank, the number of its process in the default process group; None: all processes in order.

    Raises:
        ConfigError: torch has no such backend, or the default process group has other processes than torchrun started.
    """

    def __init__(self, devices: Sequence[torch.device], *, processes: Sequence[int] | None = None) -> None:
        session = arrive(processes)
        self.members = session.members
        rank = self.members.rank
        self.n_ranks = len(devices)
        self.local_ranks: tuple[int, ...] = (rank,)
        self.devices = (
            *devices[:rank],
            _with_local_index(devices[rank], self.members, of_mesh=processes is not None),
            *devices[rank + 1 :],
        )
        self._rank = rank
        self._connection = connect(session, self.devices[rank])
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
            ConfigError: the ranks run different programs; or an operation of the model fails.
        """
        with self.failing_together() as connection, torch.no_grad():
            prepared = self._prepare(programs)
            connection.agreement.agree("program", f"{prepared.traffic.name} of model {self._number}", in_step=True)
            samples = {name: sample_of(tensor) for name, tensor in (given or {}).items()}
            compared = {name: sample for name, sample in samples.items() if sample is not None}
            kind = prepared.traffic.name.rpartition(" ")[0]  # without the digest
            connection.begin_call(f"{kind} of model {self._number}", compared, optimizer_steps)
            connection.open(prepared.traffic)
            stream = RandomStream(programs.draws, inputs[self._rank].get("batch", 0), [self.devices[self._rank]])
            transport = DistributedTransport(connection, prepared, stream)
            result = _result_of(programs.executables[self._rank], transport, inputs[self._rank])
            stream.finish()
            transport.finish()
        return {self._rank: result}

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[Connection]:
        """Report an error raised inside to all ranks, and raise it with the first failure of any rank."""
        try:
            self._connection.check()
        except PartitionError as error:
            self.members.explain(error)
            raise
        try:
            yield self._connection
        except BaseException as error:
            raised = self._connection.fail(error)
            self.members.explain(raised)
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
        with self.failing_together() as connection, torch.no_grad(), connection.communicating("a gathering of the tensors of all ranks"):
            group = connection.group(connection.everyone)
            own_kinds = {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in owned.items()}
            kinds_of_ranks = _gather_objects(own_kinds, group, self.devices[self._rank])
            return {
                name: None if kind is None else _broadcast(owned.get(name), kind, source, connection)
                for source, kinds in enumerate(kinds_of_ranks)
                for name, kind in kinds.items()
            }

    def reduce(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """Reduce a number over all processes."""
        with self.failing_together() as connection, connection.communicating("a reduction over all ranks"):
            reduced = value.detach().clone()
            operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
            wait_for(dist.all_reduce(reduced, operations[operation], connection.group(connection.everyone), async_op=True))
            return reduced

    def exchange(self, transfers: Sequence[Transfer], tensors: Mapping[int, Tensor]) -> Exchanged:
        """Carry out transfers between ranks."""
        with self.failing_together() as connection, torch.no_grad(), connection.communicating("an exchange of parts of parameters"):
            return exchange(transfers, tensors, connection.group(connection.everyone), connection.rank, connection.device)

    def _prepare(self, programs: ProgramSet) -> PreparedTraffic:
        """Return the communication of the programs, read when they first run, and forgotten with them."""
        if programs not in self._prepared:
            self._prepared[programs] = prepare_traffic(programs.programs, self._rank)
        return self._prepared[programs]


def _result_of(executable: Executable, transport: DistributedTransport, inputs: Mapping[str, Any]) -> Any:
    """Run a program to its end, and return its result; it never waits, since ``DistributedTransport.ready`` is always true."""
    try:
        next(executable.start(transport, inputs))
    except StopIteration as end:
        return end.value
    except (RuntimeError, IndexError) as error:
        raise_with_place(executable, error)
    raise AssertionError("the program waits")


def _broadcast(own: Tensor | None, shape_and_dtype: tuple[torch.Size, torch.dtype], source: int, connection: Connection) -> Tensor:
    """Return a tensor of rank ``source``, given there as ``own``, on every rank; it travels as bytes, since backends know few dtypes."""
    empty = torch.empty(shape_and_dtype[0], dtype=shape_and_dtype[1], device=connection.device)
    tensor = empty if own is None else own.to(connection.device)  # step counts are on the CPU
    if tensor.numel() > 0:
        group = connection.group(connection.everyone)
        wait_for(dist.broadcast(as_bytes(tensor.detach().contiguous()), group=group, async_op=True, group_src=source))
    return tensor


def _gather_objects(value: object, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return the values of all ranks, as ``dist.all_gather_object`` does, which knows only groups of ``dist.new_group``."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    counts = torch.empty(group.size(), dtype=torch.int64, device=device)
    wait_for(all_gather_single(counts, torch.tensor([len(data)], device=device), group=group, async_op=True))
    longest = int(counts.max())
    padded = torch.cat([data, data.new_zeros(longest - len(data))])
    gathered = data.new_empty(group.size() * longest)
    wait_for(all_gather_single(gathered, padded, group=group, async_op=True))
    parts = gathered.cpu().view(group.size(), longest)
    return [pickle.loads(part[:count].numpy().tobytes()) for part, count in zip(parts, counts.tolist(), strict=True)]  # noqa: S301  of the ranks


def _with_local_index(device: torch.device, members: Members, *, of_mesh: bool = False) -> torch.device:
    """Return this process's device; ``cuda`` without an index gets that of the environment's ``LOCAL_RANK``."""
    if device.type != "cuda" or device.index is not None:
        return device
    index = launcher.local_rank(members.own, members.world_size)
    if index is None and of_mesh:
        return torch.device("cuda", torch.cuda.current_device())  # DeviceMesh has set it, if the script has not
    if index is None:
        raise ConfigError(
            "LOCAL_RANK is not set, which says on which accelerator of its machine this process runs",
            remedy='start the script with torchrun, or name the device of each rank: devices=["cuda:0", "cuda:1"]',
        )
    return torch.device("cuda", index)
