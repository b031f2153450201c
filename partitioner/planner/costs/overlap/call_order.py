"""Calls of the units of a model, in order: what each of them reads, and what its backward gathers again."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import fx

from cost_models.collectives.algorithms import GroupLinks
from cost_models.graph_cost import GraphCost
from partitioner.planner.costs.collectives import Exchange
from partitioner.planner.costs.cut_points import CutPoints, Expansion
from partitioner.planner.costs.memory.activation_memory import UnitMemory
from partitioner.planner.costs.overlap.messages import Regather, Repeat, Stored
from partitioner.planner.costs.overlap.waits import FirstHalf
from passes.ir.graph import ModelGraph


class CallOrder:
    """The calls of the units of a rank's shard, each at its place.

    Args:
        cost, points, memory: of the graph.
        expansion: how the units repeat; None: the graph is not folded.
    """

    def __init__(self, graph: ModelGraph, cost: GraphCost, points: CutPoints, memory: UnitMemory, expansion: Expansion | None) -> None:
        self._graph, self._cost, self._points, self._memory, self._expansion = graph, cost, points, memory, expansion

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Call of a unit -> its place among all, in order."""
        names = (name for unit in self._points.units for name in unit if name in self._cost.nodes)
        return {name: place for place, name in enumerate(names)}

    @cached_property
    def repeat(self) -> Repeat | None:
        """The calls of the repeated block; None if the graph is not folded."""
        if self._expansion is None:
            return None
        start, stop = (self.unit_of_calls.index(unit) for unit in (self._expansion.start, self._expansion.stop))
        return Repeat(start, stop, self._expansion.count)

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """For each call, the place of the call before whose backward it is computed again, if it is."""
        last = self._memory.last_need(self.place_of)
        return tuple(max(place, last.get(name, place)) for name, place in self.place_of.items())

    def regather(self, exchange: Exchange, size: float, copies: int, *, is_recomputed: bool) -> Regather | None:
        """Return the repeated gather, of ``size`` bytes, of what a call reads; None: nothing is gathered again, or what is computed again.

        Args:
            is_recomputed: whether the backward computes the call again.
        """
        place = self.place_of[exchange.reader]
        if exchange.forward != "all_gather" or exchange.is_returned:
            return None
        if is_recomputed:
            is_saved = self._memory.is_saved_before_casts(exchange.value)
            return Regather(place, size, copies, is_recomputed=True) if is_saved else None
        again = self._memory.gathered_again(exchange.reader)
        if again is None:
            return None
        last = max((self.place_of[name] for name in again.readers if name in self.place_of), default=place)
        if not again.maker:
            return Regather(last, size, copies)
        maker = self.place_of.get(again.maker, last)  # computed again right before its use, unless a later call needs it first
        return Regather(last, size, copies, maker if self.needed[maker] > last else last)

    def maker_of(self, exchange: Exchange) -> int | None:
        """Return the place of the call that makes an exchanged value; None if it makes it for other copies of a repeated block, too."""
        maker, reader = self.place_of.get(exchange.value), self.place_of[exchange.reader]
        block = range(self.repeat.start, self.repeat.stop) if self.repeat is not None else range(0)
        return maker if maker is not None and maker < reader and (maker in block) == (reader in block) else None

    def stored(self, exchange: Exchange, size: float, links: GroupLinks, copies: int, *, again: bool, is_there: bool) -> Stored:
        """Return the collectives of a stored value, of ``size`` bytes.

        Args:
            again: whether the backward computes again the call that reads it.
            is_there: as in ``Stored``.
        """
        sent = size * exchange.wider if exchange.backward is not None else 0.0
        is_read = exchange.regather is not None and exchange.value in self._read_by_backward
        kind = self.dtypes.get(exchange.value, torch.float32)
        return Stored(
            self.place_of[exchange.reader],
            self._parameter_of(exchange.value),
            exchange.dimension,
            size,
            sent,
            links,
            copies,
            is_read or again,
            kind,
            is_there,
            kind.itemsize * exchange.wider,
            exchange.is_uneven,
        )

    @cached_property
    def _read_by_backward(self) -> frozenset[str]:
        """The parameters, and casts of them, that the backward reads and gathers once more."""
        return frozenset(self._cost.maker[each] for each in self._cost.gathered_again)

    def _parameter_of(self, value: str) -> str:
        """Return the parameter that a value is, or is a cast or view of."""
        node = self._nodes[value]
        while len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return node.name

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self._graph.graph.nodes}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Value -> the type of its elements."""
        values = ((node.name, node.meta.get("val")) for node in self._graph.graph.nodes)
        return {name: value.dtype for name, value in values if isinstance(value, torch.Tensor)}

    @cached_property
    def first_readers(self) -> dict[str, int]:
        """Parameter -> the place of the first call that reads it."""
        found = dict[str, int]()
        for node in self._graph.graph.nodes:
            places = [self.place_of[user.name] for user in node.users if user.name in self.place_of]
            if node.name in self._graph.parameters and places:
                found[node.name] = min(places)
        return found

    @cached_property
    def unit_of_calls(self) -> list[int]:
        """(P,) the unit of each call."""
        return [self._points.unit_of[name] for name in self.place_of]

    @cached_property
    def first_halves(self) -> list[FirstHalf]:
        """(P,) the half of each call's backward that is computed first."""
        return [self._cost.nodes[name].first_half for name in self.place_of]

    @cached_property
    def casts(self) -> frozenset[str]:
        """The calls of units that cast a parameter, or a view of one, to a smaller type."""
        sizes = {node.name: node.meta["val"].dtype.itemsize for node in self._graph.graph.nodes if node.name in self._graph.parameters}
        found = set[str]()
        for node in self._graph.computing_nodes():
            source, value = [each.name for each in node.all_input_nodes], node.meta.get("val")
            if len(source) == 1 and source[0] in sizes and isinstance(value, torch.Tensor):
                sizes[node.name] = value.dtype.itemsize
                found |= {node.name} if sizes[node.name] < sizes[source[0]] else set()
        return frozenset(found & self.place_of.keys())
