"""Carry out transfers between ranks, as one message of bytes from each rank to each other.

All backends have this collective. Buffers are bounded: many transfers are carried out in several portions, which are the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime.base import Exchanged, Transfer
from partitioner.runtime.collectives.torch_distributed import as_bytes
from partitioner.runtime.process.groups import Connection

__all__ = ["exchange"]

_BYTES_AT_ONCE = 2**30
"""Bytes over all ranks in one portion."""


def exchange(connection: Connection, transfers: Sequence[Transfer], tensors: Mapping[int, Tensor]) -> Exchanged:
    """Carry out transfers; see ``Runtime.exchange``."""
    received: dict[int, Tensor] = {}
    sent: Counter[tuple[int, int]] = Counter()
    for numbers in _portions(transfers):
        outgoing: list[list[Tensor]] = [[] for _ in connection.everyone]
        incoming: list[list[int]] = [[] for _ in connection.everyone]
        for number in numbers:
            transfer = transfers[number]
            if transfer.source == connection.rank:
                outgoing[transfer.destination].append(as_bytes(tensors[number].detach().contiguous()))
            if transfer.destination == connection.rank:
                incoming[transfer.source].append(number)
        sizes_in = [sum(transfers[number].n_bytes for number in numbers_from) for numbers_from in incoming]
        sizes_out = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
        message = torch.cat([torch.empty(0, dtype=torch.uint8, device=connection.device), *itertools.chain(*outgoing)])
        arrived = torch.empty(sum(sizes_in), dtype=torch.uint8, device=connection.device)
        dist.all_to_all_single(arrived, message, sizes_in, sizes_out, group=connection.group(connection.everyone))
        sent.update({(connection.rank, rank): size for rank, size in enumerate(sizes_out) if size})
        order = list(itertools.chain(*incoming))
        for number, piece in zip(order, arrived.split([transfers[number].n_bytes for number in order]), strict=True):
            # A copy, since a view of bytes as another dtype must be aligned.
            received[number] = torch.empty(transfers[number].shape, dtype=transfers[number].dtype, device=connection.device)
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
