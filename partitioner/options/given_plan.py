"""A plan that a caller passes in: whether it is one of this model, for these devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from partitioner.options.limits import check_shared_stages, check_stage_degrees
from partitioner.schedules.catalog import find_schedule
from partitioner.schedules.kind import check_forwards
from passes.graph.fingerprint import weights_digest
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan

__all__ = ["check_fits", "plan_on"]

_AGAIN = "make the plan again, or correct the entry"


def plan_on(plan: Plan, devices: Sequence[torch.device]) -> Plan:
    """A plan on the devices at hand: it names them, wherever it was made.

    Raises:
        ConfigError: the plan is none, or is for another number of devices.
    """
    plan.check()
    if plan.n_ranks != len(devices):
        raise ConfigError(f"the plan is for {plan.n_ranks} devices and {len(devices)} were given", remedy=f"pass devices={plan.n_ranks}")
    for index, name in enumerate(plan.devices):
        try:
            torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"plan.devices[{index}]: {name!r} is no device", remedy='devices are named "cpu", "cuda:0", ...') from error
    _check_schedule(plan)
    here = tuple(map(str, devices))
    return plan if plan.devices == here else dataclasses.replace(plan, devices=here)


def check_fits(plan: Plan, graph: ModelGraph) -> None:
    """Raise ConfigError, naming the entry, where a plan is not of this model."""
    if plan.weights not in ("", weights_digest(graph)):
        raise ConfigError(
            "the plan was made for another model: names or shapes of parameters differ", remedy="leave plan=None, and one is made for this"
        )
    names = {node.name for node in graph.graph.nodes}
    # The one stage of sequential tiles begins with an operation of the tiled graph, which is written after the plan.
    stages = () if plan.tiles else plan.stages
    entries = {f"stages[{index}].first_node": stage.first_node for index, stage in enumerate(stages)}
    entries |= {f"halos[{index}].{end}": getattr(run, end) for index, run in enumerate(plan.halos) for end in ("first", "last")}
    for entry, name in entries.items():
        if name not in names:
            raise ConfigError(f"plan.{entry}: the model has no operation {name!r}", remedy=_AGAIN)
    check_stage_degrees(graph, plan)
    check_shared_stages(graph, plan)


def _check_schedule(plan: Plan) -> None:
    """Raise ConfigError where the schedule is none, has its stages on other ranks, or more forwards than it may have."""
    try:
        kind = find_schedule(plan.schedule)
        n_places = 1 + max(map(max, plan.stage_ranks))
        per_rank, left = divmod(len(plan.stages), n_places)
        ranks = kind.stage_ranks(n_places, None if plan.replicas else per_rank, plan.replicas)
    except ConfigError as error:
        raise ConfigError(f"plan.schedule: {error.problem}", remedy=_AGAIN) from error
    try:
        check_forwards(len(plan.stages) * plan.n_microbatches)
    except ConfigError as error:
        raise ConfigError(f"plan.n_microbatches: {error.problem}", remedy=error.remedy) from error
    if ranks != plan.stage_ranks or (left and not plan.replicas):
        index = next((index for index, pair in enumerate(zip(ranks, plan.stage_ranks, strict=False)) if pair[0] != pair[1]), len(ranks))
        raise ConfigError(f"plan.stages[{index}].ranks: schedule {plan.schedule} runs stages on ranks {ranks}", remedy=_AGAIN)
