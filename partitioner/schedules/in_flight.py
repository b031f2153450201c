"""How many activations a schedule keeps alive.

An activation is held from the forward of its stage and microbatch to the end of the backward that reads it: B, or W when the backward
is split. This depends on the order of the actions of one rank alone, never on how long they take.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import NamedTuple

from passes.ir.schedule import ActionKind, Schedule

__all__ = ["Awaiting", "awaiting", "peak_activation", "peak_in_flight"]

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


class Awaiting(NamedTuple):
    """For each stage, the most microbatches that it holds while it computes and what its next action waits for comes; 0: that is never so.

    Receives are posted one action ahead: a stage has room for a message while the action in front goes on.

    Attributes:
        forward, later_forward: where the next action is a forward: before there are gradients, and from then on.
        backward, later_backward: where it is a backward, or an input half.
    """

    forward: tuple[int, ...]
    later_forward: tuple[int, ...]
    backward: tuple[int, ...]
    later_backward: tuple[int, ...]


def awaiting(schedule: Schedule) -> Awaiting:
    """What stages hold when messages come to them; of actions that follow on one of another stage of the rank, nothing is said.

    >>> from partitioner.schedules.catalog import make_schedule
    >>> awaiting(make_schedule("1F1B", 2, 3))  # of stage 0: F0 F1 B0 F2 B1 B2
    Awaiting(forward=(2, 1), later_forward=(0, 1), backward=(2, 1), later_backward=(2, 1))
    """
    found = [[0] * schedule.n_stages for _ in Awaiting._fields]
    for actions in schedule.actions:
        held, ended = [0] * schedule.n_stages, [False] * schedule.n_stages
        for action, following in zip_longest(actions, actions[1:]):
            stage = action.stage
            held[stage] += action.kind is ActionKind.FORWARD
            if following is not None and following.stage == stage and following.kind is not ActionKind.BACKWARD_WEIGHT:
                counts = found[2 * (following.kind is not ActionKind.FORWARD) + ended[stage]]
                counts[stage] = max(counts[stage], held[stage])
            if action.kind in _FREES:
                held[stage] -= 1
                ended[stage] = True
    return Awaiting(*map(tuple, found))


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
