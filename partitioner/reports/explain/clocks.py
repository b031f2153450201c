"""The planner's clock beside the simulation of the programs: by how much they differ, and why.

    planner      prices the layers of each stage before programs are written, and places them by the schedule
    simulation   prices every kernel and message of the programs that run

Averaged over the ranks, a step is the time at work and the time at rest, so the difference of two steps is the difference of each.
"""

from __future__ import annotations

from cost_models.hardware.units import format_seconds
from cost_models.simulator.result import Simulation
from passes.ir.plan import Plan

_CLOSE = 0.01
"""Relative difference of step times that needs no explanation."""


def stage_seconds(plan: Plan) -> float:
    """Return the seconds that a rank of a pipeline spends in its stages, averaged over the ranks, by the planner's prices."""
    ranks = {rank for stage in plan.stages for rank in stage.ranks}
    return plan.n_microbatches * sum(stage.forward_time + stage.backward_time for stage in plan.stages) / max(len(ranks), 1)


def clocks(plan: Plan, simulation: Simulation) -> str:
    """Return the simulated and the planned step time, and the reasons for a difference."""
    simulated, planned = simulation.step_time, plan.step_time
    if format_seconds(simulated) == format_seconds(planned):
        return f"{format_seconds(simulated)} simulated"
    text = f"{format_seconds(simulated)} simulated; {format_seconds(planned)} by the planner's clock"
    if not simulated or not planned or abs(simulated / planned - 1) < _CLOSE:
        return text
    busy = (1 - simulation.bubble_fraction) * simulated
    stages = stage_seconds(plan)
    return (
        f"{text}, {100 * abs(planned / simulated - 1):.0f} % {'more' if planned > simulated else 'less'}. "
        f"Of it ranks compute {format_seconds(busy)} and {format_seconds(stages)}, on average; the rest is waiting and communication. "
        "The simulation prices every kernel and message of the programs, the planner the layers before programs are written."
    )
