"""The memory of steps that run all forwards first, and hold more microbatches than the plan's schedule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from cost_models.hardware.units import format_bytes
from partitioner.schedules.catalog import schedule_of
from partitioner.schedules.kind import peak_in_flight
from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.staged_model import SplitModel
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.errors import PartitionWarning, level_of_caller
from passes.ir.plan import Plan
from passes.ir.schedule import Schedule


def saved_bytes(lowered: SplitModel, training: DifferentiatedStage, plan: Plan) -> int:
    """Return the bytes that a rank of a stage saves of one microbatch for its backward."""
    saved = [value for value in training.saved_values if isinstance(value, Tensor)]
    rows = microbatch_sizes(plan.batch_size // lowered.graph.part.n_row_parts, plan.n_microbatches)[0]
    return sum(bytes_of(value, lowered.graph.batch, rows) for value in saved)


def peaks_of_step(plan: Plan, schedule: Schedule) -> tuple[int, ...]:
    """Return each rank's predicted peak memory in a step by this schedule: that of the plan, or the same with all forwards first."""
    is_planned = peak_in_flight(schedule) == peak_in_flight(schedule_of(plan, plan.n_microbatches))
    return plan.memory if is_planned else plan.call_memory


def warn_of_calls(plan: Plan, limits: Sequence[float], model: nn.Module) -> None:
    """Warn if ``pm(...)`` and ``backward()`` are predicted to exceed the memory limit of a rank, and ``train_step`` is not.

    A model on the meta device is planned and not called: no warning.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    if (rank := _fullest_over(plan, limits)) is not None:
        warnings.warn(
            "train_step() fits into the memory limit, and pm(...) followed by backward() does not: all its forwards come first, so that "
            f"rank {rank} is predicted to need {_need(plan, limits, rank)}; call train_step(), or let the model return its loss where "
            'an integration then runs the schedule; recompute="full" or more devices need less',
            PartitionWarning,
            stacklevel=level_of_caller(),
        )


def warn_of_loss(plan: Plan, limits: Sequence[float]) -> None:
    """Warn if a step with a loss of all rows is predicted to exceed the memory limit of a rank that the plan itself respects."""
    if (rank := _fullest_over(plan, limits)) is not None:
        warnings.warn(
            f"a loss of all rows holds all {plan.n_microbatches} microbatches on every rank: rank {rank} is predicted to need "
            f'{_need(plan, limits, rank)}; recompute="full" or more devices need less',
            stacklevel=level_of_caller(),
        )


def _fullest_over(plan: Plan, limits: Sequence[float]) -> int | None:
    """Return the rank that exceeds its limit most with all forwards first, of those that do not by the schedule; None: there is none."""
    pairs = list(zip(plan.call_memory, limits, strict=False))
    over = [rank for rank, (peak, limit) in enumerate(pairs) if peak > limit >= plan.memory[rank]]
    return max(over, key=lambda rank: pairs[rank][0] - pairs[rank][1], default=None)


def _need(plan: Plan, limits: Sequence[float], rank: int) -> str:
    """Format ``"1.2 GiB of 1 GiB (0.7 GiB by 1F1B)"``."""
    peak, planned = format_bytes(plan.call_memory[rank]), format_bytes(plan.memory[rank])
    return f"{peak} of {format_bytes(limits[rank])} ({planned} by {plan.schedule})"
