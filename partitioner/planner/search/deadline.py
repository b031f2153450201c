"""When a search ends by the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """The end of a search.

    Attributes:
        seconds: how long the search may take; None: as long as its limits of work allow, which are the same on every machine.
        end: when it ends, by ``time.monotonic``.
        reserve: the fraction of the time that is left for the simulations of the best plans, once there is a plan.
    """

    seconds: float | None
    end: float
    reserve: float = 0.0

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """Return the deadline of a search that begins now."""
        return Deadline(seconds, time.monotonic() + (seconds or 0.0))

    @property
    def left(self) -> float | None:
        """Seconds until the end, not below 0; None: without a limit."""
        return None if self.seconds is None else max(0.0, self.end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether a limit was given and has passed."""
        return self.left == 0.0

    @property
    def is_reserve_left(self) -> bool:
        """Whether a limit was given, and no more than the reserve of it is left."""
        return self.is_over or (self.left is not None and self.seconds is not None and self.left <= self.seconds * self.reserve)

    @property
    def is_half_over(self) -> bool:
        """Whether a limit was given and half of it has passed."""
        return self.left is not None and self.seconds is not None and self.left <= self.seconds / 2
