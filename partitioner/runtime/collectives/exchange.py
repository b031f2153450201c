"""One tensor's part in a collective on one rank: the pieces that it gives, and what it makes of those that it gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.ir.comm.primitives import Operation

__all__ = ["Exchange", "flatten", "is_leading", "reduce_pieces"]


@dataclass(frozen=True)
class Exchange:
    """One tensor's part in a collective, on one rank.

    Attributes:
        tensor: what this rank has.
        pieces: what each rank of the group is given of it, in the group's order.
        split_dim: along which these are pieces; None: each is the whole tensor.
        shapes: the shape of what each rank gives to this one.
        concat_dim: along which that is put together; None: it is reduced.
        make: makes the result of the pieces, where that is neither.
    """

    tensor: Tensor
    pieces: Sequence[Tensor]
    split_dim: int | None
    shapes: Sequence[Sequence[int]]
    concat_dim: int | None
    make: Callable[[Sequence[Tensor]], Tensor] | None = None

    def result(self, pieces: Sequence[Tensor], operation: Operation = "sum") -> Tensor:
        """What the collective gives, in new memory, from what each rank of the group has given, in the group's order."""
        if self.make is not None:
            return self.make(pieces)
        # What is concatenated keeps the strides of the pieces, which a program's graphs do not expect.
        return reduce_pieces(pieces, operation) if self.concat_dim is None else torch.cat(tuple(pieces), self.concat_dim).contiguous()


def reduce_pieces(pieces: Sequence[Tensor], operation: Operation) -> Tensor:
    """The reduction, first to last, contiguous and in new memory."""
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    function = _REDUCTIONS[operation]
    total = function(pieces[0], pieces[1]).contiguous()
    for piece in pieces[2:]:
        function(total, piece, out=total)
    return total


_REDUCTIONS: Mapping[Operation, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def flatten(pieces: Sequence[Tensor]) -> Tensor:
    """The elements of all pieces one after another, in one dimension; a single contiguous piece is not copied."""
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
    """Whether pieces along the dimension lie one after another in a contiguous tensor."""
    return math.prod(shape[: dim % len(shape)]) == 1
