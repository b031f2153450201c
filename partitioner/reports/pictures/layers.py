"""Layered layout of a graph in lanes (Sugiyama, Tagawa, Toda 1981): the row of each node, and its place in the row of its lane.

Nodes are numbers from 0, each in a given lane. With ``r`` the row of a node and ``x`` its place:

    r(v) >= r(u) + 1          for every edge u -> v; the smallest such rows
    x                         nodes of one row and lane are sorted by the mean place of their neighbours, so that few edges cross

An edge over several rows inside a lane gets a place of its own in each row between, so that it passes beside boxes, not under them.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

Edge = tuple[int, int]

_SWEEPS = 8
"""How often rows are sorted, alternately downwards and upwards."""


@dataclass(frozen=True)
class Layers:
    """A layout.

    Attributes:
        row: the row of each node.
        place: the place of each node in the row of its lane, from 0; shorter rows are centred, in half places.
        bends: for each edge inside a lane, its places in the rows between its ends; empty for other edges.
        width: for each lane, the number of places of its fullest row.
        n_rows: the number of rows.
    """

    row: tuple[int, ...]
    place: tuple[float, ...]
    bends: tuple[tuple[float, ...], ...]
    width: tuple[int, ...]
    n_rows: int


def arrange(lanes: Sequence[int], edges: Sequence[Edge], last: Sequence[int] = ()) -> Layers:
    """Place the nodes of a graph without cycles.

    Args:
        lanes: the lane of each node, from 0.
        edges: (source, target).
        last: nodes of the last row, below all others.

    Raises:
        CycleError: the graph has a cycle; a ValueError.
    """
    rows = _rows(len(lanes), edges)
    others_below_first_row = any(row for node, row in enumerate(rows) if node not in last)
    bottom = max(rows, default=-1) + (1 if last and others_below_first_row else 0)
    for node in last:
        rows[node] = bottom
    # Edges inside a lane become chains with a dummy node in each row between; dummy nodes are numbered after the real ones.
    all_lanes, all_rows = list(lanes), list(rows)
    dummies_of_edges: list[list[int]] = []
    links: list[Edge] = []
    for source, target in edges:
        between = range(rows[source] + 1, rows[target]) if lanes[source] == lanes[target] else range(0)
        dummies = [len(all_lanes) + index for index in range(len(between))]
        all_lanes += [lanes[source]] * len(between)
        all_rows += between
        links += itertools.pairwise([source, *dummies, target])
        dummies_of_edges.append(dummies)
    nodes_in: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # (lane, row) -> nodes
    for node, lane_and_row in enumerate(zip(all_lanes, all_rows, strict=True)):
        nodes_in[lane_and_row].append(node)
    places = _places(nodes_in, links, len(all_lanes))
    width = [1] * (max(lanes, default=-1) + 1)
    for (lane, _), nodes in nodes_in.items():
        width[lane] = max(width[lane], len(nodes))
    centred = [float(place) for place in places]
    for (lane, _), nodes in nodes_in.items():
        for node in nodes:
            centred[node] += (width[lane] - len(nodes)) / 2
    bends = tuple(tuple(centred[node] for node in dummies) for dummies in dummies_of_edges)
    return Layers(tuple(rows), tuple(centred[: len(lanes)]), bends, tuple(width), max(rows, default=-1) + 1)


def _rows(count: int, edges: Sequence[Edge]) -> list[int]:
    """Return the length of the longest path to each node."""
    sources: dict[int, set[int]] = {node: set() for node in range(count)}
    for source, target in edges:
        sources[target].add(source)
    rows = [0] * count
    for node in TopologicalSorter(sources).static_order():
        rows[node] = max((rows[source] + 1 for source in sources[node]), default=0)
    return rows


def _places(nodes_in: dict[tuple[int, int], list[int]], links: Sequence[Edge], count: int) -> list[int]:
    """Order the nodes of each (lane, row) by the mean place of their neighbours above, then below; return each node's place."""
    above: defaultdict[int, list[int]] = defaultdict(list)
    below: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in links:
        above[target].append(source)
        below[source].append(target)
    place = [0] * count
    for nodes in nodes_in.values():
        for index, node in enumerate(nodes):
            place[node] = index
    downwards = sorted(nodes_in, key=lambda lane_and_row: lane_and_row[1])
    for sweep in range(_SWEEPS):
        neighbours, order = (above, downwards) if sweep % 2 == 0 else (below, downwards[::-1])
        for lane_and_row in order:
            nodes = nodes_in[lane_and_row]
            mean = {node: statistics.fmean(place[other] for other in neighbours[node] or [node]) for node in nodes}
            for index, node in enumerate(sorted(nodes, key=lambda node: (mean[node], place[node]))):
                place[node] = index
    return place
