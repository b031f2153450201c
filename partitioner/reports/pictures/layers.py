"""A layered layout (Sugiyama, Tagawa, Toda 1981) of a graph in lanes: who stands in which row, and where in the row of a lane.

Numbers in, numbers out: nodes are counted from 0, and know their lane. In symbols, with ``r`` the row of a node and ``x`` its place in it:

    r(v) >= r(u) + 1          for every edge u -> v; the smallest such rows
    x                         within a row of a lane, so that few edges cross: sorted by the mean of the neighbours' places, down and up

Edges over several rows inside a lane get a place of their own in each row between, so that they pass beside boxes, not under them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

__all__ = ["Layers", "arrange"]

Edge = tuple[int, int]

_SWEEPS = 8


@dataclass(frozen=True)
class Layers:
    """Where everything is.

    Attributes:
        row: of each node.
        place: of each node in its row of its lane, from 0.
        bends: for each edge inside a lane that spans several rows, the places that it passes, from its first row to its last; else none.
        width: of each lane, the places that its fullest row has.
        n_rows: rows in all.
    """

    row: tuple[int, ...]
    place: tuple[float, ...]
    bends: tuple[tuple[float, ...], ...]
    width: tuple[int, ...]
    n_rows: int


def arrange(lanes: Sequence[int], edges: Sequence[Edge], last: Sequence[int] = ()) -> Layers:
    """Lay out a graph without cycles.

    Args:
        lanes: of each node.
        edges: from node to node.
        last: nodes that stand in the last row, whatever else they follow.
    """
    rows = _rows(len(lanes), edges)
    bottom = max(rows, default=-1) + (1 if last and any(rows[node] for node in range(len(rows)) if node not in last) else 0)
    for node in last:
        rows[node] = bottom
    nodes_in: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    all_lanes, all_rows = list(lanes), list(rows)
    chains: list[list[int]] = []
    pairs: list[Edge] = []
    for source, target in edges:
        chain = [source]
        if lanes[source] == lanes[target]:
            for row in range(rows[source] + 1, rows[target]):
                all_lanes.append(lanes[source])
                all_rows.append(row)
                chain.append(len(all_lanes) - 1)
        chain.append(target)
        pairs += itertools.pairwise(chain)
        chains.append(chain[1:-1])
    for node, (lane, row) in enumerate(zip(all_lanes, all_rows, strict=True)):
        nodes_in[lane, row].append(node)
    places = _order(nodes_in, pairs, len(all_lanes))
    n_lanes = max(lanes, default=-1) + 1
    width = tuple(max((len(found) for (lane, _), found in nodes_in.items() if lane == each), default=1) for each in range(n_lanes))
    centred = [place + (width[all_lanes[node]] - len(nodes_in[all_lanes[node], all_rows[node]])) / 2 for node, place in enumerate(places)]
    bends = tuple(tuple(centred[node] for node in chain) for chain in chains)
    return Layers(tuple(rows), tuple(centred[: len(lanes)]), bends, width, max(rows, default=-1) + 1)


def _rows(count: int, edges: Sequence[Edge]) -> list[int]:
    """The length of the longest way to each node; a cycle raises CycleError, a ValueError."""
    before: dict[int, set[int]] = {node: set() for node in range(count)}
    for source, target in edges:
        before[target].add(source)
    rows = [0] * count
    for node in TopologicalSorter(before).static_order():
        rows[node] = max((rows[each] + 1 for each in before[node]), default=0)
    return rows


def _order(nodes_in: dict[tuple[int, int], list[int]], pairs: Sequence[Edge], count: int) -> list[int]:
    """The place of each node in its row."""
    above: defaultdict[int, list[int]] = defaultdict(list)
    below: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in pairs:
        above[target].append(source)
        below[source].append(target)
    place = [0] * count
    for nodes in nodes_in.values():
        for index, node in enumerate(nodes):
            place[node] = index
    in_order = sorted(nodes_in, key=lambda key: key[1])
    for sweep in range(_SWEEPS):
        neighbours, keys = (above, in_order) if sweep % 2 == 0 else (below, in_order[::-1])
        for key in keys:
            nodes = nodes_in[key]
            middle = {node: _mean([place[other] for other in neighbours[node]], place[node]) for node in nodes}
            for index, node in enumerate(sorted(nodes, key=lambda node: (middle[node], place[node]))):
                place[node] = index
    return place


def _mean(values: Sequence[int], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
