"""The hardware of a mesh: the slowest device at each pipeline position, the slowest link along each mesh dimension.

{"pipeline": 2, "tensor": 2} on two nodes of two devices       tensor    the link inside a node
                                                               pipeline  the link between nodes

place 0 of the pipeline: ranks 0 and 1      place 1: ranks 2 and 3
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from cost_models.collectives.algorithms import GroupLinks, group_links
from cost_models.hardware.clusters import Cluster, Device, Link
from passes.ir.graph import ModelGraph
from passes.ir.mesh import STAGES, Mesh, pipelines

_WORST = Link(0.0, float("inf"))


class LinkTable:
    """A cache of the links along mesh dimensions, and of the clusters of pipelines; ``cluster``: of all ranks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[int, int], GroupLinks] = {}
        self._places: dict[tuple[int, int, int, bool], Cluster] = {}

    def of(self, mesh: Mesh) -> dict[str, GroupLinks]:
        """Return mesh dimension -> links of its slowest group while all groups communicate, for the dimensions that shard axes.

        If stages have a tensor-parallel degree each, the links are those of the widest.
        """
        if mesh.widths:
            return self.at(mesh, mesh.widths.index(max(mesh.widths)))
        strides = _strides(mesh)
        return {name: self._along(mesh.size, strides[name], count) for name, count in mesh.cutting.dimensions}

    def at(self, mesh: Mesh, place: int) -> dict[str, GroupLinks]:
        """Return the same for the stages of the same width as the one at a pipeline position."""
        same_width = [other for other, width in enumerate(mesh.widths) if width == mesh.widths[place]]
        ranks = sorted({pipeline[other] for pipeline in pipelines(mesh) for other in same_width})
        groups = {name: list(dict.fromkeys(mesh.group(rank, (name,)) for rank in ranks)) for name in mesh.cutting_at(place).names}
        return {name: self._slowest_group(each, mesh.size) for name, each in groups.items()}

    def places(self, mesh: Mesh, *, all_talk: bool = False) -> Cluster:
        """Return the cluster of one pipeline (``places_of``), cached by size, number of stages and stride of stages."""
        if mesh.widths:
            return places_of(mesh, self._cluster, all_talk=all_talk)
        stride = next((_strides(mesh)[name] for name in mesh.names if name in STAGES), 1)
        key = (mesh.size, stages_length(mesh), stride, all_talk)
        if key not in self._places:
            self._places[key] = places_of(mesh, self._cluster, all_talk=all_talk)
        return self._places[key]

    def _along(self, size: int, stride: int, count: int) -> GroupLinks:
        if (stride, count) not in self._known:
            self._known[stride, count] = self._slowest_group(_groups(size, stride, count), size)
        return self._known[stride, count]

    def _slowest_group(self, groups: Sequence[tuple[int, ...]], size: int) -> GroupLinks:
        """Return the links of the slowest group while all groups communicate, with the slowest memory of the first ``size`` ranks."""
        cluster = self._cluster
        slowest = min(groups, key=lambda group: _speed(_slowest(itertools.starmap(cluster.link, itertools.pairwise(group)))))
        memory = min(device.bandwidth for device in cluster.devices[:size])
        return dataclasses.replace(group_links(slowest, cluster, groups if _shares_ports(cluster) else ()), memory=memory)


def _groups(size: int, stride: int, count: int) -> list[tuple[int, ...]]:
    """Return the rank groups along a mesh dimension of ``count`` ranks: size 8, stride 4, count 2 -> (0, 4), (1, 5), ..."""
    firsts = (rank for rank in range(size) if rank // stride % count == 0)
    return [tuple(range(first, first + stride * count, stride)) for first in firsts]


def _shares_ports(cluster: Cluster) -> bool:
    return not isinstance(cluster.links, Link | Mapping) and any(level.shared for level in cluster.links)


def places_of(mesh: Mesh, cluster: Cluster, *, all_talk: bool = False) -> Cluster:
    """Return the cluster of one pipeline: the slowest device at each position, the slowest link between two positions.

    If stages have a tensor-parallel degree each, that is part of the device's name, since the work of a stage depends on it.

    Args:
        cluster: of all ranks.
        all_talk: whether any two positions may communicate, not only neighbours.
    """
    ranks = pipelines(mesh)
    n_places = len(ranks[0])
    devices = [_slowest_device([cluster.devices[pipeline[place]] for pipeline in ranks]) for place in range(n_places)]
    if mesh.widths:
        devices = [_sharing(device, width) for device, width in zip(devices, mesh.widths, strict=True)]
    if n_places == 1:
        return Cluster(devices, _WORST)
    pairs = {(place, place + 1) for place in range(n_places - 1)} | {(0, n_places - 1)}
    pairs = set(itertools.combinations(range(n_places), 2)) if all_talk else pairs
    links = {(one, other): _slowest(cluster.link(pipeline[one], pipeline[other]) for pipeline in ranks) for one, other in sorted(pairs)}
    return Cluster(devices, links)


def _sharing(device: Device, width: int) -> Device:
    """Return a device whose name contains the width of its stage."""
    return device if width == 1 else dataclasses.replace(device, name=f"{width} x {device.name}")


def stages_length(mesh: Mesh) -> int:
    """Return the number of pipeline positions."""
    return next((length for name, length in mesh.dimensions if name in STAGES), 1)


def _strides(mesh: Mesh) -> Mapping[str, int]:
    """Return mesh dimension -> the distance between neighbouring ranks along it: {"data": 2, "tensor": 4} -> data 4, tensor 1."""
    strides, stride = {}, 1
    for name, size in reversed(mesh.dimensions):
        strides[name] = stride
        stride *= size
    return strides


def _slowest(links: Iterable[Link]) -> Link:
    return min({id(link): link for link in links}.values(), key=_speed)  # thousands of ranks share a few link objects


def _speed(link: Link) -> tuple[float, float]:
    """Return a key that orders links from slow to fast."""
    return link.bandwidth, -link.latency


def _slowest_device(devices: Sequence[Device]) -> Device:
    """Return the device if all are equal, else one with the slowest of each number: the ranks of a stage wait for each other."""
    kinds = list(dict.fromkeys(devices))
    if len(kinds) == 1:
        return kinds[0]
    types = sorted({name for device in kinds for name in device.peak_flops})
    return dataclasses.replace(
        max(kinds, key=lambda device: device.launch_overhead),
        name=" or ".join(device.name for device in kinds),
        peak_flops={name: min(device.peak(name) * device.compute_efficiency for device in kinds) for name in types},
        memory_bytes=min(device.memory_bytes for device in kinds),
        memory_bandwidth=min(device.bandwidth for device in kinds),
        launch_overhead=max(device.launch_overhead for device in kinds),
        compute_efficiency=1.0,
        bandwidth_efficiency=1.0,
    )


# -- speed of compute and communication --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockRate:
    """Speed of compute and communication, by which the axes to shard are proposed; whole plans, by all prices, then decide.

    Attributes:
        flops: FLOP/s of a rank.
        bandwidth: B/s between ranks.
        latency: s of a message.
        copying: s per byte copied into and out of a message buffer.
        asked: whether the user asked for these ranks: work is then sharded even if, as in small models, messages take longer than it saves.
    """

    flops: float
    bandwidth: float
    latency: float
    copying: float = 0.0
    asked: bool = False


def clock_rate_of(graph: ModelGraph, cluster: Cluster, *, asked: bool) -> ClockRate | None:
    """Return the clock rate of the slowest device and of the link between ranks 0 and 1; None for a single device."""
    if len(cluster.devices) == 1:
        return None
    dtypes = [node.meta["val"].dtype for node in graph.graph.nodes if node.name in graph.parameters]
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    link = cluster.link(0, 1)
    copying = 2 / min(device.bandwidth for device in cluster.devices) if link.copies else 0.0
    return ClockRate(min(device.flops(dtype) for device in cluster.devices), link.bandwidth, link.latency, copying, asked)
