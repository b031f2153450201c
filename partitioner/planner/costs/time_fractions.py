"""Forward and backward fractions of unit time, for lower bounds of schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.stage_problem import Floats, Integers

__all__ = ["TimeFractions"]


@dataclass(frozen=True)
class TimeFractions:
    """What parts of the units' time forwards have, and backwards have at least.

    Attributes:
        forward: least and most.
        backward: least.
        through: of all units together, what the forward and the input half of the backward have at least.
        halves: (3, A, K) of the same, what the forward and both halves of the backward of each unit have, or of units alike together.
    """

    forward: tuple[float, float]
    backward: float
    through: float
    halves: Floats

    @staticmethod
    def of(halves: Floats, counts: Integers | None = None) -> TimeFractions:
        """Those of units that take (3, N, K) seconds, each as often as it is there: once, or (N,) times."""
        whole = halves.sum(axis=0)
        often = np.ones(len(whole)) if counts is None else counts
        seconds = max(float((whole.min(axis=1) * often).sum()), 1e-300)
        shares = np.divide(halves[0], whole, out=np.full_like(whole, np.nan), where=whole > 0)
        least, most = float(np.nanmin(shares, initial=1.0)), float(np.nanmax(shares, initial=0.0))
        through = float(((halves[0] + halves[1]).min(axis=1) * often).sum()) / seconds
        return TimeFractions((min(least, most), most), 1 - most, min(through, 1.0), halves * often[:, None] / seconds)
