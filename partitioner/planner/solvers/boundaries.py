"""What it takes the stages at a border to send, and to read, a value that does not lie whole on the ranks of either.

stage of two ranks          border          stage of one, or of others that hold parts
halves  -> gathered  ->     whole     ->    taken in parts
halves  <- taken     <-     whole     <-    gathered  <- gradients in parts
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Gathered", "Parted"]


class Gathered(NamedTuple):
    """A value that does not lie whole on the ranks of its stage: they make it whole before they send it, once, to all later stages.

    Attributes:
        seconds: what that takes a stage of each kind, forward.
        size: bytes of the whole that it holds beside its parts.
        producer: the unit that computes it; its stage pays.
        reader: the last unit that reads it: nothing is paid where that is in the same stage.
    """

    seconds: tuple[float, ...]
    size: tuple[float, ...]
    producer: int
    reader: int


class Parted(NamedTuple):
    """A value that ranks of a stage read in parts: they make its gradient whole before they send it back.

    Attributes:
        seconds: what that takes a stage of each kind, in the input half of the backward.
        size: bytes of the whole that it holds beside its parts.
        producer: the unit that computes it: nothing is paid by its stage.
        readers: the units that read it; every stage of one pays once.
    """

    seconds: tuple[float, ...]
    size: tuple[float, ...]
    producer: int
    readers: tuple[int, ...]
