"""What became of one placement: a line of a table, plain numbers and text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from partitioner.experiments.results.placement import Placement

__all__ = ["NUMBERS", "Row", "failed_row"]


@dataclass(frozen=True)
class Row:
    """The result of a placement; what a failed one has not is None.

    Attributes:
        key: of the placement and of everything that its result depends on.
        model: name in the sweep.
        devices: how many ranks.
        mode: ``"tensor"``, ``"data=2,tensor=2"``.
        cluster: name in the sweep.
        schedule: the plan's; of a failed placement, what was asked for.
        n_microbatches: the plan's.
        recompute: the plan's.
        batch_size: rows of a step, over all devices.
        status: ``"ok"`` or ``"failed"``.
        reason: why it failed, or why it could not be measured.
        step_time: predicted seconds of one step, simulated.
        bubble_fraction: the part of the ranks' time in which they wait, 0 to 1.
        peak_memory: bytes on the fullest device.
        communication: bytes that all links carry in a step.
        planned_step_time: seconds of a step as the planner estimated them.
        bound_by: what limits the step, in words.
        measured_step_time: seconds of a step that really ran; None where none did.
        measured_memory: bytes on the fullest accelerator that really ran; None where none did.
        plan_hash: digest of the plan: equal plans, equal digests.
        plan: the plan as JSON.
        seconds: how long finding out took.
    """

    key: str
    model: str
    devices: int
    mode: str
    cluster: str
    schedule: str | None = None
    n_microbatches: int | None = None
    recompute: str | None = None
    batch_size: int | None = None
    status: str = "ok"
    reason: str = ""
    step_time: float | None = None
    bubble_fraction: float | None = None
    peak_memory: int | None = None
    communication: int | None = None
    planned_step_time: float | None = None
    bound_by: str = ""
    measured_step_time: float | None = None
    measured_memory: int | None = None
    plan_hash: str = ""
    plan: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def awaits_measurement(self) -> bool:
        """Whether it may be run and has not been tried."""
        return self.ok and self.measured_step_time is None and not self.reason

    def facts(self) -> dict[str, Any]:
        """All but the plan, for tables."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "plan"}


NUMBERS = ("step_time", "peak_memory", "communication", "bubble_fraction", "planned_step_time", "measured_step_time", "measured_memory")
"""What placements are compared by: less is better in all of them."""


def failed_row(key: str, placement: Placement, reason: str, seconds: float = 0.0) -> Row:
    """A placement that came to nothing, and why."""
    asked = (placement.schedule, placement.n_microbatches, placement.recompute)
    return Row(
        key, placement.model, placement.devices, placement.mode, placement.cluster, *asked, status="failed", reason=reason, seconds=seconds
    )
