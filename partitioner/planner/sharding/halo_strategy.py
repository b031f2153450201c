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
from passes.spmd.propagate.layouts import Intervals, Layouts

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
    regions = TileRegions.of(part.source.graph, part.axes, part.layouts, assigned)
    prices = _Prices(part, part.axes, part.layouts, regions, links, device, cost_model, rows)
    segments = [segment for region in regions.regions for segment in _Region(region, prices, asked).segments()]
    order = {node.name: place for node, place in regions.order.items()}
    return tuple(sorted(segments, key=lambda segment: order[segment.first]))


class _Region:
    """Finds the cheapest division of one region, its calls in order, into segments; ``asked``: call -> the user's strategy."""

    def __init__(self, calls: Sequence[TileCall], prices: _Prices, asked: Mapping[str, HaloStrategy]) -> None:
        self._calls, self._prices = calls, prices
        self._asked = [asked.get(call.node.name) for call in calls]
        with_halo = [place for place, call in enumerate(calls) if place and prices.exchange([call]).messages]
        self._starts = [0, *with_halo, len(calls)]  # places where a segment may start or end

    def segments(self) -> Iterator[HaloSegment]:
        """Yield the segments with their strategies; none if no call of the region needs a halo; adjacent exchanges are merged."""
        if not self._prices.exchange(self._calls).messages:
            return
        merged: list[tuple[HaloStrategy, list[TileCall]]] = []
        for start, stop in self._shortest_path():
            strategy, calls = self._strategy(start, stop), self._calls[start:stop]
            if strategy != "recompute" and merged and merged[-1][0] == strategy:
                merged[-1][1].extend(calls)
            else:
                merged.append((strategy, list(calls)))
        for strategy, calls in merged:
            yield from self._segment(calls, strategy)

    def _strategy(self, start: int, stop: int) -> HaloStrategy:
        """Return the strategy of the segment ``calls[start:stop]``; recomputation if that has an overlap to recompute."""
        calls, asked = self._calls[start:stop], self._asked[start]
        if self._prices.regions.overlaps(calls).computed:
            return "recompute"
        if asked in ("exchange", "overlap"):
            return asked
        return "overlap" if self._prices.overlapped(calls).seconds < self._prices.exchange(calls).seconds else "exchange"

    def _price(self, start: int, stop: int) -> Price:
        """Return the cost of the segment ``calls[start:stop]`` under its strategy."""
        prices = {"exchange": self._prices.exchange, "overlap": self._prices.overlapped, "recompute": self._prices.recomputed}
        return prices[self._strategy(start, stop)](self._calls[start:stop])

    def _shortest_path(self) -> list[tuple[int, int]]:
        """Return the segments of the cheapest division, as pairs (start, stop) of places in ``calls``."""
        starts = self._starts
        best, before = [0.0] + [math.inf] * (len(starts) - 1), [0] * len(starts)
        for first, start in enumerate(starts[:-1]):
            for last in range(first + 1, len(starts)):
                if self._must_divide(first, last):
                    break
                if not self._may_divide(last):
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

    def _must_divide(self, first: int, last: int) -> bool:
        """Return whether the user fixed an exchange for a call inside the segment from start number ``first`` to ``last``."""
        return any(self._asked[self._starts[number]] in ("exchange", "overlap") for number in range(first + 1, last))

    def _may_divide(self, number: int) -> bool:
        """Return whether a segment may end at a start: calls for which the user fixed recomputation stay together."""
        place = self._starts[number]
        return place == len(self._calls) or not self._asked[place] == self._asked[place - 1] == "recompute"

    def _segment(self, calls: Sequence[TileCall], strategy: HaloStrategy) -> Iterator[HaloSegment]:
        """Yield the segment of these calls; none for exchanges that no wide halo could replace with fewer."""
        if not calls:
            return
        exchange, wide = self._prices.exchange(calls), self._prices.recomputed(calls)
        if strategy != "exchange" or wide.messages < exchange.messages:
            paths = list(dict.fromkeys(filter(None, (module_path(call.node) for call in calls)))) or [""]
            first, last, ends = calls[0].node.name, calls[-1].node.name, tuple(dict.fromkeys((paths[0], paths[-1])))
            overlapped = self._prices.overlapped(calls).seconds
            yield HaloSegment(first, last, ends, strategy, exchange.messages, exchange.seconds, overlapped, wide.messages, wide.seconds)


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
        self._share = 1.0 if part.source.graph.batch is not None else rows / part.batch_size
        self._known: dict[tuple[fx.Node, float], float] = {}

    def exchange(self, calls: Sequence[TileCall]) -> Price:
        """Return the cost of a halo exchange before every call that needs one."""
        return self._messages(calls, Overlaps({}, {}))

    def overlapped(self, calls: Sequence[TileCall]) -> Price:
        """Return the cost of the same exchanges if every call computes its interior meanwhile."""
        exchanged: set[object] = set()
        sending = computing = 0.0
        for call in calls:
            waits, pieces = self._overlapped_seconds(call.node, exchanged)
            sending, computing = sending + waits, computing + pieces
        return Price(len(exchanged), sending, computing)

    def _overlapped_seconds(self, node: fx.Node, exchanged: set[object]) -> tuple[float, float]:
        """Return the seconds that a call waits after its interior is computed, and those that it takes longer in pieces.

        The keys of its halos are added to ``exchanged``, those of earlier calls: a halo is exchanged once.
        """
        assert self._part.sizes is not None
        slides = slides_of(node.name, self._axes, self._layouts, self._part.sizes.extents)
        interior = interior_of(self._axes.loops[node.name], slides)
        waits = pieces = 0.0
        for key, exchange in self._halos(node, self._layouts):
            if key in exchanged:
                continue
            exchanged.add(key)
            forward, backward = exchange.seconds(self._numbers[exchange.size] * self._share, self._links[exchange.dimension])
            if interior is not None and exchange.dimension == interior.slide.over:
                forward_seconds, input_seconds, weight_seconds = self._seconds(node)
                share, backward_seconds = interior.share, input_seconds + weight_seconds
                forward = max(0.0, forward - share * forward_seconds)
                backward = max(0.0, backward - share * backward_seconds)
                pieces += self._splitting_seconds(node, interior.slide.window.operand, differentiated=bool(backward_seconds))
            waits += forward + backward
        return waits, pieces

    def _splitting_seconds(self, node: fx.Node, place: int, *, differentiated: bool) -> float:
        """Return the extra seconds in three pieces: launches, concatenated results, summed gradients of operand ``place``."""
        cost, sizes = self._part.cost.nodes[node.name], self._part.cost.bytes
        result, operand = (self._numbers[sizes[name]] * self._share for name in (node.name, self._axes.operands[node.name][place].name))
        works = [Work(0, 2 * result, 1 + 2 * cost.forward.launches)]
        if differentiated:
            works.append(Work(0, 3 * operand, 2 + 2 * (cost.backward_input.launches + cost.backward_weight.launches)))
        return sum(self._cost_model.operation_time(work, self._device, cost.dtype) for work in works)

    def recomputed(self, calls: Sequence[TileCall]) -> Price:
        """Return the cost of one wide halo before the segment, with the overlap of its calls recomputed."""
        overlaps = self.regions.overlaps(calls)
        widened = [call.node for call in calls if call.node.name in overlaps.computed]
        computing = sum(self._recomputed_seconds(node, overlaps.computed[node.name]) for node in widened)
        return replace(self._messages(calls, overlaps), computing=computing)

    def _messages(self, calls: Sequence[TileCall], overlaps: Overlaps) -> Price:
        """Return the cost of the messages alone; a halo that several calls read is sent once."""
        layouts = replace(self._layouts, wide=overlaps.computed, fetched=overlaps.fetched)
        exchanges: dict[object, Exchange] = {}
        for call in calls:
            for key, exchange in self._halos(call.node, layouts):
                exchanges.setdefault(key, exchange)
        seconds = (each.seconds(self._numbers[each.size] * self._share, self._links[each.dimension]) for each in exchanges.values())
        return Price(len(exchanges), sum(forward + backward for forward, backward in seconds))

    def _halos(self, node: fx.Node, layouts: Layouts) -> Iterator[tuple[object, Exchange]]:
        assert self._part.sizes is not None
        return find_halos(node, self._axes, layouts, self._part.sizes, self._part.cost.gradients)

    def _recomputed_seconds(self, node: fx.Node, wide: Sequence[Intervals | None]) -> float:
        """Return the seconds that a call takes longer with its overlap; ``wide``: by dimension, the interval of each rank, or None."""
        times = 1.0
        for index, intervals in enumerate(wide):
            if intervals is not None:
                own = max(stop - start for start, stop in self.regions.own(node, index))
                times *= max(stop - start for start, stop in intervals) / own
        if (node, times) not in self._known:
            pairs = zip(self._seconds(node, times), self._seconds(node), strict=True)
            self._known[node, times] = sum(widened - own for widened, own in pairs)
        return self._known[node, times]

    def _seconds(self, node: fx.Node, times: float = 1.0) -> tuple[float, float, float]:
        """Return the seconds of forward, input gradient and weight gradient, for ``times`` the work of a call."""
        cost = self._part.cost.nodes[node.name]
        return call_seconds(cost, self._device, self._cost_model, self._numbers, self._share * times, measured=False)


_ROUNDING = 1e-9
"""Relative difference below which costs count as equal; the shorter segment then wins."""
