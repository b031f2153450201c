"""How a run of calls pays for what its windows read beyond a rank's own part: what the planner decided, and both prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["HaloRun", "Payment"]

Payment = Literal["exchange", "recompute"]
"""Halos move in front of every call that needs one; or a wider halo moves once, and the overlap is computed by both neighbours."""


@dataclass(frozen=True)
class HaloRun:
    """Calls that follow each other, of which several read beyond a rank's own part.

    Attributes:
        first, last: names of the first and the last call.
        modules: the first and the last module that it computes in, for reading; one where they are the same.
        payment: what was chosen.
        exchange_messages: halo exchanges of a forward if they move layer by layer.
        exchange_time: predicted seconds for one microbatch, forward and backward, if they do.
        recompute_messages: halo exchanges of a forward if a wider halo moves once for each value that comes from outside.
        recompute_time: predicted seconds for one microbatch, forward and backward, if it does: messages, and what is computed twice.
    """

    first: str
    last: str
    modules: tuple[str, ...]
    payment: Payment
    exchange_messages: int
    exchange_time: float
    recompute_messages: int
    recompute_time: float
