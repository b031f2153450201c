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

__all__ = ["Timing", "held_up", "run_on_clock"]

_Result = tuple[int, ActionKind, int]
"""Something computed: a stage, FORWARD, BACKWARD_INPUT or BACKWARD_WEIGHT, a microbatch."""


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


def held_up(left: float, there: float, free: float, share: float) -> float:
    """How much later a rank is done with what it computed while a message came, of which its processor moved a part.

        message           left |~~~~~~~~| there
        rank     ... computing ...   | free          held up by share x (free - left), of there - left at most

    Args:
        share: the part of the message's time that is the processor's (``Link.host_share``).
    """
    return share * max(0.0, min(there, free) - left)


def run_on_clock(
    schedule: Schedule,
    duration: Callable[[Action], float],
    on_its_way: Callable[[int, ActionKind], float] | None = None,
    share: Callable[[int, ActionKind], float] | None = None,
) -> Timing:
    """Run a schedule on the clock.

    Args:
        duration: of an action.
        on_its_way: how long a stage's result (of a FORWARD, or a BACKWARD_INPUT) takes to the stage that reads it. None: no time.
        share: the part of that time in which the processor of who receives is busy with it. None: nothing.

    Raises:
        VerificationError: the schedule cannot run: ranks wait for each other, or for what no rank computes, or compute twice.
    """
    ready: dict[_Result, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.n_ranks
    busy = [0.0] * schedule.n_ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while len(starts[rank]) < len(actions):
                action = actions[len(starts[rank])]
                message = _last_message(action, schedule.n_stages, ready, on_its_way)
                if message is None:
                    break
                left, start, need = message
                moved = 0.0 if share is None or need is None else held_up(left, start, clock[rank], share(*need))
                starts[rank].append(max(clock[rank], start) + moved)
                lasts = duration(action)
                clock[rank] = starts[rank][-1] + lasts
                busy[rank] += lasts
                for result in _results(action):
                    if result in ready:
                        raise VerificationError(f"schedule {schedule.name} computes {Action(*result)} twice", remedy=f"leave {action} out")
                    ready[result] = clock[rank]
                progress = True
    heads = {rank: actions[len(starts[rank])] for rank, actions in enumerate(schedule.actions) if len(starts[rank]) < len(actions)}
    if heads:
        raise _stuck(schedule, heads, set(ready))
    return Timing(schedule, tuple(tuple(rank_starts) for rank_starts in starts), tuple(busy), tuple(clock))


def _last_message(
    action: Action, n_stages: int, ready: dict[_Result, float], on_its_way: Callable[[int, ActionKind], float] | None
) -> tuple[float, float, tuple[int, ActionKind] | None] | None:
    """When what the action needs of another stage left, when all that it needs is there, and the message; None: not computed yet."""
    left, start, message = 0.0, 0.0, None
    for need in _needs(action, n_stages):
        arrival = ready.get(need)
        if arrival is None:
            return None
        if on_its_way is not None and need[0] != action.stage:
            left, message = arrival, (need[0], need[1])
            arrival += on_its_way(*message)
        start = max(start, arrival)
    return left, start, message


def _needs(action: Action, n_stages: int) -> list[_Result]:
    stage, microbatch, kind = action.stage, action.microbatch, action.kind
    if kind is ActionKind.FORWARD:
        return [(stage - 1, ActionKind.FORWARD, microbatch)] if stage > 0 else []
    if kind is ActionKind.BACKWARD_WEIGHT:
        return [(stage, ActionKind.BACKWARD_INPUT, microbatch)]
    own = (stage, ActionKind.FORWARD, microbatch)
    return [own, (stage + 1, ActionKind.BACKWARD_INPUT, microbatch)] if stage + 1 < n_stages else [own]


def _results(action: Action) -> list[_Result]:
    """What the action computes; a whole backward is both halves."""
    stage, microbatch, kind = action.stage, action.microbatch, action.kind
    if kind is ActionKind.BACKWARD:
        return [(stage, ActionKind.BACKWARD_INPUT, microbatch), (stage, ActionKind.BACKWARD_WEIGHT, microbatch)]
    return [(stage, kind, microbatch)]


def _stuck(schedule: Schedule, heads: dict[int, Action], ready: set[_Result]) -> VerificationError:
    """Follow who waits for whom, from one rank that is stuck, to a rank met before or to a result that nobody computes.

    Args:
        schedule: what cannot go on.
        heads: for each rank that is not done, the action that it waits with.
        ready: all that has been computed.
    """
    producers = {
        result: (rank, action) for rank, actions in enumerate(schedule.actions) for action in actions for result in _results(action)
    }
    waits: dict[int, str] = {}
    rank = min(heads)
    while rank not in waits:
        missing = next(need for need in _needs(heads[rank], schedule.n_stages) if need not in ready)
        if missing not in producers:
            return VerificationError(
                f"schedule {schedule.name} cannot run: {heads[rank]} of rank {rank} needs {Action(*missing)}, which no rank computes",
                remedy="give every stage a forward and a backward for every microbatch",
            )
        producer, awaited = producers[missing]
        waits[rank] = f"rank {rank} at {heads[rank]} waits for {awaited} of rank {producer}"
        rank = producer
    circle = list(waits)[list(waits).index(rank) :]
    return VerificationError(
        f"schedule {schedule.name} cannot run: {'; '.join(waits[rank] for rank in circle)}",
        remedy="order the actions of each rank so that what comes first never waits for what comes later",
    )
