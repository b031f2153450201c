"""A schedule on a clock: when each action starts, given how long actions and messages take.

    rank 0   |F0|F1|F2|      |B0|     |B1| ...       an action starts when its rank is free
    rank 1      ~|F0|F1|F2|~|B0|...                   and what it needs has arrived: ~ is the message on its way

What an action needs:

    F of stage s    the F of stage s-1 on the same microbatch
    B or I of s     its own F, and the B or I of stage s+1
    W of s          its own I
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes.ir.errors import VerificationError
from passes.ir.schedule import Action, ActionKind, Schedule

_Result = tuple[int, ActionKind, int]
"""Stage, kind, and microbatch of a result; the kind is FORWARD, BACKWARD_INPUT or BACKWARD_WEIGHT."""


@dataclass(frozen=True)
class Timing:
    """When each action of a schedule runs.

    Attributes:
        schedule: what was run.
        start: for each rank, when each of its actions starts, in the order of ``schedule.actions``.
        busy: for each rank, the time that it computes.
        finish: for each rank, when its last action ends.
    """

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]
    finish: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last action of all ends."""
        return max(self.finish)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time, from the first start to the last end, that is idle (Huang et al. 2019)."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


def host_delay(sent_at: float, arrives_at: float, free_at: float, host_share: float) -> float:
    """Return by how much a message delays the computation of its receiver, whose processor moves a part of it.

        message        sent_at |~~~~~~~~| arrives_at
        receiver     ... computing ...  | free_at          delayed by host_share * (time in which it computes and the message moves)

    Args:
        host_share: part of the message's time that the processor is busy with it (``Link.host_share``).
    """
    return host_share * max(0.0, min(arrives_at, free_at) - sent_at)


def run_on_clock(
    schedule: Schedule,
    duration: Callable[[Action], float],
    message_time: Callable[[int, ActionKind], float] | None = None,
    host_share: Callable[[int, ActionKind], float] | None = None,
) -> Timing:
    """Run a schedule on the clock.

    Args:
        duration: of an action.
        message_time: of a stage's result (kind FORWARD or BACKWARD_INPUT), until the stage that reads it has it. None: no time.
        host_share: of the same, the part of that time in which the receiver's processor is busy with it. None: nothing.

    Raises:
        VerificationError: the schedule cannot run: ranks wait for each other, or for what no rank computes, or compute twice.
    """
    computed_at: dict[_Result, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.n_ranks
    busy = [0.0] * schedule.n_ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while len(starts[rank]) < len(actions):
                action = actions[len(starts[rank])]
                arrival = _arrival(action, schedule.n_stages, computed_at, message_time)
                if arrival is None:
                    break
                sent_at, arrives_at, message = arrival
                delay = 0.0
                if host_share is not None and message is not None:
                    delay = host_delay(sent_at, arrives_at, clock[rank], host_share(*message))
                starts[rank].append(max(clock[rank], arrives_at) + delay)
                seconds = duration(action)
                clock[rank] = starts[rank][-1] + seconds
                busy[rank] += seconds
                for result in _results(action):
                    if result in computed_at:
                        raise VerificationError(f"schedule {schedule.name} computes {Action(*result)} twice", remedy=f"leave {action} out")
                    computed_at[result] = clock[rank]
                progress = True
    blocked = {rank: actions[len(starts[rank])] for rank, actions in enumerate(schedule.actions) if len(starts[rank]) < len(actions)}
    if blocked:
        raise _deadlock(schedule, blocked, set(computed_at))
    return Timing(schedule, tuple(tuple(rank_starts) for rank_starts in starts), tuple(busy), tuple(clock))


def _arrival(
    action: Action, n_stages: int, computed_at: dict[_Result, float], message_time: Callable[[int, ActionKind], float] | None
) -> tuple[float, float, tuple[int, ActionKind] | None] | None:
    """Return when an action's message was sent, when all that it needs is there, and the message; None while a need is not computed."""
    sent_at, arrives_at, message = 0.0, 0.0, None
    for need in _needs(action, n_stages):
        arrival = computed_at.get(need)
        if arrival is None:
            return None
        if message_time is not None and need[0] != action.stage:
            sent_at, message = arrival, (need[0], need[1])
            arrival += message_time(*message)
        arrives_at = max(arrives_at, arrival)
    return sent_at, arrives_at, message


def _needs(action: Action, n_stages: int) -> list[_Result]:
    """Return the results that an action reads."""
    stage, microbatch, kind = action.stage, action.microbatch, action.kind
    if kind is ActionKind.FORWARD:
        return [(stage - 1, ActionKind.FORWARD, microbatch)] if stage > 0 else []
    if kind is ActionKind.BACKWARD_WEIGHT:
        return [(stage, ActionKind.BACKWARD_INPUT, microbatch)]
    own = (stage, ActionKind.FORWARD, microbatch)
    return [own, (stage + 1, ActionKind.BACKWARD_INPUT, microbatch)] if stage + 1 < n_stages else [own]


def _results(action: Action) -> list[_Result]:
    """Return the results that an action computes; a whole backward computes both halves."""
    stage, microbatch, kind = action.stage, action.microbatch, action.kind
    if kind is ActionKind.BACKWARD:
        return [(stage, ActionKind.BACKWARD_INPUT, microbatch), (stage, ActionKind.BACKWARD_WEIGHT, microbatch)]
    return [(stage, kind, microbatch)]


def _deadlock(schedule: Schedule, blocked: dict[int, Action], computed: set[_Result]) -> VerificationError:
    """Return the error for a schedule that cannot go on: it names a cycle of waiting ranks, or a result that no rank computes.

    Args:
        blocked: for each rank that is not done, its next action.
        computed: all results so far.
    """
    producers = {
        result: (rank, action) for rank, actions in enumerate(schedule.actions) for action in actions for result in _results(action)
    }
    waits: dict[int, str] = {}
    rank = min(blocked)
    while rank not in waits:  # follow each rank to the one that it waits for, until one is met again
        missing = next(need for need in _needs(blocked[rank], schedule.n_stages) if need not in computed)
        if missing not in producers:
            return VerificationError(
                f"schedule {schedule.name} cannot run: {blocked[rank]} of rank {rank} needs {Action(*missing)}, which no rank computes",
                remedy="give every stage a forward and a backward for every microbatch",
            )
        producer, awaited = producers[missing]
        waits[rank] = f"rank {rank} at {blocked[rank]} waits for {awaited} of rank {producer}"
        rank = producer
    cycle = list(waits)[list(waits).index(rank) :]
    return VerificationError(
        f"schedule {schedule.name} cannot run: {'; '.join(waits[rank] for rank in cycle)}",
        remedy="order the actions of each rank so that what comes first never waits for what comes later",
    )
