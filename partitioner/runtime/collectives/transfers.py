"""Carry out transfers between ranks, as one message of bytes from each rank to each other.

All backends have this collective. Buffers are bounded: many transfers are carried out in several portions, which are the same on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.collectives.torch_distributed import as_bytes, wait_for

_BYTES_AT_ONCE = 2**30
"""Bytes over all ranks in one portion."""


@dataclass(frozen=True)
class Transfer:
    """A tensor that one rank sends to another."""

    source: int
    destination: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Exchanged:
    """The result of an exchange in one process.

    Attributes:
        received: number of a transfer -> its tensor, for the transfers to ranks of this process.
        sent: (source, destination) -> bytes that ranks of this process have sent, counted as they were sent.
    """

    received: Mapping[int, Tensor]
    sent: Mapping[tuple[int, int], int]


def exchange(
    transfers: Sequence[Transfer], tensors: Mapping[int, Tensor], group: dist.ProcessGroup, rank: int, device: torch.device
) -> Exchanged:
    """Carry out transfers; see ``Runtime.exchange``.

    Args:
        group: of all ranks, in their order.
        rank: of this process.
        device: where tensors are received.
    """
    received: dict[int, Tensor] = {}
    sent: Counter[tuple[int, int]] = Counter()
    for numbers in _portions(transfers):
        outgoing: list[list[Tensor]] = [[] for _ in range(group.size())]
        incoming: list[list[int]] = [[] for _ in range(group.size())]
        for number in numbers:
            transfer = transfers[number]
            if transfer.source == rank:
                outgoing[transfer.destination].append(as_bytes(tensors[number].detach().contiguous()))
            if transfer.destination == rank:
                incoming[transfer.source].append(number)
        sizes_in = [sum(transfers[number].n_bytes for number in numbers_from) for numbers_from in incoming]
        sizes_out = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
        message = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *itertools.chain(*outgoing)])
        arrived = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
        wait_for(dist.all_to_all_single(arrived, message, sizes_in, sizes_out, group=group, async_op=True))
        sent.update({(rank, other): size for other, size in enumerate(sizes_out) if size})
        order = list(itertools.chain(*incoming))
        for number, piece in zip(order, arrived.split([transfers[number].n_bytes for number in order]), strict=True):
            # A copy, since a view of bytes as another dtype must be aligned.
            received[number] = torch.empty(transfers[number].shape, dtype=transfers[number].dtype, device=device)
            as_bytes(received[number]).copy_(piece)
    return Exchanged(received, sent)


def _portions(transfers: Sequence[Transfer]) -> Iterator[list[int]]:
    """Yield the numbers of transfers, a bounded number of bytes at a time."""
    numbers: list[int] = []
    size = 0
    for number, transfer in enumerate(transfers):
        if numbers and size + transfer.n_bytes > _BYTES_AT_ONCE:
            yield numbers
            numbers, size = [], 0
        numbers.append(number)
        size += transfer.n_bytes
    if numbers:
        yield numbers
