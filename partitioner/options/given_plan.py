"""Check ``plan=``: whether the plan is one of this model, for these devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from partitioner.options.limits import check_shared_stages, check_stage_degrees
from partitioner.schedules.catalog import find_schedule
from partitioner.schedules.kind import check_forwards
from passes.graph.equivalence import weights_digest
from passes.graph.provenance import source_name
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan

__all__ = ["check_fits", "plan_on"]

_REMEDY = "make the plan again, or correct the entry"


def plan_on(plan: Plan, devices: Sequence[torch.device]) -> Plan:
    """Return a plan with its devices replaced by those at hand; raise ConfigError if it is invalid, or for another number of devices."""
    plan.check()
    if plan.n_ranks != len(devices):
        raise ConfigError(f"the plan is for {plan.n_ranks} devices and {len(devices)} were given", remedy=f"pass devices={plan.n_ranks}")
    for index, name in enumerate(plan.devices):
        try:
            torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"plan.devices[{index}]: {name!r} is no device", remedy='devices are named "cpu", "cuda:0", ...') from error
    _check_schedule(plan)
    names = tuple(map(str, devices))
    return plan if plan.devices == names else dataclasses.replace(plan, devices=names)


def check_fits(plan: Plan, graph: ModelGraph) -> None:
    """Raise ConfigError, naming the entry, if a plan is not one of this model."""
    if plan.weights not in ("", weights_digest(graph)):
        raise ConfigError(
            "the plan was made for another model: names or shapes of parameters differ", remedy="leave plan=None, and one is made for this"
        )
    names = {node.name for node in graph.graph.nodes}
    # The one stage of sequential tiles begins with an operation of the tiled graph, which does not exist yet.
    stages = () if plan.tiles else plan.stages
    entries = {f"stages[{index}].first_node": stage.first_node for index, stage in enumerate(stages)}
    entries |= {f"regions[{index}].first_node": region.first_node for index, region in enumerate(plan.regions)}
    entries |= {f"halos[{index}].{end}": getattr(run, end) for index, run in enumerate(plan.halos) for end in ("first", "last")}
    entries |= {f"recomputed[{index}]": name for index, name in enumerate(plan.recomputed) if source_name(name, names) is None}
    for entry, name in entries.items():
        if name not in names:
            raise ConfigError(f"plan.{entry}: the model has no operation {name!r}", remedy=_REMEDY)
    check_stage_degrees(graph, plan)
    check_shared_stages(graph, plan)


def _check_schedule(plan: Plan) -> None:
    """Raise ConfigError if the schedule is unknown, runs the stages on other ranks than the plan says, or has too many forwards."""
    try:
        kind = find_schedule(plan.schedule)
        n_positions = 1 + max(map(max, plan.stage_ranks))
        stages_per_rank, remainder = divmod(len(plan.stages), n_positions)
        ranks = kind.stage_ranks(n_positions, None if plan.replicas else stages_per_rank, plan.replicas)
    except ConfigError as error:
        raise ConfigError(f"plan.schedule: {error.problem}", remedy=_REMEDY) from error
    try:
        check_forwards(len(plan.stages) * plan.n_microbatches)
    except ConfigError as error:
        raise ConfigError(f"plan.n_microbatches: {error.problem}", remedy=error.remedy) from error
    if ranks != plan.stage_ranks or (remainder and not plan.replicas):
        differs = [expected != actual for expected, actual in zip(ranks, plan.stage_ranks, strict=False)]
        index = differs.index(True) if True in differs else len(ranks)
        raise ConfigError(f"plan.stages[{index}].ranks: schedule {plan.schedule} runs stages on ranks {ranks}", remedy=_REMEDY)
