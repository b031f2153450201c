"""Halo strategies: how a segment of calls gets the elements that its windows read beyond a rank's own part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["HaloSegment", "HaloStrategy", "ends_of"]

HaloStrategy = Literal["exchange", "overlap", "recompute"]
"""Halos move in front of every call that needs one, which waits; or which computes its interior meanwhile; or a wider halo moves once, and
both neighbours compute the rows between."""


@dataclass(frozen=True)
class HaloSegment:
    """Calls that follow each other, of which several read beyond a rank's own part.

    Attributes:
        first, last: names of the first and the last call.
        modules: the first and the last module that it computes in, for reading; one where they are the same.
        strategy: what was chosen.
        exchange_messages: halo exchanges of a forward if they move layer by layer.
        exchange_time: predicted seconds for one microbatch, forward and backward, if they do, and calls wait for them.
        overlap_time: the same if calls compute their interior meanwhile: what is left to wait for, and what computing in pieces costs.
        recompute_messages: halo exchanges of a forward if a wider halo moves once for each value that comes from outside.
        recompute_time: predicted seconds for one microbatch, forward and backward, if it does: messages, and what is computed twice.
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


def ends_of(runs: Iterable[HaloSegment], strategy: HaloStrategy) -> tuple[tuple[str, str], ...]:
    """Return the first and the last call of every segment with a strategy."""
    return tuple((run.first, run.last) for run in runs if run.strategy == strategy)
