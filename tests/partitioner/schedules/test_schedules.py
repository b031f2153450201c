"""Properties of every schedule, on every 1..8 ranks with every 1..16 microbatches."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.schedules.catalog import SCHEDULES, find_schedule, make_schedule
from partitioner.schedules.clocks.clock import Timing
from partitioner.schedules.clocks.unit_time import Durations, simulate
from partitioner.schedules.kind import peak_in_flight
from partitioner.schedules.pattern import on
from passes.ir.errors import ConfigError
from passes.ir.schedule import Action, ActionKind, Schedule
from tests.support.planning.peak_activation import peak_activation

CASES = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 3),
    ("ZB1P", 1),
    ("ZBV", 2),
    ("DualPipeV", 2),
]
N_RANKS = range(1, 9)
N_MICROBATCHES = range(1, 17)
BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

each_case = pytest.mark.parametrize(("name", "v"), CASES)
each_size = pytest.mark.parametrize("n_ranks", N_RANKS)


@cache
def _timeline(name: str, n_ranks: int, n_microbatches: int, v: int) -> Timing:
    return simulate(make_schedule(name, n_ranks, n_microbatches, v))


def _rank_of(name: str, n_ranks: int, v: int, stage: int) -> int:
    """Return the rank of a stage in the papers."""
    if name in ("ZBV", "DualPipeV"):
        return stage if stage < n_ranks else 2 * n_ranks - 1 - stage
    return stage % n_ranks


def _check_every_action_once(schedule: Schedule, name: str, v: int) -> None:
    assert schedule.n_stages == v * schedule.n_ranks
    microbatches = list(range(schedule.n_microbatches))
    seen: dict[tuple[int, ActionKind], list[int]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            assert _rank_of(name, schedule.n_ranks, v, action.stage) == schedule.stage_ranks[action.stage][0] == rank
            seen.setdefault((action.stage, action.kind), []).append(action.microbatch)
    for stage in range(schedule.n_stages):
        forwards, wholes, inputs, weights = (seen.get((stage, ActionKind(letter)), []) for letter in "FBIW")
        assert forwards == microbatches
        assert sorted(wholes + inputs) == microbatches
        assert inputs == weights
        assert wholes == sorted(wholes)
        assert inputs == sorted(inputs)


def _check_dependencies(timeline: Timing) -> None:
    schedule, durations = timeline.schedule, Durations()
    start: dict[Action, float] = {}
    for actions, starts in zip(schedule.actions, timeline.start, strict=True):
        start.update(zip(actions, starts, strict=True))
        for (one, one_start), (_, next_start) in pairwise(zip(actions, starts, strict=True)):
            assert next_start >= one_start + durations.of(one.kind)
    end = {action: at + durations.of(action.kind) for action, at in start.items()}
    gradient = {(action.stage, action.microbatch): end[action] for action in schedule if action.kind in BACKWARDS}
    for action in schedule:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD and stage > 0:
            assert start[action] >= end[Action(stage - 1, ActionKind.FORWARD, microbatch)]
        if action.kind in BACKWARDS:
            assert start[action] >= end[Action(stage, ActionKind.FORWARD, microbatch)]
            assert stage + 1 == schedule.n_stages or start[action] >= gradient[stage + 1, microbatch]
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            assert start[action] >= end[Action(stage, ActionKind.BACKWARD_INPUT, microbatch)]


def _held(timeline: Timing, of: Callable[[int], int]) -> dict[int, int]:
    """Return, by brute force on the clock, the most activations alive when a stage of each group begins."""
    lives: dict[tuple[int, int], list[float]] = {}
    for actions, starts in zip(timeline.schedule.actions, timeline.start, strict=True):
        for action, start in zip(actions, starts, strict=True):
            life = lives.setdefault((action.stage, action.microbatch), [start, start])
            life[1] = max(life[1], start + Durations().of(action.kind))
    groups: dict[int, list[list[float]]] = {}
    for (stage, _), life in lives.items():
        groups.setdefault(of(stage), []).append(life)
    return {key: max(sum(b <= born < e for b, e in group) for born, _ in group) for key, group in groups.items()}


IN_FLIGHT_BOUND: dict[str, Callable[[int, int, int, int], int]] = {
    "GPipe": lambda rank, n_ranks, m, v: m,
    "1F1B": lambda rank, n_ranks, m, v: min(m, n_ranks - rank),
    "Interleaved1F1B": lambda rank, n_ranks, m, v: (
        min(v * m, 2 * (n_ranks - 1 - rank) + (v - 1) * n_ranks + 1) if v > 1 else min(m, n_ranks - rank)
    ),
    "ZB1P": lambda rank, n_ranks, m, v: min(m, n_ranks),
    "ZBV": lambda rank, n_ranks, m, v: min(2 * m, 2 * n_ranks),
    "DualPipeV": lambda rank, n_ranks, m, v: min(2 * m, 2 * n_ranks + 1),
}
"""The most activations (of a stage and a microbatch) that a rank holds, of (rank, n_ranks, m, v), as the papers state it."""

IN_PAPER: dict[str, Callable[[int, int], bool]] = {
    "GPipe": lambda n_ranks, m: True,
    "1F1B": lambda n_ranks, m: True,
    "Interleaved1F1B": lambda n_ranks, m: m % n_ranks == 0,
    "ZB1P": lambda n_ranks, m: True,
    "ZBV": lambda n_ranks, m: m >= 2 * n_ranks - 1,
    "DualPipeV": lambda n_ranks, m: m >= 2 * n_ranks,
}
"""Whether the paper has a schedule for (n_ranks, m): there the bound is reached, elsewhere it is only kept."""


def _check_in_flight(timeline: Timing, name: str, v: int) -> None:
    schedule = timeline.schedule
    n_ranks, m = schedule.n_ranks, schedule.n_microbatches
    by_rank = _held(timeline, lambda stage: schedule.stage_ranks[stage][0])
    bounds = {rank: IN_FLIGHT_BOUND[name](rank, n_ranks, m, v) for rank in range(n_ranks)}
    if IN_PAPER[name](n_ranks, m):
        assert by_rank == bounds
    assert all(by_rank[rank] <= bounds[rank] for rank in bounds)
    by_stage = _held(timeline, lambda stage: stage)
    assert peak_in_flight(schedule) == tuple(by_stage[stage] for stage in range(schedule.n_stages))
    assert peak_activation(schedule, [1] * schedule.n_stages) == tuple(by_rank[rank] for rank in range(n_ranks))


@pytest.mark.parametrize(
    ("n_ranks", "name", "v"),
    [
        pytest.param(n_ranks, name, v, marks=pytest.mark.slow if (name, v) == ("Interleaved1F1B", 2) and n_ranks >= 7 else ())
        for n_ranks in N_RANKS
        for name, v in CASES
    ],
)
def test_every_action_once_on_the_right_rank_in_order(name: str, v: int, n_ranks: int) -> None:
    for m in N_MICROBATCHES:
        schedule = _timeline(name, n_ranks, m, v).schedule
        _check_every_action_once(schedule, name, v)
        assert SCHEDULES[name].splits_backward or not schedule.splits_backward


@each_case
@each_size
def test_dependencies_are_kept_and_nothing_waits_in_a_circle(name: str, v: int, n_ranks: int) -> None:
    for m in N_MICROBATCHES:
        _check_dependencies(_timeline(name, n_ranks, m, v))


@each_case
@each_size
def test_activations_in_flight_keep_the_bound_of_the_paper(name: str, v: int, n_ranks: int) -> None:
    for m in N_MICROBATCHES:
        _check_in_flight(_timeline(name, n_ranks, m, v), name, v)


@each_size
def test_interleaving_one_stage_a_rank_is_1f1b(n_ranks: int) -> None:
    for m in N_MICROBATCHES:
        interleaved, plain = make_schedule("Interleaved1F1B", n_ranks, m, 1), make_schedule("1F1B", n_ranks, m)
        assert (interleaved.actions, interleaved.stage_ranks) == (plain.actions, plain.stage_ranks)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(case=st.sampled_from(CASES), n_ranks=st.integers(1, 20), m=st.integers(1, 50), v=st.integers(1, 5))
def test_larger_numbers_keep_the_same_properties(case: tuple[str, int], n_ranks: int, m: int, v: int) -> None:
    name, stages = case
    stages = v if name == "Interleaved1F1B" else stages
    timeline = simulate(make_schedule(name, n_ranks, m, stages))
    _check_every_action_once(timeline.schedule, name, stages)
    _check_dependencies(timeline)
    _check_in_flight(timeline, name, stages)


@each_case
@each_size
def test_fewer_microbatches_never_take_longer(name: str, v: int, n_ranks: int) -> None:
    makespans = [_timeline(name, n_ranks, m, v).makespan for m in N_MICROBATCHES]
    assert all(fewer <= more for fewer, more in pairwise(makespans))


@pytest.mark.parametrize(
    "module",
    ["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zbv", "dualpipe_v", "pattern", "catalog"],
)
def test_drawings_and_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"partitioner.schedules.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


@each_case
def test_text_round_trip(name: str, v: int) -> None:
    for n_ranks, m in [(1, 1), (2, 3), (4, 8), (8, 5)]:
        schedule = make_schedule(name, n_ranks, m, v)
        text = schedule.to_text()
        assert Schedule.parse(text, name=name, stage_ranks=schedule.stage_ranks, n_microbatches=m) == schedule
        assert len(text.splitlines()) == n_ranks
        assert Schedule.parse(text, name=name) == schedule, "the text has stages, ranks and microbatches"


def test_a_text_alone_is_a_schedule() -> None:
    schedule = Schedule.parse("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1")
    assert (schedule.stage_ranks, schedule.n_microbatches) == (((0,), (1,)), 2)
    assert schedule == Schedule.parse(schedule.to_text(), stage_ranks=((0,), (1,)), n_microbatches=2)
    assert schedule.name.startswith("custom-")
    assert schedule.name != Schedule.parse("0F0,0B0").name


def test_ranks_that_share_a_stage_are_in_the_order_of_microbatches() -> None:
    assert Schedule.parse("0F1,0B1\n0F0,0B0\n1F0,1B0,1F1,1B1").stage_ranks == ((1, 0), (2,))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (None, {}, "text must be a str, not None"),
        ("0F0,0B0", {"n_microbatches": "two"}, "n_microbatches must be"),
        ("0F0,0B0", {"stages": 1}, "its arguments are text, name, stage_ranks, n_microbatches"),
        ("", {}, "no action of stage 0"),
        ("0F0,0B0\n2F0,2B0", {}, "no action of stage 1"),
        ("0F0,0B0\n1F0,1B0", {"stage_ranks": ((0,), (0,))}, r"runs 1F0 on rank 1, which does not fit stage_ranks=\(\(0,\), \(0,\)\)"),
        ("0F0,0F1,0B0,0B1", {"n_microbatches": 1}, "runs 0F1 on rank 0, which does not fit .*n_microbatches=1"),
    ],
)
def test_a_text_that_is_no_schedule(text: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        Schedule.parse(text, **options)


@each_case
def test_stage_ranks_of_the_kind_are_those_of_the_schedule(name: str, v: int) -> None:
    assert SCHEDULES[name].stage_ranks(3, v) == make_schedule(name, 3, 7, v).stage_ranks


def test_peak_activation_is_weighted_by_stage() -> None:
    """The rank holds at most two of stage 0 and one of stage 1 at once."""
    text = "0F0,0F1,1F0,1B0,0B0,1F1,1B1,0B1"
    schedule = Schedule.parse(text, name="hand-made", stage_ranks=((0,), (0,)), n_microbatches=2)
    assert peak_in_flight(schedule) == (2, 1)
    assert peak_activation(schedule, [10, 1]) == (21,)
    assert peak_activation(schedule, [1, 10]) == (12,)


def test_default_stages_per_rank() -> None:
    stages = {name: make_schedule(name, 3, 4).n_stages for name in SCHEDULES}
    assert stages == {"GPipe": 3, "1F1B": 3, "Interleaved1F1B": 6, "ZB1P": 3, "ZBV": 6, "DualPipeV": 6}


@pytest.mark.parametrize(("typed", "meant"), [("1f1b", "1F1B"), ("Gpipe", "GPipe"), ("ZB-V", "ZBV"), ("Interleaved", "Interleaved1F1B")])
def test_unknown_schedule_suggests_the_closest(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"no schedule '{typed}'") as error:
        find_schedule(typed)
    assert error.value.remedy is not None
    assert error.value.remedy.startswith(f"did you mean '{meant}'?")
    assert all(name in error.value.remedy for name in SCHEDULES)


def test_unknown_schedule_that_is_close_to_none_lists_them() -> None:
    with pytest.raises(ConfigError) as error:
        make_schedule("round robin", 2, 2)
    assert str(error.value.remedy).startswith("choose one of GPipe, 1F1B, Interleaved1F1B, ZB1P, ZBV, DualPipeV")


@pytest.mark.parametrize(
    ("name", "numbers", "problem"),
    [
        ("1F1B", (0, 4, None), "cannot have 0 pipeline ranks"),
        ("1F1B", (4, 0, None), "cannot have 0 microbatches"),
        ("ZB1P", (4, 4, 2), "cannot run 2 stages on each device: it runs exactly 1"),
        ("ZBV", (4, 4, 1), "cannot run 1 stages on each device: it runs exactly 2"),
        ("Interleaved1F1B", (4, 4, 0), "cannot run 0 stages on each device: it runs at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(name: str, numbers: tuple[int, int, int | None], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_schedule(name, *numbers)


def test_a_pattern_is_letters_of_a_stage() -> None:
    assert on(3, "IW") == [(3, ActionKind.BACKWARD_INPUT), (3, ActionKind.BACKWARD_WEIGHT)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_states_is_what_its_ranks_do(name: str) -> None:
    kind = SCHEDULES[name]
    for n_ranks, m in product((1, 2, 3, 5), (1, 4, 12)):
        schedule = kind.build(n_ranks, m)
        for rank, actions in enumerate(schedule.actions):
            is_forward = [action.kind is ActionKind.FORWARD for action in actions]
            assert not kind.forwards_first or is_forward == sorted(is_forward, reverse=True)
            if kind.forwards_ahead is not None:
                first = min(action.stage for action in actions)
                in_front = next(place for place, action in enumerate(actions) if action.stage != first)
                assert in_front == min(m, kind.forwards_ahead(n_ranks, rank))
