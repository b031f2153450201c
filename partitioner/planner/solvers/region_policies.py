"""Choose which regions of a stage are recomputed: the least time that fits its memory.

N regions in order; region r has a policy x(r) of P, with ``time(r, x)`` seconds, ``saved(r, x)`` bytes that a microbatch keeps,
``working(r, x)`` bytes while it computes, beyond what it and the regions before it saved, and ``gradients(r)`` bytes that its backward
makes. Choose x that

    minimise    sum over r of time(r, x(r))
    subject to  (m - 1) * S(N) + max over r of ( S(r) + working(r, x(r)) + G(r) )  <=  limit        for each (m, limit)

    S(r)        saved bytes of the regions up to r
    G(r)        gradients of the regions after r: the backward runs from the last region to the first

One pair (m, limit) is for the m microbatches in flight before there are gradients, one for those in flight after. To save or to recompute
is the problem of Chen et al., 2016, Checkmate (Jain et al., 2020) and Rockmate (Zhao et al., 2023), which decide by value; here regions are
given, and a region is recomputed at once.

Method: dynamic programming over regions. A label holds (time, S, maximum so far); one that another equals or beats in all three is dropped.
Equal regions have equal sums, so a chain of equal blocks has at most about N labels a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Policies", "RegionCosts", "cheapest_policies"]


class RegionCosts(NamedTuple):
    """The costs of a region, by policy.

    Attributes:
        time: seconds.
        saved: bytes that each microbatch in flight keeps.
        working: bytes while it computes, beyond what is saved up to it.
        gradients: bytes of the parameter gradients that its backward makes, whatever the policy.
    """

    time: tuple[float, ...]
    saved: tuple[float, ...]
    working: tuple[float, ...]
    gradients: float


class Policies(NamedTuple):
    """What ``cheapest_policies`` chooses.

    Attributes:
        choice: the policy of each region.
        spare: bytes of the tightest limit that stay free.
    """

    choice: tuple[int, ...]
    spare: float


class _Label(NamedTuple):
    time: float
    saved: float
    highest: float
    choice: tuple[int, ...]

    def spare(self, limits: Sequence[tuple[int, float]]) -> float:
        return min((limit - (count - 1) * self.saved - self.highest for count, limit in limits), default=0.0)


def cheapest_policies(regions: Sequence[RegionCosts], limits: Sequence[tuple[int, float]]) -> Policies | None:
    """Return the policies of least time that fit; None if none fits.

    Args:
        limits: pairs (microbatches in flight, bytes that these, gradients and the computation may take).
    """
    after = sum(region.gradients for region in regions)
    labels = [_Label(0.0, 0.0, 0.0, ())]
    for region in regions:
        after -= region.gradients
        labels = _undominated([_extended(label, region, policy, after) for label in labels for policy in range(len(region.time))])
    fitting = [(label, spare) for label in labels if (spare := label.spare(limits)) >= 0.0]
    if not fitting:
        return None
    label, spare = min(fitting)
    return Policies(label.choice, spare)


def _extended(label: _Label, region: RegionCosts, policy: int, after: float) -> _Label:
    saved = label.saved + region.saved[policy]
    highest = max(label.highest, saved + region.working[policy] + after)
    return _Label(label.time + region.time[policy], saved, highest, (*label.choice, policy))


def _undominated(labels: Sequence[_Label]) -> list[_Label]:
    """Return the labels that no other one equals or beats in time, saved bytes and maximum."""
    kept: list[_Label] = []
    for label in sorted(labels):
        if not any(other.saved <= label.saved and other.highest <= label.highest for other in kept):
            kept.append(label)
    return kept
