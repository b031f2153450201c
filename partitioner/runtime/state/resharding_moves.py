"""What moves between ranks when one plan takes the place of another: of every tensor the parts that a rank is to hold and does not.

weight, rows over 4 ranks, then over 2        rank 0    rank 1    rank 2    rank 3
    before                                    0 .. 3    4 .. 7    8 .. 11   12 .. 15
    after                                     0 .. 7    8 .. 15
    moves                                     4 .. 7 from rank 1;   8 .. 15 from ranks 2 and 3
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from passes.spmd.shards import Block

__all__ = ["Move", "Moves", "TensorBytes", "moves_between"]

Holdings: TypeAlias = Mapping[str, Mapping[int, Block]]
"""Tensor -> rank -> the block of it that the rank holds."""

Cells: TypeAlias = NDArray[np.bool_]
"""Which cells of a tensor: parts between which no block tells apart."""


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of one element.

    Attributes:
        own: of the tensor.
        state: of what the optimizer keeps for it.
    """

    own: int
    state: int


@dataclass(frozen=True)
class Move:
    """Elements of one tensor that a rank gets.

    Attributes:
        name: of the tensor.
        source: the rank of the old plan that has them; None: no rank that is left, so that they come from a checkpoint.
        destination: the rank of the new plan.
        own: bytes of the tensor.
        state: bytes of the optimizer's state.
    """

    name: str
    source: int | None
    destination: int
    own: int
    state: int

    @property
    def size(self) -> int:
        return self.own + self.state


@dataclass(frozen=True)
class Moves:
    """Everything that moves.

    Attributes:
        moves: one for each tensor and pair of ranks.
        kept: for each rank of the new plan, bytes that it holds already.
    """

    moves: tuple[Move, ...]
    kept: tuple[int, ...]

    @property
    def between_ranks(self) -> int:
        """Bytes that ranks send each other."""
        return sum(move.size for move in self.moves if move.source is not None)

    @property
    def from_checkpoint(self) -> int:
        """Bytes that no rank has any more."""
        return sum(move.size for move in self.moves if move.source is None)

    def received(self, rank: int) -> int:
        """Bytes that a rank of the new plan gets from others."""
        return sum(move.size for move in self.moves if move.destination == rank and move.source is not None)

    def loaded(self, rank: int) -> int:
        """Bytes that a rank of the new plan gets from a checkpoint."""
        return sum(move.size for move in self.moves if move.destination == rank and move.source is None)

    def sent(self, rank: int) -> int:
        """Bytes that a rank of the old plan gives."""
        return sum(move.size for move in self.moves if move.source == rank)

    def of(self, name: str) -> int:
        """Bytes of one tensor that move."""
        return sum(move.size for move in self.moves if move.name == name)


def moves_between(
    before: Holdings, after: Holdings, sizes: Mapping[str, TensorBytes], survivors: Sequence[int | None], n_ranks: int
) -> Moves:
    """What moves.

    Args:
        before: what ranks of the old plan hold.
        after: what ranks of the new plan are to hold.
        sizes: bytes of an element of each tensor.
        survivors: for each rank of the new plan, the rank of the old one whose memory it has; None: it is new. An old rank that is not
            among these is gone, with all that it held.
        n_ranks: ranks of the new plan.

    Of several ranks that have the same elements, the one that has sent least so far gives them.
    """
    sent: dict[int, int] = {}
    moves: list[Move] = []
    kept = [0] * n_ranks
    left = {old for old in survivors if old is not None}
    for name, each in after.items():
        size = sizes[name].own + sizes[name].state
        if any(0 in block.shape for block in each.values()):
            continue
        had = {rank: block for rank, block in before[name].items() if rank in left}
        grid = _Grid([*had.values(), *each.values()])
        for rank, block in sorted(each.items(), key=lambda item: item[0]):
            missing = grid.cells(block)
            old = survivors[rank]
            if old in had:
                own = grid.cells(had[old]) & missing
                kept[rank] += grid.count(own) * size
                missing = missing & ~own
            for source in _sources(grid, missing, had, sent):
                given = missing if source is None else missing & grid.cells(had[source])
                count = grid.count(given)
                if count:
                    moves.append(Move(name, source, rank, count * sizes[name].own, count * sizes[name].state))
                    missing = missing & ~given
                    if source is not None:
                        sent[source] = sent.get(source, 0) + count * size
    return Moves(tuple(moves), tuple(kept))


def _sources(grid: _Grid, missing: Cells, had: Mapping[int, Block], sent: Mapping[int, int]) -> list[int | None]:
    """Who is asked, in order: those who have sent least; at last the checkpoint."""
    if not missing.any():
        return []
    able = [rank for rank, block in had.items() if (grid.cells(block) & missing).any()]
    return [*sorted(able, key=lambda rank: (sent.get(rank, 0), rank)), None]


class _Grid:
    """A tensor cut wherever one of some blocks begins or ends: every block is a number of whole cells.

    Args:
        blocks: of one tensor, perhaps under several ways to write its dimensions as axes.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        unlike = list(dict.fromkeys(blocks))
        inside = [_inside(block) for block in unlike]
        kinds = [np.unique(np.stack(each), axis=1, return_counts=True) for each in zip(*inside, strict=True)]
        self._weights = functools.reduce(np.multiply.outer, (counts for _, counts in kinds), np.ones((), dtype=np.int64))
        self._cells: dict[Block, Cells] = {}
        for number, block in enumerate(unlike):
            along = (marks[number] for marks, _ in kinds)
            self._cells[block] = functools.reduce(np.logical_and.outer, along, np.ones((), dtype=bool))

    def cells(self, block: Block) -> Cells:
        """The cells of a block."""
        return self._cells[block]

    def count(self, cells: Cells) -> int:
        """Elements in some cells."""
        return int(self._weights[cells].sum())


def _inside(block: Block) -> list[Cells]:
    """For each dimension of a tensor, which of its indices a block has."""
    axes = list(zip(block.unfolded, block.intervals, strict=True))
    found = []
    for size in block.shape:
        marks = np.ones(1, dtype=bool)
        while axes and (len(marks) < size or (size == 1 and axes[0][0] == 1)):
            length, (start, stop) = axes.pop(0)
            along = np.zeros(length, dtype=bool)
            along[start:stop] = True
            marks = np.logical_and.outer(marks, along).ravel()
        found.append(marks)
    return found
