"""Choose one option for each of V variables so that a sum of small tables is least, under a limit on another such sum; exactly.

    minimise    sum over t of  seconds_t(x[scope_t])
    subject to  sum over t of  bytes_t(x[scope_t])  <=  limit             x_v in {0 .. n_v - 1}

Method: variables are eliminated one by one, those that fewest others meet first. The tables that hold variable v are added up to its
bucket ``B_v``; what is left of it, ``m_v = min over x_v of B_v``, is a table of the others (Dechter, "Bucket elimination", 1999). Any sum
of tables is then

    sum(x) = least + sum over v of (B_v(x) - m_v(x))         with no summand negative,

so options decided in the opposite order have, as their partial sums, the least value of all that begins alike. A search in that order
(best option first) leaves out what cannot beat the best by its seconds, cannot fit by its bytes, or by both at once: by
``seconds + price * bytes - price * limit``, at the price of a byte for which this bound is highest (Lagrange). Without a limit the first
descent is the optimum. Buckets that would be too large are divided (Dechter and Rish, "Mini-buckets", 2003): the bounds stay bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.planner.solvers.stage_problem import Floats

__all__ = ["ChoiceProblem", "Choices", "Term", "choose"]

Options = tuple[int, ...]

_LARGEST = 2**18
"""Numbers in a table beyond which a bucket is divided."""

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
        places = [(term, tuple(options[variable] for variable in term.scope)) for term in self.terms]
        return sum(float(term.seconds[place]) for term, place in places), sum(float(term.bytes[place]) for term, place in places)


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
    seconds, held = problem.totals(search.best)
    return Choices(search.best, seconds, held, seconds if search.finished else min(seconds, search.bound()))


def _order(problem: ChoiceProblem) -> tuple[int, ...]:
    """Return the variables in the order of elimination: greedily the one with the smallest bucket."""
    meets: dict[int, set[int]] = {variable: set() for variable in range(len(problem.n_options))}
    for term in problem.terms:
        for variable in term.scope:
            meets[variable] |= set(term.scope) - {variable}
    order = []
    while meets:
        chosen = min(meets, key=lambda variable: (math.prod(problem.n_options[other] for other in meets[variable]), variable))
        others = meets.pop(chosen)
        for other in others:
            meets[other] |= others
            meets[other] -= {other, chosen}
        order.append(chosen)
    return tuple(order)


Table = tuple[tuple[int, ...], Floats]
"""(scope: variables in ascending order, array with a dimension for each of them)."""


class _Buckets:
    """One sum of tables with its variables eliminated.

    Attributes:
        least: lower bound of the sum over all choices.
    """

    def __init__(self, tables: Sequence[Table], order: Sequence[int], n_options: Sequence[int]) -> None:
        self._excess: dict[int, list[Table]] = {}
        waiting = list(tables)
        for variable in order:
            mine = [table for table in waiting if variable in table[0]]
            waiting = [table for table in waiting if variable not in table[0]]
            self._excess[variable] = []
            for part in _divided(mine, n_options):
                scope, total = _added(part, n_options)
                place = scope.index(variable)
                least = total.min(axis=place, keepdims=True)
                with np.errstate(invalid="ignore"):
                    self._excess[variable].append((scope, np.where(np.isinf(total), np.inf, total - least)))
                waiting.append(((*scope[:place], *scope[place + 1 :]), least.squeeze(axis=place)))
        self.least = float(sum(float(table) for _, table in waiting))

    def excess(self, variable: int, options: Sequence[int]) -> Floats:
        """Return (n,) the excess of each option over the least sum, given the options of the variables eliminated after it."""
        rows = [
            table[tuple(slice(None) if each == variable else options[each] for each in scope)] for scope, table in self._excess[variable]
        ]
        total: Floats = sum(rows[1:], rows[0]) if rows else np.zeros(1)
        return total


def _divided(tables: Sequence[Table], n_options: Sequence[int]) -> list[list[Table]]:
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


def _added(tables: Sequence[Table], n_options: Sequence[int]) -> Table:
    """Return the sum of tables, broadcast over the union of their scopes."""
    scope = tuple(sorted({variable for each, _ in tables for variable in each}))
    total = np.zeros([n_options[variable] for variable in scope])
    for each, table in tables:
        total = total + table.reshape([n_options[variable] if variable in each else 1 for variable in scope])
    return scope, total


class _Search:
    """Depth-first branch and bound that decides variables in reverse order of elimination."""

    def __init__(self, problem: ChoiceProblem, order: Sequence[int], known: Sequence[Options], most_steps: int) -> None:
        self._problem, self._order, self._left = problem, order, most_steps
        self._seconds = self._buckets(1.0, 0.0)
        self._bytes: _Buckets | None = None
        self._priced: _Buckets | None = None
        self._price = 0.0
        self.finished = True
        self.best: Options | None = None
        self._least = math.inf
        for options in known:
            self._keep(options)

    def _buckets(self, seconds: float, held: float) -> _Buckets:
        tables = [(term.scope, seconds * term.seconds + (held * term.bytes if held else 0.0)) for term in self._problem.terms]
        missing = [((variable,), np.zeros(count)) for variable, count in enumerate(self._problem.n_options)]
        return _Buckets([*tables, *missing], self._order, self._problem.n_options)

    def _keep(self, options: Options) -> None:
        seconds, held = self._problem.totals(options)
        if held <= self._problem.limit and seconds < self._least * (1 - _ROUNDING):
            self.best, self._least = options, seconds

    def _descend(self, buckets: _Buckets) -> Options:
        """Return the options of a greedy descent: of each variable the one with the least excess."""
        options = [0] * len(self._problem.n_options)
        for variable in reversed(self._order):
            options[variable] = int(np.argmin(buckets.excess(variable, options)))
        return tuple(options)

    def price_bytes(self) -> None:
        """Find the price of a byte at which the bound is highest: between a choice that fits and one that does not."""
        self._bytes = self._buckets(0.0, 1.0)
        fast, small = self._descend(self._seconds), self._descend(self._bytes)
        self._keep(fast)
        self._keep(small)
        self._priced = self._seconds
        (quick, much), (slow, little) = self._problem.totals(fast), self._problem.totals(small)
        for _ in range(_MOST_PRICES):
            if much <= self._problem.limit or little > self._problem.limit or slow <= quick:
                return
            price = (slow - quick) / (much - little)
            buckets = self._buckets(1.0, price)
            options = self._descend(buckets)
            self._keep(options)
            if buckets.least - price * self._problem.limit > self.bound():
                self._priced, self._price = buckets, price
            seconds, held = self._problem.totals(options)
            if seconds + price * held >= (quick + price * much) * (1 - _ROUNDING):
                return
            if held <= self._problem.limit:
                slow, little = seconds, held
            else:
                quick, much = seconds, held

    def bound(self) -> float:
        """Return a lower bound of the seconds of all choices within the limit."""
        return max(self._seconds.least, 0.0 if self._priced is None else self._priced.least - self._price * self._problem.limit)

    def run(self) -> None:
        """Search until no choice left can be better, or ``most_steps`` options were tried."""
        options = [0] * len(self._problem.n_options)
        decided = tuple(reversed(self._order))
        sums = (self._seconds, self._bytes, self._priced)
        waiting = [self._tried(decided[0], options, [0.0 if each is None else each.least for each in sums])] if decided else []
        if not decided:
            self._keep(())
        while waiting:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
            elif self._left <= 0:
                self.finished = False
                return
            else:
                option, totals = following
                self._left -= 1
                if self._may_be_better(*totals):
                    options[decided[len(waiting) - 1]] = option
                    if len(waiting) == len(decided):
                        self._keep(tuple(options))
                    else:
                        waiting.append(self._tried(decided[len(waiting)], options, totals))

    def _tried(self, variable: int, options: Sequence[int], totals: Sequence[float]) -> Iterator[tuple[int, list[float]]]:
        """Yield the options of a variable, most promising first, with lower bounds of the sums of seconds, bytes, and priced seconds."""
        sums = (self._seconds, self._bytes, self._priced)
        n = self._problem.n_options[variable]
        each = [
            np.zeros(n) if of is None else np.broadcast_to(so_far + of.excess(variable, options), n)
            for of, so_far in zip(sums, totals, strict=True)
        ]
        for option in np.lexsort((each[0], each[2])).tolist():
            yield option, [float(values[option]) for values in each]

    def _may_be_better(self, seconds: float, held: float, priced: float) -> bool:
        bound = self._least * (1 - _ROUNDING)
        limit = self._problem.limit
        fits = self._bytes is None or held <= limit * (1 + _ROUNDING)
        return seconds < bound and fits and (self._priced is None or priced - self._price * limit < bound)


_MOST_PRICES = 40
"""Limit of the prices of a byte that are tried."""
