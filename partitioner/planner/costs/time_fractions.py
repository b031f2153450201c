"""Forward and backward fractions of unit time, for lower bounds of schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.stage_memory import Floats, Integers


@dataclass(frozen=True)
class TimeFractions:
    """Fractions of unit time, over all units and kinds of stages.

    Attributes:
        forward: least and most fraction of a unit's time that its forward takes.
        backward: least fraction of a unit's time that its backward takes.
        through: least fraction of the whole model's time that forwards and input halves of backwards take.
        halves: (3, A, K) fractions of the whole model's time: forward, input half, weight half of each (group of equal) unit and kind.
    """

    forward: tuple[float, float]
    backward: float
    through: float
    halves: Floats

    @staticmethod
    def of(halves: Floats, counts: Integers | None = None) -> TimeFractions:
        """Return the fractions of N units on K kinds of stages, from (3, N, K) seconds; ``counts``: (N,) how often each unit occurs."""
        whole = halves.sum(axis=0)
        often = np.ones(len(whole)) if counts is None else counts
        seconds = max(float((whole.min(axis=1) * often).sum()), 1e-300)
        shares = np.divide(halves[0], whole, out=np.full_like(whole, np.nan), where=whole > 0)
        least, most = float(np.nanmin(shares, initial=1.0)), float(np.nanmax(shares, initial=0.0))
        through = float(((halves[0] + halves[1]).min(axis=1) * often).sum()) / seconds
        return TimeFractions((min(least, most), most), 1 - most, min(through, 1.0), halves * often[:, None] / seconds)
