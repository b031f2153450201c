"""How long a step takes: a schedule on the clock, every stage with its own times, messages with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.schedules.clock import Timing, run_on_clock
from passes.ir.schedule import ActionKind, Schedule

__all__ = ["StageTimes", "simulate_step"]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one microbatch.

    Attributes:
        forward: compute.
        backward_input: compute of the input half.
        backward_weight: compute of the weight half.
        send: until what it sends forward has arrived.
        send_gradient: until the gradients that it sends back have arrived.
        share: the part of the time of messages between it and the next stage in which who receives computes nothing.
    """

    forward: float
    backward_input: float
    backward_weight: float
    send: float
    send_gradient: float
    share: float = 0.0

    def of(self, kind: ActionKind) -> float:
        """Seconds of an action."""
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward_input + self.backward_weight,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


def simulate_step(schedule: Schedule, stages: Sequence[StageTimes]) -> Timing:
    """Run a schedule on the clock; raises VerificationError when it cannot run."""

    def on_its_way(stage: int, kind: ActionKind) -> float:
        return stages[stage].send if kind is ActionKind.FORWARD else stages[stage].send_gradient

    def share(stage: int, kind: ActionKind) -> float:
        return stages[stage if kind is ActionKind.FORWARD else stage - 1].share

    seconds = {kind: [times.of(kind) for times in stages] for kind in ActionKind}
    return run_on_clock(schedule, lambda action: seconds[action.kind][action.stage], on_its_way, share)
