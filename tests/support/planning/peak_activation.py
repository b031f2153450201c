"""How many bytes of activations each rank of a schedule holds at its peak, counted action by action."""

from __future__ import annotations

from collections.abc import Sequence

from passes.ir.schedule import ActionKind, Schedule


def peak_activation(schedule: Schedule, stage_activation: Sequence[int]) -> tuple[int, ...]:
    """Return for each rank the peak of the activations of all its stages.

    The stages of a rank need not peak at the same moment, so this is at most the sum of ``peak_in_flight`` times the sizes.

    Args:
        schedule: any schedule.
        stage_activation: for each stage, the activations of one microbatch in bytes; or 1, to count microbatches.
    """
    peaks = []
    for actions in schedule.actions:
        held = peak = 0
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                held += stage_activation[action.stage]
                peak = max(peak, held)
            elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                held -= stage_activation[action.stage]
        peaks.append(peak)
    return tuple(peaks)
