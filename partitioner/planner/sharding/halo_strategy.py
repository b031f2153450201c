"""Choose halo strategies for segments of calls, by cost or as the user fixed them.

Three strategies: exchange before each layer and wait; exchange before each layer and compute the interior meanwhile; or one wider halo for
the whole segment, whose overlap both neighbours recompute.

A region of connected calls may be divided before every call that needs a halo:

    conv  relu  conv  relu  conv  relu  conv          c = cost of a segment: its messages, and the recomputed overlap
    |------ c(0, 2) -------|-------- c(2, 4) -----|    best[k] = min over j < k of best[j] + c(j, k)

A segment with one such call exchanges before it. The division is a shortest path, exact except that segments are not extended once their
overlap costs more than twice their messages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from cost_models.collectives.algorithms import GroupLinks
from cost_models.cost_model import CostModel, call_seconds
from cost_models.formulas.symbols import Numbers
from cost_models.hardware.clusters import Device
from cost_models.ops.work import Work
from partitioner.planner.costs.collectives import Exchange, find_halos
from partitioner.planner.sharding.rank_shard import ModelPart
from passes.analysis.axes import Axes
from passes.graph.provenance import module_path
from passes.ir.comm.halo_strategy import HaloSegment, HaloStrategy
from passes.spmd.halo.call_tiles import TileCall
from passes.spmd.halo.overlap import interior_of
from passes.spmd.halo.regions import slides_of
from passes.spmd.halo.wide import Overlaps, TileRegions
from passes.spmd.propagate import Intervals, Layouts

__all__ = ["Price", "choose_halos"]

_HOPELESS = 2.0
"""A segment is not extended if its recomputed overlap costs more than this many times its messages."""


@dataclass(frozen=True)
class Price:
    """The cost of a segment's halos, forward and backward, for one microbatch.

    Attributes:
        messages: halo exchanges of its forward.
        sending: seconds of these, and of those of its backward.
        computing: seconds of recomputed overlap, on the rank that has most of it.
    """

    messages: int
    sending: float
    computing: float = 0.0

    @property
    def seconds(self) -> float:
        return self.sending + self.computing


def choose_halos(
    part: ModelPart,
    assigned: Mapping[str, Sequence[int]],
    links: Mapping[str, GroupLinks],
    device: Device,
    cost_model: CostModel,
    rows: int,
    asked: Mapping[str, HaloStrategy],
) -> tuple[HaloSegment, ...]:
    """Return the chosen segments of a model, in order of the graph; regions without halo exchanges have none.

    Args:
        part: one rank's shard of the model, without overlap.
        assigned: mesh dimension -> the axes that it shards.
        links: along each mesh dimension.
        device: prices the overlap, with the cost model.
        rows: samples of one rank's microbatch.
        asked: call -> the strategy that the user fixed.
    """
    assert part.layouts is not None
    assert part.axes is not None
    regions = TileRegions.of(part.of.graph, part.axes, part.layouts, assigned)
    prices = _Prices(part, part.axes, part.layouts, regions, links, device, cost_model, rows)
    runs = [run for region in regions.regions for run in _Region(region, prices, asked).runs()]
    order = {node.name: place for node, place in regions.order.items()}
    return tuple(sorted(runs, key=lambda run: order[run.first]))


class _Region:
    """Finds the cheapest division of one region into segments.

    Args:
        calls: in order of the graph.
        asked: call -> the strategy that the user fixed.
    """

    def __init__(self, calls: Sequence[TileCall], prices: _Prices, asked: Mapping[str, HaloStrategy]) -> None:
        self._calls, self._prices = calls, prices
        self._ways = [asked.get(call.node.name) for call in calls]
        needing = [place for place, call in enumerate(calls) if place and prices.exchange([call]).messages]
        self._starts = [0, *needing, len(calls)]

    def runs(self) -> Iterator[HaloSegment]:
        """Yield the segments with their strategies; none if no call of the region needs a halo. Neighbours that exchange are merged."""
        if not self._prices.exchange(self._calls).messages:
            return
        found: list[tuple[HaloStrategy, list[TileCall]]] = []
        for start, stop in self._segments():
            strategy, calls = self._strategy(start, stop), self._calls[start:stop]
            if strategy != "recompute" and found and found[-1][0] == strategy:
                found[-1][1].extend(calls)
            else:
                found.append((strategy, list(calls)))
        for strategy, calls in found:
            yield from self._run(calls, strategy)

    def _strategy(self, start: int, stop: int) -> HaloStrategy:
        """Of a segment."""
        calls, asked = self._calls[start:stop], self._ways[start]
        if self._prices.regions.overlaps(calls).computed:
            return "recompute"
        if asked in ("exchange", "overlap"):
            return asked
        return "overlap" if self._prices.overlapped(calls).seconds < self._prices.exchange(calls).seconds else "exchange"

    def _price(self, start: int, stop: int) -> Price:
        """Of a segment."""
        calls = self._calls[start:stop]
        return {"exchange": self._prices.exchange, "overlap": self._prices.overlapped, "recompute": self._prices.once}[
            self._strategy(start, stop)
        ](calls)

    def _segments(self) -> list[tuple[int, int]]:
        """Return the segments of the shortest path."""
        starts = self._starts
        best, before = [0.0] + [math.inf] * (len(starts) - 1), [0] * len(starts)
        for first, start in enumerate(starts[:-1]):
            for last in range(first + 1, len(starts)):
                if self._must_part(first, last):
                    break
                if not self._may_part(last):
                    continue
                price = self._price(start, starts[last])
                if best[first] + price.seconds < best[last] * (1 - _ROUNDING):
                    best[last], before[last] = best[first] + price.seconds, first
                if price.computing > _HOPELESS * self._prices.exchange(self._calls[start : starts[last]]).seconds:
                    break
        path = [len(starts) - 1]
        while path[-1]:
            path.append(before[path[-1]])
        places = [starts[number] for number in reversed(path)]
        return list(itertools.pairwise(places))

    def _must_part(self, first: int, last: int) -> bool:
        """Return whether a segment contains a call, after its first, for which the user fixed an exchange."""
        return any(self._ways[self._starts[number]] in ("exchange", "overlap") for number in range(first + 1, last))

    def _may_part(self, number: int) -> bool:
        """Return whether a segment may end there: calls for which the user fixed recomputation stay together."""
        place = self._starts[number]
        return place == len(self._calls) or not self._ways[place] == self._ways[place - 1] == "recompute"

    def _run(self, calls: Sequence[TileCall], strategy: HaloStrategy) -> Iterator[HaloSegment]:
        if not calls:
            return
        exchange, once = self._prices.exchange(calls), self._prices.once(calls)
        if strategy != "exchange" or once.messages < exchange.messages:
            paths = list(dict.fromkeys(path for call in calls if (path := module_path(call.node)))) or [""]
            yield HaloSegment(
                calls[0].node.name,
                calls[-1].node.name,
                tuple(dict.fromkeys((paths[0], paths[-1]))),
                strategy,
                exchange.messages,
                exchange.seconds,
                self._prices.overlapped(calls).seconds,
                once.messages,
                once.seconds,
            )


class _Prices:
    """Prices segments of calls; see ``choose_halos``."""

    def __init__(
        self,
        part: ModelPart,
        axes: Axes,
        layouts: Layouts,
        regions: TileRegions,
        links: Mapping[str, GroupLinks],
        device: Device,
        cost_model: CostModel,
        rows: int,
    ) -> None:
        self.regions = regions
        self._part, self._axes, self._layouts = part, axes, layouts
        self._links, self._device, self._cost_model = links, device, cost_model
        self._numbers = Numbers(rows)
        self._share = 1.0 if part.of.graph.batch is not None else rows / part.batch_size
        self._known: dict[tuple[fx.Node, float], float] = {}

    def exchange(self, calls: Sequence[TileCall]) -> Price:
        """Return the cost of a halo exchange before every call that needs one."""
        return self._sent(calls, Overlaps({}, {}))

    def overlapped(self, calls: Sequence[TileCall]) -> Price:
        """Return the cost of the same exchanges if every call computes its interior meanwhile."""
        found: dict[object, None] = {}
        sending = computing = 0.0
        for call in calls:
            waits, pieces = self._meanwhile(call.node, found)
            sending, computing = sending + waits, computing + pieces
        return Price(len(found), sending, computing)

    def _meanwhile(self, node: fx.Node, found: dict[object, None]) -> tuple[float, float]:
        """Return the seconds that a call waits after its interior is computed, and those that it takes longer in pieces.

        Args:
            found: what was exchanged for calls in front of it.
        """
        assert self._part.sizes is not None
        slides = slides_of(node.name, self._axes, self._layouts, self._part.sizes.extents)
        interior = interior_of(self._axes.loops[node.name], slides)
        waits = pieces = 0.0
        for key, exchange in self._halos(node, self._layouts):
            if key in found:
                continue
            found[key] = None
            forward, backward = exchange.seconds(self._numbers[exchange.size] * self._share, self._links[exchange.dimension])
            if interior is not None and exchange.dimension == interior.slide.over:
                of_forward, of_inputs, of_weights = self._seconds(node)
                share, halves = interior.share, of_inputs + of_weights
                forward = max(0.0, forward - share * of_forward)
                backward = max(0.0, backward - share * halves)
                pieces += self._in_pieces(node, interior.slide.window.operand, differentiated=bool(halves))
            waits += forward + backward
        return waits, pieces

    def _in_pieces(self, node: fx.Node, place: int, *, differentiated: bool) -> float:
        """Return the seconds of computing in three pieces: more launches, concatenated results, added gradients of overlapping reads."""
        cost, sizes = self._part.cost.nodes[node.name], self._part.cost.bytes
        result, operand = (self._numbers[sizes[name]] * self._share for name in (node.name, self._axes.operands[node.name][place].name))
        works = [Work(0, 2 * result, 1 + 2 * cost.forward.launches)]
        if differentiated:
            works.append(Work(0, 3 * operand, 2 + 2 * (cost.backward_input.launches + cost.backward_weight.launches)))
        return sum(self._cost_model.operation_time(work, self._device, cost.dtype) for work in works)

    def once(self, calls: Sequence[TileCall]) -> Price:
        """Return the cost of one wide halo before the segment, with the overlap of its calls recomputed."""
        overlaps = self.regions.overlaps(calls)
        again = (self._again(call.node, overlaps.computed[call.node.name]) for call in calls if call.node.name in overlaps.computed)
        return replace(self._sent(calls, overlaps), computing=sum(again))

    def _sent(self, calls: Sequence[TileCall], overlaps: Overlaps) -> Price:
        layouts = replace(self._layouts, wide=overlaps.computed, fetched=overlaps.fetched)
        found: dict[object, Exchange] = {}
        for call in calls:
            for key, exchange in self._halos(call.node, layouts):
                found.setdefault(key, exchange)
        seconds = (each.seconds(self._numbers[each.size] * self._share, self._links[each.dimension]) for each in found.values())
        return Price(len(found), sum(forward + backward for forward, backward in seconds))

    def _halos(self, node: fx.Node, layouts: Layouts) -> Iterator[tuple[object, Exchange]]:
        assert self._part.sizes is not None
        return find_halos(node, self._axes, layouts, self._part.sizes, self._part.cost.gradients)

    def _again(self, node: fx.Node, wide: Sequence[Intervals | None]) -> float:
        """Return the seconds that a call takes longer with its overlap."""
        times = 1.0
        for index, intervals in enumerate(wide):
            if intervals is not None:
                own = max(stop - start for start, stop in self.regions.own(node, index))
                times *= max(stop - start for start, stop in intervals) / own
        if (node, times) not in self._known:
            pairs = zip(self._seconds(node, times), self._seconds(node), strict=True)
            self._known[node, times] = sum(more - less for more, less in pairs)
        return self._known[node, times]

    def _seconds(self, node: fx.Node, times: float = 1.0) -> tuple[float, float, float]:
        """Return the seconds of a multiple of the work of a call."""
        cost = self._part.cost.nodes[node.name]
        return call_seconds(cost, self._device, self._cost_model, self._numbers, self._share * times, measured=False)


_ROUNDING = 1e-9
"""Relative: of segments that cost the same, the shorter ones."""
