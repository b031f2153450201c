"""Translate constraints on stages for the stage cutter: into forced boundaries, and the stages that each unit may be in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partitioner.options.constraints import Constraints
from partitioner.planner.constraints.modules import check_module, prefixes
from partitioner.planner.costs.cut_points import CutPoints
from passes.graph.provenance import module_path
from passes.ir.errors import ConfigError, Place
from passes.ir.graph import SPLITS, ModelGraph

__all__ = ["Restrictions", "restrict"]

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
    names = _Names(graph, points, modules)
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
        ranks = _unit_ranks(constraints.device_map, names, points, devices)
        if len(set(stage_ranks)) == len(stage_ranks):
            _check_order(ranks, names, points)
        for unit, rank in ranks.items():
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
                remedy="call it in front of them, or behind",
            )
        if max(numbers, default=passed) > passed and index > 0:
            found.append(index)
        passed = max(numbers, default=passed)
    return frozenset(found)


class _Names:
    """The modules and nodes that constraints may name."""

    def __init__(self, graph: ModelGraph, points: CutPoints, modules: Collection[str]) -> None:
        self._points = points
        self._unit_of = points.unit_of
        self.module_of = {node.name: module_path(node) for node in graph.computing_nodes()}
        parameters = (*graph.parameters.values(), *graph.buffers.values(), *graph.aliases)
        owners = [name.rpartition(".")[0] for name in parameters]
        paths = {*self.module_of.values(), *owners, *modules}
        modules_and_nodes = {"", *(prefix for path in paths for prefix in prefixes(path)), *self.module_of}
        self._known = modules_and_nodes.union(parameters)

    def check(self, name: str) -> bool:
        """Return True; raise ConfigError if no module, parameter or node has the name."""
        check_module(name, self._known, "the constraints name")
        return True

    def units(self, name: str) -> list[int]:
        """Return the units of a module or node, in order; none for a module that computes nothing."""
        self.check(name)
        nodes = [node for node, module in self.module_of.items() if node == name or _is_inside(module, name)]
        return sorted({self._unit_of[node] for node in nodes if node in self._unit_of})

    def boundary(self, name: str, at_end: bool) -> int:
        """Return the boundary at the beginning or the end of a module; raise ConfigError if stages cannot be cut there."""
        units = self.units(name)
        where = "behind" if at_end else "in front of"
        if not units:
            raise ConfigError(
                f"split_spec cuts {where} {name!r}, which computes nothing", place=Place(module=name), remedy="cut at another module"
            )
        edge_unit = self._points.units[units[-1] if at_end else units[0]]
        edge_node = edge_unit[-1] if at_end else self._points.starts[units[0]]
        boundary = units[-1] + 1 if at_end else units[0]
        if not _is_inside(self.module_of[edge_node], name) and edge_node != name:
            raise ConfigError(
                f"split_spec cuts {where} {name!r}, where something crosses that cannot be sent: {', '.join(edge_unit)} stay together",
                place=Place(module=name),
                remedy="cut at another module",
            )
        if not 0 < boundary < len(self._points.units):
            raise ConfigError(
                f"split_spec cuts {where} {name!r}, where the model has nothing more", place=Place(module=name), remedy="leave it out"
            )
        return boundary


def _is_inside(module: str, name: str) -> bool:
    return name in ("", module) or module.startswith(f"{name}.")


def _split_point(name: str, where: Any) -> bool:
    """Return whether the cut is at the end of the module; raise ConfigError if ``where`` is no split point."""
    text = str(getattr(where, "name", where)).lower()
    if text not in ("beginning", "end"):
        raise ConfigError(f"split_spec[{name!r}] is {where!r}", remedy='write "beginning" or "end", or a SplitPoint')
    return text == "end"


def _unit_ranks(
    device_map: Mapping[str, int | str | torch.device], names: _Names, points: CutPoints, devices: Sequence[str]
) -> dict[int, int]:
    """Return unit -> the rank that the device_map assigns it to; units without an entry are absent."""
    entries = {name: _rank(name, device, devices) for name, device in device_map.items() if names.check(name)}
    ranks: dict[int, int] = {}
    for index, unit in enumerate(points.units):
        for node in unit:
            path = names.module_of[node]
            entry = max((name for name in entries if _is_inside(path, name)), key=len, default=None)
            if entry is None:
                continue
            if ranks.setdefault(index, entries[entry]) != entries[entry]:
                raise ConfigError(
                    f"device_map puts {', '.join(unit)} on ranks {ranks[index]} and {entries[entry]}, but they cannot be parted",
                    place=Place(module=path),
                    remedy="give both modules the same rank",
                )
    return ranks


def _rank(name: str, device: int | str | torch.device, devices: Sequence[str]) -> int:
    """Return the rank of an entry of the device_map; raise ConfigError if there is none, or several run on the device."""
    if isinstance(device, int):
        if 0 <= device < len(devices):
            return device
        raise ConfigError(f"device_map puts {name!r} on rank {device}, there are ranks 0 to {len(devices) - 1}", remedy="use one of these")
    ranks = [rank for rank, text in enumerate(devices) if text == str(device)]
    if len(ranks) == 1:
        return ranks[0]
    problem = f"{len(ranks)} ranks run there" if ranks else f"no rank runs there: they run on {', '.join(devices)}"
    raise ConfigError(f"device_map puts {name!r} on {str(device)!r}, but {problem}", remedy="write the number of the rank")


def _check_order(ranks: Mapping[int, int], names: _Names, points: CutPoints) -> None:
    """Raise ConfigError if a unit is on an earlier rank than one before it: with one stage a rank, values only go to later ranks."""
    highest, before = -1, ""
    for unit in sorted(ranks):
        module = names.module_of[points.units[unit][0]]
        if ranks[unit] < highest:
            raise ConfigError(
                f"device_map goes back: {module!r} is on rank {ranks[unit]}, but {before!r}, computed before it, is on rank {highest}",
                place=Place(module=module),
                remedy="map modules to ranks in the order in which they compute, or use a schedule with several stages on each device",
            )
        if ranks[unit] > highest:
            highest, before = ranks[unit], module
