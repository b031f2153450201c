"""The machines that plans are made for: devices, the links between them, clusters of both.

    node 0                        node 1
    +--------+   inside   +--------+        +--------+            +--------+
    | rank 0 |------------| rank 1 |        | rank 2 |------------| rank 3 |
    +--------+            +--------+        +--------+            +--------+
         +------------ between ---------------+

A device and a link are described in ``cost_models.hardware.devices``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from cost_models.hardware.detect import detect
from cost_models.hardware.devices import SAME_DEVICE, Device, Level, Link, check, check_count
from cost_models.hardware.units import parse_bytes
from cost_models.text_files import read_toml
from passes.ir.arguments.checked import at_least, check_fields, checked_arguments, checked_names
from passes.ir.arguments.conform import conform
from passes.ir.errors import ConfigError, did_you_mean

__all__ = ["Cluster", "Device", "Level", "Link"]


@checked_names
@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, and the links between them.

    >>> Cluster.preset("h100", nodes=2, devices_per_node=8).link(7, 8).bandwidth
    50000000000.0

    Attributes:
        devices: one for each rank.
        links: one link for all pairs; levels, innermost first; or a link for each pair of places (one direction stands for both).
        places: where each rank sits; its own number where nothing is said. See ``placed``.
    """

    devices: Sequence[Device]
    links: Link | Sequence[Level] | Mapping[tuple[int, int], Link] = field(hash=False)
    places: Sequence[int] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments that make an equal cluster: a read-only mapping cannot be pickled."""
        return Cluster, (self.devices, dict(self.links) if isinstance(self.links, Mapping) else self.links, self.places)

    def __post_init__(self) -> None:
        if not isinstance(self.links, MappingProxyType):  # else they come from a checked cluster: skip, since subclusters are many
            check_fields(self)
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "places", tuple(self.places) or tuple(range(len(self.devices))))
        check(len(self.places) == len(self.devices), f"{len(self.devices)} devices have {len(self.places)} places")
        check(len(self.devices) > 0, "a cluster needs at least one device")
        check(min(self.places) >= 0, f"a place is a number from 0, got {min(self.places)}")
        if isinstance(self.links, Mapping):
            object.__setattr__(self, "links", MappingProxyType(dict(self.links)))
        elif not isinstance(self.links, Link):
            levels = tuple(sorted(self.links, key=lambda level: level.size))
            reach = levels[-1].size if levels else 1
            check(reach > max(self.places), f"the links join {reach} devices, the cluster has {max(self.places) + 1}")
            object.__setattr__(self, "links", levels)

    def link(self, one: int, other: int) -> Link:
        """Return the link between two ranks; raise ConfigError when there is none."""
        if one == other:
            return SAME_DEVICE
        if isinstance(self.links, Link):
            return self.links
        if not (0 <= one < len(self.places) and 0 <= other < len(self.places)):
            raise ConfigError(f"there are no ranks {one} and {other}", remedy=f"ranks are 0 to {len(self.places) - 1}")
        here, there = self.places[one], self.places[other]
        if isinstance(self.links, tuple):
            for level in self.links:
                if here // level.size == there // level.size:
                    return cast(Link, level.link)
            found = None
        else:
            assert isinstance(self.links, Mapping)
            found = self.links.get((here, there)) or self.links.get((there, here))
        if found is None:
            raise ConfigError(f"no link joins ranks {one} and {other}", remedy=f"add ({one}, {other}) to the links of the cluster")
        return found

    @property
    def copies(self) -> bool:
        """Whether tensors are copied into messages over any of the links (``Link.copies``)."""
        if isinstance(self.links, Link):
            return self.links.copies
        links = self.links.values() if isinstance(self.links, Mapping) else (level.link for level in self.links)
        return any(link.copies for link in links)

    @property
    def has_accelerators(self) -> bool:
        """Whether any device is an accelerator, which the host starts operations ahead of."""
        return any(device.asynchronous for device in self.devices)

    @checked_arguments()
    def first(self, n_devices: int) -> Cluster:
        """Return the cluster of the first so many devices; raise ConfigError when there are fewer."""
        if not 1 <= n_devices <= len(self.devices):
            raise ConfigError(
                f"{n_devices} devices were asked for, the cluster has {len(self.devices)}", remedy="describe a cluster with enough devices"
            )
        return Cluster(self.devices[:n_devices], self.links, self.places[:n_devices])

    @checked_arguments()
    def placed(self, order: Sequence[int]) -> Cluster:
        """Return the cluster with ranks on other devices: rank i where rank ``order[i]`` was.

        Meshes number ranks with the last dimension running fastest, so the last dimension uses the innermost links; another order
        assigns them to another dimension.

        Raises:
            ConfigError: ``order`` does not name each rank once.
        """
        check(sorted(order) == list(range(len(self.devices))), f"{tuple(order)} does not name each of {len(self.devices)} ranks once")
        return Cluster([self.devices[rank] for rank in order], self.links, [self.places[rank] for rank in order])

    @staticmethod
    @checked_arguments()
    def preset(name: str, nodes: int = 1, devices_per_node: int = 1) -> Cluster:
        """Return a cluster of equal, well-known devices; raise ConfigError naming the presets for an unknown name."""
        presets = _presets()
        if name not in presets:
            raise ConfigError(f"there is no device preset {name!r}", remedy=_choices(name, presets))
        return _uniform(presets[name], nodes, devices_per_node)

    @staticmethod
    @checked_arguments()
    def parse(text: str) -> Cluster:
        """Read ``KIND:NODESxDEVICES`` (``"h100:8x8"``), ``KIND:DEVICES`` on one node, or ``KIND``: one device.

        The path of a file, ``"cluster.toml"``, is read by ``from_toml``.
        """
        if text.strip().lower().endswith(".toml"):
            return Cluster.from_toml(text.strip())
        match = re.fullmatch(r"([^:]+)(?::(?:(\d+)x)?(\d+))?", text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a cluster", remedy='write a device and how many, "h100:8x8": 8 nodes of 8 devices')
        return Cluster.preset(match[1], nodes=int(match[2] or 1), devices_per_node=int(match[3] or 1))

    @staticmethod
    @checked_arguments({"n_devices": at_least(1)})
    def detect(n_devices: int | None = None, *, refresh: bool = False, progress: bool | None = None) -> Cluster:
        """Measure this machine: peaks of matrix products, memory bandwidth, launches, and messages between two ranks.

        Takes less than a minute the first time; later calls read what was found, as long as machine, threads and torch are the same.

        Args:
            n_devices: ranks that there may be; None: all accelerators, or one for each core.
            refresh: measure again.
            progress: whether to show what is measured; None: on a terminal alone.
        """
        found = detect(refresh=refresh, progress=progress)
        count = n_devices or found.n_devices
        check_count(count)
        return Cluster([found.device] * count, [Level(count, found.link)])

    @staticmethod
    @checked_arguments()
    def from_toml(path: str | Path) -> Cluster:
        """Read a cluster from a file.

        Devices are described as in the presets, or named from them. Either many equal ones:

            device = "mine"
            nodes = 2
            devices_per_node = 4

            [devices.mine]
            memory = "16GiB"
            memory_bandwidth = 900e9
            peak_flops = { float32 = 15e12 }
            inside = { latency = 8e-6, bandwidth = 150e9 }
            between = { latency = 20e-6, bandwidth = 12.5e9 }

        or one for each rank, with one link or a link for each level:

            ranks = ["h100", "h100", "mine"]
            links = [{ size = 2, latency = 8e-6, bandwidth = 450e9 }, { size = 3, latency = 20e-6, bandwidth = 12.5e9 }]

        Raises:
            ConfigError: the file is not TOML, or says something that is not a cluster.
        """
        table = read_toml(path, "the cluster file", "pass the path of a TOML file")
        try:
            return _cluster_from_file(conform(table, _File, "", plain=True))
        except ConfigError as error:
            raise ConfigError(f"the cluster file {path}: {error.problem}", place=error.place, remedy=error.remedy) from error


@dataclass(frozen=True)
class _Kind:
    """A device and how such devices are joined inside a node and between nodes."""

    device: Device
    inside: Level
    between: Level


@cache
def _presets() -> Mapping[str, _Kind]:
    table = tomllib.loads(resources.files("cost_models.hardware").joinpath("presets.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _kind(name, fields) for name, fields in table.items()})


@dataclass(frozen=True)
class _File:
    """Contents of a cluster file: many equal devices, or one for each rank; see ``Cluster.from_toml``."""

    device: str | None = None
    nodes: int = 1
    devices_per_node: int = 1
    ranks: tuple[str, ...] | None = None
    links: tuple[Mapping[str, Any], ...] = ()
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _kind(name: str, fields: Mapping[str, Any]) -> _Kind:
    path = f"devices.{name}"
    if "memory" not in fields:
        raise ConfigError(f"{path} lacks memory", remedy='add memory = "16GiB"')
    links = {key: _level(conform(fields[key], Mapping[str, Any], f"{path}.{key}"), f"{path}.{key}") for key in _JOINS if key in fields}
    inside = links.get("inside", Level(1, SAME_DEVICE))
    numbers = {key: value for key, value in fields.items() if key not in (*_JOINS, "memory")}
    memory = parse_bytes(conform(fields["memory"], int | str, f"{path}.memory"))
    device = conform({"name": name, "memory_bytes": memory, **numbers}, Device, path, plain=True)
    return _Kind(device, inside, links.get("between", inside))


_JOINS = ("inside", "between")


def _level(fields: Mapping[str, Any], path: str) -> Level:
    """Return a level from a table; its size is 1 where the table gives none."""
    link = conform({key: value for key, value in fields.items() if key not in ("size", "shared")}, Link, path, plain=True)
    size, shared = conform(fields.get("size", 1), int, f"{path}.size"), conform(fields.get("shared", False), bool, f"{path}.shared")
    return Level(size, link, shared)


def _uniform(kind: _Kind, nodes: int, devices_per_node: int) -> Cluster:
    check(nodes >= 1 and devices_per_node >= 1, f"a cluster needs at least one device, got {nodes} nodes of {devices_per_node}")
    check_count(nodes * devices_per_node)
    sizes = (devices_per_node, nodes * devices_per_node)
    levels = [replace(level, size=size) for level, size in zip((kind.inside, kind.between), sizes, strict=True)]
    return Cluster([kind.device] * (nodes * devices_per_node), levels)


def _cluster_from_file(file: _File) -> Cluster:
    kinds = dict(_presets()) | {name: _kind(name, fields) for name, fields in file.devices.items()}
    if (file.device is None) == (file.ranks is None):
        both = "both" if file.device is not None else "neither"
        raise ConfigError(
            f"it gives {both} of `device` and `ranks`",
            remedy="give `device`, `nodes` and `devices_per_node`, or `ranks` and `links`; see Cluster.from_toml",
        )
    if file.device is not None:
        return _uniform(_named(file.device, kinds), file.nodes, file.devices_per_node)
    devices = [_named(name, kinds).device for name in file.ranks or ()]
    for index, link in enumerate(file.links):
        check("size" in link, f"links[{index}] lacks size, the number of ranks that it joins")
    return Cluster(devices, [_level(link, f"links[{index}]") for index, link in enumerate(file.links)])


def _named(name: str, kinds: Mapping[str, _Kind]) -> _Kind:
    if name not in kinds:
        raise ConfigError(f"there is no device {name!r}", remedy=_choices(name, kinds))
    return kinds[name]


def _choices(name: str, known: Mapping[str, _Kind]) -> str:
    return f"{did_you_mean(name, known)}choose one of {', '.join(known)}, or describe your own"
