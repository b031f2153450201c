"""Halo strategies: when a segment of calls receives the elements that its windows read of other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

HaloStrategy = Literal["exchange", "overlap", "recompute"]
"""``exchange``: before every call that needs a halo. ``overlap``: the same, while the call computes its interior. ``recompute``: a wider
halo once, and both neighbours compute the rows of the overlap."""


@dataclass(frozen=True)
class HaloSegment:
    """Consecutive calls, several of which read elements of other ranks.

    Attributes:
        first, last: names of the first and the last call.
        modules: the first and the last module that it computes in, for reports; one if they are the same.
        strategy: the chosen one.
        exchange_messages: halo exchanges of a forward with ``exchange``.
        exchange_time: predicted seconds of ``exchange`` for one microbatch, forward and backward.
        overlap_time: the same for ``overlap``: the rest of the wait, and the cost of computing in pieces.
        recompute_messages: halo exchanges of a forward with ``recompute``: one for each value from outside of the segment.
        recompute_time: predicted seconds of ``recompute``: messages and the rows that are computed twice.
    """

    first: str
    last: str
    modules: tuple[str, ...]
    strategy: HaloStrategy
    exchange_messages: int
    exchange_time: float = field(compare=False)
    overlap_time: float = field(compare=False)
    recompute_messages: int
    recompute_time: float = field(compare=False)


def ends_of(segments: Iterable[HaloSegment], strategy: HaloStrategy) -> tuple[tuple[str, str], ...]:
    """Return the first and the last call of every segment with a strategy."""
    return tuple((segment.first, segment.last) for segment in segments if segment.strategy == strategy)
