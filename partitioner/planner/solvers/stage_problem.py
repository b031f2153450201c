"""The stage-cutting problem in numbers, without graphs; ``min_max_dp`` solves it.

Units 0..N-1 stand in a row; stage s computes a run of them, ``i..j``; stages are in order and none is empty.

    unit      0    1    2  |  3    4  |  5        N = 6, two cuts: before units 3 and 5
    stage          0       |    1     |  2
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.planner.solvers.stage_memory import Floats, Integers, TransientMemory
from partitioner.schedules.kind import Awaiting


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


class Crossing(NamedTuple):
    """Bytes of the values that cross between S stages, and of their gradients.

    Attributes:
        forward: (S,) received by a forward from other ranks.
        backward: (S,) gradients received by a backward from other ranks.
        waiting: (stage, last stage of its ranks that reads a value of it) -> bytes of the gradients of such values, which the later stage's
            backward leaves in memory for the stage's own.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    waiting: dict[tuple[int, int], float]


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

    def messages_of_stages(self, starts: Sequence[int], kinds: Sequence[int]) -> Floats:
        """Return (2, S) bytes of the gradients that such stages send (``TransientMemory.messages_of_stages``)."""
        by_kind = np.stack([working.messages_of_stages(starts) for working in self.workings])
        found: Floats = by_kind[list(kinds) if len(by_kind) > 1 else 0, :, np.arange(len(starts))].T
        return found

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

    def crossing(self, stage_of: Integers, ranks: Sequence[Hashable]) -> Crossing:
        """Return the bytes of the values that cross between such stages.

        Args:
            stage_of: (N + 1,) the stage of each unit (``stages_of``).
            ranks: (S,) the ranks of each stage, or a number of these.
        """
        stages, n_stages = stage_of.tolist(), len(ranks)
        forward, backward, waiting = [0.0] * n_stages, [0.0] * n_stages, dict[tuple[int, int], float]()
        for value in self.values:
            stage = stages[value.producer + 1]
            if stages[value.readers[-1] + 1] == stage:
                continue
            readers = sorted({stages[unit + 1] for unit in value.readers} - {stage})
            receivers = {ranks[reader]: reader for reader in reversed(readers)}
            own = receivers.pop(ranks[stage], None)
            for reader in receivers.values():
                forward[reader] += value.size
            backward[stage] += value.gradient_size * sum(ranks[reader] != ranks[stage] for reader in readers)
            if own is not None:
                last = max(reader for reader in readers if ranks[reader] == ranks[stage])
                waiting[stage, last] = waiting.get((stage, last), 0.0) + value.gradient_size
        return Crossing(tuple(forward), tuple(backward), waiting)

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
