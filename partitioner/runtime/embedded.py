"""Run all ranks in this process, one after another: each runs until it waits for another rank.

    rank 0   0F0 0F1 0F2 | wait for gradient of rank 1 |             0B0 ...
    rank 1               | 1F0 1B0 1F1 ...             |

Deterministic, no threads, no set-up. On GPUs the kernels of several devices still overlap: launching them does not wait. If all
ranks are blocked, the error says what each waits for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange
from partitioner.runtime.collectives.random_stream import RandomStream
from partitioner.runtime.collectives.transfers import Exchanged, Transfer
from partitioner.runtime.collectives.transport import Collective, CollectiveTransport, writes_in_place
from partitioner.runtime.executor import ProgramSet, Run, raise_with_place
from passes.ir.comm.primitives import Operation
from passes.ir.errors import CommunicationError
from passes.ir.mesh import rank_list


@dataclass(frozen=True)
class _Receive:
    """A message that a rank waits for."""

    source: int
    destination: int
    tag: int

    def __str__(self) -> str:
        return f"message {self.tag} of rank {self.source}"


@dataclass(frozen=True)
class _Collective:
    """One collective of a group; ``number`` counts the collectives of the group from 0."""

    name: Collective
    operation: Operation
    group: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        operation = f" ({self.operation})" if self.name == "all_reduce" else ""
        return f"{self.name}{operation}, collective {self.number} of {rank_list(self.group)}"


@dataclass
class _Mailbox:
    """Communication under way between the ranks of one run.

    Attributes:
        messages: what was sent and not received yet.
        exchanges: collective -> rank that has started it -> its exchanges.
        n_finished: collective -> how many ranks have its results.
        draws: (group, number of the draw) -> what the first rank drew, and how many ranks have it.
    """

    messages: dict[_Receive, Tensor] = field(default_factory=dict)
    exchanges: defaultdict[_Collective, dict[int, Sequence[Exchange]]] = field(default_factory=lambda: defaultdict(dict))
    n_finished: defaultdict[_Collective, int] = field(default_factory=lambda: defaultdict(int))
    draws: dict[tuple[tuple[int, ...], int], tuple[Any, int]] = field(default_factory=dict)


class _EmbeddedTransport(CollectiveTransport):
    """The communication of one rank: through the mailbox, without copies between ranks of one device."""

    def __init__(self, rank: int, devices: Sequence[torch.device], mailbox: _Mailbox, stream: RandomStream) -> None:
        self.stream = stream
        self.rank = rank
        self.device = devices[rank]
        self._devices = devices
        self._mailbox = mailbox
        self._n_collectives: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._n_draws: defaultdict[tuple[int, ...], int] = defaultdict(int)

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        self._mailbox.messages[_Receive(self.rank, destination, tag)] = tensor.to(self._devices[destination], non_blocking=True)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> _Receive:
        return _Receive(source, self.rank, tag)

    def start(self, name: Collective, group: tuple[int, ...], exchanges: Sequence[Exchange], operation: Operation) -> _Collective:
        collective = _Collective(name, operation, group, self._n_collectives[group])
        self._n_collectives[group] += 1
        self._mailbox.exchanges[collective][self.rank] = exchanges
        return collective

    def draw_alike(self, function: Callable[..., Any], group: tuple[int, ...], *arguments: Any, **keywords: Any) -> Any:
        """Draw on the first rank that comes to this draw; the others of the group get its result."""
        key = (group, self._n_draws[group])
        self._n_draws[group] += 1
        in_place = writes_in_place(function)
        if key not in self._mailbox.draws:
            result = function(*arguments, **keywords)
            if len(group) > 1:
                self._mailbox.draws[key] = (result.clone() if in_place else result, 1)
            return result
        drawn, n_ranks = self._mailbox.draws.pop(key)
        if n_ranks + 1 < len(group):
            self._mailbox.draws[key] = (drawn, n_ranks + 1)
        if in_place:
            return arguments[0].copy_(drawn)
        return tuple(tensor.to(self.device) for tensor in drawn) if isinstance(drawn, tuple) else drawn.to(self.device)

    def share_random_state(self, group: tuple[int, ...], source: int, *, after_loss: bool = False) -> None:
        """Do nothing: the ranks of this process share its generators."""

    def ready(self, pending: _Receive | _Collective) -> bool:
        """Return whether a message was sent, or all ranks have started a collective."""
        if isinstance(pending, _Receive):
            return pending in self._mailbox.messages
        return len(self._mailbox.exchanges[pending]) == len(pending.group)

    def wait(self, pending: _Receive | _Collective) -> Tensor | list[Tensor]:
        if isinstance(pending, _Receive):
            return self._mailbox.messages.pop(pending)
        exchanges_of = self._mailbox.exchanges[pending]
        results = [self._result(pending, index, exchange, exchanges_of) for index, exchange in enumerate(exchanges_of[self.rank])]
        self._mailbox.n_finished[pending] += 1
        if self._mailbox.n_finished[pending] == len(pending.group):
            del self._mailbox.exchanges[pending], self._mailbox.n_finished[pending]
        return results

    def _result(self, pending: _Collective, index: int, exchange: Exchange, exchanges_of: Mapping[int, Sequence[Exchange]]) -> Tensor:
        """Return this rank's result for one tensor of a collective, number ``index``, from the pieces of all ranks of the group."""
        group = pending.group
        if len(group) == 1:
            return exchange.tensor.detach().contiguous()
        position = group.index(self.rank)
        pieces = [exchanges_of[rank][index].pieces[position].to(self.device) for rank in group]
        for rank, piece, shape in zip(group, pieces, exchange.shapes, strict=True):
            if tuple(piece.shape) != tuple(shape):
                raise CommunicationError(
                    f"{pending}: rank {rank} gives rank {self.rank} shape {tuple(piece.shape)} where it expects {tuple(shape)}",
                    remedy="every rank of a group gives tensors that fit together: pm.verify() names the nodes",
                )
        return exchange.result(pieces, pending.operation)

    def finish(self) -> None:
        """Do nothing: every message is delivered when it is sent."""


class EmbeddedRuntime:
    """Runs the programs of all ranks in this process.

    Args:
        devices: for each rank, where it runs.
    """

    members = None

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.n_ranks = len(self.devices)
        self.local_ranks = tuple(range(self.n_ranks))

    def run(
        self,
        programs: ProgramSet,
        inputs: Mapping[int, Mapping[str, Any]],
        given: Mapping[str, Tensor] | None = None,
        optimizer_steps: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Run every rank's program; return rank -> result. No rank is left waiting: the next one runs when one waits.

        Raises:
            CommunicationError: deadlock, all ranks are blocked; names what each waits for.
            ConfigError: an operation of the model fails.
        """
        mailbox = _Mailbox()
        stream = RandomStream(programs.draws, max((given.get("batch", 0) for given in inputs.values()), default=0), self.devices)
        transports = {rank: _EmbeddedTransport(rank, self.devices, mailbox, stream) for rank in self.local_ranks}
        running = {rank: programs.executables[rank].start(transports[rank], inputs[rank]) for rank in self.local_ranks}
        waiting: dict[int, Any] = {}
        results: dict[int, Any] = {}
        with torch.no_grad():
            while running:
                runnable = [rank for rank in running if rank not in waiting or transports[rank].ready(waiting[rank])]
                if not runnable:
                    raise _deadlock(waiting)
                for rank in runnable:
                    try:
                        _advance(rank, running, waiting, results)
                    except (RuntimeError, IndexError) as error:
                        raise_with_place(programs.executables[rank], error)
            stream.finish()
        return results

    def agree(self, what: str, value: object, *, in_step: bool = False) -> str | None:
        """Return the value as text: one process runs all ranks, so there is nothing to compare."""
        return None if value is None else str(value)

    def failing_together(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: no other process waits."""
        return nullcontext()

    def collect(self, owned: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the owned blocks unchanged: this process has all ranks."""
        return dict(owned)

    def reduce(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """Return the value: this process has all ranks."""
        return value

    def exchange(self, transfers: Sequence[Transfer], tensors: Mapping[int, Tensor]) -> Exchanged:
        """Copy each tensor to the device of the rank that receives it."""
        received: dict[int, Tensor] = {}
        sent: Counter[tuple[int, int]] = Counter()
        for number, transfer in enumerate(transfers):
            received[number] = tensors[number].detach().to(self.devices[transfer.destination], non_blocking=True)
            sent[transfer.source, transfer.destination] += received[number].nbytes
        return Exchanged(received, sent)


def _advance(rank: int, running: dict[int, Run], waiting: dict[int, Any], results: dict[int, Any]) -> None:
    """Run one rank until it waits, noted in ``waiting``, or ends, noted in ``results``."""
    waiting.pop(rank, None)
    try:
        waiting[rank] = next(running[rank])
    except StopIteration as end:
        results[rank] = end.value
        del running[rank]


def _deadlock(waiting: Mapping[int, Any]) -> CommunicationError:
    lines = "\n".join(f"  rank {rank} waits for {pending}" for rank, pending in sorted(waiting.items()))
    return CommunicationError(
        f"deadlock: all ranks are blocked:\n{lines}",
        remedy="a custom schedule or plan is wrong: pm.verify() names the nodes",
    )
