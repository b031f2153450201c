"""Plans with one option fixed by hand, to be compared with the plan that the planner makes when nothing is fixed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cost_models.hardware.clusters import Cluster
from partitioner import Constraints
from partitioner.options.mode import resolve_mode
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.shared_models import SharedModels
from partitioner.schedules.catalog import SCHEDULES
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.analysis.axis_names import axis_names
from passes.ir.errors import PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import STAGES
from passes.ir.plan import Plan
from tests.support.models.realistic import REALISTIC

Mode = str | Mapping[str, int]

CLUSTERS = ("cpu:1x4", "h100:1x4")

MODES: Mapping[str, Mode] = {
    **{name: name for name in ("auto", "model", "pipeline", "data", "fsdp", "tensor", "sequence", "tile")},
    "data x tensor": {"data": 2, "tensor": 2},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2},
    "data x pipeline": {"data": 2, "pipeline": 2},
}

_ROUNDING = 1e-6
"""Relative: of a gap that is printed in numbers."""


@dataclass(frozen=True)
class Beaten:
    """A plan that is faster than the default by more than the gap that it states.

    Attributes:
        option: what was fixed.
        seconds: of a step with it.
        default: of the default plan.
        gap: that the default plan states.
    """

    option: str
    seconds: float
    default: float
    gap: float

    def __str__(self) -> str:
        less = 1 - self.seconds / self.default
        return f"{self.option} takes {less:.1%} less ({self.seconds:.4g} s of {self.default:.4g} s), the stated gap is {self.gap:.1%}"


@functools.cache
def graph_of(name: str) -> ModelGraph:
    """Return a realistic model, traced for training."""
    with torch.device("meta"):
        model, inputs = REALISTIC[name]()
    return trace(model, inputs, {}, training=True)


@functools.lru_cache(maxsize=2)
def _models_of(name: str) -> SharedModels:
    """Return the caches that a model's plans share."""
    return SharedModels()


def plan_of(name: str, mode: Mode, cluster: str, **fixed: Any) -> Plan:
    """Return the plan of a model, with user-fixed options."""
    hardware = Cluster.parse(cluster)
    devices = tuple(f"cuda:{rank}" for rank in range(len(hardware.devices)))
    mesh = resolve_mode(mode, len(devices))
    of_stages = "auto" if mesh is None else next((each for each in mesh.names if each in STAGES), "model")
    return PlanProblem(graph_of(name), hardware, PlanRequest(of_stages, devices, **fixed), None, mesh, models=_models_of(name)).solve()


def fixed_options(name: str, mode: Mode) -> Iterator[Mapping[str, Any]]:
    """Yield the options that a user can fix: every microbatch count, schedule, policy, number of stages and axis, and all axes together."""
    graph, whole = graph_of(name), isinstance(mode, str) and mode != "auto"
    names = ("pipeline", "tensor") if mode == "auto" else (mode,) if whole else tuple(mode)
    for policy in ("none", "selective", "full"):
        yield {"recompute": policy}
    if not graph.mixing:  # else other numbers would be computed, which the planner does not choose
        yield from ({"n_microbatches": count} for count in (1, 2, 4, 8) if graph.batch_size % count == 0)
    if "pipeline" in names:
        yield from ({"schedule": schedule} for schedule in SCHEDULES)
        yield from ({"stages_per_rank": count} for count in (1, 2, 3))
        if not graph.mixing:
            yield from ({"schedule": schedule, "n_microbatches": 1} for schedule in ("1F1B", "ZB1P", "Interleaved1F1B"))
    bases = sorted({each.partition("[")[0] for each in axis_names(graph, find_axes(graph.graph))} - {"rest", "batch"})
    for dimension in {"tensor", "tile", "data", "sequence"}.intersection(names):
        yield from ({"constraints": Constraints(axes={base: dimension})} for base in bases)
        yield {"constraints": Constraints(axes=dict.fromkeys((base for base in bases if base not in ("sequence", "head")), dimension))}
        yield {"constraints": Constraints(axes=dict.fromkeys({"heads", "ffn", "vocab"}.intersection(bases), dimension))}


def beaten_by(name: str, mode: Mode, cluster: str) -> tuple[Plan, list[Beaten]]:
    """Return the default plan, and the plans that beat it by more than the gap that it states; the refusal of the default is raised."""
    default = plan_of(name, mode, cluster)
    assert default.gap is not None
    found = []
    for fixed in fixed_options(name, mode):
        try:
            plan = plan_of(name, mode, cluster, **fixed)
        except PartitionError:
            continue
        if plan.batch_size == default.batch_size and plan.step_time < default.step_time * (1 - default.gap) * (1 - _ROUNDING):
            said = {key: value.axes if isinstance(value, Constraints) else value for key, value in fixed.items()}
            found.append(Beaten(str(said), plan.step_time, default.step_time, default.gap))
    return default, found
