"""The placements of a sweep that no worker has begun, and the next one for a free worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

from partitioner.experiments.results.placement import Placement


class OpenPlacements:
    """Gives placements one at a time, so that a worker keeps to those that share lowered programs.

    Args:
        placements: all of a sweep.
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._open = list(placements)
        self._begun: set[tuple[object, ...]] = set()  # families

    def next(self, neighbour: Placement | None = None) -> Placement | None:
        """Return the first open placement of the neighbour's family; else of a family that was not begun; else of any; None: all are begun.

        Args:
            neighbour: the last placement of the free worker.
        """
        if not self._open:
            return None
        family = _family(neighbour)
        of_same_family = (placement for placement in self._open if _family(placement) == family)
        of_new_family = (placement for placement in self._open if _family(placement) not in self._begun)
        chosen = next(of_same_family, None) or next(of_new_family, None) or self._open[0]
        self._open.remove(chosen)
        self._begun.add(_family(chosen))
        return chosen


def sample_of(placements: Sequence[Placement], n_samples: int | None, seed: int) -> Sequence[Placement]:
    """Return a random sample, in order; the same seed gives the same sample. ``n_samples=None``: all."""
    if n_samples is None:
        return placements
    chosen = random.Random(seed).sample(range(len(placements)), min(n_samples, len(placements)))
    return [placements[index] for index in sorted(chosen)]


def _family(placement: Placement | None) -> tuple[object, ...]:
    """Return model, number of devices and mode."""
    return () if placement is None else (placement.model, placement.devices, placement.mode)
