"""The part of one rank in a halo exchange and in its gradient.

A dimension of 16 over two ranks, window of three, padding of one (``_1 0:9|7:16 _1``):

    rank 0   has 0 .. 7     gives 7 to rank 1     gets 8      makes  _ 0 1 2 3 4 5 6 7 8
    rank 1   has 8 .. 15    gives 8 to rank 0     gets 7      makes  7 8 9 10 11 12 13 14 15 _

What a rank has itself does not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange
from passes.ir.comm.index_ranges import Copy, Segment, from_text, length, put_copies, segments

__all__ = ["Halo"]


@dataclass(frozen=True)
class Halo:
    """Who reads what of whom.

    Attributes:
        dim: the dimension.
        position: of this rank in the group.
        owned: how many elements each rank has.
        wanted: what each reads (``passes.ir.comm.index_ranges``).
    """

    dim: int
    position: int
    owned: tuple[int, ...]
    wanted: str

    def fetch(self, x: Tensor, fill: float) -> Exchange:
        """What this rank gives of its elements, and how it puts together what it reads."""
        x = x.detach()
        read = segments(self.owned, self.wanted)
        pieces = [self._copied(x, () if rank == self.position else read[rank][self.position]) for rank in range(len(self.owned))]
        mine = read[self.position]
        size = length(from_text(self.wanted)[self.position])

        def make(found: Sequence[Tensor]) -> Tensor:
            parts: list[tuple[int, Tensor]] = []
            for owner, copies in enumerate(mine):
                if owner == self.position:
                    parts += [(copy.place, self._oriented(x.narrow(self.dim, copy.start, copy.count), copy)) for copy in copies]
                else:
                    parts += [
                        (copy.place, self._oriented(piece, copy))
                        for copy, piece in zip(copies, self._split(found[owner], copies), strict=True)
                    ]
            return self._together(x, sorted(parts, key=lambda part: part[0]), size, fill)

        shapes = [self._sized(x, 0 if owner == self.position else _count(copies)) for owner, copies in enumerate(mine)]
        return Exchange(x, pieces, self.dim, shapes, self.dim, make)

    def give_back(self, grad: Tensor) -> Exchange:
        """What this rank gives of the gradients of what it read, and how it adds those of its own elements."""
        grad = grad.detach()
        read = segments(self.owned, self.wanted)
        mine = read[self.position]
        pieces = [self._from_places(grad, () if owner == self.position else copies) for owner, copies in enumerate(mine)]
        size = self.owned[self.position]

        def make(found: Sequence[Tensor]) -> Tensor:
            total = put_copies(grad, self.dim, mine[self.position], size)
            for reader in range(len(self.owned)):
                copies = () if reader == self.position else read[reader][self.position]
                for copy, piece in zip(copies, self._split(found[reader], copies), strict=True):
                    total.narrow(self.dim, copy.start, copy.count).add_(piece)
            return total

        counts = [0 if reader == self.position else _count(read[reader][self.position]) for reader in range(len(self.owned))]
        return Exchange(grad, pieces, self.dim, [self._sized(grad, count) for count in counts], self.dim, make)

    def _sized(self, x: Tensor, size: int) -> list[int]:
        shape = list(x.shape)
        shape[self.dim] = size
        return shape

    def _copied(self, x: Tensor, copies: Segment) -> Tensor:
        """An owner's elements, in ascending order each run."""
        return self._joined(x, [x.narrow(self.dim, copy.start, copy.count) for copy in copies])

    def _from_places(self, grad: Tensor, copies: Segment) -> Tensor:
        """A reader's gradients of them, in the owner's order."""
        return self._joined(grad, [self._oriented(grad.narrow(self.dim, copy.place, copy.count), copy) for copy in copies])

    def _joined(self, like: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        if not pieces:
            return like.narrow(self.dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), self.dim)

    def _split(self, message: Tensor, copies: Segment) -> Sequence[Tensor]:
        return torch.split(message, [copy.count for copy in copies], self.dim)

    def _oriented(self, piece: Tensor, copy: Copy) -> Tensor:
        return piece.flip(self.dim) if copy.step == -1 else piece

    def _together(self, like: Tensor, parts: Sequence[tuple[int, Tensor]], size: int, fill: float) -> Tensor:
        """Parts in their places; what lies between them is padding."""
        pieces: list[Tensor] = []
        end = 0
        for place, part in parts:
            if place > end:
                pieces.append(like.new_full(self._sized(like, place - end), fill))
            pieces.append(part)
            end = place + part.shape[self.dim]
        if size > end:
            pieces.append(like.new_full(self._sized(like, size - end), fill))
        return torch.cat(pieces, self.dim).contiguous()


def _count(copies: Segment) -> int:
    return sum(copy.count for copy in copies)
