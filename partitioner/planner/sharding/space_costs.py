"""Costs of sharding space or another axis: seconds of every call under each layout, with the halos of its windows.

    sharded by height     1 / n of the work, the halos of its windows; kernels on thin tiles are less efficient
    sharded by batch      1 / n of the work, and the reshard of operands that are sharded by height
    replicated            all of the work, on every rank

Costs are those of whole plans (``cost_models``), call by call: the same work, the same collectives on the same links.
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
from passes.ir.comm.index_ranges import largest_message, to_text
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.graph import ModelGraph
from passes.ir.layout import Placement, Replicate, Shard, Varying
from passes.rules.window import Window
from passes.spmd.propagate.enumerate_layouts import CallLayout


@dataclass(frozen=True)
class Ranks:
    """The ranks along a mesh dimension.

    Attributes:
        device: the device of each.
        share: fraction of every value, and of all work, that other mesh dimensions and microbatches leave.
    """

    device: Device
    links: GroupLinks
    cost_model: CostModel
    share: float


class SpacePrices:
    """Seconds of a microbatch, forward and backward (``axis_costs.AxisPrices``).

    Args:
        asked: whether the user asked for these ranks: a replicated contraction then costs ``WORTH`` messages more, so that it is sharded
            even if that does not save time.
    """

    def __init__(self, graph: ModelGraph, axes: Axes, cost: GraphCost, ranks: Ranks, *, asked: bool = False) -> None:
        self._axes, self._cost, self._ranks = axes, cost, ranks
        self._count = ranks.links.n_ranks
        self._numbers = Numbers(graph.batch_size)
        self._nodes: dict[str, fx.Node] = {node.name: node for node in graph.graph.nodes}
        self._known: dict[tuple[str, float], float] = {}
        self.message = ranks.links.seconds("all_reduce", 0.0)
        self._worth = dict.fromkeys(contractions_of(axes) if asked else (), WORTH * self.message)

    def replicate(self, _name: str) -> float:
        """Return 0: replicating a parameter costs only the sum of its gradient, which is a reshard."""
        return 0.0

    def reshard(self, value: str, have: Placement, need: Placement, size: float) -> float:
        """Return the seconds of a reshard, forward and backward; ``size``: bytes of the whole value."""
        forward, backward = collectives_between(have, need)
        reshard = Exchange("", 0, "", forward, backward if value in self._cost.gradients else None)
        is_parameter = self._nodes[value].op == "placeholder" and value in self._cost.gradients
        if is_parameter and isinstance(need, Varying) and isinstance(have, Replicate):
            return sum(reshard.seconds(size, self._ranks.links))  # summed once a step, whole
        return sum(reshard.seconds(size * self._ranks.share, self._ranks.links))

    def work(self, name: str, layout: CallLayout) -> float:
        """Return the seconds of a call on the rank with the largest shard, and of its halos."""
        if name not in self._cost.nodes:
            return 0.0
        if layout.cut is None:
            return self._seconds(name, 1.0) + self._worth.get(name, 0.0)
        size = self._axes.sizes[layout.cut.axis]
        largest = 1 / self._count if not isinstance(size, int) else -(-size // self._count) / size
        windows = (window for window in self._axes.loops[name].windows if window.factor == layout.cut.factor)
        return self._seconds(name, largest) + sum(self._halo_seconds(name, layout, window) for window in windows)

    def _seconds(self, name: str, fraction: float) -> float:
        """Return the seconds of a fraction of a call's work, forward and backward."""
        if (name, fraction) not in self._known:
            ranks, cost = self._ranks, self._cost.nodes[name]
            seconds = call_seconds(cost, ranks.device, ranks.cost_model, self._numbers, ranks.share * fraction, measured=False)
            self._known[name, fraction] = sum(seconds)
        return self._known[name, fraction]

    def _halo_seconds(self, name: str, layout: CallLayout, window: Window) -> float:
        """Return the seconds of a window's halo exchange, forward and backward: the largest message between two ranks counts."""
        if not isinstance(layout.needs[window.operand], Shard):
            return 0.0
        assert layout.cut is not None
        operand = self._axes.operands[name][window.operand]
        steps = self._shard_lengths(self._axes.factors[name][layout.cut.factor])
        owned = self._shard_lengths(self._axes.under(name, window))
        ends = [sum(steps[:rank]) for rank in range(len(steps) + 1)]
        wanted = to_text(window.reach.reads(*ends[rank : rank + 2]) for rank in range(len(steps)))
        largest = largest_message(owned, wanted)
        if not largest:
            return 0.0
        size = self._numbers[self._cost.bytes[operand.name]] * self._ranks.share * largest / sum(owned)
        back: Collective | None = "halo_exchange" if operand.name in self._cost.gradients else None
        return sum(Exchange("", 0, "", "halo_exchange", back).seconds(size, self._ranks.links))

    def _shard_lengths(self, dimension: tuple[int, ...]) -> tuple[int, ...]:
        """Return each rank's length of a dimension whose outermost axis is sharded."""
        outermost, *inner = (int(self._axes.sizes[axis]) for axis in dimension)
        return tuple(part * math.prod(inner) for part in microbatch_sizes(outermost, self._count))
