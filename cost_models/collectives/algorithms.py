"""Time collectives on a cluster: links of the group, groups that share them, and the fastest algorithm.

    node 0              node 1                   groups (0 1) (2 3): each stays in its node
    0 --NVLink-- 1      2 --NVLink-- 3           group (0 1 2 3): a ring whose slowest step crosses nodes
         |__ InfiniBand __|                      groups (0 2) (1 3) at once: both cross, and halve a shared adapter

A ring goes as fast as its slowest step. A step leaves its sender through a port: of the device, or of its node where the devices of a node
share an adapter (``Level.shared``). Steps that leave through one port at the same time divide its bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, TypeAlias

from cost_models.collectives import alpha_beta as communication
from cost_models.hardware.clusters import Cluster, Level, Link

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "halo_exchange"]
"""Kind of collective."""

Group: TypeAlias = tuple[int, ...]
"""Ranks, in the order in which they pass parts on."""

_Port: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class GroupLinks:
    """Links of a group, from which its collectives are priced for any size.

    Attributes:
        n_ranks: size of the group.
        ring: the slowest step of a ring.
        levels: for each level of a hierarchy the number of parts and the link; empty where parts are unequal.
        memory: B/s of the memory of the slowest rank.
    """

    n_ranks: int
    ring: Link
    levels: tuple[tuple[int, Link], ...] = ()
    memory: float = math.inf

    def copying(self, size: float) -> float:
        """Return the seconds of copying so many bytes into a message, or out of one."""
        return 2 * size / self.memory if self.ring.copies else 0.0

    def seconds(self, kind: Collective, size: float) -> float:
        """Return the seconds of a collective by its fastest algorithm.

        Args:
            size: bytes of the whole tensor; see ``cost_models.collectives.alpha_beta``.
        """
        if self.n_ranks < 2:
            return 0.0
        if kind == "all_reduce" and self.ring.gathered_bytes and size * self.n_ranks <= self.ring.gathered_bytes:
            return self.ring.start + float(communication.gathered_all_reduce(size, self.n_ranks, self.ring))
        formula = getattr(communication, kind)
        times = [float(formula(size, self.n_ranks, self.ring))]
        if kind == "all_reduce":
            times.append(float(communication.tree_all_reduce(size, self.n_ranks, self.ring)))
            if len(self.levels) > 1:
                times.append(float(communication.hierarchical_all_reduce(size, self.levels)))
        return self.ring.start + min(times)


def group_links(group: Group, cluster: Cluster, at_once: Sequence[Group] = ()) -> GroupLinks:
    """Return the links of a group, from which its collectives are priced.

    Args:
        at_once: groups that communicate at the same time; ``group`` may be one of them.

    Raises:
        ConfigError: no link joins two neighbours of the group.
    """
    if len(group) < 2:
        return GroupLinks(len(group), cluster.link(0, 0))
    group = _by_place(group, cluster)
    others = [_by_place(other, cluster) for other in at_once if other != group]
    memory = min(cluster.devices[rank].bandwidth for rank in group)
    return GroupLinks(len(group), slowest_link(group, cluster, others), tuple(_hierarchy(group, cluster, others)), memory)


def slowest_link(group: Group, cluster: Cluster, at_once: Sequence[Group] = ()) -> Link:
    """Return the link of a ring's slowest step: the least bandwidth left, the longest latency and start, the busiest processors."""
    links = message_links([pair for each in (group, *at_once) for pair in _ring(each)], cluster)[: len(_ring(group))]
    slowest = min(links, key=lambda link: link.bandwidth)
    busiest = max(link.host_share for link in links)  # the kernel of a ring runs on all links for as long as the slowest takes
    return replace(slowest, latency=max(link.latency for link in links), start=max(link.start for link in links), host_share=busiest)


def message_links(messages: Sequence[tuple[int, int]], cluster: Cluster) -> list[Link]:
    """Return the link of each message, with the bandwidth left when all are sent at once.

    Args:
        messages: sender and receiver.
        cluster: where they are.
    """
    ports = [port(one, other, cluster) for one, other in messages]
    uses = Counter(ports)
    pairs = [(cluster.link(*message), uses[leaving]) for message, leaving in zip(messages, ports, strict=True)]
    shared: dict[tuple[int, int], Link] = {}  # a cluster has few links, thousands of messages go over each
    for link, number in pairs:
        if (id(link), number) not in shared:
            shared[id(link), number] = replace(link, bandwidth=link.bandwidth / number)
    return [shared[id(link), number] for link, number in pairs]


def _ring(group: Group) -> list[tuple[int, int]]:
    return list(zip(group, (*group[1:], group[0]), strict=True))


def _by_place(group: Group, cluster: Cluster) -> Group:
    """Sort ranks by place: a ring that visits node after node crosses each node boundary once."""
    return tuple(sorted(group, key=lambda rank: cluster.places[rank]))


def port(one: int, other: int, cluster: Cluster) -> _Port:
    """Return the port that a message leaves through: (level of its link, device or node that has the port)."""
    here, there = cluster.places[one], cluster.places[other]
    inner = 1
    for number, level in enumerate(_levels(cluster)):
        if here // level.size == there // level.size:
            return number, (here // inner if level.shared else here)
        inner = level.size
    return -1, here


def _levels(cluster: Cluster) -> tuple[Level, ...]:
    return tuple(cluster.links) if isinstance(cluster.links, Sequence) else ()


def _hierarchy(group: Group, cluster: Cluster, at_once: Sequence[Group]) -> list[tuple[int, Link]]:
    """Return (number of parts, link) for each level on which the group has equal parts; empty when parts are unequal."""
    found: list[tuple[int, Link]] = []
    units: list[Group] = [(rank,) for rank in group]
    for level in _levels(cluster):
        joined = [tuple(parts) for _, parts in groupby(units, key=lambda unit: cluster.places[unit[0]] // level.size)]
        count = len(joined[0])
        if any(len(parts) != count for parts in joined):
            return []
        if count > 1:
            # Every rank of a unit reduces its part with its counterparts in the other units, all at the same time.
            rings: list[Group] = [ring for parts in joined for ring in zip(*parts, strict=True)]
            links = message_links([pair for ring in (*rings, *at_once) for pair in _ring(ring)], cluster)
            crossing = links[: sum(len(ring) for ring in rings)]
            found.append((count, min(crossing, key=lambda link: link.bandwidth)))
        units = [tuple(rank for part in parts for rank in part) for parts in joined]
    return found
