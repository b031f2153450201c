"""One row of the table of communication."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """A value that is communicated in a step, all its microbatches together.

    Attributes:
        value: its name: ``"add_3"``, ``"gradient of add_3"``.
        shape: dtype and shape of its first microbatch: ``"float32 (2, 6, 12)"``.
        bytes: the bytes of all messages of the step.
        times: the number of messages of the step.
        source, destination: ``"stage 0, rank 0"``; the ranks of a collective.
        reason: the modules that compute and read it, ``"blocks.0 -> blocks.1"``; ``"blocks.0 <- blocks.1"`` for the gradient.
    """

    value: str
    shape: str
    bytes: int
    times: int
    source: str
    destination: str
    reason: str
