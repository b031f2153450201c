"""One tensor in a collective, on one rank: the pieces that the rank sends, and the result of those that it receives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.ir.comm.primitives import Operation


@dataclass(frozen=True)
class Exchange:
    """One tensor in a collective, on one rank.

    Attributes:
        tensor: this rank's input.
        pieces: the piece of it that is sent to each rank of the group, in the group's order.
        split_dim: the dimension along which it is split into these; None: each is the whole tensor.
        shapes: the shape of the piece that is received from each rank.
        concat_dim: the dimension along which received pieces are concatenated; None: they are reduced.
        assemble: computes the result from the received pieces, where they are neither concatenated nor reduced.
    """

    tensor: Tensor
    pieces: Sequence[Tensor]
    split_dim: int | None
    shapes: Sequence[Sequence[int]]
    concat_dim: int | None
    assemble: Callable[[Sequence[Tensor]], Tensor] | None = None

    def result(self, pieces: Sequence[Tensor], operation: Operation = "sum") -> Tensor:
        """Return the result of the collective, in new memory, from the pieces received from each rank, in the group's order."""
        if self.assemble is not None:
            return self.assemble(pieces)
        if self.concat_dim is None:
            return reduce_pieces(pieces, operation)
        return torch.cat(tuple(pieces), self.concat_dim).contiguous()  # cat may keep strides of the pieces, which graphs do not expect


def reduce_pieces(pieces: Sequence[Tensor], operation: Operation) -> Tensor:
    """Reduce pieces from first to last; the result is contiguous and in new memory."""
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    function = _REDUCTIONS[operation]
    total = function(pieces[0], pieces[1]).contiguous()
    for piece in pieces[2:]:
        function(total, piece, out=total)
    return total


_REDUCTIONS: Mapping[Operation, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def flatten(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of all pieces in one dimension; a single contiguous piece is not copied."""
    if len(pieces) == 1:
        return pieces[0].contiguous().view(-1)
    if all(piece.is_contiguous() for piece in pieces):
        return torch.cat([piece.view(-1) for piece in pieces])
    flat = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    start = 0
    for piece in pieces:
        flat[start : start + piece.numel()].view(piece.shape).copy_(piece)
        start += piece.numel()
    return flat


def is_leading(shape: Sequence[int], dim: int) -> bool:
    """Return whether pieces along ``dim`` are consecutive in the memory of a contiguous tensor: all dimensions before it have size 1."""
    return math.prod(shape[: dim % len(shape)]) == 1
