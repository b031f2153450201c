"""The stage-cutting problem in numbers, without graphs; ``min_max_dp`` solves it.

Units 0..N-1 stand in a row; stage s computes a run of them, ``i..j``; stages are in order and none is empty.

    unit      0    1    2  |  3    4  |  5        N = 6, two cuts: before units 3 and 5
    stage          0       |    1     |  2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.schedules.kind import Awaiting

__all__ = [
    "Floats",
    "Gathered",
    "Integers",
    "Shared",
    "StageProblem",
    "TransientMemory",
    "Units",
    "Uses",
    "Value",
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
        amount: bytes; a tuple has one number for each kind of stage.
        units: the units that need it, in order.
        producer: an earlier unit, whose own stage does not need the item (a received value); -1: every stage with a user needs it.
    """

    amount: float | tuple[float, ...]
    units: tuple[int, ...]
    producer: int = -1

    @property
    def least(self) -> float:
        """The smallest amount over all kinds of stages."""
        return min(self.amount) if isinstance(self.amount, tuple) else self.amount

    @property
    def most(self) -> float:
        """The largest amount over all kinds of stages."""
        return max(self.amount) if isinstance(self.amount, tuple) else self.amount

    def of_kind(self, kind: int) -> float:
        """Return the amount on one kind of stage."""
        return self.amount[kind] if isinstance(self.amount, tuple) else self.amount


class Uses(NamedTuple):
    """All pairs (shared item, unit that uses it), in no order.

    Attributes:
        before: (U,) the item's previous user; for its first user, its producer or -1.
        unit: (U,) the unit that uses the item.
        amount: (U,) the amount of the item; (U, K) if it differs between kinds of stages.
    """

    before: Integers
    unit: Integers
    amount: Floats

    def per_stage(self, stage_of: Integers, n_stages: int, kinds: Sequence[int] = ()) -> Floats:
        """Return (S,) the amount that each stage needs; an item counts once a stage, at the stage's first use of it.

        Args:
            stage_of: (N + 1,) the stage of each unit (``stages_of``).
            kinds: (S,) the kind of each stage; unused if amounts do not differ between kinds.
        """
        stage = stage_of[self.unit + 1]
        is_first_use = stage_of[self.before + 1] < stage
        return self._sum_by_stage(stage, is_first_use, n_stages, kinds)

    def sent_per_stage(self, stage_of: Integers, n_stages: int, kinds: Sequence[int] = ()) -> Floats:
        """Return (S,) the amount that each stage sends, for items with one use each: those used in a later stage than their producer's."""
        stage = stage_of[self.before + 1]
        is_sent = stage < stage_of[self.unit + 1]
        return self._sum_by_stage(stage, is_sent, n_stages, kinds)

    def of_kind(self, kind: int) -> Floats:
        """Return (U,) the amounts on one kind of stage."""
        return self.amount[:, kind] if self.amount.ndim == 2 else self.amount

    def _sum_by_stage(self, stage: Integers, mask: NDArray[np.bool_], n_stages: int, kinds: Sequence[int]) -> Floats:
        """Return (S,) the sum of the masked uses' amounts by stage; ``stage``: (U,) the stage of each use."""
        stage, amount = stage[mask], self.amount[mask]
        if amount.ndim == 2:
            amount = amount[np.arange(len(stage)), np.array(kinds, dtype=np.int64)[stage]]
        total: Floats = np.bincount(stage, amount, n_stages).astype(float)
        return total


def uses(items: Iterable[tuple[float | Sequence[float], tuple[int, ...], int]], n_kinds: int = 0) -> Uses:
    """List the uses of items (amount, users in order, producer or -1); ``n_kinds``: length of the amounts, 0 for plain numbers.

    (5.0, (2, 4), -1), (7.0, (3,), 1)    ->    unit 2 4 3, before -1 2 1, amount 5 5 7
    """
    items = list(items)
    amounts, users, producers = zip(*items, strict=True) if items else ((), (), ())
    counts = np.fromiter(map(len, users), np.int64, len(users))
    unit = np.fromiter(chain.from_iterable(users), np.int64)
    before = np.concatenate([[-1], unit[:-1]]) if len(unit) else unit
    first_use = np.cumsum(counts) - counts
    before[first_use[counts > 0]] = np.array(producers, np.int64)[counts > 0]
    amount = np.array(amounts, float).reshape((len(users), n_kinds) if n_kinds else len(users))
    return Uses(before, unit, np.repeat(amount, counts, axis=0))


def shared_uses(items: Collection[Shared], n_kinds: int) -> Uses:
    """List the uses of shared items, with an amount for each of ``n_kinds`` kinds if that of any item differs between kinds."""
    if not any(isinstance(item.amount, tuple) for item in items):
        return uses((item.amount, item.units, item.producer) for item in items)
    by_kind = (tuple(map(item.of_kind, range(n_kinds))) for item in items)
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


class Gathered(NamedTuple):
    """A tensor that is sharded over the ranks of its stage, and gathered before it is sent to another: a value, or a value's gradient.

                stage of two ranks       boundary       stage of other ranks
    value       shards  -> gathered  ->  whole      ->  each rank takes its shard
    gradient    each rank takes its  <-  whole      <-  gathered <- shards
                shard

    Attributes:
        seconds: of the gather, in the forward or in the input half of the backward, for each kind of stage.
        size: bytes of the gathered tensor, beside the shards, for each kind of stage.
        producer: the unit that computes the value; its stage gathers no gradient.
        readers: of a value, the last unit that reads it: its stage gathers once, unless that unit is in the same stage. Of a gradient, all
            units that read the value: every other stage of one gathers once.
    """

    seconds: tuple[float, ...]
    size: tuple[float, ...]
    producer: int
    readers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TransientMemory:
    """Memory of a stage while it computes, beside permanent memory and the saved activations of all microbatches in flight.

    A stage of units ``i..j`` needs the maximum over its units u of

        forward    forward(u) - saved(u+1..j)
        backward   backward(u) + gradients(u+1..j) - saved(u+1..j)

    and ``coalesced(i..j)``, at most ``coalesced_at_once``. Gradients reduced during the backward exist twice: ``gradients(u+1..j)`` is
    added once more, at most ``summed`` bytes, and at most the gradients of all units after u: an upper bound. Of a backward in two halves,
    the first has no gradients of parameters, and leaves what these are computed from, which the second frees:

        input half     inputs(u) + weights(u+1..j) - saved(u+1..j)
        weight half    gradients(u..j) + weights(i..u) - saved(i..j)

    There each microbatch in flight counts as ``saved`` and ``deferred``, which is subtracted here: ``deferred(i..j)``.

    Attributes:
        forward, backward: (N,) bytes that a unit computes with, beyond the saved activations of it and of the units before it.
        inputs: (N,) the same of a backward that computes no gradients of weights, and frees nothing.
        saved: (N,) bytes that each unit adds to the saved activations.
        gradients: (N,) bytes of the parameter gradients that exist after the unit's backward.
        coalesced: (N,) bytes of small weights gathered for each unit in coalesced messages.
        coalesced_at_once: the most bytes of these that exist at once.
        weights: (N,) bytes that a unit holds between the two halves of a backward: operands and gradients of results, for those of weights.
        is_split: whether backwards run in two halves.
        summed: the most bytes of gradients that exist twice during a backward.
    """

    forward: Floats
    backward: Floats
    inputs: Floats
    saved: Floats
    gradients: Floats
    coalesced: Floats
    coalesced_at_once: float
    weights: Floats
    is_split: bool = False
    summed: float = 0.0

    @staticmethod
    def nothing(n_units: int) -> TransientMemory:
        """Return the table of units without transient memory."""
        nothing = np.zeros(n_units)
        return TransientMemory(nothing, nothing, nothing, nothing, nothing, nothing, 0.0, nothing)

    def repeated(self, source: Integers) -> TransientMemory:
        """Return the table of the given units, in any order and with repetition."""
        names = ("forward", "backward", "inputs", "saved", "gradients", "coalesced", "weights")
        return replace(self, **{name: getattr(self, name)[source] for name in names})

    def split(self) -> TransientMemory:
        """Return the table for backwards in two halves."""
        return replace(self, is_split=True)

    @cached_property
    def deferred(self) -> Floats:
        """(N,) bytes beyond ``saved`` that each unit holds between the two halves of a backward, if all saved values are held as long."""
        total = self.weights.sum()
        return self.weights * max(1 - self.saved.sum() / total, 0.0) if total else self.weights

    @cached_property
    def _sums(self) -> Floats:
        """(5, N + 1) prefix sums of saved, gradients, coalesced, weights and deferred."""
        columns = self.saved, self.gradients, self.coalesced, self.weights, self.deferred
        return np.pad(np.cumsum(columns, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def _peaks(self) -> Floats:
        """(3, N) the terms in u of forward, backward, and backward with gradients twice; sums over ``u+1..j`` begin as ``-_sums`` at u.

        Of a backward in two halves: of forward, input half and weight half.
        """
        saved, gradients, _, weights, _ = self._sums[:, 1:]
        if self.is_split:
            return np.stack([self.forward + saved, self.inputs - weights + saved, self.gradients - gradients + weights])
        backward = self.backward - gradients + saved
        twice = np.minimum(gradients[-1] - gradients, self.summed)
        return np.stack([self.forward + saved, backward + twice, backward - gradients])

    def of_block(self, start: int, stop: int, width: int) -> Floats:
        """Return (stop - start, width) bytes of the runs of 1..width units from each of the units ``start .. stop - 1``."""
        first = np.arange(start, stop)[:, None]
        last = np.minimum(first + np.arange(width), len(self.saved) - 1)
        return self._of_runs(np.maximum.accumulate(self._peaks[:, last], axis=2), first, last + 1)

    def of_stages(self, starts: Sequence[int]) -> Floats:
        """Return (S,) bytes of the stages with these first units."""
        ends = np.array([*starts[1:], len(self.saved)])
        return self._of_runs(np.maximum.reduceat(self._peaks, starts, axis=1), np.array(starts), ends)

    def by_action(self, starts: Sequence[int]) -> Floats:
        """Return (4, S) bytes of the stages with these first units in a forward, and the input half, weight half and whole of a backward.

        They are beyond the saved activations, and beyond ``weights`` in a weight half.

            input half     inputs(u) + weights(u+1..j) - saved(u+1..j)
            weight half    gradients(u..j) - weights(u+1..j)
        """
        ends = np.array([*starts[1:], len(self.saved)])
        saved, gradients, coalesced, held, _ = self._sums
        twice = np.minimum(gradients[-1] - gradients[1:], self.summed)
        freed = (saved - held)[1:], gradients[1:] - saved[1:], (gradients - held)[1:]
        terms = np.stack([self.forward + saved[1:], self.inputs + freed[0], self.gradients - freed[2], self.backward + twice - freed[1]])
        highest = np.maximum.reduceat(terms, starts, axis=1)
        after = np.stack([-saved[ends], (held - saved)[ends], (gradients - held)[ends], (gradients - saved)[ends]])
        computing: Floats = np.maximum(highest + after, 0.0) + np.minimum(coalesced[ends] - coalesced[starts], self.coalesced_at_once)
        return computing

    def _of_runs(self, highest: Floats, start: Integers, end: Integers) -> Floats:
        """Return the bytes of the runs ``start .. end - 1``: the terms in i and j, added to the maxima of ``_peaks`` over the run."""
        forward, first, second = highest
        saved, gradients, coalesced, held, deferred = self._sums
        if self.is_split:
            twice = np.minimum(gradients[end] - gradients[start], self.summed)
            second = second + gradients[end] + twice - held[start] - saved[end] + saved[start]
            backward = np.maximum(first + held[end] - saved[end], second)
            deferral = deferred[end] - deferred[start]
            forward, backward = forward - deferral, backward - deferral
        else:
            backward = np.minimum(first + gradients[end], second + 2 * gradients[end]) - saved[end]
        computing: Floats = np.maximum(np.maximum(forward - saved[end], backward), 0.0)
        weights: Floats = np.minimum(coalesced[end] - coalesced[start], self.coalesced_at_once)
        return computing + weights


@dataclass(frozen=True, eq=False)
class Units:
    """N units, with all costs that do not depend on where stages are cut.

    Attributes:
        time: (N, K) seconds of each unit in a stage of each kind.
        values: the tensors that cross between units.
        replicated: (seconds by kind, units that need it) of each op that every stage with such a unit computes for itself.
        fixed: memory that a stage holds all the time: parameters, optimizer state.
        kept: saved activations that a stage holds for every microbatch in flight.
        depth: (N,) number of modules that a cut before each unit goes through. Breaks ties.
        gradients: memory that a stage holds from its first backward on.
        summed: the most bytes of gradients that exist twice while they are reduced over ranks.
        working: transient memory, one for each kind if these differ; None: none.
        gathered_values: values that a stage gathers before it sends them.
        gathered_gradients: values of which it gathers the gradients before it sends these back.
    """

    time: Floats
    values: tuple[Value, ...]
    replicated: tuple[tuple[tuple[float, ...], tuple[int, ...]], ...]
    fixed: tuple[Shared, ...]
    kept: tuple[Shared, ...]
    depth: Integers
    gradients: tuple[Shared, ...] = ()
    summed: float = 0.0
    working: TransientMemory | tuple[TransientMemory, ...] | None = None
    gathered_values: tuple[Gathered, ...] = ()
    gathered_gradients: tuple[Gathered, ...] = ()

    def __len__(self) -> int:
        return int(self.time.shape[0])

    @property
    def n_kinds(self) -> int:
        """The number of kinds of stages, K."""
        return int(self.time.shape[1])

    @property
    def workings(self) -> tuple[TransientMemory, ...]:
        """The transient memory of each kind; a single entry if it is the same for all kinds."""
        if self.working is None:
            return (TransientMemory.nothing(len(self)),)
        return self.working if isinstance(self.working, tuple) else (self.working,)

    def working_of_stages(self, starts: Sequence[int], kinds: Sequence[int]) -> Floats:
        """Return (S,) transient bytes of stages with these first units and kinds, and of the tensors gathered at their boundaries."""
        n_stages = len(starts)
        by_kind = np.zeros((1, n_stages)) if self.working is None else np.stack([working.of_stages(starts) for working in self.workings])
        computing: Floats = by_kind[0] if len(by_kind) == 1 else by_kind[list(kinds), np.arange(n_stages)]
        return computing + self._gathered_of_stages(starts, kinds)

    def _gathered_of_stages(self, starts: Sequence[int], kinds: Sequence[int]) -> Floats | float:
        """Return (S,) bytes of the tensors gathered at the boundaries of stages; 0 if there are none."""
        if not (self.gathered_values or self.gathered_gradients):
            return 0.0
        stage_of, n_stages = stages_of(starts, len(self)), len(starts)
        values = self.gathered_value_bytes.sent_per_stage(stage_of, n_stages, kinds)
        return values + self.gathered_gradient_bytes.per_stage(stage_of, n_stages, kinds)

    def transient_of_stages(self, starts: Sequence[int], kinds: Sequence[int]) -> Floats:
        """Return (4, S) transient bytes of such stages in each kind of action (``TransientMemory.by_action``)."""
        n_stages = len(starts)
        by_kind = np.stack([working.by_action(starts) for working in self.workings])
        computing: Floats = by_kind[list(kinds) if len(by_kind) > 1 else 0, :, np.arange(n_stages)].T
        return computing + self._gathered_of_stages(starts, kinds)

    def between_of_stages(self, starts: Sequence[int], kinds: Sequence[int]) -> Floats:
        """Return (S,) bytes that such stages hold of a microbatch between the halves of its backward."""
        by_kind = np.add.reduceat(np.stack([working.weights for working in self.workings]), starts, axis=1)
        held: Floats = by_kind[list(kinds) if len(by_kind) > 1 else 0, np.arange(len(starts))]
        return held

    @cached_property
    def split(self) -> Units:
        """The units where backwards run in two halves: what is held between these counts as saved."""
        if self.working is None:
            return self
        deferred = np.stack([working.deferred for working in self.workings])
        amounts = deferred[0].tolist() if len(deferred) == 1 else list(map(tuple, deferred.T.tolist()))
        extra = (Shared(amount, (unit,)) for unit, amount in enumerate(amounts) if deferred[:, unit].any())
        split = tuple(working.split() for working in self.workings)
        return replace(self, kept=(*self.kept, *extra), working=split if isinstance(self.working, tuple) else split[0])

    @cached_property
    def fixed_uses(self) -> Uses:
        """The uses of ``fixed``, in bytes."""
        return shared_uses(self.fixed, self.n_kinds)

    @cached_property
    def kept_uses(self) -> Uses:
        """The uses of ``kept``, in bytes."""
        return shared_uses(self.kept, self.n_kinds)

    @cached_property
    def gradient_uses(self) -> Uses:
        """The uses of ``gradients``, in bytes."""
        return shared_uses(self.gradients, self.n_kinds)

    @cached_property
    def replicated_uses(self) -> Uses:
        """The uses of ``replicated``, (U, K) seconds."""
        return uses(((seconds, users, -1) for seconds, users in self.replicated), self.n_kinds)

    @cached_property
    def gathered_value_seconds(self) -> Uses:
        """The last use of each of ``gathered_values``, (U, K) seconds: for ``Uses.sent_per_stage``."""
        return uses(((item.seconds, item.readers, item.producer) for item in self.gathered_values), self.n_kinds)

    @cached_property
    def gathered_value_bytes(self) -> Uses:
        """The same in bytes."""
        return uses(((item.size, item.readers, item.producer) for item in self.gathered_values), self.n_kinds)

    @cached_property
    def gathered_gradient_seconds(self) -> Uses:
        """The uses of ``gathered_gradients``, (U, K) seconds."""
        return uses(((item.seconds, item.readers, item.producer) for item in self.gathered_gradients), self.n_kinds)

    @cached_property
    def gathered_gradient_bytes(self) -> Uses:
        """The same in bytes."""
        return uses(((item.size, item.readers, item.producer) for item in self.gathered_gradients), self.n_kinds)

    @cached_property
    def leaving(self) -> Uses:
        """The last use of each value, in bytes, for ``Uses.sent_per_stage``: sent once, if a later stage than the producer's uses it."""
        return uses((value.size, value.readers[-1:], value.producer) for value in self.values)

    @cached_property
    def entering(self) -> Uses:
        """The uses of values with a gradient, in bytes of it: every later stage that reads the value sends a gradient back, once."""
        return uses((value.gradient_size, value.readers, value.producer) for value in self.values if value.gradient_size)


@dataclass(frozen=True, eq=False)
class StageProblem:
    """N units, S stages on R ranks.

    Attributes:
        kind: (S,) the kind of each stage: its device, and how many ranks share it.
        rank: (S,) the rank of each stage; of several, the first.
        latency: (S-1,) s, of the link from each stage to the next; 0 on one rank.
        seconds_per_byte: (S-1,) of that link.
        in_flight: (S,) the most microbatches that each stage holds at once.
        later: (S,) the same after its first parameter gradients exist; 0: it computes nothing after that.
        awaiting: (S,) the same while messages arrive.
        limit: (R,) bytes of each rank; the stages of a rank share them.
        forced: boundaries that must be cuts: b is the boundary before unit b.
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
