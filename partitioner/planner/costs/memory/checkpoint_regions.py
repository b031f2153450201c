"""Choose the regions that a full recomputation computes again one by one: repeated blocks, or segments between narrow cuts.

    embedding | block 0 | block 1 | ... | block 31 | norm, head        each block is a region; the values that enter it are kept
    conv ... pool | conv ... pool | upsample ... | head                no block repeats: segments, their number chosen (``segments``)

Of all places where a block can begin, it begins where the fewest bytes enter it. Nodes between blocks are cut further only if they hold
more bytes than a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from partitioner.planner.costs.cut_points import CutPoints
from partitioner.planner.solvers.segments import Crossing, cut_into_segments
from partitioner.planner.solvers.stage_memory import Integers
from passes.graph.aliasing import allocations
from passes.graph.repeated_subgraphs import Run, border_depth, longest_run, signatures
from passes.graph.symbolic_sizes import evaluated
from passes.ir.graph import ModelGraph
from passes.ir.plan import Region

_LEAST_REPEATED = 6
"""Nodes that must repeat to be a block."""

_MOST_UNITS = 300
"""Units of which segments are made; of more, the narrowest cuts count."""


def checkpoint_regions(graph: ModelGraph, points: CutPoints) -> tuple[Region, ...]:
    """Return the regions, in order; none if the whole graph is one.

    Args:
        graph: of the whole model.
        points: its units: a region begins with one.
    """
    if not points.units:
        return ()
    chain = _chain_of(graph, points)
    pieces = list(_pieces(chain, 0, len(chain.nodes)))
    largest_block = max((chain.inside(start, stop) for start, stop, is_block in pieces if is_block), default=0)
    starts: list[int] = []
    for start, stop, is_block in pieces:
        starts += [start] if is_block else _segment_starts(chain, start, stop, largest_block)
    return tuple(Region(chain.nodes[start].name) for start in starts) if len(starts) > 1 else ()


@dataclass(frozen=True, eq=False)
class _Chain:
    """The nodes of all units, in order.

    Attributes:
        nodes: P of them.
        signatures: (P,) equal for nodes that compute alike.
        is_start: (P,) whether a unit begins there.
        before: (P + 1,) bytes that all nodes before a position allocate.
        values: the allocations that later nodes read; producer and last reader are positions.
        crossing: (P,) bytes of the values that cross the boundary before each node.
    """

    nodes: Sequence[fx.Node]
    signatures: Sequence[int]
    is_start: Sequence[bool]
    before: Integers
    values: Sequence[Crossing]
    crossing: Integers

    def inside(self, start: int, stop: int) -> int:
        """Return the bytes that a run of nodes allocates."""
        return int(self.before[stop] - self.before[start])


def _chain_of(graph: ModelGraph, points: CutPoints) -> _Chain:
    position = {name: place for place, name in enumerate(name for unit in points.units for name in unit)}
    nodes = [node for node in graph.graph.nodes if node.name in position]
    memory = allocations(graph.graph)
    producer: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in nodes:
        for allocation in memory.allocations_of[node.name]:
            producer.setdefault(allocation, position[node.name])
            readers = [position[user.name] for user in node.users if user.name in position]
            last[allocation] = max(last.get(allocation, 0), *readers, position[node.name])
    held = {allocation for node in graph.graph.nodes if node.op == "placeholder" for allocation in memory.allocations_of[node.name]}
    sizes = {key: int(evaluated(memory.bytes[key], graph.batch, graph.batch_size)) for key in producer if key not in held}
    values = [Crossing(size, producer[key], last[key]) for key, size in sizes.items() if last[key] > producer[key]]
    allocated, crossing = np.zeros(len(nodes), np.int64), np.zeros(len(nodes) + 1, np.int64)
    for key, size in sizes.items():
        allocated[producer[key]] += size
    for value in values:
        crossing[value.producer + 1] += value.size
        crossing[value.last + 1 :][:1] -= value.size
    starts = {unit[0] for unit in points.units}
    return _Chain(
        nodes=nodes,
        signatures=signatures(nodes, lambda _: ""),
        is_start=[node.name in starts for node in nodes],
        before=np.concatenate([[0], np.cumsum(allocated)]),
        values=values,
        crossing=np.cumsum(crossing)[:-1],
    )


def _pieces(chain: _Chain, first: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, whether it is a block) of the copies of the longest run, and of the pieces before and after it, in order."""
    found = longest_run(chain.nodes[first:stop], chain.signatures[first:stop])
    run = None if found is None else _narrowest(chain, Run(first + found.start, found.length, found.count))
    if run is None or (run.count - 1) * run.length < _LEAST_REPEATED:
        if first < stop:
            yield first, stop, False
        return
    end = run.start + run.count * run.length
    yield from _pieces(chain, first, run.start)
    for start in range(run.start, end, run.length):
        yield start, start + run.length, True
    yield from _pieces(chain, end, stop)


def _narrowest(chain: _Chain, run: Run) -> Run | None:
    """Return the run shifted to where the fewest bytes enter its copies; None if no unit begins where a copy does.

    Of equal ones, the run whose copies begin at the outermost modules.
    """
    shifted = [Run(run.start + shift, run.length, run.count - (shift > 0)) for shift in range(run.length)]

    def price(candidate: Run) -> tuple[float, int, int]:
        inner = range(candidate.start + candidate.length, candidate.start + candidate.count * candidate.length, candidate.length)
        entering = float(np.mean([chain.crossing[start] for start in inner])) if inner else np.inf
        return entering, border_depth(chain.nodes, candidate.start), candidate.start

    def may_begin(candidate: Run) -> bool:
        return all(chain.is_start[candidate.start + copy * candidate.length] for copy in range(candidate.count))

    return min(filter(may_begin, shifted), key=price, default=None)


def _segment_starts(chain: _Chain, first: int, stop: int, largest_block: int) -> list[int]:
    """Return the starts of the segments that a piece is cut into; it is one segment if it holds no more bytes than a block."""
    starts = [place for place in range(first, stop) if chain.is_start[place] or place == first]
    if chain.inside(first, stop) <= largest_block or len(starts) == 1:
        return [first]
    if len(starts) > _MOST_UNITS:
        narrow = sorted(starts[1:], key=lambda place: float(chain.crossing[place]))[: _MOST_UNITS - 1]
        starts = [first, *sorted(narrow)]
    unit_of = np.searchsorted(starts, np.arange(first, stop), side="right") - 1
    inner = (value for value in chain.values if first <= value.producer and value.last < stop)
    values = [Crossing(size, int(unit_of[producer - first]), int(unit_of[last - first])) for size, producer, last in inner]
    inside = [chain.inside(start, end) for start, end in zip(starts, (*starts[1:], stop), strict=True)]
    return [starts[unit] for unit in cut_into_segments(inside, [value for value in values if value.last > value.producer], largest_block)]
