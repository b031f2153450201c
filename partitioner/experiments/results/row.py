"""The result of one placement as a row of plain numbers and texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from partitioner.experiments.results.placement import Placement


@dataclass(frozen=True)
class Row:
    """The result of a placement; numbers that a failed placement lacks are None.

    Attributes:
        key: digest of the placement and of everything that its result depends on.
        model: the name of the model in the sweep.
        devices: the number of ranks.
        mode: ``"tensor"``, ``"data=2,tensor=2"``.
        cluster: the name of the machine in the sweep.
        schedule, n_microbatches, recompute: those of the plan; of a failed placement, those of the request. A plan of one stage has the
            schedule ``"none"``.
        batch_size: rows of a step, over all devices.
        options: other keywords of ``partition`` as JSON; empty: their defaults.
        mesh: the mesh of the plan, as ``--mode`` takes it: ``"pipeline=2,tensor=4"``.
        rows_per_second: samples of the batch.
        tokens_per_second: of a model of token sequences.
        mfu: model FLOPs utilization: the time of the model's matrix products at the devices' peak, relative to that of a step.
        step_cost: price of a step: the devices' prices an hour for its time; None if the price of a device is not known.
        status: ``"ok"`` or ``"failed"``.
        reason: why it failed, or why it could not be measured.
        step_time: simulated seconds of a step.
        bubble_fraction: the idle share of the ranks' time, 0 to 1.
        peak_memory: bytes on the fullest device.
        over_limit: bytes by which a simulated peak exceeds the memory limit of its device; None: all fit.
        communication: bytes that all ranks send in a step.
        planned_step_time: seconds of a step as estimated by the planner.
        bound_by: the bottleneck of the step, in words.
        measured_step_time: measured seconds of a step; None if not measured.
        measured_memory: measured bytes on the fullest accelerator; None if not measured.
        runner_up: the next best plan and its cost, in words; empty if there was none.
        plan_hash: digest of the plan.
        plan: the plan as JSON.
        seconds: the time that the evaluation took.
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
    over_limit: int | None = None
    communication: int | None = None
    planned_step_time: float | None = None
    bound_by: str = ""
    runner_up: str = ""
    options: str = ""
    mesh: str = ""
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    step_cost: float | None = None
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
        """Whether the placement can be measured and no attempt was made yet."""
        return self.ok and self.measured_step_time is None and not self.reason

    def facts(self) -> dict[str, Any]:
        """Return all fields but the plan, for tables."""
        return {name: getattr(self, name) for name in FACTS}


FACTS = tuple(field.name for field in dataclasses.fields(Row) if field.name != "plan")
"""The columns of tables."""

NUMBERS = (
    "step_time",
    "peak_memory",
    "step_cost",
    "communication",
    "bubble_fraction",
    "planned_step_time",
    "measured_step_time",
    "measured_memory",
)
"""The fields by which placements are compared; smaller is better."""

RATES = ("rows_per_second", "tokens_per_second", "mfu")
"""The same where larger is better."""


def failed_row(key: str, placement: Placement, reason: str, seconds: float = 0.0) -> Row:
    """Return the row of a placement that failed."""
    return Row(key, **dataclasses.asdict(placement), status="failed", reason=reason, seconds=seconds)
