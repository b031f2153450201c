"""What the backward of a model keeps and what it computes again, as ``passes.autograd.recompute`` decides it for the stages' graphs.

Read from the model's operators, before there is a backward: what each operator's backward keeps, and how large values are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from passes.autograd.recompute import ENOUGH, Recompute
from passes.graph.schemas import draws, packet
from passes.ir.graph import ModelGraph
from passes.normalize.randomness.functional_rng import dropout_mask

__all__ = ["CheckpointSelection"]

aten = torch.ops.aten

CONTRACTIONS = frozenset({aten.linear, aten.addmm, aten.mm, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.conv_transpose1d})
CONTRACTIONS |= {aten.conv_transpose2d, aten.conv_transpose3d, aten.lstm, aten.gru}
"""Contractions with weights, as models call them (``passes.autograd.recompute`` has what they become)."""


class CheckpointSelection:
    """What is kept of one rank's part of a model.

    Args:
        within: the nodes that some stage computes; all others every stage has for itself.

    Attributes:
        again: the nodes that the backward computes again.
        savers: allocation that is kept -> the nodes for whose sake.
        needed: the same if all were kept.
    """

    def __init__(self, graph: ModelGraph, cost: GraphCost, within: frozenset[str], recompute: Recompute) -> None:
        self._cost, self._within, self._policy = cost, within, recompute
        self._nodes = {node.name: node for node in graph.graph.nodes}
        self._numbers = Numbers(graph.batch_size)
        self._own: dict[str, int] = {}
        for allocation, maker in cost.maker.items():
            self._own.setdefault(maker, allocation)
        moved = (each for each in cost.part_of if each not in cost.copies and self._is_dear_to_send(each))
        self._received = {cost.part_of[each]: each for each in moved}
        self.again: frozenset[str] = frozenset()
        self.needed: Mapping[int, Collection[str]] = self._savers(gathered=True)
        self.savers = self.needed
        if recompute == "full":
            self._choose(frozenset(name for name in within if self._may_repeat(self._nodes[name])))
        elif recompute == "selective":
            enough = ENOUGH * self._bytes()
            self._choose(self._larger_than_sources())
            if self._bytes() > enough:
                self._choose(frozenset(name for name in within if not self._is_dear(self._nodes[name])))

    def made_for(self, place: Mapping[str, int]) -> dict[str, int]:
        """For each node that is computed again, the last call, of those with a place, whose backward needs it or what is made from it."""
        made_by: dict[str, set[int]] = {}
        for allocation, readers in self.needed.items():
            made_by.setdefault(self._cost.maker[allocation], set()).update(place[name] for name in readers if name in place)
        found: dict[str, int] = {}
        for name, node in reversed(self._nodes.items()):
            if name in self.again:
                found[name] = max((*made_by.get(name, ()), *(found.get(user.name, -1) for user in node.users)), default=-1)
        return found

    def _choose(self, again: frozenset[str]) -> None:
        self.again = again
        self.savers = self._savers(gathered=False)

    def _may_repeat(self, node: fx.Node) -> bool:
        return node.target is dropout_mask or not draws(node)

    def _is_dear(self, node: fx.Node) -> bool:
        return packet(node.target) in CONTRACTIONS or not self._may_repeat(node)

    def _bytes(self) -> float:
        return sum(float(self._numbers[self._cost.allocation_bytes[allocation]]) for allocation in self.savers)

    def _size(self, name: str) -> float:
        return float(self._numbers[self._cost.bytes[name]])

    def _larger_than_sources(self) -> frozenset[str]:
        """What is no contraction with weights, and larger than the kept values that it is made from; views among it.

        Masks are, where they are larger than what the values are made from that they are laid over.
        """
        drawn = {name for name in self._within if self._nodes[name].target is dropout_mask}
        sources = self._sources(drawn)
        drawn = {name for name in drawn if all(self._is_larger(name, reader, sources) for reader in self._nodes[name].users)}
        return frozenset(name for name, made_from in self._sources(drawn).items() if name in self._within and made_from != {name})

    def _is_larger(self, mask: str, reader: fx.Node, sources: Mapping[str, frozenset[str]]) -> bool:
        laid_over = {value.name for value in reader.all_input_nodes} - {mask}
        return self._size(mask) > sum(map(self._size, frozenset[str]().union(*(sources[value] for value in laid_over))))

    def _sources(self, drawn: Collection[str]) -> dict[str, frozenset[str]]:
        """The kept values from which each is made, itself alone where it is kept.

        Args:
            drawn: masks that are drawn from nothing.
        """
        sources: dict[str, frozenset[str]] = {}
        for name, node in self._nodes.items():
            if name not in self._within:
                is_value = node.op == "placeholder" and name not in self._cost.gradients
                sources[name] = frozenset({name}) if is_value and node.users else frozenset()
                continue
            made_from = frozenset[str]().union(*(sources[source.name] for source in node.all_input_nodes))
            is_view = not self._cost.nodes[name].forward.launches
            grows = name in drawn or is_view or self._size(name) > sum(map(self._size, made_from))
            is_again = grows and not self._is_dear(node) and (node.target is not dropout_mask or name in drawn)
            sources[name] = made_from if is_again else frozenset({name})
        return sources

    def _savers(self, *, gathered: bool) -> dict[int, set[str]]:
        """Allocations that the backward keeps, with what is needed to make others again.

        Args:
            gathered: whether values are kept as they are read; else in the parts that ranks have of them.
        """
        savers: dict[int, set[str]] = {}
        for name, kept in self._cost.saved.items():
            if name in self._within:
                for allocation in kept:
                    for each in {allocation} if gathered else self._behind(self._in_parts(allocation)):
                        savers.setdefault(each, set()).add(name)
        return savers

    def _in_parts(self, allocation: int) -> int:
        """What a copy is made from: a rank's part of it, or, where that is dear, what other ranks had a part in."""
        while allocation in self._cost.part_of and not self._is_dear_to_send(allocation):
            allocation = self._cost.part_of[allocation]
        return allocation

    def _is_dear_to_send(self, allocation: int) -> bool:
        """Whether a copy is kept as it came from other ranks: all but what was gathered."""
        if self._policy != "selective" or allocation not in self._cost.part_of:
            return False
        sizes, part = self._cost.allocation_bytes, self._cost.part_of[allocation]
        return self._cost.copies.get(allocation, bool(self._numbers[sizes[allocation]] < self._numbers[sizes[part]]))

    def _behind(self, allocation: int) -> set[int]:
        """An allocation, or those that it is made again from."""
        if self._cost.maker[allocation] not in self.again or self._is_dear_to_send(allocation):
            return {allocation}
        found, seen, stack = set[int](), set[str](), [self._cost.maker[allocation]]
        while stack:
            name = stack.pop()
            if name in seen or name not in self._within:
                continue
            seen.add(name)
            if name in self.again:
                stack += [source.name for source in self._nodes[name].all_input_nodes]
            elif name in self._own:
                found.add(self._received.get(self._own[name], self._own[name]))
        return found
