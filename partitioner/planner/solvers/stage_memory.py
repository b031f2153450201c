"""What a stage holds at its fullest moments, from how many microbatches it holds and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partitioner.planner.solvers.stage_problem import Floats

__all__ = ["Held"]


class Held(NamedTuple):
    """What stages hold beside what they hold all the time; arrays of one shape.

    Until its first gradients a stage holds n microbatches at once, from then on n' of them and the gradients; what it computes with comes
    on top, and what is on its way to it for its next action: receives are posted one action ahead. At the end of the step the gradients are
    left, some of them twice while they are summed.

    Attributes:
        in_flight, later: n, n'; where n' is 0, no gradients are there while the stage computes.
        kept: bytes of each microbatch.
        gradients: bytes of them.
        working: bytes that the stage computes with.
        comes: how many microbatches it holds while a message comes, and bytes of that; without gradients.
        comes_later: the same with gradients.
        summed: bytes of gradients that are there twice, at most.
    """

    in_flight: Floats
    later: Floats
    kept: Floats
    gradients: Floats
    working: Floats
    comes: Sequence[tuple[Floats, Floats]]
    comes_later: Sequence[tuple[Floats, Floats]]
    summed: float

    @property
    def most(self) -> Floats:
        """Bytes at the fullest moment."""
        early, late = self._fullest(self.in_flight, self.comes), self._fullest(self.later, self.comes_later) + self.gradients
        if not self.later.all():
            late = np.where(self.later > 0, late, 0.0)
        most: Floats = np.maximum(np.maximum(early, late) + self.working, self.gradients + np.minimum(self.gradients, self.summed))
        return most

    def _fullest(self, held: Floats, comes: Sequence[tuple[Floats, Floats]]) -> Floats:
        """Bytes of microbatches, and of messages that come."""
        most: Floats = held * self.kept
        for number, size in comes:
            if number.any():
                here = number * self.kept + size
                most = np.maximum(most, here if number.all() else np.where(number > 0, here, 0.0))
        return most

    @property
    def between(self) -> Floats:
        """Bytes at the fullest moment at which another stage computes."""
        most: Floats = np.maximum(self.in_flight * self.kept, self.later * self.kept + self.gradients)
        return most

    @property
    def computing(self) -> Floats:
        """Bytes that come on top of these when the stage itself computes."""
        return self.most - self.between
