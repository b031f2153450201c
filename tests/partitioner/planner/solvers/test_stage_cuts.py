"""The stage cutter against brute force: every way to cut, every cost summed from the definition."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from partitioner.planner.solvers import min_max_dp
from partitioner.planner.solvers.min_max_dp import shortfall, solve
from partitioner.planner.solvers.shared_rank_memory import counted_again
from partitioner.planner.solvers.stage_memory import GradientMessages, TransientMemory
from partitioner.planner.solvers.stage_problem import Gathered, Shared, StageProblem, Units, Value, stages_of
from partitioner.schedules.clocks.order import order_of
from partitioner.schedules.kind import Awaiting
from tests.support.running.slow_values import all_but, slow

Starts = tuple[int, ...]
MakeProblem = Callable[..., StageProblem]
ROOMINESS = (6, 8, 9, 10, 12, 40)
"""Limits, in quarters of an even share: most are nearly full."""


def some_units(draw: random.Random, n_units: int) -> tuple[int, ...]:
    return tuple(sorted(draw.sample(range(n_units), draw.randint(1, min(3, n_units)))))


def some_values(draw: random.Random, n_units: int) -> tuple[Value, ...]:
    """Return a chain, and skips over it that one or several later units read."""
    chain = [Value(unit, (unit + 1,), 8 * draw.randint(1, 6), 8 * draw.randint(0, 6)) for unit in range(n_units - 1)]
    skips = []
    for _ in range(draw.randint(0, 4)):
        if n_units > 2:
            producer = draw.randrange(n_units - 2)
            readers = draw.sample(range(producer + 1, n_units), draw.randint(1, n_units - producer - 1))
            skips.append(Value(producer, tuple(sorted(readers)), 8 * draw.randint(1, 20), 8 * draw.randint(0, 20)))
    return (*chain, *skips)


def some_kept(draw: random.Random, n_units: int) -> Shared:
    """Kept by its users; or by those that receive it, that is, by stages without its producer."""
    units = some_units(draw, n_units)
    producer = draw.randrange(units[0]) if units[0] > 0 and draw.random() < 0.3 else -1
    return Shared(draw.randint(1, 20), units, producer)


def some_working(draw: random.Random, n_units: int) -> TransientMemory | None:
    """Return transient memory that is at most a unit's backward: otherwise a longer run could need less."""
    if draw.random() < 0.3:
        return None
    made, trained, bundled, left, forward, backward = (
        np.array([float(draw.randint(0, most)) for _ in range(n_units)]) for most in (6, 6, 4, 6, 20, 30)
    )
    at_once, called = float(draw.choice((0, 5, 100))), draw.random() < 0.5
    inputs = np.maximum(backward - trained, 0.0)
    return TransientMemory(forward, backward, inputs, made, trained, bundled, at_once, left, called, summed=at_once / 5)


def random_problem(seed: int, *, shared_ranks: bool) -> StageProblem:
    """Draw whole numbers, so that sums are exact and ties are common."""
    draw = random.Random(seed)
    n_kinds = draw.choice((1, 1, 2, 3))
    if shared_ranks:
        n_ranks = draw.randint(1, 3)
        down = list(range(n_ranks))
        rank = draw.choice((down + down[::-1], down + down, down * 3 if n_ranks < 3 else down + down))
    else:
        n_ranks = draw.randint(1, 5)
        rank = list(range(n_ranks))
    n_stages = len(rank)
    n_units = draw.randint(max(1, n_stages - (draw.random() < 0.1)), 9)
    kind_of_rank = [draw.randrange(n_kinds) for _ in range(n_ranks)]
    joined = [one == other for one, other in itertools.pairwise(rank)]
    allowed = np.array([[draw.random() < 0.97 for _ in range(n_stages)] for _ in range(n_units)])
    fixed = tuple(Shared(draw.randint(1, 60), some_units(draw, n_units)) for _ in range(draw.randint(0, 8)))
    kept = (
        *(Shared(draw.randint(1, 20), some_units(draw, n_units)) for _ in range(draw.randint(0, 8))),
        *(Shared(draw.randint(1, 20), value.readers, value.producer) for value in some_values(draw, n_units) if draw.random() < 0.5),
    )
    gradients = tuple(Shared(draw.randint(1, 20), some_units(draw, n_units)) for _ in range(draw.randint(0, 4)))
    in_flight = tuple(draw.randint(1, 4) for _ in range(n_stages))
    later = tuple(draw.randint(0, held) for held in in_flight)
    messages = Awaiting(*(tuple(draw.randint(0, held) for held in most) for most in (in_flight, later, in_flight, later)))
    share = int(sum(item.most for item in fixed) + 2 * sum(item.most for item in kept)) // n_ranks
    limit = tuple(float(share * draw.choice(ROOMINESS) // 4 + 1) for _ in range(n_ranks))
    taking_turns = not shared_ranks and draw.random() < 0.4
    replicas = tuple(draw.choice((1, 2, 4)) for _ in range(n_stages)) if taking_turns else ()  # halves of whole numbers are exact
    units = Units(
        time=np.array([[float(draw.randint(0, 9)) for _ in range(n_kinds)] for _ in range(n_units)]),
        values=some_values(draw, n_units),
        replicated=tuple(
            (tuple(float(draw.randint(0, 3)) for _ in range(n_kinds)), some_units(draw, n_units)) for _ in range(draw.randint(0, 2))
        ),
        fixed=fixed,
        kept=kept,
        depth=np.array([draw.randint(0, 3) for _ in range(n_units)], dtype=np.int64),
        gradients=gradients,
        summed=float(draw.choice((0, 5, 1000))),
        working=some_working(draw, n_units),
    )
    return StageProblem(
        units=units,
        kind=tuple(kind_of_rank[each] for each in rank),
        rank=tuple(rank),
        latency=np.array([0.0 if same else float(draw.randint(0, 2)) for same in joined]),
        seconds_per_byte=np.array([0.0 if same else draw.choice((0.0, 0.125, 0.5)) for same in joined]),
        in_flight=in_flight,
        later=later,
        awaiting=messages,
        limit=limit,
        forced=frozenset(unit for unit in range(1, n_units) if draw.random() < 0.05),
        allowed=allowed if draw.random() < 0.3 else None,
        replicas=replicas,
    )


def unlike_problem(seed: int, *, shared_ranks: bool) -> StageProblem:
    """Return a problem with stages of different kinds, memory and times; some values are gathered to be sent."""
    problem, draw = random_problem(seed, shared_ranks=shared_ranks), random.Random(-seed - 1)
    n_units, n_kinds, units = problem.n_units, draw.randint(2, 3), problem.units

    def by_kind(items: tuple[Shared, ...]) -> tuple[Shared, ...]:
        if draw.random() < 0.2:  # all kinds are alike in this
            return items
        factors = [[draw.choice((0.0, 0.5, 1.0, 2.0)) for _ in range(n_kinds)] for _ in items]
        each = [tuple(factor * item.most for factor in of_item) for of_item, item in zip(factors, items, strict=True)]
        return tuple(item._replace(amount=amount) if draw.random() < 0.8 else item for amount, item in zip(each, items, strict=True))

    def seconds(most: int) -> tuple[float, ...]:
        return tuple(float(draw.randint(0, most)) for _ in range(n_kinds))

    workings = [some_working(draw, n_units) or TransientMemory.nothing(n_units) for _ in range(n_kinds)]
    crossing = [value for value in units.values if draw.random() < 0.4]
    other = dataclasses.replace(
        units,
        time=np.array([seconds(9) for _ in range(n_units)]),
        replicated=tuple((seconds(3), each) for _, each in units.replicated),
        fixed=by_kind(units.fixed),
        kept=by_kind(units.kept),
        gradients=by_kind(units.gradients),
        working=tuple(workings) if draw.random() < 0.7 else workings[0],
        gathered_values=tuple(Gathered(seconds(6), seconds(3), value.producer, value.readers[-1:]) for value in crossing),
        gathered_gradients=tuple(
            Gathered(seconds(6), seconds(3), value.producer, value.readers) for value in crossing if draw.random() < 0.5
        ),
    )
    return dataclasses.replace(problem, units=other, kind=tuple(draw.randrange(n_kinds) for _ in problem.kind))


def all_cuts(problem: StageProblem) -> Iterator[Starts]:
    for cuts in itertools.combinations(range(1, problem.n_units), problem.n_stages - 1):
        yield (0, *cuts)


def runs(problem: StageProblem, starts: Starts) -> list[range]:
    return [range(start, end) for start, end in zip(starts, (*starts[1:], problem.n_units), strict=True)]


def parts_of_memory(problem: StageProblem, starts: Starts) -> Iterator[tuple[float, float, float, float]]:
    """Yield each stage's memory: constant, for a microbatch, gradients, and transient."""
    units = problem.units
    for kind, run in zip(problem.kind, runs(problem, starts), strict=True):
        fixed, gradients = (
            sum(amount(item, kind) for item in items if set(item.units) & set(run)) for items in (units.fixed, units.gradients)
        )
        kept = sum(amount(item, kind) for item in units.kept if set(item.units) & set(run) and item.producer not in run)
        gathered, parted = at_borders(problem, run)
        beside = sum(item.size[kind] for item in gathered) + sum(item.size[kind] for item in parted)
        working = working_memory(units.working[kind] if isinstance(units.working, tuple) else units.working, run)
        yield fixed, kept, gradients, working + beside


def amount(item: Shared, kind: int) -> float:
    return item.amount[kind] if isinstance(item.amount, tuple) else item.amount


@functools.lru_cache(maxsize=256)
def working_memory(working: TransientMemory | None, run: range) -> float:
    if working is None:
        return 0.0
    moments, once, twice = [0.0], list[float](), list[float]()
    for unit in run:
        behind = slice(unit + 1, run.stop)
        given_back, trained = working.saved[behind].sum(), working.gradients[behind].sum()
        deferred = working.deferred[run.start : run.stop].sum() if working.is_split else 0.0
        moments.append(working.forward[unit] - given_back - deferred)
        if working.is_split:
            left, still = working.weights[behind].sum(), working.weights[run.start : unit + 1].sum()
            moments.append(working.inputs[unit] + left - given_back - deferred)
            computed = working.gradients[unit] + trained + still - working.saved[run.start : run.stop].sum() - deferred
            once.append(computed + working.summed)
            twice.append(computed + working.gradients[run.start : run.stop].sum())
        else:
            computed = working.backward[unit] + trained - given_back
            once.append(computed + min(working.gradients[unit + 1 :].sum(), working.summed))
            twice.append(computed + trained)
    moments.append(min(max(once), max(twice)))
    return float(max(moments) + min(working.coalesced[run.start : run.stop].sum(), working.coalesced_at_once))


def stage_memory(problem: StageProblem, starts: Starts) -> list[float]:
    found = []
    stages = zip(runs(problem, starts), parts_of_memory(problem, starts), strict=True)
    for stage, (run, (fixed, kept, gradients, working)) in enumerate(stages):
        moments = [problem.in_flight[stage] * kept + working, gradients + min(gradients, problem.units.summed)]
        if problem.later[stage]:
            moments.append(problem.later[stage] * kept + gradients + working)
        forward, back = sent(problem, run)
        given, gradients_given = sum(value.gradient_size for value in back), sum(value.size for value in forward)
        for (early, late), message in ((problem.awaiting[:2], given), (problem.awaiting[2:], gradients_given)):
            if early[stage]:
                moments.append(early[stage] * kept + working + message)
            if late[stage]:
                moments.append(late[stage] * kept + gradients + working + message)
        found.append(fixed + max(moments))
    return found


def permitted(problem: StageProblem, starts: Starts) -> bool:
    if not problem.forced <= set(starts):
        return False
    return problem.allowed is None or all(problem.allowed[unit, stage] for stage, run in enumerate(runs(problem, starts)) for unit in run)


def fits(problem: StageProblem, starts: Starts) -> bool:
    """Return whether stages fit: those of one rank hold their peaks between actions at once, plus the transient memory of one.

    An item of permanent memory that several stages of a rank need is held once: the most that one of them needs.
    """
    alone = stage_memory(problem, starts)
    held, needed = [0.0] * len(problem.limit), [0.0] * len(problem.limit)
    for item, rank in itertools.product(problem.units.fixed, range(len(problem.limit))):
        holders = [stage for stage, run in enumerate(runs(problem, starts)) if problem.rank[stage] == rank and set(run) & set(item.units)]
        amounts = [item.of_kind(problem.kind[stage]) for stage in holders]
        held[rank] += max(amounts, default=0.0) - sum(amounts)
    for stage, (fixed, kept, gradients, _) in enumerate(parts_of_memory(problem, starts)):
        between, rank = fixed + max(problem.in_flight[stage] * kept, problem.later[stage] * kept + gradients), problem.rank[stage]
        held[rank] += between
        needed[rank] = max(needed[rank], alone[stage] - between)
    return all(between + top <= limit for between, top, limit in zip(held, needed, problem.limit, strict=True))


def sent(problem: StageProblem, run: range) -> tuple[list[Value], list[Value]]:
    """Return the values that a stage sends forward, and those whose gradients it sends back."""
    inside = set(run)
    forward = [value for value in problem.units.values if value.producer in inside and max(value.readers) >= run.stop]
    entering = [value for value in problem.units.values if value.producer < run.start and inside & set(value.readers)]
    return forward, [value for value in entering if value.gradient_size]


def at_borders(problem: StageProblem, run: range) -> tuple[list[Gathered], list[Gathered]]:
    """Return the values that a stage gathers to send, and those that it reads in parts."""
    gathered = [item for item in problem.units.gathered_values if item.producer in run and item.readers[-1] >= run.stop]
    return gathered, [item for item in problem.units.gathered_gradients if item.producer < run.start and set(item.readers) & set(run)]


def slowest_stage(problem: StageProblem, starts: Starts) -> float:
    slowest = 0.0
    for stage, run in enumerate(runs(problem, starts)):
        kind = problem.kind[stage]
        seconds = sum(problem.units.time[unit, kind] for unit in run)
        seconds += sum(times[kind] for times, units in problem.units.replicated if set(units) & set(run))
        gathered, parted = at_borders(problem, run)
        seconds += sum(item.seconds[kind] for item in gathered) + sum(item.seconds[kind] for item in parted)
        forward, backward = sent(problem, run)
        for value in forward:
            seconds += problem.latency[stage] + value.size * problem.seconds_per_byte[stage]
        for value in backward:
            seconds += problem.latency[stage - 1] + value.gradient_size * problem.seconds_per_byte[stage - 1]
        slowest = max(slowest, seconds / (problem.replicas[stage] if problem.replicas else 1))
    return slowest


def price(problem: StageProblem, starts: Starts) -> tuple[int, int]:
    """Return bytes sent, and modules cut."""
    size = 0
    for run in runs(problem, starts):
        forward, backward = sent(problem, run)
        size += sum(value.size for value in forward) + sum(value.gradient_size for value in backward)
    return size, sum(int(problem.units.depth[start]) for start in starts[1:])


def best_by_brute_force(problem: StageProblem, slack: float = 0.0) -> tuple[float, Starts] | None:
    possible = [starts for starts in all_cuts(problem) if permitted(problem, starts) and fits(problem, starts)]
    if not possible:
        return None
    best = min(slowest_stage(problem, starts) for starts in possible)
    near = [starts for starts in possible if slowest_stage(problem, starts) <= best * (1 + slack)]
    return best, min(near, key=lambda starts: (price(problem, starts), starts))


@pytest.mark.parametrize("make", [random_problem, *slow(unlike_problem)])
@pytest.mark.parametrize("block", all_but((0,), range(10)))
def test_one_stage_a_rank_equals_brute_force(block: int, make: MakeProblem) -> None:
    solvable = 0
    for seed in range(block * 100, block * 100 + 100):
        problem = make(seed, shared_ranks=False)
        slack = random.Random(seed).choice((0.0, 0.0, 0.25))
        found, reference = solve(problem, slack), best_by_brute_force(problem, slack)
        assert (found is None) == (reference is None), seed
        if found is not None and reference is not None:
            solvable += 1
            assert (found.bottleneck, found.starts) == reference, seed
            assert found.proven
    assert solvable > 20


@pytest.mark.parametrize("make", [*slow(random_problem), unlike_problem])
@pytest.mark.parametrize("block", all_but((3,), range(4)))
def test_several_stages_a_rank_equal_brute_force(block: int, make: MakeProblem) -> None:
    solvable = together = 0
    for seed in range(block * 50, block * 50 + 50):
        problem = make(seed, shared_ranks=True)
        found, reference = solve(problem), best_by_brute_force(problem)
        assert (found is None) == (reference is None), seed
        if found is not None and reference is not None:
            solvable += 1
            assert found.proven
            assert (found.bottleneck, found.starts) == reference, seed
            roomy = dataclasses.replace(problem, limit=(1e9,) * len(problem.limit))
            together += solve(roomy) != found
    assert solvable > 12
    assert together > 1


@pytest.mark.parametrize("make", [random_problem, *slow(unlike_problem)])
def test_the_shortfall_is_the_least_that_the_worst_stage_lacks(make: MakeProblem) -> None:
    for seed in range(200):
        problem = make(seed, shared_ranks=False)
        lacking = [
            max(memory - problem.limit[problem.rank[stage]] for stage, memory in enumerate(stage_memory(problem, starts)))
            for starts in all_cuts(problem)
            if permitted(problem, starts)
        ]
        assert shortfall(problem) == pytest.approx(min(lacking, default=np.inf)), seed
        assert min_max_dp.fits(problem) == (min(lacking, default=np.inf) <= 0), seed


def chain(n_units: int, n_stages: int) -> StageProblem:
    """Return a long transformer-like chain: repeating times, a residual stream, one tied parameter at both ends."""
    time = np.array([[(unit % 34 + 1) * 1e-4] for unit in range(n_units)])
    values = [
        Value(unit, (unit + 1, *((unit + 9,) if unit % 9 == 0 and unit + 9 < n_units else ())), 1000, 1000) for unit in range(n_units - 1)
    ]
    units = Units(
        time=time,
        values=tuple(values),
        replicated=(),
        fixed=(Shared(5000, (0, n_units - 1)), *(Shared(100, (unit,)) for unit in range(n_units))),
        kept=tuple(Shared(10, (unit,)) for unit in range(n_units)),
        depth=np.zeros(n_units, dtype=np.int64),
    )
    return StageProblem(
        units=units,
        kind=(0,) * n_stages,
        rank=tuple(range(n_stages)),
        latency=np.full(n_stages - 1, 1e-5),
        seconds_per_byte=np.full(n_stages - 1, 1e-9),
        in_flight=tuple(n_stages - stage for stage in range(n_stages)),
        later=tuple(n_stages - stage for stage in range(n_stages)),
        awaiting=order_of("1F1B", n_stages, 2 * n_stages, 1).awaiting,
        limit=(1e9,) * n_stages,
        forced=frozenset(),
        allowed=None,
    )


@pytest.mark.parametrize("n_stages", [*slow(2), 64])
def test_a_model_of_thousands_of_units_is_balanced(n_stages: int) -> None:
    problem = chain(3278, n_stages)
    found = solve(problem)
    assert found is not None
    even = float(problem.units.time.sum()) / n_stages
    assert even <= found.bottleneck <= 1.1 * even
    assert found.bottleneck == pytest.approx(slowest_stage(problem, found.starts))


@pytest.mark.slow
def test_a_search_that_is_cut_short_says_so_and_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partitioner.planner.solvers.shared_rank_memory._MOST_VISITS", 1)
    unproven = 0
    for seed in range(300):
        problem = random_problem(seed, shared_ranks=True)
        found = solve(problem)
        if found is not None:
            assert permitted(problem, found.starts)
            assert fits(problem, found.starts)
            unproven += not found.proven
    assert unproven > 5


def test_stages_of_one_rank_hold_a_shared_weight_once() -> None:
    """Stages 0 and 3 of a V are on rank 0, and share a weight; so do stages 0 and 1, which are on different ranks."""
    items = (Shared(100, (0, 7)), Shared(10, (1, 2)), Shared(1, (4,)))
    stage_of = stages_of((0, 2, 4, 6), 8)
    assert counted_again(items, stage_of, (0, 1, 1, 0), (0, 0, 0, 0)).tolist() == [0, 0, 0, 100]
    assert counted_again(items, stage_of, (0, 1, 2, 3), (0, 0, 0, 0)).tolist() == [0, 0, 0, 0]
    received = Shared(7, (1, 6), 0)  # stage 0 makes it, and does not need it; stage 3 receives it
    assert counted_again((received,), stage_of, (0, 1, 1, 0), (0, 0, 0, 0)).tolist() == [0, 0, 0, 0]
    unlike = Shared((5, 8), (0, 4, 7))  # rank 0 holds the larger amount, of stage 3
    assert counted_again((unlike,), stage_of, (0, 1, 1, 0), (0, 0, 0, 1)).tolist() == [0, 0, 0, 5]


def test_values_between_stages_of_one_rank_are_no_messages() -> None:
    """A V of four stages of two units: stage 0 and 3 are on rank 0, and a value of unit 0 is read by all of them."""
    values = (Value(0, (1, 3, 5, 7), 10, 100), Value(1, (2,), 3, 30), Value(2, (3,), 5, 50))
    nothing = np.zeros(8, np.int64)
    units = Units(time=np.ones((8, 1)), values=values, replicated=(), fixed=(), kept=(), depth=nothing)
    found = units.crossing(stages_of((0, 2, 4, 6), 8), (0, 1, 1, 0))
    assert found.forward == (0, 10 + 3, 0, 0)  # rank 1 receives the first value once
    assert found.backward == (2 * 100 + 30, 0, 0, 0)  # its two stages each send a gradient
    assert found.waiting == {(0, 3): 100}


def test_gradients_are_under_way_until_others_leave() -> None:
    """Units 2 and 3 are a stage: unit 2 sends 4 bytes, then 6; unit 3 sends 8, and has a small one for a coalesced message."""
    last = np.array([[0, 0], [0, 0], [6, 4], [8, 0]], float)
    unsent, gradients, saved = np.array([1, 1, 20, 30], float), np.array([0, 1, 1, 1], float), np.array([2, 2, 2, 2], float)
    sums = [np.append(0.0, np.cumsum(each)) for each in (gradients, saved)]
    of = GradientMessages(unsent, last, np.array([False, False, False, True]))
    under_way, early = of.at_borders((0, 2), *sums)
    assert under_way.tolist() == [0, 6]  # one of two messages is the coalesced one
    assert early.tolist() == [1, 30]  # unit 3 sends first; nothing of its stage is after it
    under_way, early = GradientMessages(unsent, last * [[0], [0], [1], [0]], np.zeros(4, np.bool_)).at_borders((0, 2), *sums)
    assert under_way.tolist() == [0, 6 + 4]
    assert early.tolist() == [1, max(30, 20 + 1 - 2)]
