"""One line of what a step communicates."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Transfer"]


@dataclass(frozen=True)
class Transfer:
    """One value that is communicated in a step, all its microbatches together.

    Attributes:
        value: what it is: ``"add_3"``, ``"gradient of add_3"``.
        shape: of its first microbatch, with the dtype: ``"float32 (2, 6, 12)"``.
        bytes: in the whole step, over all microbatches.
        times: messages in the step.
        source, destination: ``"stage 0, rank 0"``; for a sum over ranks, the ranks.
        reason: which module computes it and which reads it: ``"computes -> reads"``, ``"computes <- reads"`` for the gradient.
        ranks: those that send it.
    """

    value: str
    shape: str
    bytes: int
    times: int
    source: str
    destination: str
    reason: str
    ranks: tuple[int, ...]
