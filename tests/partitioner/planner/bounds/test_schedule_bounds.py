"""Bounds of steps never exceed the clock, whatever times, cuts and schedule are; where a paper knows the step, they reach it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from partitioner.planner.bounds.schedule_bounds import least_load, least_shared_step, least_step, shared_load
from partitioner.planner.bounds.v_schedules import least_on_v
from partitioner.planner.costs.time_fractions import TimeFractions
from partitioner.planner.pipeline.candidate import StageTimes, simulate_step
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.solvers.branch_and_bound import fastest_cuts, promising_cuts
from partitioner.planner.solvers.critical_paths import PathCosts
from partitioner.planner.solvers.stage_memory import Floats
from partitioner.planner.solvers.stage_problem import Gathered, Shared, StageProblem, Units, Value
from partitioner.planner.solvers.stage_tables import best_bottleneck
from partitioner.schedules.catalog import SCHEDULES, make_schedule
from partitioner.schedules.clocks.order import Order, order_of
from partitioner.schedules.clocks.step_clock import step_clock
from partitioner.schedules.kind import Awaiting, in_flight_while_awaiting, peak_in_flight
from passes.ir.schedule import ActionKind, Schedule
from tests.support.planning.peak_activation import peak_activation
from tests.support.running.slow_values import slow

NAMES = tuple((name, kind.default_stages_per_rank) for name, kind in SCHEDULES.items())


@dataclass(frozen=True, eq=False)
class Case:
    """Units of random lengths, on different links; stages may be of different kinds, with limited constant memory."""

    name: str
    n_ranks: int
    n_microbatches: int
    stages_per_rank: int
    halves: Floats
    latency: Floats
    values: tuple[Value, ...]
    replicas: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()
    fixed: tuple[Shared, ...] = ()
    gathered: tuple[Gathered, ...] = ()
    parted: tuple[Gathered, ...] = ()
    limit: float = np.inf

    @property
    def kind(self) -> tuple[int, ...]:
        return self.kinds or (0,) * self.n_stages

    @property
    def n_stages(self) -> int:
        return len(self.replicas) or self.n_ranks * self.stages_per_rank

    @property
    def order(self) -> Order:
        return order_of(self.name, self.n_ranks, self.n_microbatches, self.stages_per_rank, self.replicas)

    @property
    def n_units(self) -> int:
        return int(self.halves.shape[1])

    def problem(self) -> StageProblem:
        order = self.order
        depth = np.zeros(self.n_units, dtype=np.int64)
        units = Units(
            self.halves.sum(axis=0), self.values, (), self.fixed, (), depth, gathered_values=self.gathered, gathered_gradients=self.parted
        )
        return StageProblem(
            units=units,
            kind=self.kind,
            rank=tuple(ranks[0] for ranks in order.stage_ranks),
            latency=self.latency,
            seconds_per_byte=np.full(self.n_stages - 1, 0.01),
            in_flight=order.in_flight,
            later=order.later,
            awaiting=Awaiting(*((0,) * self.n_stages,) * 4),  # messages take no memory here
            limit=(self.limit,) * self.n_ranks,
            forced=frozenset(),
            allowed=None,
            replicas=self.replicas,
        )

    def costs(self) -> PathCosts:
        return PathCosts(self.problem(), self.halves, self.order)

    def seconds(self, starts: tuple[int, ...]) -> float:
        """Return seconds on the clock, from the definition; inf where the stages of some rank do not fit."""
        runs = list(itertools.pairwise((*starts, self.n_units)))
        times, held = [], [0.0] * self.n_ranks
        for stage, (start, end) in enumerate(runs):
            leaving = [value.size for value in self.values if start <= value.producer < end <= value.readers[-1]]
            entering = [
                value.gradient_size for value in self.values if value.producer < start and set(value.readers) & set(range(start, end))
            ]
            send = sum(self.latency[stage] + 0.01 * size for size in leaving)
            back = sum(self.latency[stage - 1] + 0.01 * size for size in entering if size)
            forward, *backward = self.halves[:, start:end, self.kind[stage]].sum(axis=1)
            forward += sum(item.seconds[self.kind[stage]] for item in self.gathered if start <= item.producer < end <= item.readers[-1])
            parted = (item for item in self.parted if item.producer < start and set(item.readers) & set(range(start, end)))
            backward[0] += sum(item.seconds[self.kind[stage]] for item in parted)
            times.append(StageTimes(*map(float, (forward, *backward, send, back))))
            for rank in self.order.stage_ranks[stage]:
                held[rank] += sum(item.of_kind(self.kind[stage]) for item in self.fixed if set(item.units) & set(range(start, end)))
        if max(held) > self.limit:
            return np.inf
        schedule = make_schedule(self.name, self.n_ranks, self.n_microbatches, self.stages_per_rank, self.replicas)
        return simulate_step(schedule, times).makespan

    def all_cuts(self) -> list[tuple[int, ...]]:
        return [(0, *cuts) for cuts in itertools.combinations(range(1, self.n_units), self.n_stages - 1)]


def some_case(seed: int, most_ranks: int = 4, *, shared: bool = False) -> Case:
    """Return stages on one rank each, several on a rank; or, if they are shared, on up to three ranks each."""
    draw = random.Random(seed)
    name, each = draw.choice([pair for pair in NAMES if pair[1] == 1 or not shared])
    n_stages = n_ranks = draw.randint(2 if shared else 1, most_ranks)
    replicas: tuple[int, ...] = ()
    if shared:
        replicas = tuple(draw.randint(1, 3) for _ in range(n_stages))
        n_ranks = sum(replicas)
    n_units = draw.randint(n_stages * each, max(n_stages * each, 9))
    share = draw.choice((0.2, 1 / 3, 0.5))
    lengths = np.array([draw.choice((1.0, 1.0, 2.0, 5.0)) for _ in range(n_units)])
    forward = lengths * (share if draw.random() < 0.5 else np.array([draw.uniform(0.1, 0.6) for _ in range(n_units)]))
    inputs = (lengths - forward) * draw.choice((0.3, 0.5, 0.7))
    chain = [Value(unit, (unit + 1,), draw.randint(1, 5), draw.randint(0, 5)) for unit in range(n_units - 1)]
    skips = [Value(0, (2, n_units - 1), 3, 2)] if n_units > 3 and draw.random() < 0.5 else []
    return Case(
        name,
        n_ranks,
        draw.randint(1, 9),
        each,
        np.stack([forward, inputs, lengths - forward - inputs])[:, :, None],
        np.array([draw.choice((0.0, 0.3)) for _ in range(n_stages * each - 1)]),
        tuple(chain + skips),
        replicas,
    )


def unlike(case: Case, seed: int) -> Case:
    """Return the case with stages of different kinds: other lengths, scarce memory, values gathered before they are sent."""
    draw, n_kinds = random.Random(-seed - 1), 3
    factors = np.array([[draw.choice((0.5, 0.7, 1.0, 2.0)) for _ in range(n_kinds)] for _ in range(case.n_units)])
    units = [tuple(sorted(draw.sample(range(case.n_units), draw.randint(1, min(2, case.n_units))))) for _ in range(6)]
    fixed = tuple(Shared(tuple(float(draw.randint(0, 9)) for _ in range(n_kinds)), each) for each in units)
    nothing = (0.0,) * n_kinds

    def seconds() -> tuple[float, ...]:
        return tuple(draw.choice((0.0, 0.5, 3.0)) for _ in range(n_kinds))

    gathered = [Gathered(seconds(), nothing, each.producer, each.readers[-1:]) for each in case.values if draw.random() < 0.6]
    parted = [Gathered(seconds(), nothing, each.producer, each.readers) for each in case.values if draw.random() < 0.4]
    kinds = tuple(draw.randrange(n_kinds) for _ in range(case.n_stages))
    limited = replace(case, halves=case.halves * factors, kinds=kinds, fixed=fixed, gathered=tuple(gathered), parted=tuple(parted))
    whole = sum(sum(item.amount) for item in fixed if isinstance(item.amount, tuple)) / n_kinds
    return replace(limited, limit=float(whole * draw.choice((1.0, 1.5, 2.5)) / min(case.n_ranks, case.n_stages)))


def searched(case: Case) -> tuple[float, Floats, TimeFractions]:
    """Return the best of all cuts, which the search has to find; the seconds of all units, and the fractions of their halves."""
    best = min(case.seconds(starts) for starts in case.all_cuts())
    costs = case.costs()
    path = best_bottleneck(costs)
    shares = TimeFractions.of(case.halves)
    assert path <= best * (1 + 1e-9), case
    if path == np.inf:
        return best, case.halves.sum(axis=0).min(axis=1), shares
    found = fastest_cuts(costs, path, 0.0, case.seconds, promising_cuts(costs, path), 10_000)
    assert found.seconds == pytest.approx(best, rel=1e-9), case
    assert found.bound == found.seconds, case
    return best, case.halves.sum(axis=0).min(axis=1), shares


@pytest.mark.parametrize("block", [0, *slow(1, 2, 3)])
def test_no_cuts_beat_the_bounds_and_the_search_finds_the_best(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        case = some_case(seed)
        best, whole, shares = searched(case)
        loads = least_load(whole, case.n_ranks, case.stages_per_rank), least_load(whole, case.n_stages, 1)
        candidate = Candidate(case.name, case.stages_per_rank, case.n_microbatches)
        assert least_step(candidate, case.n_ranks, float(whole.sum()), *loads, shares) <= best * (1 + 1e-6), seed


@pytest.mark.parametrize("block", [0, *slow(1, 2, 3)])
def test_no_cuts_of_stages_that_ranks_share_beat_the_bounds_either(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        case = some_case(seed, shared=True)
        best, whole, shares = searched(case)
        candidate = Candidate(case.name, 1, case.n_microbatches, case.replicas)
        assert least_shared_step(candidate, float(whole.sum()), float(whole.max()), shares) <= best * (1 + 1e-6), seed


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("block", [0, *slow(1, 2, 3)])
def test_no_cuts_beat_the_bounds_wherever_ranks_exchange(block: int, shared: bool) -> None:
    """The bound knows how much all stages exchange together; some units do much of it, others nothing."""
    for seed in range(block * 25, block * 25 + 25):
        case, draw = some_case(seed, shared=shared), np.random.default_rng(seed)
        waiting = np.zeros_like(case.halves)
        some = draw.integers(0, case.halves.shape[1], 2)
        waiting[:2, some] = draw.random((2, 2, 1)) * draw.choice([0.1, 1.0, 10.0]) * case.halves.mean()
        exchanging = replace(case, halves=case.halves + waiting)
        best = min(exchanging.seconds(starts) for starts in case.all_cuts())
        whole, shares = case.halves.sum(axis=0).min(axis=1), TimeFractions.of(case.halves)
        exchanged = float(waiting[0].sum()), float(waiting[1].sum())
        candidate, lengths = Candidate(case.name, case.stages_per_rank, case.n_microbatches, case.replicas), float(whole.sum())
        if shared:
            bound = least_shared_step(candidate, lengths, float(whole.max()), shares, exchanged)
        else:
            loads = least_load(whole, case.n_ranks, case.stages_per_rank), least_load(whole, case.n_stages, 1)
            bound = least_step(candidate, case.n_ranks, lengths, *loads, shares, exchanged)
        assert bound <= best * (1 + 1e-6), seed


@pytest.mark.parametrize("block", [0, *slow(1, 2, 3)])
def test_no_cuts_into_stages_of_unlike_kinds_beat_the_bounds_and_the_search_finds_the_best(block: int) -> None:
    fit = limited = 0
    for seed in range(block * 25, block * 25 + 25):
        case = unlike(some_case(seed, shared=block == 3), seed)
        best, whole, shares = searched(case)
        candidate, lengths = Candidate(case.name, case.stages_per_rank, case.n_microbatches, case.replicas), float(whole.sum())
        loads = least_load(whole, case.n_ranks, case.stages_per_rank), least_load(whole, case.n_stages, 1)
        if case.replicas:
            assert least_shared_step(candidate, lengths, float(whole.max()), shares) <= best * (1 + 1e-6), seed
        else:
            assert least_step(candidate, case.n_ranks, lengths, *loads, shares) <= best * (1 + 1e-6), seed
        roomy = replace(case, limit=np.inf)
        fit, limited = fit + (best < np.inf), limited + (best > min(map(roomy.seconds, case.all_cuts())))
    assert fit > 5
    assert limited > 4


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (1, 2)])
def test_shared_stages_as_long_as_they_have_ranks_take_little_more_than_the_bound(shape: tuple[int, ...]) -> None:
    """Each rank has the same work; with many microbatches only the fill is left, of which the bound knows the last stage's."""
    count, n_ranks = 60, sum(shape)
    times = [StageTimes(each / 3, each / 3, each / 3, 0, 0) for each in map(float, shape)]
    seconds = simulate_step(make_schedule("1F1B", n_ranks, count, None, shape), times).makespan
    shares = TimeFractions((1 / 3, 1 / 3), 2 / 3, 2 / 3, np.full((3, 1, 1), 1 / 3))
    bound = least_shared_step(Candidate("1F1B", 1, count, shape), float(n_ranks), 1.0, shares)
    assert bound <= seconds * (1 + 1e-9)
    assert seconds == pytest.approx(bound, rel=0.06)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_equal_stages_take_what_the_bound_says(name: str) -> None:
    """(M + R - 1) t."""
    halves = np.ones((3, 12, 1))
    case = Case(name, 4, 9, 1, halves, np.zeros(3), ())
    assert best_bottleneck(case.costs()) == pytest.approx((9 + 4 - 1) * 9)
    shares = TimeFractions((1 / 3, 1 / 3), 2 / 3, 2 / 3, halves / halves.sum())
    assert least_step(Candidate(name, 1, 9), 4, 36, 9, 9, shares) == pytest.approx((9 + 4 - 1) * 9)


def on_a_v(name: str, n_ranks: int, count: int, halves: Floats) -> float:
    """Return seconds of a step on the clock; messages take no time."""
    (forward, inputs, weights), nothing = halves.tolist(), [0.0] * (2 * n_ranks)
    return step_clock(name, n_ranks, count, 2).makespan(forward, inputs, weights, nothing, nothing)


@pytest.mark.parametrize("name", ["ZBV", *slow("DualPipeV")])
def test_no_stages_on_a_v_beat_the_mean_of_paths(name: str) -> None:
    """Whatever their times: alike, at random, or most of them in few stages."""
    draw = np.random.default_rng(0)
    for number in range(200):
        n_ranks, count = int(draw.integers(1, 7)), int(draw.integers(1, 20))
        halves = draw.random((3, 2 * n_ranks)) ** 2 * (draw.integers(0, 2, (1, 2 * n_ranks)) if number % 3 == 0 else 1)
        seconds = on_a_v(name, n_ranks, count, halves)
        assert least_on_v(name, n_ranks, count, halves[:, :, None]) <= seconds * (1 + 1e-9), (name, n_ranks, count)


def test_a_v_of_whose_order_nothing_is_known_has_the_bounds_of_any_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(SCHEDULES["ZBV"], name="W", forwards_ahead=None)
    monkeypatch.setattr("partitioner.planner.bounds.schedule_bounds.find_schedule", {"W": kind}.__getitem__)
    shares = TimeFractions.of(np.ones((3, 8, 1)))
    assert least_step(Candidate("W", 2, 2), 4, 24.0, 6.0, 3.0, shares) == pytest.approx(max(24.0 * shares.through, 2 * 6.0))


@pytest.mark.parametrize("name", ["ZBV", "DualPipeV"])
@pytest.mark.parametrize("n_ranks", [4, 8, 16])
def test_few_microbatches_leave_a_v_idle(name: str, n_ranks: int) -> None:
    """With as many microbatches as ranks, by more than half of what the last rank waits for to begin."""
    halves = np.repeat([[0.3], [0.4], [0.3]], 2 * n_ranks, axis=1)
    seconds = on_a_v(name, n_ranks, n_ranks, halves)
    begins, busy = 0.3 * (n_ranks - 1), 2.0 * n_ranks
    assert busy + begins / 2 < least_on_v(name, n_ranks, n_ranks, halves[:, :, None]) <= seconds


def test_units_are_not_divided() -> None:
    """96 blocks and a head a third as long on 16 ranks: one has six blocks and the head; of 90 blocks, some have six."""
    assert least_load(np.array([1.0] * 96 + [1 / 3]), 16, 1) == pytest.approx(6 + 1 / 3, rel=1e-5)
    assert least_load(np.array([1.0] * 90), 16, 2) == pytest.approx(6, rel=1e-5)
    assert least_load(np.array([1.0, 2.0] * 48), 32, 1) == pytest.approx(5, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_fullest_part_is_never_below_the_least_load(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        n_parts, n_runs = draw.randint(1, 3), draw.choice((1, 2))
        lengths = np.array([draw.choice((1.0, 1.0, 2.0, 0.3, 5.0)) for _ in range(draw.randint(n_parts * n_runs, 8))])
        part = [number % n_parts for number in range(n_parts * n_runs)]
        fullest = np.inf
        for cuts in itertools.combinations(range(1, len(lengths)), n_parts * n_runs - 1):
            held = np.zeros(n_parts)
            for place, (start, end) in zip(part, itertools.pairwise((0, *cuts, len(lengths))), strict=True):
                held[place] += lengths[start:end].sum()
            fullest = min(fullest, float(held.max()))
        assert least_load(lengths, n_parts, n_runs) <= fullest * (1 + 1e-9)


@pytest.mark.parametrize(("name", "each"), NAMES)
def test_the_clock_of_numbers_and_its_order_are_those_of_the_schedule(name: str, each: int) -> None:
    for n_ranks, count in itertools.product((1, 2, 3, 5), (1, 2, 4, 7)):
        schedule, clock = make_schedule(name, n_ranks, count, each), step_clock(name, n_ranks, count, each)
        draw = random.Random(count)
        times = [StageTimes(*(draw.random() for _ in range(5))) for _ in schedule.stage_ranks]
        times = [replace(each, share=draw.choice((0.0, 0.5))) for each in times]
        columns = [[getattr(stage, field) for stage in times] for field in StageTimes.__dataclass_fields__]
        assert clock.makespan(*columns) == pytest.approx(simulate_step(schedule, times).makespan)
        kept, gradients, entering, leaving, between = ([draw.randint(1, 9) for _ in schedule.stage_ranks] for _ in range(5))
        working = [[draw.randint(1, 9) for _ in schedule.stage_ranks] for _ in ActionKind]
        nothing = [0] * schedule.n_stages
        assert clock.peak_memory(kept, nothing, between=kept) == peak_activation(schedule, kept)
        under_way, unsent = ([draw.randint(1, 9) for _ in schedule.stage_ranks] for _ in range(2))
        pairs = itertools.combinations(range(schedule.n_stages), 2)
        waiting = {(one, other): draw.randint(1, 9) for one, other in pairs if schedule.stage_ranks[one] == schedule.stage_ranks[other]}
        sizes = (kept, gradients, working, 20.0, entering, leaving, between, waiting, under_way, unsent)
        assert clock.peak_memory(*sizes) == peak_memory(schedule, *sizes)
        order = order_of(name, n_ranks, count, each)
        assert (order.stage_ranks, order.in_flight) == (schedule.stage_ranks, peak_in_flight(schedule))
        assert order.later == tuple(held_later(schedule, stage) for stage in range(schedule.n_stages))
        assert order.awaiting == in_flight_while_awaiting(schedule)
        assert order.splits == SCHEDULES[name].splits_backward


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB1P"])
def test_what_waits_for_messages_in_closed_form_is_what_schedules_have(name: str) -> None:
    for n_ranks, count in itertools.product(range(1, 7), range(1, 10)):
        assert order_of(name, n_ranks, count, 1).awaiting == in_flight_while_awaiting(make_schedule(name, n_ranks, count)), (n_ranks, count)


def peak_memory(
    schedule: Schedule,
    kept: list[int],
    gradients: list[int],
    working: list[list[int]],
    summed: float,
    entering: list[int],
    leaving: list[int],
    between: list[int],
    waiting: Mapping[tuple[int, int], int],
    under_way: list[int],
    unsent: list[int],
) -> tuple[float, ...]:
    """Return peak memory by the definition: at each action, memory held by stages, of the action, and of arriving messages.

    Gradients that a stage's first backward sent are under way until another action has sent some; before it does, it holds ``unsent``.
    """
    peaks = []
    for actions in schedule.actions:
        held, made, moments, sent = 0, dict[int, int](), [0.0], 0
        done: set[tuple[int, int]] = set()  # (stage, microbatch) of the backwards so far
        for place, action in enumerate(actions):
            held += kept[action.stage] if action.kind is ActionKind.FORWARD else 0
            comes = 0
            if place + 1 < len(actions) and actions[place + 1].kind is not ActionKind.BACKWARD_WEIGHT:
                following = actions[place + 1]
                comes = (entering if following.kind is ActionKind.FORWARD else leaving)[following.stage]
            kind = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD).index(action.kind)
            computed = {(action.stage, action.microbatch)} if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) else set()
            left = sum(
                size * sum(stage == later and (first, row) not in done | computed for stage, row in done)
                for (first, later), size in waiting.items()
            )
            others = held + sum(made.values()) + comes + left
            sends = action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
            early = unsent[action.stage] if action.kind is ActionKind.BACKWARD else 0
            moments += [others + working[kind][action.stage], others + (early if sends else working[kind][action.stage]) + sent]
            done |= computed
            if sends:
                sent = under_way[action.stage] if action.stage not in made else 0
            if action.kind is ActionKind.BACKWARD_INPUT:
                held += between[action.stage] - kept[action.stage]
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                held -= (kept if action.kind is ActionKind.BACKWARD else between)[action.stage]
                made[action.stage] = gradients[action.stage]
        moments.append(sum(made.values()) + min(sum(made.values()), summed))
        peaks.append(max(moments))
    return tuple(peaks)


def held_later(schedule: Schedule, stage: int) -> int:
    """Return the most microbatches that a stage holds when it acts while it has gradients."""
    actions = [action for action in schedule.actions[schedule.stage_ranks[stage][0]] if action.stage == stage]
    ends = [place for place, action in enumerate(actions) if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)]
    held = []
    for place in range(ends[0] + 1, len(actions)):
        before = [action.kind for action in actions[: place + 1]]
        held.append(before.count(ActionKind.FORWARD) - sum(end < place for end in ends))
    return max(held, default=0)


@pytest.mark.parametrize("seed", range(20))
def test_unlike_ranks_share_the_work(seed: int) -> None:
    """However units are given to ranks, the busiest one has at least the bound, which equal speeds and small units reach."""
    generator = random.Random(seed)
    n_units, n_kinds = generator.randint(1, 6), generator.randint(1, 3)
    seconds = np.array([[generator.uniform(0.1, 1.0) for _ in range(n_kinds)] for _ in range(n_units)])
    kinds = [generator.randrange(n_kinds) for _ in range(generator.randint(1, 3))]
    busiest = (
        max(sum(seconds[unit, kind] for unit in range(n_units) if ranks[unit] == rank) for rank, kind in enumerate(kinds))
        for ranks in itertools.product(range(len(kinds)), repeat=n_units)
    )
    assert shared_load(seconds, kinds) <= min(busiest) * (1 + 1e-12)


def test_ranks_three_times_as_fast_take_three_quarters() -> None:
    assert shared_load(np.array([[1.0, 3.0]] * 8), [0, 1]) == pytest.approx(8 * 3 / 4)
    assert shared_load(np.array([[1.0]] * 8), [0, 0]) == pytest.approx(4)
    assert shared_load(np.zeros((8, 2)), [0, 1]) == 0
