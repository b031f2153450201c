"""What it costs to cut space, or another axis instead: seconds of every call under an outcome, with the halos of its windows.

    cut by height     its share of the work, halos of its windows, kernels as short as tiles are thin
    cut by batch      its share of the work; where height is cut before it, what is exchanged for that
    not cut           all of the work, on every rank

Prices are those of whole plans (``cost_models``), call by call: the same work, the same collectives on the same links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from cost_models.collectives.algorithms import Collective, GroupLinks
from cost_models.cost_model import CostModel, call_seconds
from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from cost_models.hardware.clusters import Device
from partitioner.planner.costs.collectives import Exchange, collectives_between
from partitioner.planner.sharding.axis_costs import WORTH, contractions_of
from passes.analysis.axes import Axes
from passes.ir.comm.index_ranges import segments, to_text
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.graph import ModelGraph
from passes.ir.layout import Placement, Replicate, Shard, Varying
from passes.rules.window import Window
from passes.spmd.enumerate_layouts import CallLayout

__all__ = ["Ranks", "SpacePrices"]


@dataclass(frozen=True)
class Ranks:
    """Who computes along a mesh dimension.

    Attributes:
        share: what other mesh dimensions and microbatches leave of every value, and of all work.
    """

    device: Device
    links: GroupLinks
    cost_model: CostModel
    share: float


class SpacePrices:
    """Seconds of a microbatch, forward and backward (``axis_terms.AxisPrices``).

    Args:
        asked: whether somebody asked for the ranks, so that work is cut though messages take longer than it saves: some for each call.
    """

    def __init__(self, graph: ModelGraph, axes: Axes, cost: GraphCost, ranks: Ranks, *, asked: bool = False) -> None:
        self._axes, self._cost, self._ranks = axes, cost, ranks
        self._count = ranks.links.n_ranks
        self._numbers = Numbers(graph.batch_size)
        self._nodes: dict[str, fx.Node] = {node.name: node for node in graph.graph.nodes}
        self._known: dict[tuple[str, float], float] = {}
        self.message = ranks.links.seconds("all_reduce", 0.0)
        self._worth = dict.fromkeys(contractions_of(axes) if asked else (), WORTH * self.message)

    def whole(self, _name: str) -> float:
        """Of a parameter that is not cut: what matters is the sum of its gradient, which is a change of layout."""
        return 0.0

    def change(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Of a change of layout of so many bytes, the whole value, forward and backward."""
        forward, backward = collectives_between(have, need)
        found = Exchange("", 0, "", forward, backward if value in self._cost.gradients else None)
        is_parameter = self._nodes[value].op == "placeholder" and value in self._cost.gradients
        if is_parameter and isinstance(need, Varying) and isinstance(have, Replicate):
            return sum(found.seconds(size, self._ranks.links))  # summed once a step, whole
        return sum(found.seconds(size * self._ranks.share, self._ranks.links))

    def work(self, name: str, found: CallLayout) -> float:
        """The part of the rank that has most to compute, and its halos."""
        if name not in self._cost.nodes:
            return 0.0
        if found.cut is None:
            return self._seconds(name, 1.0) + self._worth.get(name, 0.0)
        size = self._axes.sizes[found.cut.axis]
        parts = 1 / self._count if not isinstance(size, int) else -(-size // self._count) / size
        windows = (window for window in self._axes.loops[name].windows if window.factor == found.cut.factor)
        return self._seconds(name, parts) + sum(self._halo(name, found, window) for window in windows)

    def _seconds(self, name: str, part: float) -> float:
        if (name, part) not in self._known:
            ranks, cost = self._ranks, self._cost.nodes[name]
            halves = call_seconds(cost, ranks.device, ranks.cost_model, self._numbers, ranks.share * part, measured=False)
            self._known[name, part] = sum(halves)
        return self._known[name, part]

    def _halo(self, name: str, found: CallLayout, window: Window) -> float:
        """Seconds of what a window reads of neighbours, forward and backward."""
        place = found.needs[window.operand]
        if not isinstance(place, Shard):
            return 0.0
        assert found.cut is not None
        operand = self._axes.operands[name][window.operand]
        steps = self._parts(self._axes.factors[name][found.cut.factor])
        owned = self._parts(self._axes.under(name, window))
        ends = [sum(steps[:rank]) for rank in range(len(steps) + 1)]
        wanted = to_text(window.reach.reads(*ends[rank : rank + 2]) for rank in range(len(steps)))
        read = segments(owned, wanted)
        foreign = (
            sum(copy.count for copy in copies) for rank, each in enumerate(read) for owner, copies in enumerate(each) if owner != rank
        )
        most = max(foreign, default=0)
        if not most:
            return 0.0
        size = self._numbers[self._cost.bytes[operand.name]] * self._ranks.share * most / sum(owned)
        back: Collective | None = "halo_exchange" if operand.name in self._cost.gradients else None
        return sum(Exchange("", 0, "", "halo_exchange", back).seconds(size, self._ranks.links))

    def _parts(self, dimension: tuple[int, ...]) -> tuple[int, ...]:
        """How many elements of a dimension each rank has, whose outermost axis is cut."""
        outermost, *inner = (int(self._axes.sizes[axis]) for axis in dimension)
        return tuple(part * math.prod(inner) for part in microbatch_sizes(outermost, self._count))
