"""Which placement of a grid comes next: each in its turn, or some by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import Row
from passes.ir.errors import ConfigError

__all__ = ["GridSampler", "RandomSampler", "Sampler"]


class Sampler(Protocol):
    """Chooses placements one at a time and hears what became of them.

    A sweep calls ``start`` once, then ``ask`` whenever a worker is free and ``tell`` for every answer. ``ask`` returns None when it has no
    placement to give; the sweep ends when it has none and every answer has been told.
    """

    def start(self, placements: Sequence[Placement]) -> int:
        """Begin with a grid; returns how many placements will be asked for."""

    def ask(self, neighbour: Placement | None = None) -> Placement | None:
        """The next placement.

        Args:
            neighbour: what the free worker evaluated last: one that shares its model and mesh is cheaper.
        """

    def tell(self, placement: Placement, row: Row) -> None:
        """What became of a placement."""


class GridSampler:
    """Every placement of the grid."""

    def __init__(self) -> None:
        self._open: list[Placement] = []
        self._last: list[Placement] = []

    def start(self, placements: Sequence[Placement]) -> int:
        self._open = list(placements)
        return len(self._open)

    def ask(self, neighbour: Placement | None = None) -> Placement | None:
        """The first of the worker's own family; else of a family that no worker is at; else the first."""
        if not self._open:
            return None
        family = _family(neighbour)
        begun = {_family(each) for each in self._last}
        own = (each for each in self._open if _family(each) == family)
        fresh = (each for each in self._open if _family(each) not in begun)
        chosen = next(own, None) or next(fresh, None) or self._open[0]
        self._open.remove(chosen)
        self._last.append(chosen)
        return chosen

    def tell(self, placement: Placement, row: Row) -> None:
        """Every placement is asked for, whatever became of others."""


class RandomSampler(GridSampler):
    """So many placements of the grid, each at most once, by chance.

    Args:
        n_samples: how many.
        seed: the same seed, the same placements: a sweep that is resumed asks for them again.
    """

    def __init__(self, n_samples: int, seed: int = 0) -> None:
        if n_samples < 1:
            raise ConfigError(f"n_samples={n_samples} asks for nothing", remedy="pass 1 or more")
        super().__init__()
        self._n_samples = n_samples
        self._seed = seed

    def start(self, placements: Sequence[Placement]) -> int:
        chosen = random.Random(self._seed).sample(range(len(placements)), min(self._n_samples, len(placements)))
        return super().start([placements[index] for index in sorted(chosen)])


def _family(placement: Placement | None) -> tuple[object, ...]:
    """Placements of one family are lowered from the same parts."""
    return () if placement is None else (placement.model, placement.devices, placement.mode)
