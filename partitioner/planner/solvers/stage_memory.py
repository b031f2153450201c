"""Peak memory of stages beyond their permanent memory, from the sizes and numbers of the values that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partitioner.planner.solvers.stage_problem import Floats

__all__ = ["DynamicMemory"]


class DynamicMemory(NamedTuple):
    """Memory of stages that changes during a step; arrays of one shape, such as an entry for each stage.

    before its first parameter gradients    in_flight microbatches + transient memory + a message that arrives
    after these                             later microbatches + gradients + transient memory + a message that arrives
    at the end of the step                  gradients, and a second copy of at most ``summed`` bytes of them during their reduction

    Messages for the next action arrive during an action: receives are posted one action ahead.

    Attributes:
        in_flight, later: the most microbatches held before, and after; if ``later`` is 0, the stage computes nothing after.
        kept: bytes of each microbatch.
        gradients: bytes of them.
        working: transient bytes.
        arriving: (microbatches held while a message arrives, bytes of it) for each kind of message, before.
        arriving_later: the same after.
        summed: the most bytes of gradients that exist twice.
    """

    in_flight: Floats
    later: Floats
    kept: Floats
    gradients: Floats
    working: Floats
    arriving: Sequence[tuple[Floats, Floats]]
    arriving_later: Sequence[tuple[Floats, Floats]]
    summed: float

    @property
    def peak(self) -> Floats:
        """The peak over the whole step, in bytes."""
        before = self._activations(self.in_flight, self.arriving)
        after = self._activations(self.later, self.arriving_later) + self.gradients
        if not self.later.all():
            after = np.where(self.later > 0, after, 0.0)
        reduction = self.gradients + np.minimum(self.gradients, self.summed)
        peak: Floats = np.maximum(np.maximum(before, after) + self.working, reduction)
        return peak

    def _activations(self, count: Floats, arriving: Sequence[tuple[Floats, Floats]]) -> Floats:
        """Return the peak bytes of saved activations and arriving messages; ``count``: the most microbatches without a message."""
        peak: Floats = count * self.kept
        for n_held, size in arriving:
            if n_held.any():
                with_message = n_held * self.kept + size
                peak = np.maximum(peak, with_message if n_held.all() else np.where(n_held > 0, with_message, 0.0))
        return peak

    @property
    def idle_peak(self) -> Floats:
        """The peak while another stage of the rank computes, in bytes."""
        peak: Floats = np.maximum(self.in_flight * self.kept, self.later * self.kept + self.gradients)
        return peak

    @property
    def computing(self) -> Floats:
        """Bytes beyond ``idle_peak`` while the stage itself computes."""
        return self.peak - self.idle_peak
