"""Samplers choose the next placement of a grid: all of them in order, or a random sample."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import Row
from passes.ir.errors import ConfigError

__all__ = ["GridSampler", "RandomSampler", "Sampler"]


class Sampler(Protocol):
    """Chooses placements one at a time and receives their results.

    A sweep calls ``start`` once, then ``ask`` whenever a worker is free and ``tell`` for every result. ``ask`` returns None when it has no
    placement to give; the sweep ends when it has none and every result has been reported.
    """

    def start(self, placements: Sequence[Placement]) -> int:
        """Set the grid; return the number of placements that ``ask`` will give."""

    def ask(self, neighbour: Placement | None = None) -> Placement | None:
        """Return the next placement.

        Args:
            neighbour: the last placement of the free worker. A placement with the same model and mesh is evaluated faster.
        """

    def tell(self, placement: Placement, row: Row) -> None:
        """Receive the result of a placement."""


class GridSampler:
    """Gives every placement of the grid."""

    def __init__(self) -> None:
        self._open: list[Placement] = []
        self._begun: set[tuple[object, ...]] = set()  # families

    def start(self, placements: Sequence[Placement]) -> int:
        self._open = list(placements)
        return len(self._open)

    def ask(self, neighbour: Placement | None = None) -> Placement | None:
        """Return the first open placement of the neighbour's family; else of a family that was not begun; else of any."""
        if not self._open:
            return None
        family = _family(neighbour)
        of_same_family = (placement for placement in self._open if _family(placement) == family)
        of_new_family = (placement for placement in self._open if _family(placement) not in self._begun)
        chosen = next(of_same_family, None) or next(of_new_family, None) or self._open[0]
        self._open.remove(chosen)
        self._begun.add(_family(chosen))
        return chosen

    def tell(self, placement: Placement, row: Row) -> None:
        """Ignore the result: the grid does not depend on it."""


class RandomSampler(GridSampler):
    """Gives a random sample of the grid, without repetition.

    Args:
        n_samples: the number of placements.
        seed: the seed of the sample. A sweep that is resumed with the same seed has the same sample.
    """

    def __init__(self, n_samples: int, seed: int = 0) -> None:
        if n_samples < 1:
            raise ConfigError(f"n_samples={n_samples} is below 1", remedy="pass 1 or more")
        super().__init__()
        self._n_samples = n_samples
        self._seed = seed

    def start(self, placements: Sequence[Placement]) -> int:
        chosen = random.Random(self._seed).sample(range(len(placements)), min(self._n_samples, len(placements)))
        return super().start([placements[index] for index in sorted(chosen)])


def _family(placement: Placement | None) -> tuple[object, ...]:
    """Return model, number of devices and mode: placements that share them can share lowered programs."""
    return () if placement is None else (placement.model, placement.devices, placement.mode)
