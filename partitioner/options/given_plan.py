"""Check ``plan=``: whether the plan is one of this model, for these devices, and has the values of the options beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cost_models.hardware.units import parse_bytes
from partitioner.options.constraints import Constraints
from partitioner.options.limits import check_shared_stages, check_stage_degrees
from partitioner.options.mode import ranks_of_mesh, ranks_of_stages, resolve_mode, sequential_tiles
from partitioner.options.precision import read_reduce_dtype
from partitioner.schedules.catalog import find_schedule
from partitioner.schedules.kind import check_forwards
from partitioner.schedules.registered import read_schedule
from passes.graph.equivalence import weights_digest
from passes.graph.provenance import source_name
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import TILE, TILES, Mesh
from passes.ir.plan import BATCHNORM, OBJECTIVES, Plan

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


def check_options(plan: Plan, mode: str | Mapping[str, int | Sequence[int]], options: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming them, for options of planning that differ from the plan, which leaves them nothing to decide.

    An option at its default counts as left out. A plan has no value of constraints, a time limit or an objective to compare with.
    """
    defaults = {"mode": "auto", "batchnorm": BATCHNORM[0], "objective": OBJECTIVES[0], "constraints": Constraints()}
    every = {"mode": mode, **options}
    given = {name: value for name, value in every.items() if value is not None and value != defaults.get(name)}
    differing = [name for name, value in given.items() if not _is_of_plan(plan, name, value)]
    if differing:
        listed = ", ".join(f"{name}={given[name]!r}" for name in differing)
        raise ConfigError(
            f"plan= gives a whole plan, which differs from {listed}",
            remedy=f"leave out {', '.join(f'{name}=' for name in differing)}; or leave out plan=, and a plan is made that keeps to them",
        )


def _is_of_plan(plan: Plan, name: str, value: Any) -> bool:
    """Return whether a plan has the value of an option."""
    match name:
        case "mode":
            return _has_mode(plan, value)
        case "schedule":
            return plan.schedule == read_schedule(value) and plan.n_microbatches == getattr(value, "n_microbatches", plan.n_microbatches)
        case "stages_per_device":
            return bool(value * (1 + max(map(max, plan.stage_ranks))) == len(plan.stages))
        case "memory_limit":
            return max(plan.memory) <= parse_bytes(value)
        case "reduce_dtype":
            return plan.reduce_dtype == read_reduce_dtype(value)
        case "n_microbatches" | "recompute" | "batchnorm":
            return bool(getattr(plan, name) == value)
    return False


def _has_mode(plan: Plan, mode: str | Mapping[str, int | Sequence[int]]) -> bool:
    """Return whether a plan has the mesh of a mode, but for dimensions of one rank, and the grid of a number of tiles."""
    tiles = sequential_tiles(mode, plan.n_ranks)
    if tiles is not None:
        return math.prod(plan.tiles) == tiles if isinstance(tiles, int) else plan.tiles == tiles
    if not isinstance(mode, str) and ranks_of_mesh(mode) != plan.n_ranks:
        return False
    mesh = resolve_mode(mode, plan.n_ranks)
    if mesh is None:
        return True
    counts_tiles = TILE in mesh.names
    is_equal = _sizes(mesh, counts_tiles) == _sizes(plan.grid, counts_tiles) and mesh.widths == plan.widths
    return is_equal and not plan.tiles and (isinstance(mode, str) or ranks_of_stages(mode) == plan.replicas)


def _sizes(mesh: Mesh, counts_tiles: bool) -> list[tuple[str, int]]:
    """Return the dimensions of several ranks; ``counts_tiles``: those of a grid of tiles as one."""
    sizes = dict[str, int]()
    for name, size in mesh.dimensions:
        key = TILE if counts_tiles and name in TILES else name
        sizes[key] = sizes.get(key, 1) * size
    return [(name, size) for name, size in sizes.items() if size > 1]


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
