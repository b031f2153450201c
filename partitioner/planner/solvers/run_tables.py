"""Sums over runs of units, for all runs that start in a block of units at a time.

Some quantities of a run are plain sums over its units (time). Others are *shared*: a parameter that two units of the run use is held
once, a value that two units of the run read is received once. With the users of item x in order ``u1 < u2 < ...`` and the use before
each, ``w`` (-1 before the first), item x counts in run i..j exactly once: at the use with ``w < i <= u <= j``. So every quantity is a sum
of what units add to the runs that reach them from some starts:

    a unit that takes t seconds        t at u           from 0 <= i <= u
    an item, at each of its uses       its amount at u  from w < i <= u
    a value, made at p, last read at q its size at p, and less by it at q, where it has not left     from 0 <= i <= p
    what makes it whole to be sent     its seconds, likewise
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.planner.solvers.stage_memory import Held
from partitioner.planner.solvers.stage_problem import Floats, Integers, StageProblem, Units, Uses

__all__ = ["RunCosts", "RunTable", "Runs", "run_table"]


_BLOCK = 128
"""Starts that are looked at together."""

_MOST_KEPT_RUNS = 1_000_000
"""Runs that a table keeps, about nine numbers each; of more, blocks are worked out again each time."""


@dataclass(frozen=True)
class Runs:
    """Every run that starts in a block of C units: entry [c, k] is about the run ``start + c .. start + c + k``; of none beyond the end.

    Attributes:
        start: the first unit of the block.
        time: (K, C, width) seconds of a stage of each kind.
        leaving: (2, C, width) messages and bytes that leave forward.
        entering: (2, C, width) messages and bytes of the gradients of what enters.
        fixed: (K, C, width) bytes; (1, C, width) where all kinds are alike, here and below.
        kept: (K, C, width) bytes for each microbatch in flight.
        gradients: (K, C, width) bytes from the first backward on.
        working: (K, C, width) bytes while the run computes.
        parted: (K, C, width) seconds of ``time`` until the gradients of what is read in parts are whole.
        behind: (C, width) the unit behind each run; the number of units where a run would go beyond the last.
    """

    start: int
    time: Floats
    leaving: Floats
    entering: Floats
    fixed: Floats
    kept: Floats
    gradients: Floats
    working: Floats
    parted: Floats
    behind: Integers

    @property
    def width(self) -> int:
        return int(self.behind.shape[1])

    @property
    def units(self) -> range:
        """The units of the block."""
        return range(self.start, self.start + self.behind.shape[0])

    @property
    def starts(self) -> slice:
        """The same as an index."""
        return slice(self.units.start, self.units.stop)

    def first(self, width: int) -> Runs:
        """The same of the shortest so many runs from each unit."""
        return self._part(slice(None), slice(width))

    def of(self, unit: int) -> Runs:
        """The runs that start at one unit of the block: a block of its own."""
        return self._part(slice(unit - self.start, unit - self.start + 1), slice(None))

    def _part(self, starts: slice, lengths: slice) -> Runs:
        time, leaving, entering = (each[:, starts, lengths] for each in (self.time, self.leaving, self.entering))
        fixed, kept, gradients, working = (each[:, starts, lengths] for each in (self.fixed, self.kept, self.gradients, self.working))
        start, behind = self.start + (starts.start or 0), self.behind[starts, lengths]
        return Runs(start, time, leaving, entering, fixed, kept, gradients, working, self.parted[:, starts, lengths], behind)


class RunTable:
    """The runs of some units, worked out once for all problems about them."""

    def __init__(self, units: Units) -> None:
        self._n_units = len(units)
        of_borders = _together(_of_values(units.gathered_uses), _of_uses(units.parted_uses))
        self._of_time = _together(_at_each(units.time), _of_uses(units.replicated_uses), of_borders)
        self._of_leaving = _of_values(_counted(units.leaving))
        self._of_entering = _of_uses(_counted(units.entering))
        self._of_memory = [_of_uses(each) for each in (units.fixed_uses, units.kept_uses, units.gradient_uses)]
        self._workings, self._has_borders = units.workings, bool(units.gathered or units.parted)
        self._of_parted = _of_uses(units.parted_uses)
        self._of_border_memory = _together(_of_values(units.gathered_sizes), _of_uses(units.parted_sizes))
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
                if wider * self._n_units > _MOST_KEPT_RUNS:
                    yield self._table_of(start, stop, width)
                    continue
                self._known[start] = self._table_of(start, stop, wider)
            yield self._known[start].first(width)

    def _table_of(self, start: int, stop: int, width: int) -> Runs:
        """The runs that start with one of the units ``start .. stop - 1``, of every length up to a width."""
        time, leaving, entering = (each.sums(start, stop, width) for each in (self._of_time, self._of_leaving, self._of_entering))
        fixed, kept, gradients = (each.sums(start, stop, width) for each in self._of_memory)
        peaks = [working.of_block(start, stop, width) for working in self._workings]
        working = np.stack(peaks) if len(peaks) > 1 else peaks[0][None]
        parted = np.zeros((1, *working.shape[1:]))
        if self._has_borders:
            working = working + self._of_border_memory.sums(start, stop, width)
            parted = self._of_parted.sums(start, stop, width)
        behind = np.minimum(np.arange(start + 1, stop + 1)[:, None] + np.arange(width), self._n_units)
        return Runs(start, time, leaving, entering, fixed, kept, gradients, working, parted, behind)


run_table = lru_cache(maxsize=32)(RunTable)
"""The table of units; the last 32 are cached."""


class _Additions(NamedTuple):
    """What units add to the runs that reach them from ``first <= i <= last``.

    Attributes:
        unit, first, last: (E,).
        amount: (E, A).
    """

    unit: Integers
    first: Integers
    last: Integers
    amount: Floats

    def sums(self, start: int, stop: int, width: int) -> Floats:
        """Return (A, stop - start, width) sums of all runs that start in a block.

        An addition counts for first units from ``first`` to ``last``, so it is two entries of a difference array over first units. The
        cumulative sum of that gives the additions of each unit, and their cumulative sum along a run its sum.
        """
        n_starts, n_units = stop - start, stop - start + width - 1
        first = np.maximum(np.maximum(self.first, self.unit - width + 1), start) - start
        last = np.minimum(self.last, stop - 1) - start
        counts = (self.unit >= start) & (self.unit < start + n_units) & (first <= last)
        places = (self.unit[counts] - start) * (n_starts + 1)
        place = np.concatenate([places + first[counts], places + last[counts] + 1])
        differences = np.empty((self.amount.shape[1], n_units, n_starts + 1))
        for number, amounts in enumerate(self.amount[counts].T):
            signed = np.concatenate([amounts, -amounts])
            differences[number] = np.bincount(place, signed, n_units * (n_starts + 1)).reshape(n_units, n_starts + 1)
        added = np.cumsum(differences, axis=2)
        run = np.arange(n_starts)[:, None]
        found: Floats = np.cumsum(added[:, run + np.arange(width), run], axis=2)
        return found


def _at_each(amount: Floats) -> _Additions:
    unit = np.arange(len(amount))
    return _Additions(unit, np.zeros_like(unit), unit, amount)


def _of_uses(uses: Uses) -> _Additions:
    amount = uses.amount if uses.amount.ndim == 2 else uses.amount[:, None]
    return _Additions(uses.unit, uses.before + 1, uses.unit, amount)


def _of_values(leaving: Uses) -> _Additions:
    producer, reader, amount = leaving
    nothing = np.zeros_like(producer)
    here, there = _Additions(producer, nothing, producer, amount), _Additions(reader, nothing, producer, -amount)
    return _together(here, there)


def _counted(uses: Uses) -> Uses:
    """Return uses with the amounts (number of messages, bytes)."""
    return uses._replace(amount=np.stack([np.ones_like(uses.amount), uses.amount], axis=1))


def _together(*additions: _Additions) -> _Additions:
    return _Additions(*map(np.concatenate, zip(*additions, strict=True)))


# -- cost, memory and sends of runs in stages --------------------------------------------------------------------------------------


_ROUNDING = 1e-9
"""Relative margin by which a bound is widened, so that no run is lost to the rounding of sums."""


class RunCosts:
    """What a problem says about runs.

    Args:
        stage_limit: (S,) bytes that each stage may hold; None: each the whole limit of its rank.

    Attributes:
        least_bottleneck: seconds that no run of the best cuts can be below, all of them together.
        most: seconds of a run of all units, messages aside.
    """

    def __init__(self, problem: StageProblem, stage_limit: Floats | None = None) -> None:
        self.problem = problem
        self._kind = np.array(problem.kind)
        self._next = np.array([[*problem.latency, 0.0], [*problem.seconds_per_byte, 0.0]]).T
        self._previous = np.array([[0.0, *problem.latency], [0.0, *problem.seconds_per_byte]]).T
        self._in_flight, self._later = (np.array(held, dtype=float) for held in (problem.in_flight, problem.later))
        self._awaiting = np.array(problem.awaiting, dtype=float)
        self.stage_limit = np.array([problem.limit[rank] for rank in problem.rank]) if stage_limit is None else stage_limit
        self._reach = _reach(problem)
        fastest = problem.units.time.min(axis=1)
        self._n_replicas = problem.n_replicas
        self._elapsed = np.concatenate([[0.0], np.cumsum(fastest)])
        self.least_bottleneck = max(
            float(self._elapsed[-1]) / int(self._n_replicas.sum()), float(fastest.max()) / int(self._n_replicas.max())
        )
        self.most = float(problem.units.time.max(axis=1).sum())

    def blocks(self, longest: Integers) -> Iterator[Runs]:
        """All runs, the last block first; see ``RunTable``."""
        return run_table(self.problem.units).blocks(longest)

    def longest(self, bound: float) -> Integers:
        """For each unit, how many units a run from there can have if it computes for no longer than the bound."""
        n, bound = self.problem.n_units, bound * int(self._n_replicas.max())
        ends = np.searchsorted(self._elapsed, self._elapsed[:-1] + bound * (1 + _ROUNDING), side="right") - 1
        lengths: Integers = np.maximum(np.minimum(ends - np.arange(n), self._reach.max(axis=1)), 0)
        return lengths

    def stages(self, runs: Runs, bound: float) -> slice:
        """The stages that can start in a block if none computes for longer than the bound."""
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
        """The lengths of which some run fits the roomiest stage of its kind, or exceeds it by no more than so many bytes."""
        alike = len(runs.fixed) == len(runs.kept) == len(runs.gradients) == 1
        groups = [(0, slice(None))] if alike else [(kind, np.flatnonzero(self._kind == kind)) for kind in set(self.problem.kind)]
        return runs.first(max(self._longest_fitting(runs, kind, stages, excess) for kind, stages in groups))

    def _longest_fitting(self, runs: Runs, kind: int, stages: slice | Integers, excess: float) -> int:
        """Units of the longest run that fits the roomiest of some stages, all of one kind."""
        fixed, kept, gradients = (each[min(kind, len(each) - 1)] for each in (runs.fixed, runs.kept, runs.gradients))
        least = np.maximum(self._in_flight[stages].min() * kept, self._later[stages].min() * kept + gradients)
        fits = fixed + least <= self.stage_limit[stages].max() + excess
        return int(fits.sum(axis=1).max(initial=0))

    def cost(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) seconds of a run with what it sends, of which each replica has a part."""
        seconds: Floats = runs.time[self._kind[stages]] + self.sending(runs, stages) + self.sending_back(runs, stages)
        return seconds / self._n_replicas[stages, None, None] if self.problem.replicas else seconds

    def sending(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) seconds that what leaves a run is on its way to the next stage."""
        return _seconds(self._next[stages], runs.leaving)

    def sending_back(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) the same of the gradients of what enters it."""
        return _seconds(self._previous[stages], runs.entering)

    def memory(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) bytes that the stage holds."""
        return self.fixed(runs, stages) + self.held(runs, stages).most

    def fixed(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) what it holds all the time; (1, C, width) where all kinds are alike."""
        return self._of_kinds(runs.fixed, stages)

    def _of_kinds(self, each: Floats, stages: slice) -> Floats:
        """Of the kind of each stage; as it is where all kinds are alike."""
        return each[self._kind[stages]] if len(each) > 1 else each

    def held(self, runs: Runs, stages: slice) -> Held:
        """(stages, C, width) what it holds beside what it holds all the time."""
        in_flight, later = (held[stages, None, None] for held in (self._in_flight, self._later))
        comes = list(zip(self._awaiting[:, stages, None, None], np.repeat([runs.entering[1], runs.leaving[1]], 2, axis=0), strict=True))
        kept, gradients, working = (self._of_kinds(each, stages) for each in (runs.kept, runs.gradients, runs.working))
        return Held(in_flight, later, kept, gradients, working, comes[::2], comes[1::2], self.problem.units.summed)

    def fits(self, runs: Runs, stages: slice) -> NDArray[np.bool_]:
        """(stages, C, width) whether the stage alone has the memory, and may hold the units."""
        return (self.memory(runs, stages) <= self.stage_limit[stages, None, None]) & self.permitted(runs, stages)

    def permitted(self, runs: Runs, stages: slice) -> NDArray[np.bool_]:
        """(stages, C, width) whether the stage may hold the units."""
        allowed: NDArray[np.bool_] = np.arange(runs.width) < self._reach[runs.starts, stages].T[:, :, None]
        return allowed

    def price(self, runs: Runs) -> Integers:
        """(C, width) bytes sent, and below them the modules cut: what ties are broken by."""
        depth = np.append(self.problem.units.depth, 0)[runs.behind]
        sent = np.rint(runs.leaving[1] + runs.entering[1]).astype(np.int64)
        price: Integers = sent * (int(self.problem.units.depth.max(initial=0)) * self.problem.n_stages + 1) + depth
        return price


def _seconds(links: Floats, messages: Floats) -> Floats:
    """(stages, C, width) seconds of messages, counted and in bytes, over the link of each stage."""
    latency, slope = links[:, :1, None], links[:, 1:, None]
    seconds: Floats = latency * messages[0] + slope * messages[1]
    return seconds


def _reach(problem: StageProblem) -> Integers:
    """(N, S) how many units a run from each unit may have in each stage: up to a forced cut, or a unit not allowed there."""
    n, n_stages = problem.n_units, problem.n_stages
    if problem.allowed is None and not problem.forced:
        return np.repeat(np.arange(n, 0, -1)[:, None], n_stages, axis=1)
    allowed = np.ones((n, n_stages), dtype=bool) if problem.allowed is None else problem.allowed
    reach = np.zeros((n + 1, n_stages), dtype=np.int64)
    for unit in range(n - 1, -1, -1):
        after = 0 if unit + 1 in problem.forced else reach[unit + 1]
        reach[unit] = np.where(allowed[unit], 1 + after, 0)
    return reach[:n]
