"""The communication of one rank in a process of its own, over ``torch.distributed``.

Sends and receives go straight to the process group: ``dist.isend`` around it costs as much again as the rest of this file. A send is kept
until a message comes back that shows that it has arrived (see ``traffic.arrivals_shown``), so that memory is that of the schedule without
asking or waiting.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.connection import Connection, Route
from partitioner.runtime.traffic import Traffic, arrivals_shown, message_name, traffic_of
from passes.ir.communication import Operation
from passes.ir.errors import CommunicationError
from passes.ir.program import Program

__all__ = ["DistributedTransport", "PreparedTraffic", "as_bytes", "prepare_traffic"]


@dataclass(frozen=True)
class PreparedTraffic:
    """What one rank's transport knows of a set of programs.

    Attributes:
        program: this rank's.
        traffic: of all ranks.
        shown: peer -> tag of a message of it -> how many messages to it that shows to have arrived.
    """

    program: Program
    traffic: Traffic
    shown: Mapping[int, Mapping[int, int]]


def prepare_traffic(programs: Sequence[Program], rank: int) -> PreparedTraffic:
    """Read the programs of all ranks, once."""
    return PreparedTraffic(programs[rank], traffic_of(programs), arrivals_shown(programs, rank))


class _Receive(NamedTuple):
    """A posted receive."""

    work: dist.Work
    value: Tensor
    source: int
    tag: int


class _Sum(NamedTuple):
    """A started all_reduce: for each dtype one flat tensor, and the tensors that it holds."""

    works: list[dist.Work]
    flats: list[Tensor]
    members: list[list[int]]
    shapes: list[torch.Size]
    group: tuple[int, ...]


class DistributedTransport:
    """Carries one run of one rank's program.

    Args:
        connection: has all groups that the programs need.
        prepared: what the programs communicate.
    """

    def __init__(self, connection: Connection, prepared: PreparedTraffic) -> None:
        self.rank = connection.rank
        self.device = connection.device
        self._connection = connection
        self._program = prepared.program
        self._shown = prepared.shown
        self._routes_out: dict[int, Route] = {}
        self._routes_in: dict[int, Route] = {}
        for source, destination in prepared.traffic.channels:
            if source == self.rank:
                self._routes_out[destination] = connection.route(source, destination)
            elif destination == self.rank:
                self._routes_in[source] = connection.route(source, destination)
        self._sent: defaultdict[int, deque[tuple[int, dist.Work]]] = defaultdict(deque)
        self._tagged = connection.tagged
        self._bytes_only = frozenset() if connection.tagged else _NOT_IN_NCCL

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start sending; the work keeps the tensor alive."""
        group, peer = self._routes_out[destination]
        tensor = tensor.contiguous()
        if tensor.dtype in self._bytes_only:
            tensor = as_bytes(tensor)
        try:
            work = group.send([tensor], peer, tag if self._tagged else 0)
        except RuntimeError as error:
            raise self._lost("send", destination, tag, None) from error
        self._sent[destination].append((tag, work))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> _Receive:
        """Post a receive into new memory."""
        group, peer = self._routes_in[source]
        value = torch.empty(shape, dtype=dtype, device=self.device)
        buffer = as_bytes(value) if dtype in self._bytes_only else value
        try:
            return _Receive(group.recv([buffer], peer, tag if self._tagged else 0), value, source, tag)
        except RuntimeError as error:
            raise self._lost("receive", source, tag, None) from error

    def all_reduce(self, tensors: Sequence[Tensor], group: tuple[int, ...], operation: Operation = "sum") -> _Sum:
        """Start one sum a dtype, over flat copies: every rank then has the very same bits."""
        by_dtype: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            by_dtype[tensor.dtype].append(index)
        members = list(by_dtype.values())
        flats = [torch.cat([tensors[index].detach().reshape(-1) for index in indices]) for indices in members]
        pending = _Sum([], flats, members, [tensor.shape for tensor in tensors], group)
        try:
            for flat in flats:
                summed = torch.view_as_real(flat) if flat.is_complex() else flat
                work = dist.all_reduce(summed, _OPERATIONS[operation], group=self._connection.group(group), async_op=True)
                assert work is not None
                pending.works.append(work)
        except RuntimeError as error:
            raise self._sum_failed(pending) from error
        return pending

    def ready(self, pending: _Receive | _Sum) -> bool:
        """Waiting blocks: there is nobody else to run in this process."""
        return True

    def wait(self, pending: _Receive | _Sum) -> Tensor | list[Tensor]:
        """The received tensor, or the sums."""
        if isinstance(pending, _Sum):
            return self._sums(pending)
        work, value, source, tag = pending
        start = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost("receive", source, tag, start) from error
        shown = self._shown.get(source)
        if shown is not None and tag in shown:
            self._arrived(source, shown[tag])
        return value

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for destination, sent in self._sent.items():
            if sent:
                self._arrived(destination, sent[-1][0] + 1)

    def _arrived(self, destination: int, count: int) -> None:
        """Drop the sends of the first so many messages to a rank."""
        sent = self._sent[destination]
        while sent and sent[0][0] < count:
            tag, work = sent.popleft()
            start = time.monotonic()
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost("send", destination, tag, start) from error

    def _sums(self, pending: _Sum) -> list[Tensor]:
        try:
            for work in pending.works:
                work.wait()
        except RuntimeError as error:
            raise self._sum_failed(pending) from error
        sums: dict[int, Tensor] = {}
        for flat, indices in zip(pending.flats, pending.members, strict=True):
            parts = flat.split([pending.shapes[index].numel() for index in indices])
            sums.update({index: part.view(pending.shapes[index]) for index, part in zip(indices, parts, strict=True)})
        return [sums[index] for index in range(len(sums))]

    # -- errors --------------------------------------------------------------------------------------------------------------------

    def _lost(self, step: Literal["send", "receive"], peer: int, tag: int, start: float | None) -> CommunicationError:
        """The error of a message that did not come through."""
        name = message_name(self._program, step, peer, tag)
        limit = self._connection.timeout.total_seconds()
        timed_out = start is not None and time.monotonic() - start >= limit
        why = f"nothing happened for {limit:.0f} s" if timed_out else f"rank {peer} has left: its process died, or closed its connections"
        return CommunicationError(
            f"rank {self.rank} could not {step} {name} {'to' if step == 'send' else 'from'} rank {peer}: {why}",
            remedy=f"look at what rank {peer} reports",
        )

    def _sum_failed(self, pending: _Sum) -> CommunicationError:
        ranks = ", ".join(str(rank) for rank in pending.group)
        return CommunicationError(
            f"rank {self.rank} could not all_reduce with ranks {ranks}: one has left, or did not come within {self._connection.timeout}",
            remedy="look at what those ranks report",
        )


_OPERATIONS: Mapping[Operation, dist.ReduceOp.RedOpType] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_NOT_IN_NCCL = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128})
"""Dtypes that NCCL does not know; messages of them travel as bytes."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: of one dimension, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)
