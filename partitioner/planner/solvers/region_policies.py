"""Choose which regions of a rank's stages are recomputed: the least time that fits its memory.

N regions in order; region r has a policy x(r) of P, and its stage has m(r) microbatches in flight. ``time(r, x)`` is seconds,
``saved(r, x)`` bytes that a microbatch keeps, ``working(r, x)`` bytes while it computes, beyond what it and the regions before it
saved, and ``gradients(r)`` bytes that its backward makes. Choose x that

    minimise    sum over r of time(r, x(r))
    subject to  sum over r of (m(r) - 1) * saved(r, x(r))
                + max over r of ( S(r) + working(r, x(r)) + G(r) )  <=  limit        for each (m, limit)

    S(r)        saved bytes of the regions up to r
    G(r)        gradients of the regions after r: the backward runs from the last region to the first

One pair (m, limit) is for the microbatches in flight before there are gradients, one for those in flight after. To save or to recompute
is the problem of Chen et al., 2016, Checkmate (Jain et al., 2020) and Rockmate (Zhao et al., 2023), which decide by value; here regions are
given, and a region is recomputed at once.

Method: dynamic programming over regions. A label holds (time, the first sum for each pair, S, maximum so far); one that another equals or
beats in all is dropped. Equal regions have equal sums, so a chain of equal blocks has at most about N labels a step.

A rank with several stages has the regions of all of them, in order. While one of its stages computes, the later ones hold one microbatch
more than the formula counts, so that the caller checks the exact memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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
    """The policies of all regions.

    Attributes:
        choice: the policy of each region.
        spare: bytes of the tightest limit that stay free.
    """

    choice: tuple[int, ...]
    spare: float


class _Label(NamedTuple):
    time: float
    held: tuple[float, ...]
    saved: float
    highest: float
    choice: tuple[int, ...]

    def spare(self, limits: Sequence[tuple[Sequence[int], float]]) -> float:
        return min((limit - held - self.highest for held, (_, limit) in zip(self.held, limits, strict=True)), default=0.0)


def cheapest_policies(regions: Sequence[RegionCosts], limits: Sequence[tuple[Sequence[int], float]]) -> Policies | None:
    """Return the policies of least time that fit; None if none fits.

    Args:
        limits: pairs (for each region, the microbatches in flight of its stage; bytes that these, gradients and the computation may take).
    """
    after = sum(region.gradients for region in regions)
    labels = [_Label(0.0, (0.0,) * len(limits), 0.0, 0.0, ())]
    for place, region in enumerate(regions):
        after -= region.gradients
        others = [max(counts[place] - 1, 0) for counts, _ in limits]
        labels = _undominated([_extended(label, region, policy, others, after) for label in labels for policy in range(len(region.time))])
    fitting = [(label, spare) for label in labels if (spare := label.spare(limits)) >= 0.0]
    if not fitting:
        return None
    label, spare = min(fitting)
    return Policies(label.choice, spare)


def _extended(label: _Label, region: RegionCosts, policy: int, others: Sequence[int], after: float) -> _Label:
    """Return a label with one more region; ``others``: microbatches in flight beside the one that is computed, for each pair."""
    own = region.saved[policy]
    held = tuple(sum_of + count * own for sum_of, count in zip(label.held, others, strict=True))
    highest = max(label.highest, label.saved + own + region.working[policy] + after)
    return _Label(label.time + region.time[policy], held, label.saved + own, highest, (*label.choice, policy))


def _undominated(labels: Sequence[_Label]) -> list[_Label]:
    """Return the labels that no other one equals or beats in time, held and saved bytes, and maximum."""
    ordered, kept = sorted(labels), list[int]()
    sizes = np.array([(*label.held, label.saved, label.highest) for label in ordered])
    for place, size in enumerate(sizes):
        if not (sizes[kept] <= size).all(axis=1).any():
            kept.append(place)
    return [ordered[place] for place in kept]
