"""Choose one option for each of V variables: minimise a sum of small tables under a limit on another such sum, exactly.

    minimise    sum over t of  seconds_t(x[scope_t])
    subject to  sum over t of  bytes_t(x[scope_t])  <=  limit             x_v in {0 .. n_v - 1}

Method: variables are eliminated one by one, those that share tables with the fewest others first. The tables with variable v are added up
to its bucket ``B_v``, and replaced by ``m_v = min over x_v of B_v``, a table of the others (Dechter, "Bucket elimination", 1999). Then

    sum(x) = least + sum over v of (B_v(x) - m_v(x))         with no summand negative,

so if options are decided in the opposite order, the partial sum is the least total of all choices with these options. A depth-first search
in that order, best option first, prunes by three such lower bounds: of the seconds, of the bytes, and of
``seconds + price * bytes - price * limit``, at the price of a byte for which that bound is highest (Lagrange). Without a limit the first
descent is the optimum. Buckets that would be too large are divided (Dechter and Rish, "Mini-buckets", 2003): the bounds stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.stage_memory import Floats

Options = tuple[int, ...]

_LARGEST = 2**18
"""Entries of a table beyond which a bucket is divided."""

_MOST_STEPS = 200_000
"""Options that are tried before the search ends without a proof."""

_ROUNDING = 1e-12
"""Relative differences that are rounding."""


@dataclass(frozen=True, eq=False)
class Term:
    """A cost table over some variables: an entry for each combination of their options.

    Attributes:
        scope: the variables, ascending.
        seconds: one dimension for each variable of the scope, as long as its number of options.
        bytes: of the same shape.
    """

    scope: tuple[int, ...]
    seconds: Floats
    bytes: Floats


@dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """V variables, and the tables whose sum is minimised.

    Attributes:
        n_options: (V,) options of each variable.
        limit: largest allowed sum of bytes.
    """

    n_options: tuple[int, ...]
    terms: tuple[Term, ...]
    limit: float = math.inf

    def totals(self, options: Sequence[int]) -> tuple[float, float]:
        """Return the seconds and bytes of a choice."""
        entries = [(term, tuple(options[variable] for variable in term.scope)) for term in self.terms]
        seconds = sum(float(term.seconds[entry]) for term, entry in entries)
        return seconds, sum(float(term.bytes[entry]) for term, entry in entries)


@dataclass(frozen=True)
class Choices:
    """A solution.

    Attributes:
        options: one for each variable.
        bound: seconds that no choice within the limit can beat.
    """

    options: Options
    seconds: float
    bytes: float
    bound: float

    @property
    def gap(self) -> float:
        """The fraction by which the optimum could be less; 0: proved optimal."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds > 0 else 0.0


def choose(problem: ChoiceProblem, known: Sequence[Options] = (), most_steps: int = _MOST_STEPS) -> Choices | None:
    """Return the choice of least seconds within the limit; None if nothing fits, or the search ended early without a solution.

    Args:
        known: choices to start from; those that do not fit are ignored.
        most_steps: largest number of options to try.
    """
    order = _order(problem)
    search = _Search(problem, order, known, most_steps)
    if math.isfinite(problem.limit):
        search.price_bytes()
    search.run()
    if search.best is None:
        return None
    seconds, size = problem.totals(search.best)
    return Choices(search.best, seconds, size, seconds if search.finished else min(seconds, search.bound()))


def _order(problem: ChoiceProblem) -> tuple[int, ...]:
    """Return the variables in the order of elimination: greedily the one with the smallest bucket."""
    neighbours: dict[int, set[int]] = {variable: set() for variable in range(len(problem.n_options))}
    for term in problem.terms:
        for variable in term.scope:
            neighbours[variable] |= set(term.scope) - {variable}

    def bucket_size(variable: int) -> int:
        return math.prod(problem.n_options[other] for other in neighbours[variable])

    order = []
    while neighbours:
        eliminated = min(neighbours, key=lambda variable: (bucket_size(variable), variable))
        others = neighbours.pop(eliminated)
        for other in others:
            neighbours[other] |= others
            neighbours[other] -= {other, eliminated}
        order.append(eliminated)
    return tuple(order)


Table = tuple[tuple[int, ...], Floats]
"""(scope: variables in ascending order, array with a dimension for each of them)."""


class _Buckets:
    """One sum of tables with its variables eliminated.

    Attributes:
        least: lower bound of the sum over all choices.
    """

    def __init__(self, tables: Sequence[Table], order: Sequence[int], n_options: Sequence[int]) -> None:
        self._excess: dict[int, list[Table]] = {}  # variable -> ``B_v - m_v`` of the parts of its bucket
        remaining = list(tables)
        for variable in order:
            bucket = [table for table in remaining if variable in table[0]]
            remaining = [table for table in remaining if variable not in table[0]]
            self._excess[variable] = []
            for part in _divide(bucket, n_options):
                scope, total = _add(part, n_options)
                axis = scope.index(variable)
                least = total.min(axis=axis, keepdims=True)
                with np.errstate(invalid="ignore"):
                    self._excess[variable].append((scope, np.where(np.isinf(total), np.inf, total - least)))
                remaining.append(((*scope[:axis], *scope[axis + 1 :]), least.squeeze(axis=axis)))
        self.least = float(sum(float(table) for _, table in remaining))

    def excess(self, variable: int, options: Sequence[int]) -> Floats:
        """Return (n,) by how much each option raises the least sum, given the options of the variables eliminated after it."""

        def entry(scope: tuple[int, ...]) -> tuple[slice | int, ...]:
            return tuple(slice(None) if each == variable else options[each] for each in scope)

        rows = [table[entry(scope)] for scope, table in self._excess[variable]]
        total: Floats = sum(rows[1:], rows[0]) if rows else np.zeros(1)
        return total


def _divide(tables: Sequence[Table], n_options: Sequence[int]) -> list[list[Table]]:
    """Divide the tables of a bucket into parts, greedily, so that the sum of each part has at most ``_LARGEST`` entries."""
    parts: list[tuple[set[int], list[Table]]] = []
    for table in sorted(tables, key=lambda table: -len(table[0])):
        for scope, part in parts:
            if math.prod(n_options[variable] for variable in scope | set(table[0])) <= _LARGEST:
                scope |= set(table[0])
                part.append(table)
                break
        else:
            parts.append((set(table[0]), [table]))
    return [part for _, part in parts]


def _add(tables: Sequence[Table], n_options: Sequence[int]) -> Table:
    """Return the sum of tables, broadcast over the union of their scopes."""
    union = tuple(sorted({variable for scope, _ in tables for variable in scope}))
    total = np.zeros([n_options[variable] for variable in union])
    for scope, table in tables:
        total = total + table.reshape([n_options[variable] if variable in scope else 1 for variable in union])
    return union, total


class _Search:
    """Depth-first branch and bound that decides variables in reverse order of elimination."""

    def __init__(self, problem: ChoiceProblem, order: Sequence[int], known: Sequence[Options], most_steps: int) -> None:
        self._problem, self._order, self._steps_left = problem, order, most_steps
        self._seconds = self._buckets(1.0, 0.0)
        self._bytes: _Buckets | None = None
        self._priced: _Buckets | None = None  # seconds + price * bytes
        self._price = 0.0
        self.finished = True
        self.best: Options | None = None
        self._best_seconds = math.inf
        for options in known:
            self._record(options)

    def _buckets(self, seconds: float, size: float) -> _Buckets:
        """Eliminate the variables from the sum of ``seconds * term.seconds + size * term.bytes``, with a table for every variable."""
        tables = [(term.scope, seconds * term.seconds + (size * term.bytes if size else 0.0)) for term in self._problem.terms]
        zeros = [((variable,), np.zeros(count)) for variable, count in enumerate(self._problem.n_options)]
        return _Buckets([*tables, *zeros], self._order, self._problem.n_options)

    def _record(self, options: Options) -> None:
        """Make a choice the best one if it fits and takes less than the best so far."""
        seconds, size = self._problem.totals(options)
        if size <= self._problem.limit and seconds < self._best_seconds * (1 - _ROUNDING):
            self.best, self._best_seconds = options, seconds

    def _descend(self, buckets: _Buckets) -> Options:
        """Choose greedily: of each variable, in reverse order of elimination, the option with the least excess."""
        options = [0] * len(self._problem.n_options)
        for variable in reversed(self._order):
            options[variable] = int(np.argmin(buckets.excess(variable, options)))
        return tuple(options)

    def price_bytes(self) -> None:
        """Find the price of a byte at which the bound is highest.

        At the price for which a fast choice beyond the limit and a small one within it cost the same, the cheapest choice replaces one of
        them, until there is none cheaper.
        """
        limit = self._problem.limit
        self._bytes = self._buckets(0.0, 1.0)
        fast, small = self._descend(self._seconds), self._descend(self._bytes)
        self._record(fast)
        self._record(small)
        self._priced = self._seconds
        (fast_seconds, fast_bytes), (small_seconds, small_bytes) = self._problem.totals(fast), self._problem.totals(small)
        for _ in range(_MOST_PRICES):
            if fast_bytes <= limit or small_bytes > limit or small_seconds <= fast_seconds:
                return
            price = (small_seconds - fast_seconds) / (fast_bytes - small_bytes)
            buckets = self._buckets(1.0, price)
            options = self._descend(buckets)
            self._record(options)
            if buckets.least - price * limit > self.bound():
                self._priced, self._price = buckets, price
            seconds, size = self._problem.totals(options)
            if seconds + price * size >= (fast_seconds + price * fast_bytes) * (1 - _ROUNDING):
                return
            if size <= limit:
                small_seconds, small_bytes = seconds, size
            else:
                fast_seconds, fast_bytes = seconds, size

    def bound(self) -> float:
        """Return a lower bound of the seconds of all choices within the limit."""
        return max(self._seconds.least, 0.0 if self._priced is None else self._priced.least - self._price * self._problem.limit)

    def run(self) -> None:
        """Search until no choice left can be better, or ``most_steps`` options were tried."""
        options = [0] * len(self._problem.n_options)
        variables = tuple(reversed(self._order))
        if not variables:
            self._record(())
            return
        sums = (self._seconds, self._bytes, self._priced)
        # The remaining options of each variable decided so far.
        stack = [self._ranked_options(variables[0], options, [0.0 if buckets is None else buckets.least for buckets in sums])]
        while stack:
            following = next(stack[-1], None)
            if following is None:
                stack.pop()
                continue
            if self._steps_left <= 0:
                self.finished = False
                return
            option, bounds = following
            self._steps_left -= 1
            if not self._may_be_better(*bounds):
                continue
            options[variables[len(stack) - 1]] = option
            if len(stack) == len(variables):
                self._record(tuple(options))
            else:
                stack.append(self._ranked_options(variables[len(stack)], options, bounds))

    def _ranked_options(self, variable: int, options: Sequence[int], bounds: Sequence[float]) -> Iterator[tuple[int, list[float]]]:
        """Yield (option, bounds) of a variable, least priced seconds first; ``bounds``: of seconds, bytes and priced seconds so far."""
        n = self._problem.n_options[variable]
        by_option = []
        for buckets, bound in zip((self._seconds, self._bytes, self._priced), bounds, strict=True):
            by_option.append(np.zeros(n) if buckets is None else np.broadcast_to(bound + buckets.excess(variable, options), n))
        for option in np.lexsort((by_option[0], by_option[2])).tolist():
            yield option, [float(values[option]) for values in by_option]

    def _may_be_better(self, seconds: float, size: float, priced: float) -> bool:
        """Return whether a choice with these lower bounds could fit and beat the best."""
        limit, best = self._problem.limit, self._best_seconds * (1 - _ROUNDING)
        fits = self._bytes is None or size <= limit * (1 + _ROUNDING)
        return seconds < best and fits and (self._priced is None or priced - self._price * limit < best)


_MOST_PRICES = 40
"""Limit of the prices of a byte that are tried."""
