"""The machines that plans are made for: devices, the links between them, clusters of both.

    node 0                        node 1
    +--------+   inside   +--------+        +--------+            +--------+
    | rank 0 |------------| rank 1 |        | rank 2 |------------| rank 3 |
    +--------+            +--------+        +--------+            +--------+
         +------------ between ---------------+

Rates are what the hardware reaches on large operations; what an operation needs is in ``cost_models.operations``.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cost_models.units import parse_bytes
from passes.ir.errors import ConfigError

__all__ = ["Cluster", "Device", "Level", "Link"]


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem, remedy="correct the description of the cluster")


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU.

    Attributes:
        name: for reading.
        peak_flops: FLOP/s by dtype name (``{"float32": 19.5e12}``). A dtype that is not named runs at the lowest rate named.
        memory_bytes: what it holds.
        memory_bandwidth: B/s.
        launch_overhead: s to start one operation, whatever its size.
        compute_efficiency: the part of the peak that large matrix products reach.
        bandwidth_efficiency: the part of the bandwidth that large copies reach.

    Raises:
        ConfigError: a number is not positive, or an efficiency is over 1.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    launch_overhead: float = 5e-6
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))
        rates = {f"peak_flops[{dtype!r}]": rate for dtype, rate in self.peak_flops.items()}
        positive = {**rates, "memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        for name, number in positive.items():
            _check(number > 0, f"device {self.name!r}: {name} must be positive, got {number}")
        _check(bool(self.peak_flops), f"device {self.name!r}: peak_flops names no dtype")
        _check(self.launch_overhead >= 0, f"device {self.name!r}: launch_overhead must not be negative, got {self.launch_overhead}")
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            _check(0 < getattr(self, name) <= 1, f"device {self.name!r}: {name} must lie in (0, 1], got {getattr(self, name)}")

    def flops(self, dtype: torch.dtype) -> float:
        """FLOP/s that large matrix products of this dtype reach."""
        name = str(dtype).removeprefix("torch.")
        name = {"complex64": "float32", "complex128": "float64"}.get(name, name)
        return self.peak_flops.get(name, min(self.peak_flops.values())) * self.compute_efficiency

    @property
    def bandwidth(self) -> float:
        """B/s that large copies reach."""
        return self.memory_bandwidth * self.bandwidth_efficiency


@dataclass(frozen=True)
class Link:
    """What joins two devices: a message of n bytes takes ``latency + n / bandwidth`` seconds, each way at the same time."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check(self.latency >= 0, f"a link's latency must not be negative, got {self.latency}")
        _check(self.bandwidth > 0, f"a link's bandwidth must be positive, got {self.bandwidth}")


_SAME_DEVICE = Link(latency=0.0, bandwidth=float("inf"))


@dataclass(frozen=True)
class Level:
    """Ranks a and b with ``a // size == b // size`` are joined by this link, unless a smaller level joins them already."""

    size: int
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, and the links between them.

    >>> Cluster.preset("h100", nodes=2, devices_per_node=8).link(7, 8).bandwidth
    50000000000.0

    Attributes:
        devices: one for each rank.
        links: one link for all pairs; levels, innermost first; or a link for each pair of ranks (one direction stands for both).
    """

    devices: Sequence[Device]
    links: Link | Sequence[Level] | Mapping[tuple[int, int], Link] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        _check(len(self.devices) > 0, "a cluster needs at least one device")
        if isinstance(self.links, Mapping):
            object.__setattr__(self, "links", MappingProxyType(dict(self.links)))
        elif not isinstance(self.links, Link):
            levels = tuple(sorted(self.links, key=lambda level: level.size))
            reach = levels[-1].size if levels else 1
            _check(reach >= len(self.devices), f"the links join {reach} devices, the cluster has {len(self.devices)}")
            object.__setattr__(self, "links", levels)

    def link(self, one: int, other: int) -> Link:
        """The link between two ranks; raises ConfigError when there is none."""
        if one == other:
            return _SAME_DEVICE
        if isinstance(self.links, Link):
            return self.links
        if isinstance(self.links, Mapping):
            found = self.links.get((one, other)) or self.links.get((other, one))
        else:
            found = next((level.link for level in self.links if one // level.size == other // level.size), None)
        if found is None:
            raise ConfigError(f"no link joins ranks {one} and {other}", remedy=f"add ({one}, {other}) to the links of the cluster")
        return found

    def first(self, n_devices: int) -> Cluster:
        """The cluster of the first so many devices; raises ConfigError when there are fewer."""
        if not 1 <= n_devices <= len(self.devices):
            raise ConfigError(
                f"{n_devices} devices were asked for, the cluster has {len(self.devices)}", remedy="describe a cluster with enough devices"
            )
        return Cluster(self.devices[:n_devices], self.links)

    @staticmethod
    def preset(name: str, nodes: int = 1, devices_per_node: int = 1) -> Cluster:
        """A cluster of equal, well-known devices; raises ConfigError naming the presets when there is none of that name."""
        presets = _presets()
        if name not in presets:
            raise ConfigError(f"there is no device preset {name!r}", remedy=_choices(name, presets))
        return _uniform(presets[name], nodes, devices_per_node)

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read ``KIND:NODESxDEVICES`` (``"h100:8x8"``), ``KIND:DEVICES`` on one node, or ``KIND``: one device."""
        match = re.fullmatch(r"([^:]+)(?::(?:(\d+)x)?(\d+))?", text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a cluster", remedy='write a device and how many, "h100:8x8": 8 nodes of 8 devices')
        return Cluster.preset(match[1], nodes=int(match[2] or 1), devices_per_node=int(match[3] or 1))

    @staticmethod
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
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"the cluster file {path} cannot be read: {error}", remedy="pass the path of a TOML file") from error
        return _cluster_from_table(table, str(path))


@dataclass(frozen=True)
class _Kind:
    """A device and how such devices are joined inside a node and between nodes."""

    device: Device
    inside: Link
    between: Link


@cache
def _presets() -> Mapping[str, _Kind]:
    table = tomllib.loads(resources.files("cost_models").joinpath("presets.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _kind(name, fields) for name, fields in table.items()})


def _kind(name: str, fields: Mapping[str, Any]) -> _Kind:
    links = {key: Link(**fields[key]) for key in ("inside", "between") if key in fields}
    inside = links.get("inside", _SAME_DEVICE)
    numbers = {key: value for key, value in fields.items() if key not in ("inside", "between", "memory")}
    return _Kind(Device(name=name, memory_bytes=parse_bytes(fields["memory"]), **numbers), inside, links.get("between", inside))


def _uniform(kind: _Kind, nodes: int, devices_per_node: int) -> Cluster:
    _check(nodes >= 1 and devices_per_node >= 1, f"a cluster needs at least one device, got {nodes} nodes of {devices_per_node}")
    levels = [Level(devices_per_node, kind.inside), Level(nodes * devices_per_node, kind.between)]
    return Cluster([kind.device] * (nodes * devices_per_node), levels)


def _cluster_from_table(table: Mapping[str, Any], path: str) -> Cluster:
    try:
        kinds = dict(_presets()) | {name: _kind(name, fields) for name, fields in table.get("devices", {}).items()}
        if "device" in table:
            return _uniform(_named(table["device"], kinds), table.get("nodes", 1), table.get("devices_per_node", 1))
        devices = [_named(name, kinds).device for name in table["ranks"]]
        levels = [Level(link["size"], Link(link["latency"], link["bandwidth"])) for link in table["links"]]
        return Cluster(devices, levels)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the cluster file {path} does not describe a cluster: {error}",
            remedy="give `device`, `nodes` and `devices_per_node`, or `ranks` and `links`; see Cluster.from_toml",
        ) from error


def _named(name: str, kinds: Mapping[str, _Kind]) -> _Kind:
    if name not in kinds:
        raise ConfigError(f"there is no device {name!r}", remedy=_choices(name, kinds))
    return kinds[name]


def _choices(name: str, known: Mapping[str, _Kind]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"choose one of {', '.join(known)}, or describe your own"
