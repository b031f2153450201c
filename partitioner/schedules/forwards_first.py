"""Any schedule with all forwards in front: what a loss asks for that needs the results of all microbatches.

1F1B, 2 ranks, 3 microbatches                the same for a loss of all rows

    rank 0   F0 F1 B0 F2 B1 B2                   rank 0   F0 F1 F2 B0 B1 B2
    rank 1   F0 B0 F1 B1 F2 B2                   rank 1   F0 F1 F2 B0 B1 B2
"""

from __future__ import annotations

import dataclasses

from passes.ir.schedule import ActionKind, Schedule

__all__ = ["forwards_first"]


def forwards_first(schedule: Schedule) -> Schedule:
    """Return the schedule with each rank's forwards in front; forwards, and all else, keep their order.

    It runs wherever the given one does: forwards wait for forwards alone, so what each half leaves out is nothing that it waits for. No
    other order would do: the first backward of the last stage follows all its forwards, and each of these follows that microbatch's
    forwards on all other stages.
    """
    actions = tuple(tuple(sorted(of_rank, key=lambda action: action.kind is not ActionKind.FORWARD)) for of_rank in schedule.actions)
    return dataclasses.replace(schedule, actions=actions)
