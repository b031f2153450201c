"""The schedules on the clock: the bubbles that the papers state, the drawing, and what cannot run."""

from __future__ import annotations

import random
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest

from partitioner.planner.pipeline.candidate import StageTimes, simulate_step
from partitioner.schedules.catalog import SCHEDULES, make_schedule
from partitioner.schedules.clocks.clock import Timing
from partitioner.schedules.clocks.step_clock import StepClock
from partitioner.schedules.clocks.unit_time import Durations, draw, simulate
from passes.ir.errors import ConfigError, VerificationError
from passes.ir.schedule import Action, ActionKind, Schedule

N_MICROBATCHES = range(1, 17)
BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

each_size = pytest.mark.parametrize("n_ranks", range(1, 9))


@pytest.mark.parametrize(("name", "v"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3)])
@each_size
def test_bubble_fraction_is_the_formula_of_huang_and_narayanan(name: str, v: int, n_ranks: int) -> None:
    """(R-1)/(v m + R-1); with v stages a rank it asks that R divides m. Interleaving one stage a rank is 1F1B's time."""
    for m in N_MICROBATCHES:
        if name != "Interleaved1F1B" or m % n_ranks == 0:
            timeline = simulate(make_schedule(name, n_ranks, m, v))
            assert timeline.makespan == 3 * (v * m + n_ranks - 1)
            assert timeline.bubble_fraction == pytest.approx((n_ranks - 1) / (v * m + n_ranks - 1))


@pytest.mark.parametrize("durations", [Durations(), Durations(3, 3, 2), Durations(2, 3, 2), Durations(3, 2, 1), Durations(1, 4, 1)])
@each_size
def test_zb1p_idle_time_is_the_formula_of_qi(durations: Durations, n_ranks: int) -> None:
    """(R-1)(F+I-W) for m >= R and W no longer than F and I; on the barrier's clock and on each rank's own."""
    f, i, w = durations.forward, durations.backward_input, durations.backward_weight
    for m in range(n_ranks, 17):
        timeline = simulate(make_schedule("ZB1P", n_ranks, m), durations)
        idle = (n_ranks - 1) * (f + i - w)
        assert timeline.makespan - m * (f + i + w) == idle
        assert _longest_span(timeline) - m * (f + i + w) == idle


def _longest_span(timing: Timing) -> float:
    """Return the longest time from a rank's first action to the end of its last."""
    return max(finish - starts[0] for starts, finish in zip(timing.start, timing.finish, strict=True) if starts)


@each_size
def test_zb1p_bubble_is_a_third_of_1f1b(n_ranks: int) -> None:
    for m in range(n_ranks, 17):
        idle, full = (simulate(make_schedule(name, n_ranks, m)).makespan - 3 * m for name in ("ZB1P", "1F1B"))
        assert 3 * idle == full


@each_size
def test_zbv_ranks_are_never_idle_between_their_first_and_last_action(n_ranks: int) -> None:
    """For F = I = W and m >= 2R-1; a barrier between steps adds the R-1 forwards that the last rank starts late."""
    for m in range(2 * n_ranks - 1, 17):
        timeline = simulate(make_schedule("ZBV", n_ranks, m))
        assert _longest_span(timeline) == max(timeline.busy)
        assert [starts[0] for starts in timeline.start] == list(range(n_ranks))
        assert timeline.makespan == 6 * m + n_ranks - 1


@pytest.mark.parametrize("durations", [Durations(), Durations(3, 3, 2), Durations(3, 3, 1), Durations(4, 4, 3)])
@each_size
def test_dualpipe_v_idle_time_in_sequence(durations: Durations, n_ranks: int) -> None:
    """(R-1)(F+I-W) for m >= 2R and F = I >= W."""
    f, i, w = durations.forward, durations.backward_input, durations.backward_weight
    for m in range(2 * n_ranks, 17):
        timeline = simulate(make_schedule("DualPipeV", n_ranks, m), durations)
        assert timeline.makespan - 2 * m * (f + i + w) == (n_ranks - 1) * (f + i - w)


@pytest.mark.parametrize("durations", [Durations(), Durations(3, 3, 2), Durations(3, 3, 1), Durations(4, 4, 3)])
@each_size
def test_dualpipe_v_idle_time_with_overlapped_pairs_is_the_formula_of_deepseek(durations: Durations, n_ranks: int) -> None:
    """(PP/2-1)(F&B + B - 3W), PP = 2R stages, m >= 2R, F = I >= W; a pair F&B, forward then whole backward, takes F + B as one action."""
    f, w, b = durations.forward, durations.backward_weight, durations.of(ActionKind.BACKWARD)
    for m in range(2 * n_ranks, 17):
        schedule = make_schedule("DualPipeV", n_ranks, m)
        makespan = _longest_path(schedule, durations, [_overlapped(schedule, rank) for rank in range(n_ranks)])
        assert makespan - 2 * m * (f + b) == (n_ranks - 1) * (f + b + b - 3 * w)


def _overlapped(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """Return a rank's actions with each forward and the whole backward after it as one; the last rank runs its first pair in sequence."""
    groups: list[tuple[Action, ...]] = []
    apart = rank == schedule.n_ranks - 1
    for action in schedule.actions[rank]:
        if action.kind is ActionKind.BACKWARD and groups[-1][-1].kind is ActionKind.FORWARD and not apart:
            groups[-1] += (action,)
        else:
            apart = apart and action.kind is not ActionKind.BACKWARD
            groups.append((action,))
    return groups


def _longest_path(schedule: Schedule, durations: Durations, groups: list[list[tuple[Action, ...]]]) -> float:
    """Return the time of a step as the longest path over groups of actions, each of which starts and ends as one."""
    home = {action: group for rank_groups in groups for group in rank_groups for action in group}
    gradient = {(action.stage, action.microbatch): home[action] for action in schedule if action.kind in BACKWARDS}
    before: dict[tuple[Action, ...], set[tuple[Action, ...]]] = {group: set() for group in home.values()}
    for rank_groups in groups:
        for one, following in pairwise(rank_groups):
            before[following].add(one)
    for action, group in home.items():
        if action.kind is ActionKind.FORWARD and action.stage > 0:
            before[group].add(home[Action(action.stage - 1, ActionKind.FORWARD, action.microbatch)])
        if action.kind in BACKWARDS and action.stage + 1 < schedule.n_stages:
            before[group].add(gradient[action.stage + 1, action.microbatch])
    end: dict[tuple[Action, ...], float] = {}
    for group in TopologicalSorter(before).static_order():
        ready = max((end[other] for other in before[group]), default=0)
        end[group] = ready + sum(durations.of(action.kind) for action in group)
    return max(end.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_clock_is_the_longest_path(name: str) -> None:
    durations = Durations(2, 3, 1, backward=5)
    for n_ranks, m in [(1, 1), (2, 5), (3, 2), (4, 4), (5, 11)]:
        schedule = make_schedule(name, n_ranks, m)
        groups: list[list[tuple[Action, ...]]] = [[(action,) for action in actions] for actions in schedule.actions]
        assert simulate(schedule, durations).makespan == _longest_path(schedule, durations, groups)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB1P"])
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (3, 1, 2)])
def test_a_step_ends_with_the_last_rank_of_a_stage(name: str, replicas: tuple[int, ...]) -> None:
    """Ranks that share a stage alternate: which of them ends last depends on the number of microbatches."""
    for n_microbatches in range(3, 9):
        schedule = make_schedule(name, sum(replicas), n_microbatches, 1, replicas)
        durations = random.Random(n_microbatches).choices(range(1, 9), k=5 * len(replicas))
        columns = [tuple(map(float, durations[index :: len(replicas)][:5])) for index in range(len(replicas))]
        times = tuple(StageTimes(*column) for column in columns)
        clock = StepClock(schedule)
        assert clock.makespan(*zip(*columns, strict=True)) == pytest.approx(simulate_step(schedule, times).makespan)


def test_drawing_scales_with_the_durations() -> None:
    schedule = make_schedule("1F1B", 2, 2)
    drawing = [
        "rank 0 |0F0    |0F1    |...........|0B0        |.......|0B1        |",
        "rank 1 |.......|1F0    |1B0        |1F1    |1B1        |",
    ]
    assert draw(schedule, Durations(2, 1, 2)).splitlines() == drawing
    with pytest.raises(ConfigError, match=r"F of 0\.5 units cannot be drawn"):
        draw(schedule, Durations(0.5))


def _actions(*texts: str) -> tuple[Action, ...]:
    return tuple(Action.parse(text) for text in texts)


def test_a_wait_cycle_names_the_actions_in_it() -> None:
    ranks = (_actions("0F0", "0B0", "0F1", "0B1"), _actions("1F1", "1B1", "1F0", "1B0"))
    with pytest.raises(VerificationError) as error:
        simulate(Schedule("hand-made", 2, ((0,), (1,)), ranks))
    assert error.value.problem == (
        "schedule hand-made cannot run: rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0"
    )


def test_a_rank_that_waits_for_itself_is_a_cycle() -> None:
    with pytest.raises(VerificationError, match="cannot run: rank 0 at 0W0 waits for 0I0 of rank 0\n"):
        simulate(Schedule("hand-made", 1, ((0,),), (_actions("0F0", "0W0", "0I0"),)))


def test_a_result_that_nobody_computes_is_named() -> None:
    with pytest.raises(VerificationError, match="1F0 of rank 1 needs 0F0, which no rank computes"):
        simulate(Schedule("hand-made", 1, ((0,), (1,)), ((), _actions("1F0", "1B0"))))


@pytest.mark.parametrize("ranks", [("0F0", "0F0"), ("0F0", "0B0", "0W0"), ("0F0", "0I0", "0B0")])
def test_an_action_done_twice_is_named(ranks: tuple[str, ...]) -> None:
    with pytest.raises(VerificationError, match=r"computes 0[FIW]0 twice"):
        simulate(Schedule("hand-made", 1, ((0,),), (_actions(*ranks),)))


@pytest.mark.parametrize(("share", "makespan"), [(0.0, 11.0), (0.5, 12.0), (1.0, 13.0)])
def test_who_moves_a_message_computes_less_meanwhile(share: float, makespan: float) -> None:
    """Charge the part of a transfer that its ends' processors do to their compute.

    rank 0   |F0|F1|. . . . .|B0 B0|B1 B1|        F1 came while rank 1 computed F0, and the gradient of B1 while rank 0 computed B0:
    rank 1   . . |F0|F1|B0 B0|B1 B1|              each of 1 s, of which a part is the processor's; an idle rank loses nothing
    """
    stages = [StageTimes(1.0, 1.0, 1.0, 1.0, 1.0, share)] * 2
    assert simulate_step(make_schedule("GPipe", 2, 2), stages).makespan == makespan
