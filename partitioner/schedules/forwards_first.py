"""Move all forwards of a schedule to the front: where a loss needs the results of all microbatches.

1F1B, 2 ranks, 3 microbatches                the same for a loss of all rows, and for pm(x) and backward()

    rank 0   F0 F1 B0 F2 B1 B2                   rank 0   F0 F1 F2 B0 B1 B2
    rank 1   F0 B0 F1 B1 F2 B2                   rank 1   F0 F1 F2 B0 B1 B2
"""

from __future__ import annotations

import dataclasses

from passes.ir.schedule import Action, ActionKind, Schedule


def forwards_first(schedule: Schedule) -> Schedule:
    """Return the schedule with each rank's forwards in front; the order among forwards, and among other actions, stays.

    The result cannot deadlock if the given schedule does not, because forwards wait for forwards alone. No other order is possible: the
    first backward of the last stage follows all its forwards, and each of these follows that microbatch's forwards on all other stages.
    """
    actions = tuple(tuple(sorted(of_rank, key=lambda action: action.kind is not ActionKind.FORWARD)) for of_rank in schedule.actions)
    return dataclasses.replace(schedule, actions=actions)


def in_sweeps(schedule: Schedule) -> Schedule:
    """Return the order in which ``pm(...)`` and ``backward()`` run a schedule: all forwards stage by stage, then all backwards.

    >>> from partitioner.schedules.catalog import make_schedule
    >>> print(in_sweeps(make_schedule("ZBV", 2, 2)).to_text())
    0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1
    1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1
    """
    actions = []
    for of_rank in schedule.actions:
        forwards = sorted(action for action in of_rank if action.kind is ActionKind.FORWARD)
        backwards = sorted(forwards, key=lambda action: (-action.stage, action.microbatch))
        actions.append((*forwards, *(Action(each.stage, ActionKind.BACKWARD, each.microbatch) for each in backwards)))
    return dataclasses.replace(schedule, actions=tuple(actions))
