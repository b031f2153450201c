"""How long a step takes: a schedule on a clock, every stage with its own times, messages with theirs.

rank 0   |F0|F1|F2|      |B0|     |B1| ...       an action starts when its rank is free
rank 1      ~|F0|F1|F2|~|B0|...                   and what it needs has arrived: ~ is the message on its way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.ir.errors import VerificationError
from passes.ir.schedule import Action, ActionKind, Schedule

__all__ = ["StageTimes", "StepTime", "simulate_step"]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one microbatch.

    Attributes:
        forward: compute.
        backward_input: compute of the input half.
        backward_weight: compute of the weight half.
        send: until what it sends forward has arrived.
        send_gradient: until the gradients that it sends back have arrived.
    """

    forward: float
    backward_input: float
    backward_weight: float
    send: float
    send_gradient: float

    def of(self, kind: ActionKind) -> float:
        """Seconds of an action."""
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward_input + self.backward_weight,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


@dataclass(frozen=True)
class StepTime:
    """What the clock says.

    Attributes:
        seconds: from the first start to the last end.
        busy: for each rank, the seconds that it computes.
    """

    seconds: float
    busy: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time that is idle."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate_step(schedule: Schedule, stages: Sequence[StageTimes]) -> StepTime:
    """Run a schedule on the clock; raises VerificationError when ranks wait for each other for ever."""
    arrived: dict[tuple[int, bool, int], float] = {}
    clock = [0.0] * schedule.n_ranks
    busy = [0.0] * schedule.n_ranks
    place = [0] * schedule.n_ranks
    waiting = list(range(schedule.n_ranks))
    while waiting:
        moved = False
        for rank in waiting:
            actions = schedule.actions[rank]
            while place[rank] < len(actions) and (start := _start(actions[place[rank]], schedule.n_stages, arrived)) is not None:
                action = actions[place[rank]]
                seconds = stages[action.stage].of(action.kind)
                clock[rank] = max(clock[rank], start) + seconds
                busy[rank] += seconds
                _arrive(action, stages[action.stage], clock[rank], arrived)
                place[rank] += 1
                moved = True
        waiting = [rank for rank in waiting if place[rank] < len(schedule.actions[rank])]
        if waiting and not moved:
            heads = ", ".join(f"rank {rank} at {schedule.actions[rank][place[rank]]}" for rank in waiting)
            raise VerificationError(f"schedule {schedule.name} cannot run: nothing can start ({heads})", remedy="correct its order")
    return StepTime(max(clock), tuple(busy))


def _start(action: Action, n_stages: int, arrived: Mapping[tuple[int, bool, int], float]) -> float | None:
    """When what the action needs from other stages is there; None: not computed yet. Its own stage's results are in order already."""
    forward = action.kind is ActionKind.FORWARD
    if action.kind is ActionKind.BACKWARD_WEIGHT or (action.stage == 0 if forward else action.stage == n_stages - 1):
        return 0.0
    return arrived.get((action.stage - 1 if forward else action.stage + 1, forward, action.microbatch))


def _arrive(action: Action, times: StageTimes, end: float, arrived: dict[tuple[int, bool, int], float]) -> None:
    """Note when the action's result reaches the next stage (forward) or the one before (backward)."""
    if action.kind is not ActionKind.BACKWARD_WEIGHT:
        forward = action.kind is ActionKind.FORWARD
        arrived[action.stage, forward, action.microbatch] = end + (times.send if forward else times.send_gradient)
