"""Carry out collectives by calls of ``torch.distributed``.

All tensors of a dtype travel as one flat message. Messages that are not reduced travel as bytes, which every backend supports.

                     gloo                                            NCCL
    all_reduce       all_reduce; when small, gathered and            all_reduce
                     reduced here, as maxima and minima
    all_gather       all_gather_single; when small or uneven,        all_gather_single; when uneven,
                     all_to_all_single of copies                     all_to_all_single of copies
    reduce_scatter   all_to_all_single, and summed here              reduce_scatter_single; when uneven, as gloo
    all_to_all       all_to_all_single                               all_to_all_single
    halo_exchange    all_to_all_single of the halo elements          all_to_all_single
    halo_add         likewise                                        likewise

Numbers of dtypes that backends do not add (``int16``, ``bool``) are gathered or exchanged and reduced here, on both. Which of these is
faster was measured: see ``docs/design/0012-collectives.md``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange, flatten, is_leading, reduce_pieces
from partitioner.runtime.collectives.transport import Collective
from passes.ir.comm.backends import GATHERED_BYTES
from passes.ir.comm.primitives import Operation


@dataclass(frozen=True)
class Calls:
    """Collectives of a backend that are used; the rest are built from exchanges.

    Attributes:
        operations: reductions for which its all_reduce and reduce_scatter are used.
        scatters: whether its reduce_scatter is used.
        small_reduction: total bytes of all ranks' tensors up to which an all_reduce gathers them and reduces on each rank.
        small_gather: total bytes of all ranks' tensors up to which an all_gather is an all_to_all.
    """

    operations: frozenset[Operation]
    scatters: bool
    small_reduction: int
    small_gather: int


GLOO = Calls(frozenset({"sum"}), scatters=False, small_reduction=GATHERED_BYTES["gloo"], small_gather=2**20)
"""Its ring algorithms take a round for each rank, its reduce_scatter is an all_reduce, and its maximum may lose a NaN."""

NCCL = Calls(frozenset({"sum", "max", "min"}), scatters=True, small_reduction=GATHERED_BYTES["nccl"], small_gather=0)
"""Its own collectives are used wherever it has them."""

_REDUCED_BY_BACKENDS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Dtypes that gloo and NCCL can both add and compare; complex numbers are pairs of them."""

_OPERATIONS: Mapping[Operation, dist.ReduceOp.RedOpType] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 has renamed them, and warns under the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers tensors of one shape from all ranks into one tensor."""

_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Message(NamedTuple):
    """The tensors of one dtype in a collective under way.

    Attributes:
        indices: of these tensors among all of the collective.
        work: must be complete before ``results`` is called.
        results: returns the result of each tensor.
    """

    indices: Sequence[int]
    work: dist.Work
    results: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Started:
    """A collective under way, with one message for each dtype; ``done`` holds the results if nothing had to be communicated."""

    name: Collective
    group: tuple[int, ...]
    messages: Sequence[_Message]
    done: Sequence[Tensor] = ()

    def finish(self) -> list[Tensor]:
        """Wait, and return the results in the order of the tensors that were given."""
        results: dict[int, Tensor] = dict(enumerate(self.done))
        for message in self.messages:
            message.work.wait()
            results.update(zip(message.indices, message.results(), strict=True))
        return [results[index] for index in range(len(results))]


def start_collective(
    process_group: dist.ProcessGroup,
    calls: Calls,
    name: Collective,
    group: tuple[int, ...],
    exchanges: Sequence[Exchange],
    operation: Operation,
) -> Started:
    """Start a collective of two or more ranks.

    Args:
        process_group: of the ranks of ``group``, in the same order.
        calls: those to use of its backend.
    """
    by_dtype: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for index, exchange in enumerate(exchanges):
        by_dtype[exchange.tensor.dtype].append(index)
    starter = _Starter(process_group, calls, len(group), operation)
    start = _STARTS[name]
    messages = [_Message(indices, *start(starter, [exchanges[index] for index in indices])) for indices in by_dtype.values()]
    return Started(name, group, messages)


_Begun = tuple[dist.Work, Callable[[], Sequence[Tensor]]]
"""A work, and a function that returns the result of each tensor when the work is complete."""


@dataclass(frozen=True)
class _Starter:
    """Starts collectives of tensors of one dtype, as one flat message."""

    process_group: dist.ProcessGroup
    calls: Calls
    n_ranks: int
    operation: Operation

    def all_reduce(self, exchanges: Sequence[Exchange]) -> _Begun:
        """Reduce by the backend, or gather and reduce on each rank if the tensors are small or the backend cannot reduce them."""
        tensors = [exchange.tensor.detach() for exchange in exchanges]
        flat = flatten(tensors)
        if not self._backend_reduces(flat.dtype) or flat.nbytes * self.n_ranks <= self.calls.small_reduction:
            work, gathered = self._gather(flat, [flat.numel()] * self.n_ranks)
            return work, lambda: _reduce(gathered, exchanges, self.operation)
        if len(tensors) == 1:
            flat = flat.clone()  # all_reduce writes in place, and the program may still read its tensor
        work = _work(dist.all_reduce(_real(flat), _OPERATIONS[self.operation], group=self.process_group, async_op=True))
        return work, lambda: _split(flat, exchanges)

    def all_gather(self, exchanges: Sequence[Exchange]) -> _Begun:
        flat = flatten([exchange.tensor.detach() for exchange in exchanges])
        work, gathered = self._gather(flat, _incoming_counts(exchanges))
        return work, lambda: _assemble(gathered, exchanges)

    def reduce_scatter(self, exchanges: Sequence[Exchange]) -> _Begun:
        """Reduce and scatter equal pieces by the backend if it can, else exchange pieces and reduce on each rank."""
        flat, counts = _outgoing_message(exchanges), _outgoing_counts(exchanges)
        if self.calls.scatters and self._backend_reduces(flat.dtype) and len(set(counts)) == 1:
            own = flat.new_empty(counts[0])
            operation = _OPERATIONS[self.operation]
            work = _work(_reduce_scatter_single(_real(own), _real(flat), operation, group=self.process_group, async_op=True))
            return work, lambda: _split(own, exchanges)
        work, received = self._exchange(flat, counts, _incoming_counts(exchanges))
        return work, lambda: _reduce(received, exchanges, self.operation)

    def all_to_all(self, exchanges: Sequence[Exchange]) -> _Begun:
        work, received = self._exchange(_outgoing_message(exchanges), _outgoing_counts(exchanges), _incoming_counts(exchanges))
        return work, lambda: _assemble(received, exchanges)

    def _backend_reduces(self, dtype: torch.dtype) -> bool:
        """Return whether the backend's own reduction is used for a dtype."""
        if dtype.is_complex:
            return self.operation == "sum"
        return self.operation in self.calls.operations and dtype in _REDUCED_BY_BACKENDS

    def _gather(self, flat: Tensor, counts: Sequence[int]) -> tuple[dist.Work, Tensor]:
        """Start gathering ``counts[rank]`` elements of each rank; return the work and their memory, one rank after another."""
        if len(set(counts)) > 1 or sum(counts) * flat.itemsize <= self.calls.small_gather:
            return self._exchange(torch.cat([flat] * self.n_ranks), [flat.numel()] * self.n_ranks, counts)
        gathered = flat.new_empty(sum(counts))
        work = all_gather_single(gathered.view(torch.uint8), flat.view(torch.uint8), group=self.process_group, async_op=True)
        return _work(work), gathered

    def _exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[dist.Work, Tensor]:
        """Start an all_to_all of ``sent[rank]`` elements to, and ``received[rank]`` from each rank; return work and received memory."""
        result = flat.new_empty(sum(received))
        bytes_in, bytes_out = ([count * flat.itemsize for count in counts] for counts in (received, sent))
        group = self.process_group
        work = dist.all_to_all_single(result.view(torch.uint8), flat.view(torch.uint8), bytes_in, bytes_out, group=group, async_op=True)
        return _work(work), result


_STARTS: Mapping[Collective, Callable[[_Starter, Sequence[Exchange]], _Begun]] = {
    "all_reduce": _Starter.all_reduce,
    "all_gather": _Starter.all_gather,
    "reduce_scatter": _Starter.reduce_scatter,
    "all_to_all": _Starter.all_to_all,
    "halo_exchange": _Starter.all_to_all,
    "halo_add": _Starter.all_to_all,
}


def _outgoing_message(exchanges: Sequence[Exchange]) -> Tensor:
    """Concatenate the pieces for each rank, one rank after another; a single tensor in this memory order is not copied."""
    first = exchanges[0]
    if len(exchanges) == 1 and first.assemble is None and first.split_dim is not None and is_leading(first.tensor.shape, first.split_dim):
        return first.tensor.detach().contiguous().view(-1)
    return flatten([exchange.pieces[rank].detach() for rank in range(len(first.pieces)) for exchange in exchanges])


def _outgoing_counts(exchanges: Sequence[Exchange]) -> list[int]:
    """Return the number of elements sent to each rank."""
    return [sum(exchange.pieces[rank].numel() for exchange in exchanges) for rank in range(len(exchanges[0].pieces))]


def _incoming_counts(exchanges: Sequence[Exchange]) -> list[int]:
    """Return the number of elements received from each rank."""
    return [sum(math.prod(exchange.shapes[rank]) for exchange in exchanges) for rank in range(len(exchanges[0].shapes))]


def _assemble(flat: Tensor, exchanges: Sequence[Exchange]) -> list[Tensor]:
    """Return the results of a received message; a single one whose pieces are in order is a view of it."""
    first = exchanges[0]
    if len(exchanges) == 1 and first.assemble is None and first.concat_dim is not None and is_leading(first.shapes[0], first.concat_dim):
        whole = list(first.shapes[0])
        whole[first.concat_dim] = sum(shape[first.concat_dim] for shape in first.shapes)
        return [flat.view(whole)]
    pieces: list[list[Tensor]] = [[] for _ in exchanges]
    start = 0
    for rank in range(len(first.shapes)):
        for received, exchange in zip(pieces, exchanges, strict=True):
            shape = torch.Size(exchange.shapes[rank])
            received.append(flat[start : start + shape.numel()].view(shape))
            start += shape.numel()
    return [exchange.result(received) for received, exchange in zip(pieces, exchanges, strict=True)]


def _reduce(flat: Tensor, exchanges: Sequence[Exchange], operation: Operation) -> list[Tensor]:
    """Reduce a received message, which has the same number of elements of each rank, and split it into its tensors."""
    n_ranks = len(exchanges[0].shapes)
    return _split(reduce_pieces(flat.chunk(n_ranks) if flat.numel() else [flat], operation), exchanges)


def _split(flat: Tensor, exchanges: Sequence[Exchange]) -> list[Tensor]:
    """Return the tensors of a reduced message, as views."""
    if len(exchanges) == 1:
        return [flat.view(exchanges[0].shapes[0])]
    shapes = [torch.Size(exchange.shapes[0]) for exchange in exchanges]
    return [part.view(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)]


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype as bytes, in one dimension."""
    return tensor.view(-1).view(torch.uint8)


def _real(flat: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, which backends can add."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


def wait_for(work: dist.Work | None) -> None:
    """Wait for a call with ``async_op=True``: torch's log hides errors of synchronous ones in groups of few processes."""
    _work(work).wait()


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work
