"""``objective="memory"``: the plan whose fullest device holds least, by bisection over the limit of memory.

limit       32 GiB    16       8        12       10       11
a plan      21 GiB    14.2     none     11.8     none     10.9        the fastest plan under each limit
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cost_models.hardware.units import format_bytes
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.deadline import Deadline
from passes.ir.errors import ConfigError, InfeasiblePlanError
from passes.ir.plan import Plan

_CLOSE = 0.01
"""Relative distance of the largest limit under which no plan is found from the smallest peak at which the search ends."""


def least_memory(solve: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan:
    """Return the plan of least memory, within 1 % of the least that the searches find: the fastest of those that fit.

    Args:
        solve: returns the fastest plan of a request; raises InfeasiblePlanError if none fits the memory.
    """
    deadline = Deadline.after(request.time_limit)
    best = solve(request)
    infeasible, tried = 0.0, 1
    while max(best.memory) > infeasible * (1 + _CLOSE) and not deadline.is_over:
        limit = (infeasible + max(best.memory)) / 2
        tried += 1
        try:
            best = solve(dataclasses.replace(request, most_bytes=limit, is_trial=True, time_limit=deadline.left))
        except InfeasiblePlanError:
            infeasible = limit
        except ConfigError:  # the time was over before this search had a plan: an earlier one has
            if not deadline.is_over:
                raise
    closeness = f"none was found that needs less than {format_bytes(int(infeasible))}" if infeasible else "less was not tried"
    return best.predicted(searched=f"{tried} limits of memory were tried, and {closeness}; of the last: {best.prediction.searched}")
