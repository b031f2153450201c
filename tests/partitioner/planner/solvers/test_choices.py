"""The chooser of options against brute force: every choice, every sum from the definition."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from partitioner.planner.solvers import variable_elimination as choices
from partitioner.planner.solvers.stage_memory import Floats
from partitioner.planner.solvers.variable_elimination import ChoiceProblem, Term, choose


def random_problem(seed: int) -> ChoiceProblem:
    """Up to ten operations in a row with skips over it, several options each; whole numbers, so that sums are exact and ties common."""
    draw = random.Random(seed)
    n_options = tuple(draw.choice((1, 2, 2, 3, 4)) for _ in range(draw.randint(1, 10)))
    while math.prod(n_options) > 20_000:
        n_options = n_options[:-1]
    count = len(n_options)
    scopes: list[tuple[int, ...]] = [(each,) for each in range(count)] + [(each, each + 1) for each in range(count - 1)]
    scopes += [tuple(sorted(draw.sample(range(count), draw.randint(1, min(4, count))))) for _ in range(draw.randint(0, 4))]
    terms = []
    for scope in scopes:
        shape = [n_options[variable] for variable in scope]
        size = math.prod(shape)
        seconds = np.array([float(draw.randint(0, 20)) for _ in range(size)]).reshape(shape)
        held = np.array([float(draw.randint(0, 20)) for _ in range(size)]).reshape(shape)
        terms.append(Term(scope, seconds, held))
    every = whole_table(ChoiceProblem(n_options, tuple(terms)))[1]
    least, most = float(every.min()), float(every.max())
    limit = draw.choice((math.inf, least, least - 1, *(least + share * (most - least) for share in (0.1, 0.3, 0.5))))
    return ChoiceProblem(n_options, tuple(terms), limit)


def whole_table(problem: ChoiceProblem) -> tuple[Floats, Floats]:
    """Return seconds and bytes of every choice, a dimension for each variable."""
    seconds, held = np.zeros(problem.n_options), np.zeros(problem.n_options)
    for term in problem.terms:
        shape = [count if variable in term.scope else 1 for variable, count in enumerate(problem.n_options)]
        seconds, held = seconds + term.seconds.reshape(shape), held + term.bytes.reshape(shape)
    return seconds, held


def optimum(problem: ChoiceProblem) -> float:
    seconds, held = whole_table(problem)
    return float(np.where(held <= problem.limit, seconds, math.inf).min())


@pytest.mark.parametrize("seed", range(200))
def test_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    found = choose(problem)
    if found is None:
        assert optimum(problem) == math.inf
        return
    assert problem.totals(found.options) == (found.seconds, found.bytes)
    assert found.seconds == optimum(problem)
    assert found.bytes <= problem.limit
    assert found.gap == 0.0


@pytest.mark.parametrize("seed", range(40))
def test_a_bound_is_never_above_the_optimum(seed: int) -> None:
    """The search ends early: its result is still a bound, and what it was given is not lost."""
    problem = random_problem(seed)
    least = optimum(problem)
    for most_steps in (0, 3, 12):
        found = choose(problem, most_steps=most_steps)
        if found is not None:
            assert found.bound <= least * (1 + 1e-9) <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_divided_tables_give_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(seed)
    monkeypatch.setattr(choices, "_LARGEST", 8)
    found = choose(problem)
    assert (math.inf if found is None else found.seconds) == optimum(problem)


def test_what_is_known_is_the_start() -> None:
    problem = random_problem(3)
    best = tuple(int(place) for place in np.unravel_index(np.argmin(whole_table(problem)[0]), problem.n_options))
    found = choose(ChoiceProblem(problem.n_options, problem.terms), known=(best,), most_steps=0)
    assert found is not None
    assert found.options == best


def test_many_variables_in_a_row_are_chosen_in_no_time() -> None:
    """Three hundred operations: steps grow with their number, not with the number of choices."""
    draw = np.random.default_rng(0)
    count, options = 300, 6
    terms = [Term((each,), draw.random(options), np.zeros(options)) for each in range(count)]
    terms += [Term((each, each + 1), draw.random((options, options)), np.zeros((options, options))) for each in range(count - 1)]
    found = choose(ChoiceProblem((options,) * count, tuple(terms)), most_steps=count * options)
    assert found is not None
    assert found.gap == 0.0
