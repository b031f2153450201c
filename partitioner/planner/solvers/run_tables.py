"""Sums over runs of units, for all runs that start in a block of units at a time.

Some quantities of a run are plain sums over its units (time). Others are *shared*: a parameter that two units of the run use is held
once, a value that two units of the run read is received once. With the users of item x in order ``u1 < u2 < ...`` and the use before
each, ``w`` (-1 before the first), item x counts in run i..j exactly once: at the use with ``w < i <= u <= j``. So every quantity is a sum
of what units add to the runs that reach them from some starts:

    a unit that takes t seconds        t at u           from 0 <= i <= u
    an item, at each of its uses       its amount at u  from w < i <= u
    a value, made at p, last read at q its size at p, minus its size at q, since it does not leave     from 0 <= i <= p
    its gather before it is sent       its seconds, likewise
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.planner.solvers.stage_memory import DynamicMemory, Floats, Integers
from partitioner.planner.solvers.stage_problem import StageProblem, Units, Uses

_BLOCK = 128
"""First units in a block."""

_MOST_CACHED_RUNS = 1_000_000
"""Runs that a table caches, about nine numbers each; the blocks of larger tables are computed anew each time."""


@dataclass(frozen=True)
class Runs:
    """Every run that starts in a block of C units: entry [c, k] is about ``start + c .. start + c + k``, if that is within the units.

    Attributes:
        start: the first unit of the block.
        time: (K, C, width) seconds of a stage of each kind.
        leaving: (2, C, width) messages and bytes that a run sends forward.
        entering: (2, C, width) messages and bytes of the gradients that it sends back.
        fixed: (K, C, width) bytes held all the time; (1, C, width) if all kinds are equal, here and below.
        kept: (K, C, width) bytes for each microbatch in flight.
        gradients: (K, C, width) bytes from the first backward on.
        working: (K, C, width) transient bytes.
        gradient_gathers: (K, C, width) seconds, part of ``time``, of gathering gradients before they are sent back.
        behind: (C, width) the unit after each run, at most the number of units.
    """

    start: int
    time: Floats
    leaving: Floats
    entering: Floats
    fixed: Floats
    kept: Floats
    gradients: Floats
    working: Floats
    gradient_gathers: Floats
    behind: Integers

    @property
    def width(self) -> int:
        """Units of the longest runs."""
        return int(self.behind.shape[1])

    @property
    def units(self) -> range:
        """The first units of the block's runs."""
        return range(self.start, self.start + self.behind.shape[0])

    @property
    def starts(self) -> slice:
        """``units`` as an index of arrays."""
        return slice(self.units.start, self.units.stop)

    def up_to(self, width: int) -> Runs:
        """Return the runs of at most ``width`` units."""
        return self._part(slice(None), slice(width))

    def from_unit(self, unit: int) -> Runs:
        """Return the runs that start at one unit, as a block of their own."""
        return self._part(slice(unit - self.start, unit - self.start + 1), slice(None))

    def _part(self, starts: slice, lengths: slice) -> Runs:
        """Return the runs with some first units, by their places in the block, and some lengths."""
        time, leaving, entering = (table[:, starts, lengths] for table in (self.time, self.leaving, self.entering))
        fixed, kept, gradients, working = (table[:, starts, lengths] for table in (self.fixed, self.kept, self.gradients, self.working))
        gathers, behind = self.gradient_gathers[:, starts, lengths], self.behind[starts, lengths]
        return Runs(self.start + (starts.start or 0), time, leaving, entering, fixed, kept, gradients, working, gathers, behind)


class RunTable:
    """Computes the runs of some units, once for all problems with these units."""

    def __init__(self, units: Units) -> None:
        self._n_units = len(units)
        gathers = _concatenate(_of_sent_values(units.gathered_value_seconds), _of_uses(units.gathered_gradient_seconds))
        self._time = _concatenate(_of_units(units.time), _of_uses(units.replicated_uses), gathers)
        self._leaving = _of_sent_values(_with_counts(units.leaving))
        self._entering = _of_uses(_with_counts(units.entering))
        self._memory = [_of_uses(each) for each in (units.fixed_uses, units.kept_uses, units.gradient_uses)]
        self._workings, self._has_gathers = units.workings, bool(units.gathered_values or units.gathered_gradients)
        self._gradient_gathers = _of_uses(units.gathered_gradient_seconds)
        self._gathered_memory = _concatenate(_of_sent_values(units.gathered_value_bytes), _of_uses(units.gathered_gradient_bytes))
        self._known: dict[int, Runs] = {}

    def blocks(self, longest: Integers) -> Iterator[Runs]:
        """Yield the tables of all runs, by blocks of first units, the last block first.

        A block is computed once, at twice the width asked for if that is not too large, and cached for later calls.

        Args:
            longest: (N,) units of the longest run that fits, from each first unit.
        """
        for start in reversed(range(0, self._n_units, _BLOCK)):
            stop = min(start + _BLOCK, self._n_units)
            width = int(longest[start:stop].max())
            if start not in self._known or self._known[start].width < width:
                wider = min(2 * width, self._n_units - start)
                if wider * self._n_units > _MOST_CACHED_RUNS:
                    yield self._compute(start, stop, width)
                    continue
                self._known[start] = self._compute(start, stop, wider)
            yield self._known[start].up_to(width)

    def _compute(self, start: int, stop: int, width: int) -> Runs:
        """Compute the runs of 1..width units from each of the units ``start .. stop - 1``."""
        time, leaving, entering = (each.sums(start, stop, width) for each in (self._time, self._leaving, self._entering))
        fixed, kept, gradients = (each.sums(start, stop, width) for each in self._memory)
        peaks = [working.of_block(start, stop, width) for working in self._workings]
        working = np.stack(peaks) if len(peaks) > 1 else peaks[0][None]
        gradient_gathers = np.zeros((1, *working.shape[1:]))
        if self._has_gathers:
            working = working + self._gathered_memory.sums(start, stop, width)
            gradient_gathers = self._gradient_gathers.sums(start, stop, width)
        behind = np.minimum(np.arange(start + 1, stop + 1)[:, None] + np.arange(width), self._n_units)
        return Runs(start, time, leaving, entering, fixed, kept, gradients, working, gradient_gathers, behind)


run_table = lru_cache(maxsize=32)(RunTable)
"""Return the table of some units; the last 32 are cached."""


class _Additions(NamedTuple):
    """Amounts that count in some runs: entry e in the runs ``i..j`` with ``first[e] <= i <= last[e]`` and ``j >= unit[e]``.

    Attributes:
        unit, first, last: (E,) units.
        amount: (E, A) amounts of A quantities.
    """

    unit: Integers
    first: Integers
    last: Integers
    amount: Floats

    def sums(self, start: int, stop: int, width: int) -> Floats:
        """Return (A, stop - start, width) sums of the runs of 1..width units from each of the units ``start .. stop - 1``.

        An amount that counts for first units from ``first`` to ``last`` is two entries, +amount and -amount, of a difference array over
        first units. Its cumulative sum is by how much runs grow at each unit, and the cumulative sum of that along a run is the run's sum.
        """
        n_starts, n_units = stop - start, stop - start + width - 1
        first = np.maximum(np.maximum(self.first, self.unit - width + 1), start) - start
        last = np.minimum(self.last, stop - 1) - start
        mask = (self.unit >= start) & (self.unit < start + n_units) & (first <= last)
        row = (self.unit[mask] - start) * (n_starts + 1)  # of the flattened (unit, first unit) array
        place = np.concatenate([row + first[mask], row + last[mask] + 1])
        differences = np.empty((self.amount.shape[1], n_units, n_starts + 1))
        for number, amounts in enumerate(self.amount[mask].T):
            signed = np.concatenate([amounts, -amounts])
            differences[number] = np.bincount(place, signed, n_units * (n_starts + 1)).reshape(n_units, n_starts + 1)
        growth = np.cumsum(differences, axis=2)
        run = np.arange(n_starts)[:, None]
        sums: Floats = np.cumsum(growth[:, run + np.arange(width), run], axis=2)
        return sums


def _of_units(amount: Floats) -> _Additions:
    """Return each unit's (N, A) amount, in every run that contains the unit."""
    unit = np.arange(len(amount))
    return _Additions(unit, np.zeros_like(unit), unit, amount)


def _of_uses(uses: Uses) -> _Additions:
    """Return the amount of each item, once in every run that uses it (``Uses.per_stage``)."""
    amount = uses.amount if uses.amount.ndim == 2 else uses.amount[:, None]
    return _Additions(uses.unit, uses.before + 1, uses.unit, amount)


def _of_sent_values(last_uses: Uses) -> _Additions:
    """Return the amount of each value in every run with its producer but not its last reader (``Uses.sent_per_stage``)."""
    producer, reader, amount = last_uses
    zero = np.zeros_like(producer)
    with_producer = _Additions(producer, zero, producer, amount)
    with_reader = _Additions(reader, zero, producer, -amount)
    return _concatenate(with_producer, with_reader)


def _with_counts(uses: Uses) -> Uses:
    """Return uses with the amounts (number of messages, bytes)."""
    return uses._replace(amount=np.stack([np.ones_like(uses.amount), uses.amount], axis=1))


def _concatenate(*additions: _Additions) -> _Additions:
    return _Additions(*map(np.concatenate, zip(*additions, strict=True)))


# -- cost, memory and sends of runs in stages --------------------------------------------------------------------------------------


_ROUNDING = 1e-9
"""Relative margin by which a bound is widened, so that no run is lost to the rounding of sums."""


class RunCosts:
    """Costs and memory of runs as the stages of a problem.

    Args:
        stage_limit: (S,) bytes that each stage may hold; None: each the whole limit of its rank.

    Attributes:
        least_bottleneck: lower bound of the seconds of the slowest stage, whatever the cuts are.
        most: seconds of a run of all units, without messages.
    """

    def __init__(self, problem: StageProblem, stage_limit: Floats | None = None) -> None:
        self.problem = problem
        self._kind = np.array(problem.kind)
        self._next = np.array([[*problem.latency, 0.0], [*problem.seconds_per_byte, 0.0]]).T
        self._previous = np.array([[0.0, *problem.latency], [0.0, *problem.seconds_per_byte]]).T
        self._in_flight, self._later = np.array(problem.in_flight, dtype=float), np.array(problem.later, dtype=float)
        self._awaiting = np.array(problem.awaiting, dtype=float)
        self.stage_limit = np.array([problem.limit[rank] for rank in problem.rank]) if stage_limit is None else stage_limit
        self._longest_permitted = _longest_permitted(problem)
        fastest = problem.units.time.min(axis=1)
        self._n_replicas = problem.n_replicas
        self._elapsed = np.concatenate([[0.0], np.cumsum(fastest)])  # (N + 1,) seconds of the units before each, at the least
        of_average_rank = float(self._elapsed[-1]) / int(self._n_replicas.sum())
        of_longest_unit = float(fastest.max()) / int(self._n_replicas.max())
        self.least_bottleneck = max(of_average_rank, of_longest_unit)
        self.most = float(problem.units.time.max(axis=1).sum())

    def blocks(self, longest: Integers) -> Iterator[Runs]:
        """Yield all runs up to these lengths, the last block first (``RunTable.blocks``)."""
        return run_table(self.problem.units).blocks(longest)

    def longest(self, bound: float) -> Integers:
        """Return (N,) the units of the longest permitted run from each unit that computes for at most ``bound`` seconds."""
        n, bound = self.problem.n_units, bound * int(self._n_replicas.max())
        ends = np.searchsorted(self._elapsed, self._elapsed[:-1] + bound * (1 + _ROUNDING), side="right") - 1
        lengths: Integers = np.maximum(np.minimum(ends - np.arange(n), self._longest_permitted.max(axis=1)), 0)
        return lengths

    def longest_within(self, excess: float) -> Integers:
        """Return (N,) the units of the longest permitted run from each unit that could exceed a stage's memory by ``excess`` bytes at most.

        A run holds at least the items whose first user is in it.
        """
        units, n = self.problem.units, self.problem.n_units
        fixed, kept, gradients = (_at_first_users(uses, n) for uses in (units.fixed_uses, units.kept_uses, units.gradient_uses))
        least = fixed + self._in_flight.min() * kept, fixed + self._later.min() * kept + gradients
        most, longest = (self.stage_limit.max() + excess) * (1 + _ROUNDING), self._longest_permitted.max(axis=1)
        for sizes in least:
            sums = np.concatenate([[0.0], np.cumsum(sizes)])
            ends = np.searchsorted(sums, sums[:-1] + most, side="right") - 1
            longest = np.minimum(longest, ends - np.arange(n))
        at_least_none: Integers = np.maximum(longest, 0)
        return at_least_none

    def stages(self, runs: Runs, bound: float) -> slice:
        """Return the stages that can start in a block if none computes for longer than ``bound`` seconds."""
        starts = runs.starts
        return slice(self._stages(starts.start, bound).start, self._stages(starts.stop - 1, bound).stop)

    def _stages(self, start: int, bound: float) -> slice:
        """Return the stages that may start at a unit: enough units are left, and no stage would have to take longer than ``bound``."""
        n, n_stages = self.problem.n_units, self.problem.n_stages
        low, high = max(0, n_stages - (n - start)), min(n_stages - 1, start)
        bound *= int(self._n_replicas.max())
        if np.isfinite(bound) and bound > 0:
            before, after = self._elapsed[start], self._elapsed[-1] - self._elapsed[start]
            low = max(low, int(np.ceil(before / bound - n_stages * _ROUNDING)))
            high = min(high, int(np.floor(n_stages - after / bound + n_stages * _ROUNDING)))
        return slice(low, high + 1)

    def affordable(self, runs: Runs, excess: float = 0.0) -> Runs:
        """Drop lengths that cannot fit: of which every run exceeds each stage's memory by more than ``excess`` bytes."""
        is_alike = len(runs.fixed) == len(runs.kept) == len(runs.gradients) == 1
        groups = [(0, slice(None))] if is_alike else [(kind, np.flatnonzero(self._kind == kind)) for kind in set(self.problem.kind)]
        return runs.up_to(max(self._longest_fitting(runs, kind, stages, excess) for kind, stages in groups))

    def _longest_fitting(self, runs: Runs, kind: int, stages: slice | Integers, excess: float) -> int:
        """Return the units of the longest run that could fit any of the stages, all of one kind: a bound that takes the best of each."""
        fixed, kept, gradients = (table[min(kind, len(table) - 1)] for table in (runs.fixed, runs.kept, runs.gradients))
        least = np.maximum(self._in_flight[stages].min() * kept, self._later[stages].min() * kept + gradients)
        fits = fixed + least <= self.stage_limit[stages].max() + excess
        return int(fits.sum(axis=1).max(initial=0))

    def cost(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) seconds of computing and sending; replicas of a stage share them."""
        seconds: Floats = runs.time[self._kind[stages]] + self.send_seconds(runs, stages) + self.send_back_seconds(runs, stages)
        return seconds / self._n_replicas[stages, None, None] if self.problem.replicas else seconds

    def send_seconds(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) seconds of the messages to the next stage."""
        return _message_seconds(self._next[stages], runs.leaving)

    def send_back_seconds(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) seconds of the gradients sent to the previous stage."""
        return _message_seconds(self._previous[stages], runs.entering)

    def memory(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) the peak bytes of each run as a stage."""
        return self.fixed(runs, stages) + self.dynamic_memory(runs, stages).peak

    def fixed(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) the permanent bytes; (1, C, width) if all kinds are equal."""
        return self._of_stages(runs.fixed, stages)

    def _of_stages(self, table: Floats, stages: slice) -> Floats:
        """Return (stages, ...) the row of each stage's kind, given one for each kind; a table of one row unchanged."""
        return table[self._kind[stages]] if len(table) > 1 else table

    def dynamic_memory(self, runs: Runs, stages: slice) -> DynamicMemory:
        """Return the memory beside ``fixed``, as arrays that broadcast to (stages, C, width)."""
        in_flight, later = self._in_flight[stages, None, None], self._later[stages, None, None]
        message_bytes = np.repeat([runs.entering[1], runs.leaving[1]], 2, axis=0)  # in the order of ``Awaiting``
        arriving = list(zip(self._awaiting[:, stages, None, None], message_bytes, strict=True))
        kept, gradients, working = (self._of_stages(table, stages) for table in (runs.kept, runs.gradients, runs.working))
        return DynamicMemory(in_flight, later, kept, gradients, working, arriving[::2], arriving[1::2], self.problem.units.summed)

    def fits(self, runs: Runs, stages: slice) -> NDArray[np.bool_]:
        """Return (stages, C, width) whether the run is permitted and the stage, alone on its rank, has the memory."""
        return (self.memory(runs, stages) <= self.stage_limit[stages, None, None]) & self.permitted(runs, stages)

    def permitted(self, runs: Runs, stages: slice) -> NDArray[np.bool_]:
        """Return (stages, C, width) whether constraints allow the run in the stage."""
        permitted: NDArray[np.bool_] = np.arange(runs.width) < self._longest_permitted[runs.starts, stages].T[:, :, None]
        return permitted

    def price(self, runs: Runs) -> Integers:
        """Return (C, width) the price that breaks ties: bytes sent, and as lower digits the modules that the cut after the run divides."""
        depth = np.append(self.problem.units.depth, 0)[runs.behind]
        sent = np.rint(runs.leaving[1] + runs.entering[1]).astype(np.int64)
        price: Integers = sent * (int(self.problem.units.depth.max(initial=0)) * self.problem.n_stages + 1) + depth
        return price


def _at_first_users(uses: Uses, n_units: int) -> Floats:
    """Return (N,) the amounts of the items of which each unit is the first user, in the kind of stage where they are least."""
    is_first = uses.before < 0
    amounts = uses.amount if uses.amount.ndim == 1 else uses.amount.min(axis=1)
    sums: Floats = np.bincount(uses.unit[is_first], amounts[is_first], n_units).astype(float)
    return sums


def _message_seconds(links: Floats, messages: Floats) -> Floats:
    """Return (stages, C, width) seconds of (2, C, width) messages and bytes over (stages, 2) links: latency and seconds per byte."""
    latency, seconds_per_byte = links[:, :1, None], links[:, 1:, None]
    seconds: Floats = latency * messages[0] + seconds_per_byte * messages[1]
    return seconds


def _longest_permitted(problem: StageProblem) -> Integers:
    """Return (N, S) the units of the longest run from each unit in each stage: up to a forced cut, or a unit not allowed there."""
    n, n_stages = problem.n_units, problem.n_stages
    if problem.allowed is None and not problem.forced:
        return np.repeat(np.arange(n, 0, -1)[:, None], n_stages, axis=1)
    allowed = np.ones((n, n_stages), dtype=bool) if problem.allowed is None else problem.allowed
    longest = np.zeros((n + 1, n_stages), dtype=np.int64)
    for unit in range(n - 1, -1, -1):
        after = 0 if unit + 1 in problem.forced else longest[unit + 1]
        longest[unit] = np.where(allowed[unit], 1 + after, 0)
    return longest[:n]
