"""Compute the elements that must move when a plan replaces another: those that a rank of the new plan needs and does not hold.

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
"""A set of cells of a tensor, see ``_Grid``, as a mask with one dimension for each of the tensor's."""


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of one element.

    Attributes:
        own: of the tensor.
        state: of the optimizer's state for it.
    """

    own: int
    state: int


@dataclass(frozen=True)
class Move:
    """Elements of one tensor that a rank receives.

    Attributes:
        name: of the tensor.
        source: the rank of the old plan that sends them; None: no surviving rank has them, so they come from a checkpoint.
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
        """Bytes in all."""
        return self.own + self.state


@dataclass(frozen=True)
class Moves:
    """Everything that moves.

    Attributes:
        moves: one for each tensor and pair of ranks.
        kept: for each rank of the new plan, bytes that it already holds.
    """

    moves: tuple[Move, ...]
    kept: tuple[int, ...]

    @property
    def between_ranks(self) -> int:
        """Bytes that ranks send each other."""
        return sum(move.size for move in self.moves if move.source is not None)

    @property
    def from_checkpoint(self) -> int:
        """Bytes that no surviving rank has."""
        return sum(move.size for move in self.moves if move.source is None)

    def received(self, rank: int) -> int:
        """Return the bytes that a rank of the new plan receives from other ranks."""
        return sum(move.size for move in self.moves if move.destination == rank and move.source is not None)

    def loaded(self, rank: int) -> int:
        """Return the bytes that a rank of the new plan loads from a checkpoint."""
        return sum(move.size for move in self.moves if move.destination == rank and move.source is None)

    def sent(self, rank: int) -> int:
        """Return the bytes that a rank of the old plan sends."""
        return sum(move.size for move in self.moves if move.source == rank)


def moves_between(
    before: Holdings, after: Holdings, sizes: Mapping[str, TensorBytes], survivors: Sequence[int | None], n_ranks: int
) -> Moves:
    """Return the moves from one plan to another. Of several ranks with the same elements, the one that has sent least so far sends them.

    Args:
        before: the blocks of the old plan.
        after: the blocks of the new plan.
        sizes: bytes of an element of each tensor.
        survivors: for each rank of the new plan, the rank of the old one whose memory it has; None: it is new. The blocks of other old
            ranks are lost.
        n_ranks: ranks of the new plan.
    """
    sent: dict[int, int] = {}
    moves: list[Move] = []
    kept = [0] * n_ranks
    surviving = {old for old in survivors if old is not None}
    for name, new_blocks in after.items():
        size = sizes[name].own + sizes[name].state
        if any(0 in block.shape for block in new_blocks.values()):
            continue
        old_blocks = {rank: block for rank, block in before[name].items() if rank in surviving}
        grid = _Grid([*old_blocks.values(), *new_blocks.values()])
        for rank, block in sorted(new_blocks.items(), key=lambda item: item[0]):
            missing = grid.cells(block)
            old = survivors[rank]
            if old in old_blocks:
                own = grid.cells(old_blocks[old]) & missing
                kept[rank] += grid.count(own) * size
                missing = missing & ~own
            for source in _sources(grid, missing, old_blocks, sent):
                moved = missing if source is None else missing & grid.cells(old_blocks[source])
                count = grid.count(moved)
                if count:
                    moves.append(Move(name, source, rank, count * sizes[name].own, count * sizes[name].state))
                    missing = missing & ~moved
                    if source is not None:
                        sent[source] = sent.get(source, 0) + count * size
    return Moves(tuple(moves), tuple(kept))


def _sources(grid: _Grid, missing: Cells, old_blocks: Mapping[int, Block], sent: Mapping[int, int]) -> list[int | None]:
    """Return the ranks with missing cells, those that have sent least first, then None for the checkpoint."""
    if not missing.any():
        return []
    holders = [rank for rank, block in old_blocks.items() if (grid.cells(block) & missing).any()]
    return [*sorted(holders, key=lambda rank: (sent.get(rank, 0), rank)), None]


class _Grid:
    """A tensor divided into cells: sets of elements that each of the given blocks contains either entirely or not at all."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        distinct = list(dict.fromkeys(blocks))
        masks_of_blocks = [_index_masks(block) for block in distinct]
        # For each dimension: the masks of all blocks over groups of equal indices, and the size of each group.
        groups = [np.unique(np.stack(masks), axis=1, return_counts=True) for masks in zip(*masks_of_blocks, strict=True)]
        self._n_elements = functools.reduce(np.multiply.outer, (counts for _, counts in groups), np.ones((), dtype=np.int64))
        self._cells: dict[Block, Cells] = {}
        for number, block in enumerate(distinct):
            masks_of_block = (masks[number] for masks, _ in groups)
            self._cells[block] = functools.reduce(np.logical_and.outer, masks_of_block, np.ones((), dtype=bool))

    def cells(self, block: Block) -> Cells:
        """Return the cells of a block."""
        return self._cells[block]

    def count(self, cells: Cells) -> int:
        """Return the number of elements in cells."""
        return int(self._n_elements[cells].sum())


def _index_masks(block: Block) -> list[Cells]:
    """Return, for each dimension of the tensor, a mask of the indices that a block has."""
    axes = list(zip(block.unfolded, block.intervals, strict=True))
    masks = []
    for size in block.shape:
        mask = np.ones(1, dtype=bool)
        while axes and (len(mask) < size or (size == 1 and axes[0][0] == 1)):
            length, intervals = axes.pop(0)
            axis_mask = np.zeros(length, dtype=bool)
            for start, stop in intervals:
                axis_mask[start:stop] = True
            mask = np.logical_and.outer(mask, axis_mask).ravel()
        masks.append(mask)
    return masks
