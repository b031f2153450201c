"""Placement of stages on ranks."""

from __future__ import annotations

__all__ = ["looped", "v_shaped"]


def looped(n_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage: round after round over the ranks.

    >>> looped(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(n_ranks)) * stages_per_rank


def v_shaped(n_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage: down the ranks and up again. Rank r of R runs stages r and 2R-1-r.

    The turn stays on one rank and costs no communication, and the first rank holds the last stage, where the loss is.

    >>> v_shaped(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(n_ranks))
    return tuple(rank for leg in range(stages_per_rank) for rank in (down if leg % 2 == 0 else reversed(down)))
