"""The part of one rank in a halo exchange and in its gradient.

A dimension of 16 over two ranks, window of three, padding of one (``_1 0:9|7:16 _1``):

    rank 0   has 0 .. 7     gives 7 to rank 1     gets 8      makes  _ 0 1 2 3 4 5 6 7 8
    rank 1   has 8 .. 15    gives 8 to rank 0     gets 7      makes  7 8 9 10 11 12 13 14 15 _

A rank's own elements are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange
from passes.ir.comm.index_ranges import Copy, Segment, from_text, length, put_copies, segments


@dataclass(frozen=True)
class Halo:
    """One rank of a halo exchange: which elements of a dimension each rank owns and reads.

    Attributes:
        dim: the sharded dimension.
        position: of this rank in the group.
        owned: number of elements that each rank owns.
        wanted: the indices that each rank reads, as text (``passes.ir.comm.index_ranges``).
    """

    dim: int
    position: int
    owned: tuple[int, ...]
    wanted: str

    def fetch(self, x: Tensor, fill: float) -> Exchange:
        """Return the exchange of the forward: send owned elements to readers, assemble those that this rank reads, pad with ``fill``."""
        x = x.detach()
        pieces = [self._owned_elements(x, copies) for copies in self._sent_copies()]
        own_copies = segments(self.owned, self.wanted)[self.position][self.position]
        received_copies = self._received_copies()
        size = length(from_text(self.wanted)[self.position])

        def assemble(received: Sequence[Tensor]) -> Tensor:
            parts = [(copy.place, self._in_reading_order(x.narrow(self.dim, copy.start, copy.count), copy)) for copy in own_copies]
            for message, copies in zip(received, received_copies, strict=True):
                for copy, piece in zip(copies, self._split(message, copies), strict=True):
                    parts.append((copy.place, self._in_reading_order(piece, copy)))
            return self._concatenate_padded(x, sorted(parts, key=lambda part: part[0]), size, fill)

        return Exchange(x, pieces, self.dim, self._message_shapes(x, received_copies), self.dim, assemble)

    def give_back(self, grad: Tensor) -> Exchange:
        """Return the exchange of the backward: send gradients of halo elements to their owners, and add up those of owned ones."""
        grad = grad.detach()
        pieces = [self._halo_gradients(grad, copies) for copies in self._received_copies()]
        own_copies = segments(self.owned, self.wanted)[self.position][self.position]
        sent_copies = self._sent_copies()
        size = self.owned[self.position]

        def assemble(received: Sequence[Tensor]) -> Tensor:
            total = put_copies(grad, self.dim, own_copies, size)
            for message, copies in zip(received, sent_copies, strict=True):
                for copy, piece in zip(copies, self._split(message, copies), strict=True):
                    total.narrow(self.dim, copy.start, copy.count).add_(piece)
            return total

        return Exchange(grad, pieces, self.dim, self._message_shapes(grad, sent_copies), self.dim, assemble)

    def _sent_copies(self) -> list[Segment]:
        """Return, for each rank, the elements of this rank that it reads in the forward; none for this rank itself."""
        by_reader = segments(self.owned, self.wanted)
        return [() if reader == self.position else by_reader[reader][self.position] for reader in range(len(self.owned))]

    def _received_copies(self) -> list[Segment]:
        """Return, for each rank, its elements that this rank reads in the forward; none for this rank itself."""
        by_owner = segments(self.owned, self.wanted)[self.position]
        return [() if owner == self.position else copies for owner, copies in enumerate(by_owner)]

    def _message_shapes(self, x: Tensor, messages: Sequence[Segment]) -> list[list[int]]:
        return [self._resized(x, sum(copy.count for copy in copies)) for copies in messages]

    def _resized(self, x: Tensor, size: int) -> list[int]:
        shape = list(x.shape)
        shape[self.dim] = size
        return shape

    def _owned_elements(self, x: Tensor, copies: Segment) -> Tensor:
        """Return the message with an owner's elements, each copy in ascending order."""
        return self._concatenate(x, [x.narrow(self.dim, copy.start, copy.count) for copy in copies])

    def _halo_gradients(self, grad: Tensor, copies: Segment) -> Tensor:
        """Return the message with a reader's gradients of these elements, in the owner's order."""
        return self._concatenate(grad, [self._in_reading_order(grad.narrow(self.dim, copy.place, copy.count), copy) for copy in copies])

    def _concatenate(self, like: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        if not pieces:
            return like.narrow(self.dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), self.dim)

    def _split(self, message: Tensor, copies: Segment) -> Sequence[Tensor]:
        return torch.split(message, [copy.count for copy in copies], self.dim)

    def _in_reading_order(self, piece: Tensor, copy: Copy) -> Tensor:
        """Flip a copy that is read backwards; flipping again restores the owner's order."""
        return piece.flip(self.dim) if copy.step == -1 else piece

    def _concatenate_padded(self, like: Tensor, parts: Sequence[tuple[int, Tensor]], size: int, fill: float) -> Tensor:
        """Concatenate ``(start, part)`` in ascending order to ``size`` elements, with gaps between them filled."""
        pieces: list[Tensor] = []
        end = 0
        for start, part in parts:
            if start > end:
                pieces.append(like.new_full(self._resized(like, start - end), fill))
            pieces.append(part)
            end = start + part.shape[self.dim]
        if size > end:
            pieces.append(like.new_full(self._resized(like, size - end), fill))
        return torch.cat(pieces, self.dim).contiguous()
