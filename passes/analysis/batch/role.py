"""The roles that a value may play towards the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

__all__ = ["Mixed", "Role", "RowNumbers", "Rows", "Same", "Total"]


@dataclass(frozen=True)
class Same:
    """Equal in every microbatch: it depends on no input that holds the batch."""


@dataclass(frozen=True)
class Rows:
    """Each row depends on that row of the inputs alone; microbatches concatenate to the batch.

    Attributes:
        dimension: the one whose size is a multiple of the batch size.
        before: how many blocks of the batch the dimension holds: ``(3, batch)`` flattened is ``3 * batch`` with 3 before.
    """

    dimension: int
    before: int = 1


@dataclass(frozen=True)
class RowNumbers:
    """The numbers of the rows, 0 to batch - 1: they may pick each row of another value, and nothing else.

    Attributes:
        dimension: the one that counts.
    """

    dimension: int


@dataclass(frozen=True)
class Total:
    """A mean or a sum over the rows of the batch of what each row gives.

    Attributes:
        kind: which of the two.
        counted: a mean over the targets that count (``ignore_index``), not over the rows: microbatches weigh by their counts.
    """

    kind: Literal["mean", "sum"]
    counted: bool = False


@dataclass(frozen=True)
class Mixed:
    """Anything else: microbatches do not give it.

    Attributes:
        node: the operation where the rows met.
    """

    node: fx.Node


Role = Same | Rows | RowNumbers | Total | Mixed
"""What one tensor is to the batch."""
