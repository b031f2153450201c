"""Transfers that share links: how long each takes alone, and how much of a link's time it uses.

    rank 0 ──out── level 0 ──in── rank 1        a device has a way out and a way in at each level of links
       └───out─── level 1 ──in──────── rank 8

Transfers that use one way at once share its bandwidth: two that fill it take twice as long. A ring that crosses nodes is as fast as the
link between them, and takes only a part of the bandwidth inside a node. Latencies are not shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from cost_models.collectives.algorithms import Collective, Group, GroupLinks, group_links, port
from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.tasks import Transfer


@dataclass(frozen=True)
class Passage:
    """A transfer on its way.

    Attributes:
        latency: seconds in which it uses no link.
        seconds: that it uses links, if nothing else does.
        ports: the ways out of devices and into them that it uses -> the fraction of their bandwidth that it takes while nothing else does.
        traffic: (source, destination) -> bytes that go there.
        host_share: the part of its time that the ranks' own processors are busy with it.
    """

    latency: float
    seconds: float
    ports: Mapping[Any, float]
    traffic: Mapping[tuple[int, int], float]
    host_share: float = 0.0


class Passages:
    """How transfers go over the links of a cluster; of equal ones, and of the links of a group, it is worked out once.

    Args:
        cluster: where ranks are.
        cost_model: how long a message takes.
    """

    def __init__(self, cluster: Cluster, cost_model: CostModel) -> None:
        self._cluster, self._cost_model = cluster, cost_model
        self._groups: dict[Group, tuple[GroupLinks, dict[Any, float]]] = {}
        self._known: dict[tuple[str, Group, int], Passage] = {}

    def of(self, transfer: Transfer) -> Passage:
        """Return the passage of a transfer over its links."""
        key = transfer.kind, transfer.group, transfer.bytes
        if key not in self._known:
            self._known[key] = self._passage(transfer)
        return self._known[key]

    def _passage(self, transfer: Transfer) -> Passage:
        group, size = transfer.group, transfer.bytes
        if transfer.kind == "message":
            link = self._cluster.link(*group)
            latency = self._cost_model.transfer_time(0, link)
            seconds = self._cost_model.transfer_time(size, link) - latency
            ports = dict.fromkeys(_ports(self._cluster, *group), 1.0)
            return Passage(latency, seconds, ports, dict(_traffic(transfer)), link.host_share)
        if len(group) == 1:
            return Passage(0.0, 0.0, {}, {})
        kind = cast(Collective, "halo_exchange" if transfer.kind == "halo_add" else transfer.kind)
        links, ports = self._links_of_group(group)
        seconds = links.seconds(kind, size)
        latency = min(links.seconds(kind, 0), seconds)  # another algorithm may be the fastest for no bytes
        share = max(self._cluster.link(*pair).host_share for pair in itertools.pairwise(group))
        return Passage(latency, seconds - latency, ports, dict(_traffic(transfer)), share)

    def _links_of_group(self, group: Group) -> tuple[GroupLinks, dict[Any, float]]:
        """Return the links of a group, and the ports that its ring uses, with the fraction of their bandwidth."""
        if group not in self._groups:
            links, ports = group_links(group, self._cluster), dict[Any, float]()
            for pair in zip(group, (*group[1:], group[0]), strict=True):
                load = min(1.0, links.ring.bandwidth / self._cluster.link(*pair).bandwidth)
                ports.update((each, min(1.0, ports.get(each, 0.0) + load)) for each in _ports(self._cluster, *pair))
            self._groups[group] = links, ports
        return self._groups[group]


def _traffic(transfer: Transfer) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield (source, destination) and the bytes that a collective sends between them.

    Reductions and gathers run as a ring: (n - 1) / n of the bytes cross each of its links, twice for an all_reduce.
    """
    group, n_ranks = transfer.group, len(transfer.group)
    if transfer.kind == "message":
        yield (group[0], group[1]), transfer.bytes
        return
    if transfer.kind == "all_to_all":
        yield from (((one, other), transfer.bytes / n_ranks) for one in group for other in group if one != other)
        return
    if transfer.kind in ("halo_exchange", "halo_add"):
        neighbours = itertools.pairwise(group)
        yield from ((pair, transfer.bytes) for one, other in neighbours for pair in ((one, other), (other, one)))
        return
    rounds = 2 if transfer.kind == "all_reduce" else 1
    for pair in zip(group, (*group[1:], group[0]), strict=True):
        yield pair, rounds * transfer.bytes * (n_ranks - 1) / n_ranks


def _ports(cluster: Cluster, source: int, destination: int) -> Iterator[Any]:
    """Yield the ports out of one device and into another."""
    if isinstance(cluster.links, Mapping):
        yield (source, destination)
        return
    yield ("out", *port(source, destination, cluster))
    yield ("in", *port(destination, source, cluster))
