"""Which calls of ``torch.distributed`` carry out a collective.

All tensors of a dtype travel as one flat message. What is only moved travels as bytes, which every backend moves whatever the dtype.

                     gloo                                            NCCL
    all_reduce       all_reduce; when small, gathered and            all_reduce
                     reduced here, as maxima and minima
    all_gather       all_gather_single; when small or uneven,        all_gather_single; when uneven,
                     all_to_all_single of copies                     all_to_all_single of copies
    reduce_scatter   all_to_all_single, and summed here              reduce_scatter_single; when uneven, as gloo
    all_to_all       all_to_all_single                               all_to_all_single
    halo_exchange    all_to_all_single, of what neighbours read      all_to_all_single
    halo_add         likewise                                        likewise

Numbers of dtypes that backends do not add (``int16``, ``bool``) are gathered or exchanged and reduced here, on both. Which of these is
faster was measured: see ``docs/design/0008-collectives.md``.
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

__all__ = ["GLOO", "NCCL", "Calls", "Started", "as_bytes", "start_collective"]


@dataclass(frozen=True)
class Calls:
    """What a backend is best asked to do.

    Attributes:
        operations: what it is asked to reduce by.
        scatters: whether it is asked to reduce and scatter at once.
        small_reduction: bytes of all ranks' tensors up to which they are gathered and reduced here.
        small_gather: bytes of all ranks' tensors up to which each rank sends to each other one.
    """

    operations: frozenset[Operation]
    scatters: bool
    small_reduction: int
    small_gather: int


GLOO = Calls(frozenset({"sum"}), scatters=False, small_reduction=GATHERED_BYTES["gloo"], small_gather=2**20)
"""Its rings take a turn for each rank, its reduce_scatter is an all_reduce, and its maximum may lose a NaN."""

NCCL = Calls(frozenset({"sum", "max", "min"}), scatters=True, small_reduction=GATHERED_BYTES["nccl"], small_gather=0)
"""It knows best."""

_REDUCED_BY_BACKENDS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Dtypes that gloo and NCCL can both add and compare; complex numbers are pairs of them."""

_OPERATIONS: Mapping[Operation, dist.ReduceOp.RedOpType] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 has renamed them, and warns under the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Message(NamedTuple):
    """The tensors of one dtype, on their way.

    Attributes:
        indices: which tensors of the collective.
        work: over when ``results`` may be called.
        results: makes tensors of what has arrived.
    """

    indices: Sequence[int]
    work: dist.Work
    results: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Started:
    """A collective that is under way.

    Attributes:
        name, group: of the collective.
        messages: one a dtype.
        done: results, where nothing had to be communicated.
    """

    name: Collective
    group: tuple[int, ...]
    messages: Sequence[_Message]
    done: Sequence[Tensor] = ()

    def finish(self) -> list[Tensor]:
        """Wait, and return the results in the order of the tensors that were given."""
        found: dict[int, Tensor] = dict(enumerate(self.done))
        for message in self.messages:
            message.work.wait()
            found.update(zip(message.indices, message.results(), strict=True))
        return [found[index] for index in range(len(found))]


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
        calls: of its backend.
    """
    by_dtype: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for index, exchange in enumerate(exchanges):
        by_dtype[exchange.tensor.dtype].append(index)
    starter = _Starter(process_group, calls, len(group), operation)
    start = _STARTS[name]
    messages = [_Message(indices, *start(starter, [exchanges[index] for index in indices])) for indices in by_dtype.values()]
    return Started(name, group, messages)


_Begun = tuple[dist.Work, Callable[[], Sequence[Tensor]]]
"""A work, and what makes tensors of what it brings."""


@dataclass(frozen=True)
class _Starter:
    """Starts messages of one dtype."""

    process_group: dist.ProcessGroup
    calls: Calls
    n_ranks: int
    operation: Operation

    def all_reduce(self, exchanges: Sequence[Exchange]) -> _Begun:
        tensors = [exchange.tensor.detach() for exchange in exchanges]
        flat = flatten(tensors)
        if not self._asks_to_reduce(flat.dtype) or flat.nbytes * self.n_ranks <= self.calls.small_reduction:
            work, everything = self._gather(flat, [flat.numel()] * self.n_ranks)
            return work, lambda: _reduced(everything, exchanges, self.operation)
        if len(tensors) == 1:
            flat = flat.clone()  # what is summed in place must not be the program's
        work = _work(dist.all_reduce(_real(flat), _OPERATIONS[self.operation], group=self.process_group, async_op=True))
        return work, lambda: _split(flat, exchanges)

    def all_gather(self, exchanges: Sequence[Exchange]) -> _Begun:
        flat = flatten([exchange.tensor.detach() for exchange in exchanges])
        work, everything = self._gather(flat, _incoming(exchanges))
        return work, lambda: _assembled(everything, exchanges)

    def reduce_scatter(self, exchanges: Sequence[Exchange]) -> _Begun:
        flat, counts = _outgoing(exchanges), _outgoing_counts(exchanges)
        if self.calls.scatters and self._asks_to_reduce(flat.dtype) and len(set(counts)) == 1:
            own = flat.new_empty(counts[0])
            operation = _OPERATIONS[self.operation]
            work = _work(_reduce_scatter_single(_real(own), _real(flat), operation, group=self.process_group, async_op=True))
            return work, lambda: _split(own, exchanges)
        work, everything = self._exchange(flat, counts, _incoming(exchanges))
        return work, lambda: _reduced(everything, exchanges, self.operation)

    def all_to_all(self, exchanges: Sequence[Exchange]) -> _Begun:
        work, everything = self._exchange(_outgoing(exchanges), _outgoing_counts(exchanges), _incoming(exchanges))
        return work, lambda: _assembled(everything, exchanges)

    def _asks_to_reduce(self, dtype: torch.dtype) -> bool:
        if dtype.is_complex:
            return self.operation == "sum"
        return self.operation in self.calls.operations and dtype in _REDUCED_BY_BACKENDS

    def _gather(self, flat: Tensor, counts: Sequence[int]) -> tuple[dist.Work, Tensor]:
        """Every rank's elements, one rank after another."""
        if len(set(counts)) > 1 or sum(counts) * flat.itemsize <= self.calls.small_gather:
            return self._exchange(torch.cat([flat] * self.n_ranks), [flat.numel()] * self.n_ranks, counts)
        everything = flat.new_empty(sum(counts))
        return _work(
            _all_gather_single(everything.view(torch.uint8), flat.view(torch.uint8), group=self.process_group, async_op=True)
        ), everything

    def _exchange(self, flat: Tensor, given: Sequence[int], taken: Sequence[int]) -> tuple[dist.Work, Tensor]:
        """What each rank gives to this one, one rank after another."""
        everything = flat.new_empty(sum(taken))
        arriving, leaving = ([count * flat.itemsize for count in counts] for counts in (taken, given))
        group = self.process_group
        work = dist.all_to_all_single(everything.view(torch.uint8), flat.view(torch.uint8), arriving, leaving, group=group, async_op=True)
        return _work(work), everything


_STARTS: Mapping[Collective, Callable[[_Starter, Sequence[Exchange]], _Begun]] = {
    "all_reduce": _Starter.all_reduce,
    "all_gather": _Starter.all_gather,
    "reduce_scatter": _Starter.reduce_scatter,
    "all_to_all": _Starter.all_to_all,
    "halo_exchange": _Starter.all_to_all,
    "halo_add": _Starter.all_to_all,
}


# -- flat messages ---------------------------------------------------------------------------------------------------------------------


def _outgoing(exchanges: Sequence[Exchange]) -> Tensor:
    """What each rank is given, one rank after another; a single tensor that lies in memory like this is not copied."""
    first = exchanges[0]
    if len(exchanges) == 1 and first.make is None and first.split_dim is not None and is_leading(first.tensor.shape, first.split_dim):
        return first.tensor.detach().contiguous().view(-1)
    return flatten([exchange.pieces[rank].detach() for rank in range(len(first.pieces)) for exchange in exchanges])


def _outgoing_counts(exchanges: Sequence[Exchange]) -> list[int]:
    if len(exchanges) == 1:
        return [piece.numel() for piece in exchanges[0].pieces]
    return [sum(exchange.pieces[rank].numel() for exchange in exchanges) for rank in range(len(exchanges[0].pieces))]


def _incoming(exchanges: Sequence[Exchange]) -> list[int]:
    return [sum(math.prod(exchange.shapes[rank]) for exchange in exchanges) for rank in range(len(exchanges[0].shapes))]


def _assembled(flat: Tensor, exchanges: Sequence[Exchange]) -> list[Tensor]:
    """The concatenations; a single one whose pieces have arrived in place is not copied."""
    first = exchanges[0]
    if len(exchanges) == 1 and first.make is None and first.concat_dim is not None and is_leading(first.shapes[0], first.concat_dim):
        whole = list(first.shapes[0])
        whole[first.concat_dim] = sum(shape[first.concat_dim] for shape in first.shapes)
        return [flat.view(whole)]
    pieces: list[list[Tensor]] = [[] for _ in exchanges]
    start = 0
    for rank in range(len(first.shapes)):
        for found, exchange in zip(pieces, exchanges, strict=True):
            shape = torch.Size(exchange.shapes[rank])
            found.append(flat[start : start + shape.numel()].view(shape))
            start += shape.numel()
    return [exchange.result(found) for found, exchange in zip(pieces, exchanges, strict=True)]


def _reduced(flat: Tensor, exchanges: Sequence[Exchange], operation: Operation) -> list[Tensor]:
    return _split(reduce_pieces(flat.chunk(len(exchanges[0].shapes)) if flat.numel() else [flat], operation), exchanges)


def _split(flat: Tensor, exchanges: Sequence[Exchange]) -> list[Tensor]:
    """The tensors that lie one after another in a reduced message."""
    if len(exchanges) == 1:
        return [flat.view(exchanges[0].shapes[0])]
    shapes = [torch.Size(exchange.shapes[0]) for exchange in exchanges]
    return [part.view(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: of one dimension, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work
