"""Minimum cut: split the nodes of a network into those of the source and those of the sink, so that the edges between them cost least.

    minimize    sum of capacity(u, v) over edges with u in S and v not in S,    source in S, sink not in S

By shortest augmenting paths (Edmonds and Karp 1972). Of several cuts of the least cost, the one with the fewest nodes in S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import TypeVar

_Node = TypeVar("_Node", bound=Hashable)


def min_cut(capacities: Mapping[tuple[_Node, _Node], float], source: _Node, sink: _Node) -> set[_Node]:
    """Return the nodes on the side of the source; ``capacities``: edge -> its cost, which may be infinite, but not on a whole path."""
    left: dict[_Node, dict[_Node, float]] = {source: {}, sink: {}}
    for (start, end), capacity in capacities.items():
        left.setdefault(start, {})[end] = left.get(start, {}).get(end, 0.0) + capacity
        left.setdefault(end, {}).setdefault(start, 0.0)
    while True:
        reached = _reach(left, source)
        if sink not in reached:
            return set(reached)
        path = [sink]
        while path[-1] != source:
            path.append(reached[path[-1]])
        edges = list(zip(path[1:], path[:-1], strict=True))
        flow = min(left[start][end] for start, end in edges)
        for start, end in edges:
            left[start][end] -= flow
            left[end][start] += flow


def _reach(left: Mapping[_Node, Mapping[_Node, float]], source: _Node) -> dict[_Node, _Node]:
    """Return the nodes that the source reaches over edges with capacity left, breadth first -> the node before."""
    reached, waiting = {source: source}, deque([source])
    while waiting:
        node = waiting.popleft()
        for other, capacity in left[node].items():
            if capacity > 0 and other not in reached:
                reached[other] = node
                waiting.append(other)
    return reached
