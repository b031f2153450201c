"""Move all forwards of a schedule to the front, for a loss that needs the results of all microbatches.

1F1B, 2 ranks, 3 microbatches                the same for a loss of all rows

    rank 0   F0 F1 B0 F2 B1 B2                   rank 0   F0 F1 F2 B0 B1 B2
    rank 1   F0 B0 F1 B1 F2 B2                   rank 1   F0 F1 F2 B0 B1 B2
"""

from __future__ import annotations

import dataclasses

from passes.ir.schedule import ActionKind, Schedule

__all__ = ["forwards_first"]


def forwards_first(schedule: Schedule) -> Schedule:
    """Return the schedule with each rank's forwards in front; the order among forwards, and among other actions, stays.

    The result cannot deadlock if the given schedule does not, because forwards wait for forwards alone. No other order is possible: the
    first backward of the last stage follows all its forwards, and each of these follows that microbatch's forwards on all other stages.
    """
    actions = tuple(tuple(sorted(of_rank, key=lambda action: action.kind is not ActionKind.FORWARD)) for of_rank in schedule.actions)
    return dataclasses.replace(schedule, actions=actions)
