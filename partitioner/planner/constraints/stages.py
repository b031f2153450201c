"""Translate constraints on stages for the stage cutter: into forced boundaries, and the stages that each unit may be in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.options.constraints import Constraints
from partitioner.planner.constraints.device_map import unit_ranks
from partitioner.planner.constraints.named_units import NamedUnits
from partitioner.planner.costs.cut_points import CutPoints
from passes.ir.errors import ConfigError
from passes.ir.graph import SPLITS, ModelGraph

Restrictions = tuple[frozenset[int], NDArray[np.bool_] | None]
"""The boundaries that must be cuts, and (N, S) whether a unit may be in a stage; None: all may."""


def restrict(
    constraints: Constraints,
    graph: ModelGraph,
    points: CutPoints,
    devices: Sequence[str],
    stage_ranks: Sequence[tuple[int, ...]],
    modules: Collection[str] = (),
) -> Restrictions:
    """Translate constraints for a number of stages.

    Args:
        devices: for each rank, its device.
        stage_ranks: for each stage, its ranks.
        modules: names of the model's modules, also of those that no node comes from (a dropout in evaluation).

    Raises:
        ConfigError: a name is unknown, a rank or stage does not exist, a module cannot be cut off, or a device_map goes back to an
            earlier rank where each rank has one stage.
    """
    marked = _marked_boundaries(graph, points) if len(stage_ranks) > 1 else frozenset[int]()
    if not marked and not constraints.split_spec and constraints.device_map is None and constraints.pin is None:
        return frozenset(), None
    names = NamedUnits(graph, points, modules)
    forced = marked.union(
        names.boundary(name, _split_point(name, where)) for name, where in (constraints.split_spec or {}).items() if names.check(name)
    )
    if len(forced) > len(stage_ranks) - 1:
        said = "split_spec" if not marked else "pipe_split()" if not constraints.split_spec else "split_spec with pipe_split()"
        raise ConfigError(
            f"{said} makes {len(forced) + 1} stages, the plan has {len(stage_ranks)}",
            remedy="pass as many devices (or stages on each) as there are stages, or fewer split points",
        )
    if constraints.device_map is None and constraints.pin is None:
        return forced, None
    allowed = np.ones((len(points.units), len(stage_ranks)), dtype=bool)
    if constraints.device_map is not None:
        in_order = len(set(stage_ranks)) == len(stage_ranks)
        for unit, rank in unit_ranks(constraints.device_map, names, devices, in_order=in_order).items():
            allowed[unit] &= np.array([rank in each for each in stage_ranks])
    for name, stage in (constraints.pin or {}).items():
        if not 0 <= stage < len(stage_ranks):
            raise ConfigError(
                f"pin puts {name!r} in stage {stage}, the plan has stages 0 to {len(stage_ranks) - 1}", remedy="pin it to one of them"
            )
        for unit in names.units(name):
            allowed[unit] &= np.arange(len(stage_ranks)) == stage
    return forced, allowed


def _marked_boundaries(graph: ModelGraph, points: CutPoints) -> frozenset[int]:
    """Return the boundaries at which the model calls ``pipe_split``; raise ConfigError if stages cannot be cut there."""
    number_of = {node.name: node.meta[SPLITS] for node in graph.computing_nodes() if SPLITS in node.meta}
    found: list[int] = []
    passed = 0
    for index, unit in enumerate(points.units if number_of else ()):
        numbers = {number_of[name] for name in unit if name in number_of}
        if len(numbers) > 1:
            raise ConfigError(
                f"pipe_split() stands where something crosses that cannot be sent: {', '.join(unit)} stay together",
                remedy="call it before them, or after",
            )
        if max(numbers, default=passed) > passed and index > 0:
            found.append(index)
        passed = max(numbers, default=passed)
    return frozenset(found)


def _split_point(name: str, where: Any) -> bool:
    """Return whether the cut is at the end of the module; raise ConfigError if ``where`` is no split point."""
    text = str(getattr(where, "name", where)).lower()
    if text not in ("beginning", "end"):
        raise ConfigError(f"split_spec[{name!r}] is {where!r}", remedy='write "beginning" or "end", or a SplitPoint')
    return text == "end"
