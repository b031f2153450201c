"""How many activations a schedule keeps alive.

An activation is held from the forward of its stage and microbatch to the end of the backward that reads it: B, or W when the backward
is split. This depends on the order of the actions of one rank alone, never on how long they take.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.ir.schedule import ActionKind, Schedule

__all__ = ["peak_activation", "peak_in_flight"]

_FREES = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def peak_in_flight(schedule: Schedule, ends: Collection[ActionKind] = _FREES, *, later: bool = False) -> tuple[int, ...]:
    """For each stage, the most microbatches whose forward has begun and whose end has not come, on any one of its ranks.

    Args:
        ends: actions that are an end; those that free activations, if nothing else is said.
        later: count only while the stage acts behind its first end: when there are gradients.
    """
    peak = [0] * schedule.n_stages
    for actions in schedule.actions:
        held = [0] * schedule.n_stages
        ended = [False] * schedule.n_stages
        for action in actions:
            stage = action.stage
            if action.kind is ActionKind.FORWARD:
                held[stage] += 1
            if ended[stage] or not later:
                peak[stage] = max(peak[stage], held[stage])
            if action.kind in ends:
                held[stage] -= 1
                ended[stage] = True
    return tuple(peak)


def peak_activation(schedule: Schedule, stage_activation: Sequence[int]) -> tuple[int, ...]:
    """For each rank, the most that all its stages together hold at once.

    The stages of a rank need not peak at the same moment, so this is at most the sum of ``peak_in_flight`` times the sizes.

    Args:
        schedule: any schedule.
        stage_activation: for each stage, what one microbatch keeps: bytes, or ones to count activations.
    """
    peaks = []
    for actions in schedule.actions:
        held = peak = 0
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                held += stage_activation[action.stage]
                peak = max(peak, held)
            elif action.kind in _FREES:
                held -= stage_activation[action.stage]
        peaks.append(peak)
    return tuple(peaks)
