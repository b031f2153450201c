"""The communication of one rank in a process of its own, over ``torch.distributed``.

Sends and receives call the process group directly: the overhead of ``dist.isend`` equals that of the rest of this file. The work of a send,
and with it its tensor, is dropped when a message of the receiver proves that it has arrived (``traffic.arrivals_shown``), so that memory
is that of the schedule without extra messages or waits.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange
from partitioner.runtime.collectives.random_stream import RandomStream
from partitioner.runtime.collectives.torch_distributed import GLOO, NCCL, Started, as_bytes, start_collective, wait_for
from partitioner.runtime.collectives.transport import Collective, CollectiveTransport
from partitioner.runtime.process.groups import Connection, Route
from partitioner.runtime.process.traffic import Traffic, arrivals_shown, message_name, traffic_of
from passes.ir.comm.primitives import Operation
from passes.ir.errors import CommunicationError
from passes.ir.mesh import rank_list
from passes.ir.program import Program


@dataclass(frozen=True)
class PreparedTraffic:
    """Communication of one rank in a run.

    Attributes:
        program: of the rank.
        traffic: of the programs of all ranks.
        shown: the arrivals that messages to this rank prove (``arrivals_shown``).
    """

    program: Program
    traffic: Traffic
    shown: Mapping[int, Mapping[int, int]]


def prepare_traffic(programs: Sequence[Program], rank: int) -> PreparedTraffic:
    """Read the communication of the programs of all ranks; done once, for all runs."""
    return PreparedTraffic(programs[rank], traffic_of(programs), arrivals_shown(programs, rank))


class _Receive(NamedTuple):
    """A posted receive."""

    work: dist.Work
    value: Tensor
    source: int
    tag: int


class DistributedTransport(CollectiveTransport):
    """Carries one run of one rank's program, over a connection with all groups that the programs need."""

    def __init__(self, connection: Connection, prepared: PreparedTraffic, stream: RandomStream) -> None:
        self.stream = stream
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
        self._calls = GLOO if connection.tagged else NCCL
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
            raise self._message_failed("send", destination, tag, None) from error
        self._sent[destination].append((tag, work))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> _Receive:
        """Post a receive into new memory."""
        group, peer = self._routes_in[source]
        value = torch.empty(shape, dtype=dtype, device=self.device)
        buffer = as_bytes(value) if dtype in self._bytes_only else value
        try:
            return _Receive(group.recv([buffer], peer, tag if self._tagged else 0), value, source, tag)
        except RuntimeError as error:
            raise self._message_failed("receive", source, tag, None) from error

    def start(self, name: Collective, group: tuple[int, ...], exchanges: Sequence[Exchange], operation: Operation) -> Started:
        """Start a collective."""
        if len(group) == 1:
            return Started(name, group, (), [exchange.tensor.detach().contiguous() for exchange in exchanges])
        try:
            return start_collective(self._connection.group(group), self._calls, name, group, exchanges, operation)
        except RuntimeError as error:
            raise self._collective_failed(name, group) from error

    def draw_alike(self, function: Callable[..., Any], group: tuple[int, ...], *arguments: Any, **keywords: Any) -> Any:
        """Draw on every rank: their generators have the same state."""
        return function(*arguments, **keywords)

    def share_random_state(self, group: tuple[int, ...], source: int, *, after_loss: bool = False) -> None:
        """Set the generators of CPU and GPU to their states on one rank."""
        if after_loss:
            self.stream.end()
        cuda = self.device.type == "cuda"
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(self.device)] if cuda else [])]
        for index, state in enumerate(states):
            message = state.to(self.device)
            try:
                wait_for(dist.broadcast(message, group=self._connection.group(group), async_op=True, group_src=source))
            except RuntimeError as error:
                raise self._collective_failed("all_gather", group) from error
            states[index] = message.cpu()
        torch.set_rng_state(states[0])
        if cuda:
            torch.cuda.set_rng_state(states[1], self.device)
        if not after_loss:
            self.stream.restart()

    def ready(self, pending: _Receive | Started) -> bool:
        """Return True, since ``wait`` blocks."""
        return True

    def wait(self, pending: _Receive | Started) -> Tensor | list[Tensor]:
        """Wait; return the received tensor, or the results of the collective."""
        start = time.monotonic()
        if isinstance(pending, Started):
            try:
                return pending.finish()
            except RuntimeError as error:
                raise self._collective_failed(pending.name, pending.group, start) from error
        work, value, source, tag = pending
        try:
            work.wait()
        except RuntimeError as error:
            raise self._message_failed("receive", source, tag, start) from error
        n_arrived = self._shown.get(source, {}).get(tag)
        if n_arrived is not None:
            self._drop_sends(source, n_arrived)
        return value

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for destination, sent in self._sent.items():
            if sent:
                self._drop_sends(destination, sent[-1][0] + 1)

    def _drop_sends(self, destination: int, count: int) -> None:
        """Complete and drop the sends of the first ``count`` messages to a rank: those with tags below it."""
        sent = self._sent[destination]
        while sent and sent[0][0] < count:
            tag, work = sent.popleft()
            start = time.monotonic()
            try:
                work.wait()
            except RuntimeError as error:
                raise self._message_failed("send", destination, tag, start) from error

    def _message_failed(self, step: Literal["send", "receive"], peer: int, tag: int, start: float | None) -> CommunicationError:
        """Return the error of a failed message; ``start`` is when the wait for it began, on the monotonic clock."""
        name = message_name(self._program, step, peer, tag)
        preposition = "to" if step == "send" else "from"
        return CommunicationError(
            f"rank {self.rank} could not {step} {name} {preposition} rank {peer}{self._connection.reason([peer], start)}",
            remedy=f"look at what rank {peer} reports",
        )

    def _collective_failed(self, name: Collective, group: tuple[int, ...], start: float | None = None) -> CommunicationError:
        why = self._connection.reason([rank for rank in group if rank != self.rank], start)
        return CommunicationError(
            f"rank {self.rank} could not {name} with {rank_list(group)}{why}",
            remedy="look at what those ranks report",
        )


_NOT_IN_NCCL = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128})
"""Dtypes that NCCL does not support; their messages travel as bytes."""
