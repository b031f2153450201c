"""The stage-cutting problem as numbers: what ``stage_cuts`` solves. Knows nothing of graphs.

Units 0..N-1 stand in a row; stage s computes a run of them, ``i..j``; stages are in order and none is empty.

    unit      0    1    2  |  3    4  |  5        N = 6, two cuts: before units 3 and 5
    stage          0       |    1     |  2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Integers", "Shared", "StageProblem", "Units", "Uses", "Value", "stage_runs", "stages_of", "uses"]

Floats = NDArray[np.float64]
"""An array of seconds, bytes or counts."""

Integers = NDArray[np.int64]
"""An array of units, boundaries or prices."""


class Shared(NamedTuple):
    """An amount that a stage needs once, however many of its units need it.

    Attributes:
        amount: bytes, or seconds.
        units: who needs it, in order.
        producer: a unit before them that makes the stage that holds it do without: what a stage receives is its producer's elsewhere.
            -1: there is none.
    """

    amount: float
    units: tuple[int, ...]
    producer: int = -1


class Uses(NamedTuple):
    """Every use of shared items, in no order.

    Attributes:
        before: (U,) the last unit before that needs the item too: its producer, or -1, before the first.
        unit: (U,) who uses it.
        amount: (U,), or (U, K) of several kinds.
    """

    before: Integers
    unit: Integers
    amount: Floats

    def held(self, stage_of: Integers, n_stages: int) -> Floats:
        """(S,) what each stage needs: of what several of its units use, the first use counts.

        Args:
            stage_of: (N + 1,) as ``stages_of`` has it.
        """
        stage = stage_of[self.unit + 1]
        first = stage_of[self.before + 1] < stage
        needed: Floats = np.bincount(stage[first], self.amount[first], n_stages).astype(float)
        return needed


def uses(items: Iterable[tuple[float | Sequence[float], tuple[int, ...], int]], n_kinds: int = 0) -> Uses:
    """The uses of items, each an amount, its users in order, and a unit before them that makes those of its stage do without, or -1.

    Args:
        n_kinds: how many numbers an amount has; 0: it is one.
    """
    amounts, users, first = zip(*items, strict=True) if (items := list(items)) else ((), (), ())
    counts = np.fromiter(map(len, users), np.int64, len(users))
    unit = np.fromiter(chain.from_iterable(users), np.int64)
    before = np.concatenate([[-1], unit[:-1]]) if len(unit) else unit
    begins = np.cumsum(counts) - counts
    before[begins[counts > 0]] = np.array(first, np.int64)[counts > 0]
    amount = np.array(amounts, float).reshape((len(users), n_kinds) if n_kinds else len(users))
    return Uses(before, unit, np.repeat(amount, counts, axis=0))


def stages_of(starts: Sequence[int], n_units: int) -> Integers:
    """(N + 1,) the stage of unit u at u + 1, when the stages start at these units; -1 in front: no stage is before the first."""
    stage_of: Integers = np.searchsorted(starts, np.arange(-1, n_units), side="right") - 1
    return stage_of


class Value(NamedTuple):
    """A tensor that crosses between units.

    Attributes:
        producer: the unit that computes it.
        readers: the units that read it, in order; a value that the model returns is read by the last unit.
        size: bytes, sent once by the stage of the producer when a later stage reads it.
        gradient_size: bytes of its gradient, sent once by every later stage that reads it; 0 when there is none.
    """

    producer: int
    readers: tuple[int, ...]
    size: int
    gradient_size: int


@dataclass(frozen=True, eq=False)
class Units:
    """What is known of N units whatever the stages are.

    Attributes:
        time: (N, K) seconds of each unit on each kind of device.
        values: what crosses.
        replicated: (seconds on each kind, units): computed again in every stage that needs it.
        fixed: bytes that a stage holds all the time: parameters, their gradients, optimizer state.
        kept: bytes that a stage holds for every microbatch in flight.
        depth: (N,) how bad a cut in front of each unit reads: how many modules it cuts through. Breaks ties.
    """

    time: Floats
    values: tuple[Value, ...]
    replicated: tuple[tuple[tuple[float, ...], tuple[int, ...]], ...]
    fixed: tuple[Shared, ...]
    kept: tuple[Shared, ...]
    depth: Integers

    def __len__(self) -> int:
        return int(self.time.shape[0])

    @cached_property
    def fixed_uses(self) -> Uses:
        """Of what stages hold all the time."""
        return uses((item.amount, item.units, item.producer) for item in self.fixed)

    @cached_property
    def kept_uses(self) -> Uses:
        """Of what stages hold for every microbatch in flight."""
        return uses((item.amount, item.units, item.producer) for item in self.kept)

    @cached_property
    def replicated_uses(self) -> Uses:
        """Of what every stage computes for itself: (U, K) seconds."""
        return uses(((seconds, users, -1) for seconds, users in self.replicated), self.time.shape[1])

    @cached_property
    def leaving(self) -> Uses:
        """Of each value the last: its stage's producer sends it, once, where that is another."""
        return uses((value.size, value.readers[-1:], value.producer) for value in self.values)

    @cached_property
    def entering(self) -> Uses:
        """Of the values that have a gradient, all: every stage that reads one sends it back, once."""
        return uses((value.gradient_size, value.readers, value.producer) for value in self.values if value.gradient_size)


@dataclass(frozen=True, eq=False)
class StageProblem:
    """N units, S stages on R ranks.

    Attributes:
        units: the units.
        kind: (S,) the kind of device of each stage.
        rank: (S,) the rank of each stage.
        latency: (S-1,) s, of the link from each stage to the next; 0 on one rank.
        seconds_per_byte: (S-1,) of that link.
        in_flight: (S,) microbatches that each stage holds at once.
        limit: (R,) bytes of each rank; the stages of a rank share them.
        forced: boundaries that must be cuts: b is the boundary in front of unit b.
        allowed: (N, S) whether a unit may be in a stage; None: all may.
    """

    units: Units
    kind: tuple[int, ...]
    rank: tuple[int, ...]
    latency: Floats
    seconds_per_byte: Floats
    in_flight: tuple[int, ...]
    limit: tuple[float, ...]
    forced: frozenset[int]
    allowed: NDArray[np.bool_] | None

    @property
    def n_units(self) -> int:
        return len(self.units)

    @property
    def n_stages(self) -> int:
        return len(self.kind)


def stage_runs(starts: Sequence[int], n_units: int) -> tuple[range, ...]:
    """The units of each stage."""
    return tuple(range(start, end) for start, end in zip(starts, (*starts[1:], n_units), strict=True))
