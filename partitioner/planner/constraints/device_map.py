"""Place units on ranks by a ``device_map``, and entries that other entries hold the weights of by the order of computation.

    device_map   embed 0 | layers.0 0 | layers.1 1 | head 0          head.weight is embed.weight
    units              0            0            1 | free            the planner places head after layers.1, with a copy of the weight

Where each rank has one stage, values only go to later ranks. accelerate puts a module with a tied weight on the device of the other module
of the weight, wherever it computes. Such an entry is kept if the order allows it. If not, its units are free: the rank of the entry holds
the weight for the other module, and the ranks that hold it sum its gradients. The same holds for an entry without tensors: a dropout that
a model calls twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from partitioner.planner.constraints.named_units import NamedUnits, is_inside
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.errors import ConfigError, Place
from passes.ir.graph import ModelGraph
from passes.ir.mesh import rank_list

DeviceMap = Mapping[str, int | str | torch.device]
"""Module name -> rank, or device."""


@dataclass(frozen=True)
class _Entry:
    """An entry of a device_map.

    Attributes:
        shared: its tensors that an entry on the same rank, whose modules compute earlier, has under another name.
        own: its other tensors.
        is_free: whether the order of computation may move it: most bytes of its tensors are shared, or it has none.
    """

    name: str
    rank: int
    shared: tuple[str, ...]
    own: tuple[str, ...]
    is_free: bool


def unit_ranks(device_map: DeviceMap, names: NamedUnits, devices: Sequence[str], *, in_order: bool) -> dict[int, int]:
    """Return unit -> the rank that the device_map assigns it to; units without an entry, or with one that gives way, are absent.

    Args:
        in_order: whether each rank has one stage, so that ranks must not decrease.

    Raises:
        ConfigError: an entry names no module or no rank, parts what cannot be parted, or goes back.
    """
    found = _entries_of_units(device_map, names, devices)
    if not in_order:
        return {unit: _one_rank(entries, names, unit) for unit, entries in found.items()}
    fixed = {unit: [entry for entry in entries if not entry.is_free] for unit, entries in found.items()}
    ranks = {unit: _one_rank(entries, names, unit) for unit, entries in fixed.items() if entries}
    _check_order(ranks, names)
    free = {unit: {entry.rank for entry in entries} for unit, entries in found.items() if unit not in ranks}
    return {**ranks, **_kept_in_order(free, ranks)}


def placement_notes(device_map: DeviceMap, names: NamedUnits, devices: Sequence[str], placed: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Yield a note for each entry that gives way to the order of computation; ``placed``: for each unit, its ranks in the plan."""
    ranks_of: dict[_Entry, set[int]] = {}
    for unit, entries in _entries_of_units(device_map, names, devices).items():
        for entry in entries:
            if entry.rank not in placed[unit]:
                ranks_of.setdefault(entry, set()).update(placed[unit])
    for entry, ranks in ranks_of.items():
        where, hold = f"rank {min(ranks)}", "holds"
        if len(ranks) > 1:
            where, hold = rank_list(ranks), "hold"
        if not entry.shared:
            yield f"device_map: {entry.name!r} has no parameters: it runs on {where}, where the order of computation requires it"
            continue
        own = f", and {_shortened(entry.own)}" if entry.own else ""
        shares = f"shares {_shortened(entry.shared)} with a module on rank {entry.rank}"
        yield f"device_map: {entry.name!r} {shares}: it runs on {where}, which {hold} a copy{own}"


def _shortened(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - _MOST_NAMED} more" if len(tensors) > _MOST_NAMED else ""
    return ", ".join(tensors[:_MOST_NAMED]) + more


_MOST_NAMED = 3
"""Tensors that a note names."""


def _entries_of_units(device_map: DeviceMap, names: NamedUnits, devices: Sequence[str]) -> dict[int, list[_Entry]]:
    """Return unit -> the entries of its nodes, each once; units without one are absent."""
    ranks = {name: _rank(name, device, devices) for name, device in device_map.items() if names.check(name)}
    named: dict[int, list[str]] = {}
    for unit, nodes in enumerate(names.points.units):
        found = dict.fromkeys(_entry_of(names.module_of[node], ranks) for node in nodes)
        if of_unit := [name for name in found if name is not None]:
            named[unit] = of_unit
    tensors, of_rank = _tensors(names.graph, ranks), [set[str]() for _ in devices]
    entries: dict[str, _Entry] = {}
    for name in dict.fromkeys(itertools.chain(*named.values())):
        entries[name] = _entry(name, ranks[name], tensors[name], of_rank[ranks[name]])
        of_rank[ranks[name]].update(tensors[name])
    return {unit: [entries[name] for name in of_unit] for unit, of_unit in named.items()}


def _entry_of(path: str, entries: Mapping[str, int]) -> str | None:
    """Return the entry of a module or tensor: its longest prefix."""
    return max((name for name in entries if is_inside(path, name)), key=len, default=None)


def _tensors(graph: ModelGraph, ranks: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return entry -> the first names of its parameters and buffers, and the bytes of each."""
    values = {node.name: node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")}
    held = graph.weights
    sizes = {name: bytes_of(values[placeholder], graph.batch, graph.batch_size) for placeholder, name in held.items()}
    tensors: dict[str, dict[str, int]] = {name: {} for name in ranks}
    for name in (*held.values(), *graph.aliases):
        entry, first = _entry_of(name, ranks), graph.aliases.get(name, name)
        if entry is not None and first in sizes:
            tensors[entry][first] = sizes[first]
    return tensors


def _entry(name: str, rank: int, tensors: Mapping[str, int], beside: Collection[str]) -> _Entry:
    """Return an entry; ``beside``: the tensors of earlier entries on its rank."""
    shared, own = (tuple(tensor for tensor in tensors if (tensor in beside) is is_shared) for is_shared in (True, False))
    is_free = not own or sum(tensors[tensor] for tensor in own) < sum(tensors[tensor] for tensor in shared)
    return _Entry(name, rank, shared, own, is_free)


def _rank(name: str, device: int | str | torch.device, devices: Sequence[str]) -> int:
    """Return the rank of an entry of the device_map; raise ConfigError if there is none, or several run on the device."""
    if isinstance(device, int):
        if 0 <= device < len(devices):
            return device
        if len(devices) == 1:
            raise ConfigError(
                f"device_map puts {name!r} on rank {device}, and the mesh has one rank for stages",
                remedy='leave device_map out, or let stages be on several ranks: mode="pipeline" or "model"',
            )
        raise ConfigError(
            f"device_map puts {name!r} on rank {device}, and stages are on ranks 0 to {len(devices) - 1}", remedy="use one of these"
        )
    ranks = [rank for rank, text in enumerate(devices) if text == str(device)]
    if len(ranks) == 1:
        return ranks[0]
    problem = f"{len(ranks)} ranks run there" if ranks else f"no rank runs there: they run on {', '.join(devices)}"
    remedy = "write the number of the rank"
    if not ranks and str(device) in _OFFLOADED:
        remedy = "weights stay on the devices of ranks and are not offloaded: write the number of a rank, or pass more devices"
    raise ConfigError(f"device_map puts {name!r} on {str(device)!r}, but {problem}", remedy=remedy)


_OFFLOADED = ("cpu", "disk")
"""Devices that accelerate writes for modules that fit no accelerator."""


def _one_rank(entries: Sequence[_Entry], names: NamedUnits, unit: int) -> int:
    """Return the rank of a unit; raise ConfigError if its entries have several."""
    first, other = entries[0], next((entry for entry in entries if entry.rank != entries[0].rank), None)
    if other is not None:
        nodes = names.points.units[unit]
        raise ConfigError(
            f"device_map puts {', '.join(nodes)} on ranks {first.rank} and {other.rank}, but they cannot be parted",
            place=Place(module=next(names.module_of[node] for node in nodes if is_inside(names.module_of[node], other.name))),
            remedy="give both modules the same rank",
        )
    return first.rank


def _kept_in_order(free: Mapping[int, set[int]], fixed: Mapping[int, int]) -> dict[int, int]:
    """Return unit -> rank of the units that may move, of those whose rank fits the order; ``fixed``: the units that may not."""
    highest: dict[int, float] = {}
    later = math.inf
    for unit in sorted({*free, *fixed}, reverse=True):
        later = highest[unit] = min(later, fixed.get(unit, math.inf))
    kept: dict[int, int] = {}
    lowest = 0
    for unit in sorted(highest):
        if unit in fixed:
            lowest = fixed[unit]
        elif len(free[unit]) == 1 and lowest <= (rank := min(free[unit])) <= highest[unit]:
            lowest = kept[unit] = rank
    return kept


def _check_order(ranks: Mapping[int, int], names: NamedUnits) -> None:
    """Raise ConfigError if a unit is on an earlier rank than one before it: with one stage a rank, values only go to later ranks."""
    highest, before = -1, ""
    for unit in sorted(ranks):
        module = names.module_of[names.points.units[unit][0]]
        if ranks[unit] < highest:
            raise ConfigError(
                f"device_map goes back: {module!r} is on rank {ranks[unit]}, but {before!r}, computed before it, is on rank {highest}",
                place=Place(module=module),
                remedy="map modules to ranks in the order in which they compute, or use a schedule with several stages on each device",
            )
        if ranks[unit] > highest:
            highest, before = ranks[unit], module
