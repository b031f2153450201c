"""The stage-cutting problem as numbers: what ``stage_cuts`` solves. Knows nothing of graphs.

Units 0..N-1 stand in a row; stage s computes a run of them, ``i..j``; stages are in order and none is empty.

    unit      0    1    2  |  3    4  |  5        N = 6, two cuts: before units 3 and 5
    stage          0       |    1     |  2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.planner.solvers.boundaries import Gathered, Parted
from partitioner.schedules.kind import Awaiting

__all__ = [
    "Floats",
    "Integers",
    "Shared",
    "StageProblem",
    "Units",
    "Uses",
    "Value",
    "Working",
    "shared_uses",
    "stage_runs",
    "stages_of",
    "uses",
]

Floats = NDArray[np.float64]
"""An array of seconds, bytes or counts."""

Integers = NDArray[np.int64]
"""An array of units, boundaries or prices."""


class Shared(NamedTuple):
    """An amount that a stage needs once, however many of its units need it.

    Attributes:
        amount: bytes; of stages of several kinds, one number for each kind.
        units: who needs it, in order.
        producer: a unit before them that makes the stage that holds it do without: what a stage receives is its producer's elsewhere.
            -1: there is none.
    """

    amount: float | tuple[float, ...]
    units: tuple[int, ...]
    producer: int = -1

    @property
    def least(self) -> float:
        """The amount on the kind of stage that needs least."""
        return min(self.amount) if isinstance(self.amount, tuple) else self.amount

    @property
    def most(self) -> float:
        """The amount on the kind of stage that needs most."""
        return max(self.amount) if isinstance(self.amount, tuple) else self.amount

    def of_kind(self, kind: int) -> float:
        """Return the amount on one kind of stage."""
        return self.amount[kind] if isinstance(self.amount, tuple) else self.amount


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

    def held(self, stage_of: Integers, n_stages: int, kinds: Sequence[int] = ()) -> Floats:
        """Return (S,) the amount that each stage needs: of what several of its units use, the first use counts.

        Args:
            stage_of: (N + 1,) as ``stages_of`` has it.
            kinds: (S,) of the stages; not asked for where all kinds are alike.
        """
        stage = stage_of[self.unit + 1]
        return self._summed(stage, stage_of[self.before + 1] < stage, n_stages, kinds)

    def left(self, stage_of: Integers, n_stages: int, kinds: Sequence[int] = ()) -> Floats:
        """Return (S,) the amounts that each stage sends: items with a single use, in a later stage than their producer."""
        stage = stage_of[self.before + 1]
        return self._summed(stage, stage < stage_of[self.unit + 1], n_stages, kinds)

    def of_kind(self, kind: int) -> Floats:
        """Return (U,) the amounts on one kind of stage."""
        return self.amount[:, kind] if self.amount.ndim == 2 else self.amount

    def _summed(self, stage: Integers, counts: NDArray[np.bool_], n_stages: int, kinds: Sequence[int]) -> Floats:
        """(S,) the amounts of the uses that count, at the stage of each."""
        where, amount = stage[counts], self.amount[counts]
        if amount.ndim == 2:
            amount = amount[np.arange(len(where)), np.array(kinds, dtype=np.int64)[where]]
        summed: Floats = np.bincount(where, amount, n_stages).astype(float)
        return summed


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


def shared_uses(items: Collection[Shared], n_kinds: int) -> Uses:
    """The uses of what stages share: of so many kinds, where an item tells them apart."""
    if not any(isinstance(item.amount, tuple) for item in items):
        return uses((item.amount, item.units, item.producer) for item in items)
    by_kind = (item.amount if isinstance(item.amount, tuple) else (item.amount,) * n_kinds for item in items)
    return uses(((amount, item.units, item.producer) for amount, item in zip(by_kind, items, strict=True)), n_kinds)


def stages_of(starts: Sequence[int], n_units: int) -> Integers:
    """Return (N + 1,) the stage of unit u at index u + 1, given the first unit of each stage; -1 at index 0: no unit."""
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
class Working:
    """What a stage holds while it computes, beside what it holds all the time and for each microbatch in flight, its own among them.

    Of a stage of units ``i..j`` at unit u, the most of all u counts:

        forward    forward(u) - made(u+1..j)
        backward   backward(u) + again(i..u) + trained(u+1..j) - made(u+1..j)

    and beside either as much of ``bundled(i..j)`` as is there at once. Gradients that are summed over ranks as soon as they are there come
    twice, ``trained(u+1..j)`` again, but no more than ``summed``; that is applied to the most of all units, not to each: never too small.
    A backward that is a call of the program gives nothing back on its way: who calls it holds what it was given.

    Attributes:
        forward, backward: (N,) bytes of what a unit computes with, beyond what is kept of it and of units in front of it.
        made: (N,) bytes that each unit adds to what is kept.
        again: (N,) bytes that the backward computes again before it begins, and drops behind the backward of the unit.
        trained: (N,) bytes of the gradients that are there behind the backward of the unit.
        bundled: (N,) bytes of the small weights that are gathered for each unit, many together.
        at_once: how much of these is there at once.
        called: whether backwards are calls.
        summed: bytes of gradients that are there twice at once, at most, while a backward goes on.
    """

    forward: Floats
    backward: Floats
    made: Floats
    again: Floats
    trained: Floats
    bundled: Floats
    at_once: float
    called: bool = False
    summed: float = 0.0

    @staticmethod
    def nothing(n_units: int) -> Working:
        """Return the table of units without transient memory."""
        nothing = np.zeros(n_units)
        return Working(nothing, nothing, nothing, nothing, nothing, nothing, 0.0)

    def repeated(self, source: Integers) -> Working:
        """Return the table of the given units, in any order and with repetition."""
        peaks = (self.forward[source], self.backward[source])
        of_units = (*peaks, self.made[source], self.again[source], self.trained[source], self.bundled[source])
        return Working(*of_units, self.at_once, self.called, self.summed)

    @cached_property
    def _sums(self) -> Floats:
        """(4, N + 1) of made, again, trained and bundled over all units in front."""
        return np.pad(np.cumsum([self.made, self.again, self.trained, self.bundled], axis=1), ((0, 0), (1, 0)))

    @cached_property
    def _peaks(self) -> Floats:
        """(3, N) forward, backward, and backward with all gradients twice, but for what depends on where the stage starts and ends."""
        made, again, trained, _ = self._sums[:, 1:]
        backward = self.backward + again - trained + (0.0 if self.called else made)
        return np.stack([self.forward + made, backward, backward - trained])

    def of_block(self, start: int, stop: int, width: int) -> Floats:
        """(stop - start, width) of every run that starts there; of none beyond the end."""
        last = np.minimum(np.arange(start, stop)[:, None] + np.arange(width), len(self.made) - 1)
        return self._of_runs(np.maximum.accumulate(self._peaks[:, last], axis=2), np.arange(start, stop)[:, None], last + 1)

    def of_stages(self, starts: Sequence[int]) -> Floats:
        """(S,) of the stages that start there."""
        ends = np.array([*starts[1:], len(self.made)])
        return self._of_runs(np.maximum.reduceat(self._peaks, starts, axis=1), np.array(starts), ends)

    def _of_runs(self, highest: Floats, start: Integers, end: Integers) -> Floats:
        """Bytes of the runs ``start .. end - 1``: the formulas of the class.

        Args:
            highest: the rows of ``_peaks``, each the most of a run's units. What does not depend on the unit is added behind the maximum;
                a sum over units of the run is a difference of ``_sums``.
        """
        forward, once, twice = highest
        made, again, trained, bundled = self._sums
        kept_behind = 0.0 if self.called else made[end]
        backward = np.minimum(once + trained[end] + self.summed, twice + 2 * trained[end]) - again[start] - kept_behind
        computing: Floats = np.maximum(np.maximum(forward - made[end], backward), 0.0)
        gathered: Floats = np.minimum(bundled[end] - bundled[start], self.at_once)
        return computing + gathered


@dataclass(frozen=True, eq=False)
class Units:
    """What is known of N units whatever the stages are.

    Attributes:
        time: (N, K) seconds of each unit in a stage of each kind.
        values: what crosses.
        replicated: (seconds of each kind, units): computed again in every stage that needs it.
        fixed: bytes that a stage holds all the time: parameters, optimizer state.
        kept: bytes that a stage holds for every microbatch in flight.
        depth: (N,) how bad a cut in front of each unit reads: how many modules it cuts through. Breaks ties.
        gradients: bytes that a stage holds from its first backward on.
        summed: bytes of gradients that are there twice at once, at most, when they are summed over ranks.
        working: what is held besides by a stage that computes, one for each kind where these differ; None: nothing.
        gathered: what a stage makes whole before it sends it.
        parted: what it reads in parts, and makes the gradient whole of.
    """

    time: Floats
    values: tuple[Value, ...]
    replicated: tuple[tuple[tuple[float, ...], tuple[int, ...]], ...]
    fixed: tuple[Shared, ...]
    kept: tuple[Shared, ...]
    depth: Integers
    gradients: tuple[Shared, ...] = ()
    summed: float = 0.0
    working: Working | tuple[Working, ...] | None = None
    gathered: tuple[Gathered, ...] = ()
    parted: tuple[Parted, ...] = ()

    def __len__(self) -> int:
        return int(self.time.shape[0])

    @property
    def n_kinds(self) -> int:
        """K."""
        return int(self.time.shape[1])

    @property
    def workings(self) -> tuple[Working, ...]:
        """One where all kinds compute with the same, else one for each kind."""
        if self.working is None:
            return (Working.nothing(len(self)),)
        return self.working if isinstance(self.working, tuple) else (self.working,)

    def working_of_stages(self, starts: Sequence[int], kinds: Sequence[int]) -> Floats:
        """(S,) bytes that stages of these kinds, which start there, compute with, and hold at their borders."""
        each = np.zeros((1, len(starts))) if self.working is None else np.stack([working.of_stages(starts) for working in self.workings])
        own: Floats = each[0] if len(each) == 1 else each[list(kinds), np.arange(len(starts))]
        if not (self.gathered or self.parted):
            return own
        stage_of = stages_of(starts, len(self))
        return own + self.gathered_sizes.left(stage_of, len(starts), kinds) + self.parted_sizes.held(stage_of, len(starts), kinds)

    @cached_property
    def fixed_uses(self) -> Uses:
        """Of what stages hold all the time."""
        return shared_uses(self.fixed, self.n_kinds)

    @cached_property
    def kept_uses(self) -> Uses:
        """Of what stages hold for every microbatch in flight."""
        return shared_uses(self.kept, self.n_kinds)

    @cached_property
    def gradient_uses(self) -> Uses:
        """Of what stages hold from their first backward on."""
        return shared_uses(self.gradients, self.n_kinds)

    @cached_property
    def replicated_uses(self) -> Uses:
        """Of what every stage computes for itself: (U, K) seconds."""
        return uses(((seconds, users, -1) for seconds, users in self.replicated), self.n_kinds)

    @cached_property
    def gathered_uses(self) -> Uses:
        """Of what is made whole before it is sent: (U, K) seconds, as ``leaving`` has bytes."""
        return uses(((item.seconds, (item.reader,), item.producer) for item in self.gathered), self.n_kinds)

    @cached_property
    def gathered_sizes(self) -> Uses:
        """The same in bytes."""
        return uses(((item.size, (item.reader,), item.producer) for item in self.gathered), self.n_kinds)

    @cached_property
    def parted_uses(self) -> Uses:
        """Of what is read in parts: (U, K) seconds, as ``entering`` has bytes."""
        return uses(((item.seconds, item.readers, item.producer) for item in self.parted), self.n_kinds)

    @cached_property
    def parted_sizes(self) -> Uses:
        """The same in bytes."""
        return uses(((item.size, item.readers, item.producer) for item in self.parted), self.n_kinds)

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
        kind: (S,) the kind of each stage: its device, and how many ranks share it.
        rank: (S,) the rank of each stage; of several, the first.
        latency: (S-1,) s, of the link from each stage to the next; 0 on one rank.
        seconds_per_byte: (S-1,) of that link.
        in_flight: (S,) microbatches that each stage holds at once.
        later: (S,) the same from its first gradients on; 0: it computes nothing any more.
        awaiting: (S,) the same while messages come to it.
        limit: (R,) bytes of each rank; the stages of a rank share them.
        forced: boundaries that must be cuts: b is the boundary in front of unit b.
        allowed: (N, S) whether a unit may be in a stage; None: all may.
        replicas: (S,) how many replicas each stage has; empty: one.
    """

    units: Units
    kind: tuple[int, ...]
    rank: tuple[int, ...]
    latency: Floats
    seconds_per_byte: Floats
    in_flight: tuple[int, ...]
    later: tuple[int, ...]
    awaiting: Awaiting
    limit: tuple[float, ...]
    forced: frozenset[int]
    allowed: NDArray[np.bool_] | None
    replicas: tuple[int, ...] = ()

    @property
    def n_units(self) -> int:
        return len(self.units)

    @property
    def n_stages(self) -> int:
        return len(self.kind)

    @property
    def n_replicas(self) -> Integers:
        """(S,) the number of replicas of each stage."""
        return np.array(self.replicas or (1,) * self.n_stages, dtype=np.int64)


def stage_runs(starts: Sequence[int], n_units: int) -> tuple[range, ...]:
    """Return the units of each stage, given its first unit."""
    return tuple(range(start, end) for start, end in zip(starts, (*starts[1:], n_units), strict=True))
