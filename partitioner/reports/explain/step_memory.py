"""The memory of a step whose loss needs all rows: it holds more microbatches than the plan's schedule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from cost_models.hardware.units import format_bytes
from partitioner.schedules.catalog import schedule_of
from partitioner.schedules.kind import peak_in_flight
from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.staged_model import LoweredStages
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.errors import level_of_caller
from passes.ir.mesh import ranks_at_places
from passes.ir.plan import Plan
from passes.ir.schedule import Schedule

__all__ = ["peaks_of_step", "saved_bytes", "warn_of_memory"]


def saved_bytes(lowered: LoweredStages, training: DifferentiatedStage, plan: Plan) -> int:
    """Return the bytes that a stage saves of one microbatch for its backward."""
    saved = [value for value in training.saved_values if isinstance(value, Tensor)]
    rows = microbatch_sizes(plan.batch_size, plan.n_microbatches)[0]
    return sum(bytes_of(value, lowered.graph.batch, rows) for value in saved)


def peaks_of_step(plan: Plan, lowered: LoweredStages, schedule: Schedule) -> tuple[float, ...]:
    """Return each rank's predicted peak memory in a step with this schedule, whose order of actions may differ from that of the plan."""
    planned, held = peak_in_flight(schedule_of(plan, plan.n_microbatches)), peak_in_flight(schedule)  # microbatches of each stage
    peaks = list(plan.memory)
    if planned == held:
        return tuple(peaks)
    places = ranks_at_places(plan.grid)
    results = [node for node in lowered.graph.graph.nodes if node.name in lowered.returned]
    result_bytes = sum(bytes_of(node.meta["val"], lowered.graph.batch, plan.batch_size) for node in results)
    for stage, training in zip(lowered.stages, lowered.training, strict=True):
        more = saved_bytes(lowered, training, plan) * (held[stage.index] - planned[stage.index])
        if stage.index == len(lowered.stages) - 1:
            more += 2 * result_bytes  # the results of all rows, and their gradients
        for place in lowered.stage_ranks[stage.index]:
            for rank in places[place]:
                peaks[rank] += more
    return tuple(peaks)


def warn_of_memory(plan: Plan, lowered: LoweredStages, schedule: Schedule, limits: Sequence[float]) -> None:
    """Warn if a step is predicted to exceed the memory limit of a rank that the plan itself respects."""
    peaks = peaks_of_step(plan, lowered, schedule)
    over = [rank for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=False)) if peak > limit >= plan.memory[rank]]
    if over:
        rank = max(over, key=lambda rank: peaks[rank] - limits[rank])
        warnings.warn(
            f"a loss of all rows holds all {plan.n_microbatches} microbatches on every rank: rank {rank} is predicted to need "
            f"{format_bytes(peaks[rank])} of {format_bytes(limits[rank])} (the plan alone {format_bytes(plan.memory[rank])}); "
            'recompute="full" or more devices need less',
            stacklevel=level_of_caller(),
        )
