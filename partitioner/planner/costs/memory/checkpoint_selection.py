"""Select the activations that a backward recomputes; it saves all others that it reads.

There is no backward graph yet: the selection follows from the values that each op saves, and their sizes.

    "full"        recomputes all but the values that enter a region
    "selective"   saves what is expensive; recomputes, cheapest per byte first, until no more than half of the bytes is left:
                    1. values larger than all that they are made from: scores and weights of attention from queries and keys, embeddings
                       from indices, copies in a wider type; what was gathered from other ranks, of which the own part is saved; masks of
                       dropout that are larger than what the dropped values are made from, drawn from the state of the generator
                    2. all else that is no weight contraction and comes from no other rank: norms, activations, fused attention, masks;
                       no embeddings from gathered tables that are larger than they
                  A residual sum is saved instead of the product that it adds, and a value that is made from more than three saved
                  ones of its size

A value that is larger than what it is made from costs less than one byte read for each that it gives back; a norm or an activation
reads as much as it gives back; a contraction with weights reads the weights too, and multiplies. Random draws are expensive where they are
no part of what is made again anyway: one that is drawn takes a CPU as long as 20 that are copied, and gives back a byte. In a transformer
with decomposed attention, the first step leaves what Korthikanti et al. (Reducing Activation Recomputation in Large Transformer
Models, 2022) keep: 34 of the 34 + 5 heads x length / width bytes an element.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import fx

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from passes.autograd.recompute import Recompute
from passes.graph.aliasing import mutated_arguments, writes_statistics
from passes.graph.schemas import draws, packet
from passes.ir.graph import ModelGraph
from passes.ir.plan import BY_REGION, Region
from passes.normalize.randomness.functional_rng import dropout_mask
from passes.rules.ops.grouped_mm import grouped_mm

aten = torch.ops.aten

CONTRACTIONS = frozenset({aten.linear, aten.addmm, aten.mm, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.conv_transpose1d})
CONTRACTIONS |= {aten.conv_transpose2d, aten.conv_transpose3d, aten.lstm, aten.gru, packet(grouped_mm)}
"""Contractions with weights, which ``"selective"`` saves."""

PRODUCTS = frozenset({aten.bmm, aten.baddbmm, aten.matmul})
"""Products that are contractions with weights if they read a parameter, such as the matrices of all experts."""

ENOUGH = 0.5
"""The part of the bytes of ``"none"`` down to which ``"selective"`` recomputes values."""

MOST_SOURCES = 3
"""Saved values of at least its size from which ``"selective"`` recomputes a value, at most: as many as fused attention reads."""


class CheckpointSelection:
    """The selection for one rank's shard of a model.

    Args:
        within: the nodes that belong to units; all others are computed by every stage that needs them.
        regions: for ``"full"`` and ``"by region"``; values that one region computes and another reads are saved.
        selected: of nodes whose policy is ``"selective"``, those to recompute; None: selects them.

    Attributes:
        recomputed: the nodes that the backward recomputes.
        unread: those of them whose results it does not read: it recomputes their statistics.
        savers: saved allocation -> the nodes whose backward needs it, or values recomputed from it.
        needed: the same if nothing were recomputed, and gathered values were saved whole.
        region_of: node -> the number of its region.
        policy_of: node -> the policy of its region.
    """

    def __init__(
        self,
        graph: ModelGraph,
        cost: GraphCost,
        within: frozenset[str],
        recompute: Recompute,
        regions: Sequence[Region] = (),
        selected: Collection[str] | None = None,
    ) -> None:
        self._cost, self._within, self._parameters = cost, within, frozenset(graph.parameters)
        self._nodes = {node.name: node for node in graph.graph.nodes}
        self.region_of, self.policy_of = self._number(regions, recompute)
        self._numbers = Numbers(graph.batch_size)
        self._own: dict[str, int] = {}  # node -> its first allocation
        for allocation, maker in cost.maker.items():
            self._own.setdefault(maker, allocation)
        received = (each for each in cost.part_of if each not in cost.copies and self._is_saved_as_received(each))
        gathered = (*cost.gathered, *cost.gathered_once)
        self._gathered = {cost.maker[each]: float(self._numbers[cost.allocation_bytes[each]]) for each in gathered}
        self._received = {cost.part_of[each]: each for each in received}
        self.recomputed: frozenset[str] = frozenset()
        self.unread: frozenset[str] = frozenset()
        self.needed: Mapping[int, Collection[str]] = self._savers(gathered=True)
        self.savers = self.needed
        policies = frozenset(self.policy_of.values())
        repeatable = within - self._entering
        full = frozenset(name for name in repeatable if self.policy_of[name] == "full" and self._can_recompute(self._nodes[name]))
        # What ranks sum is a message, which is saved.
        selective = frozenset(name for name in repeatable - cost.summed if self.policy_of[name] == "selective")
        if "selective" in policies and selected is None:
            self._select(full, selective)
        elif policies != {"none"}:
            self._recompute(full | selective.intersection(selected or ()))

    def _select(self, full: frozenset[str], selective: frozenset[str]) -> None:
        """Select the nodes to recompute of those with the policy ``"selective"``; see the module's text."""
        enough = ENOUGH * self._saved_bytes()
        self._recompute(full | (self._larger_than_sources() & selective))
        is_enough = self._saved_bytes() <= enough
        if not is_enough:
            self._recompute(full | frozenset(name for name in selective if not self._is_expensive(self._nodes[name])))
        self._recompute(self.recomputed - self._sums(selective))
        if not is_enough:
            self._recompute(self.recomputed - (self._of_many_sources() & selective))

    def last_need(self, position: Mapping[str, int]) -> dict[str, int]:
        """Return recomputed node -> the last ``position`` of a call whose backward needs its value or one computed from it; -1: none."""
        needs: dict[str, set[int]] = {}
        for allocation, readers in self.needed.items():
            needs.setdefault(self._cost.maker[allocation], set()).update(position[name] for name in readers if name in position)
        last: dict[str, int] = {}
        for name, node in reversed(self._nodes.items()):
            if name in self.recomputed:
                own = (position[name],) if self._has_buffers(name) and name in position else ()
                last[name] = max((*own, *needs.get(name, ()), *(last.get(user.name, -1) for user in node.users)), default=-1)
        return last

    def _number(self, regions: Sequence[Region], recompute: Recompute) -> tuple[dict[str, int], dict[str, str]]:
        """Return the number of each node's region, of which joined ones share one, and its policy."""
        starts = {region.first_node: region for region in regions}
        number, policy = 0, recompute if recompute != BY_REGION else regions[0].recompute
        numbers, policies = dict[str, int](), dict[str, str]()
        for name in self._nodes:
            if (region := starts.get(name)) is not None:
                number, policy = number + (not region.is_joined), region.recompute
            numbers[name], policies[name] = number, policy
        return numbers, policies

    @cached_property
    def _entering(self) -> frozenset[str]:
        """The nodes that one region computes and another reads, with those that make the memory of views among them."""
        region_of = self.region_of
        nodes = [node for name, node in self._nodes.items() if name in self._within]
        readers = {node: [user.name for user in node.users if user.name in self._within] for node in nodes}
        pending = [node for node in nodes if any(region_of[user] != region_of[node.name] for user in readers[node])]
        entering = set[str]()
        while pending:
            node = pending.pop()
            entering.add(node.name)
            if not self._cost.nodes[node.name].forward.launches:
                pending += [source for source in node.all_input_nodes if source.name in self._within - entering]
        return frozenset(entering)

    def _recompute(self, nodes: frozenset[str]) -> None:
        """Select the nodes to recompute: those of ``nodes`` that a backward needs, directly or through others of them, and their views."""
        self.recomputed = nodes
        self.savers = self._savers(gathered=False)
        read = {self._cost.maker[allocation] for allocation in self.needed}
        needed = set(read)
        for name, node in reversed(self._nodes.items()):
            is_read = name in nodes and any(user.name in needed and user.name in nodes for user in node.users)
            read.update([name] if is_read else [])
            needed.update([name] if is_read or (name in nodes and self._has_buffers(name)) else [])
        for name, node in self._nodes.items():
            is_view = name in nodes and not self._cost.nodes[name].forward.launches
            if is_view and any(source.name in nodes & needed for source in node.all_input_nodes):
                needed.add(name)
                read.add(name)
        self.recomputed = nodes & needed
        self.unread = self.recomputed - read

    def _sums(self, selective: frozenset[str]) -> frozenset[str]:
        """Return the results that are saved instead of an operand that no other call reads, if they have no more elements.

        Such as a residual sum instead of the product that it adds. Else the first sum that the backward recomputes would need all sums
        before it, of all blocks. Where the sum has another policy or region, the operand stays: nothing else saves the sum.
        """
        sums = set[str]()
        for name, node in self._nodes.items():
            if name in self._within and (name not in self.recomputed or name in sums) and self._can_recompute(node):
                reader = self._only_reader(node)
                if (
                    reader is not None
                    and reader.name in self.recomputed & selective
                    and self.region_of[reader.name] == self.region_of[name]
                ):
                    sums.add(reader.name)
        return frozenset(sums)

    def _of_many_sources(self) -> frozenset[str]:
        """Return the recomputed values that depend on more than ``MOST_SOURCES`` saved values of at least their own size.

        A value that is found counts as saved for later ones. In a ResNet, whose sums are recomputed, it is every fourth block.
        """
        made_from: dict[str, frozenset[str]] = {}
        found = set[str]()
        for name, node in self._nodes.items():
            if name in self._within:
                sources = frozenset[str]().union(*(made_from.get(operand.name, frozenset()) for operand in node.all_input_nodes))
                is_computed = name in self.recomputed and bool(self._cost.nodes[name].forward.launches)
                if is_computed and sum(self._size(source) >= self._size(name) for source in sources) > MOST_SOURCES:
                    found.add(name)
                made_from[name] = sources if name in self.recomputed and name not in found else frozenset({name})
        return frozenset(found)

    def _only_reader(self, node: fx.Node) -> fx.Node | None:
        """Return the first call that has another computed operand, of those that alone read a value, if it has no more elements."""
        before = node
        while len(node.users) == 1 and self._own.get(node.name) not in self.needed:
            (reader,) = node.users
            if reader.name not in self._within:
                return None
            if any(operand.name in self._within for operand in reader.all_input_nodes if operand is not node):
                return reader if self._elements(reader) <= self._elements(before) else None
            node = reader
        return None

    def _elements(self, node: fx.Node) -> float:
        value = node.meta.get("val")
        return self._size(node.name) / value.element_size() if isinstance(value, torch.Tensor) else math.inf

    def _has_buffers(self, name: str) -> bool:
        """Return whether the backward of a call reads internal buffers of its forward, such as the statistics of a normalization."""
        return name in self._cost.gradients and self._cost.nodes[name].keeps != 0

    def _can_recompute(self, node: fx.Node) -> bool:
        """Return whether a second run gives the same value, and writes nothing.

        It draws no random numbers, but for masks drawn from a seed, and updates no running statistics, unless it is decomposed.
        """
        if writes_statistics(node) and mutated_arguments(node):
            return self._cost.nodes[node.name].repeated is not None
        return node.target is dropout_mask or not draws(node)

    def _is_expensive(self, node: fx.Node) -> bool:
        reads_more = any(self._gathered.get(operand.name, 0.0) > self._size(node.name) for operand in node.all_input_nodes)
        reads_weights = packet(node.target) in PRODUCTS and any(map(self._is_weight, node.all_input_nodes))
        return packet(node.target) in CONTRACTIONS or reads_weights or reads_more or not self._can_recompute(node)

    def _is_weight(self, node: fx.Node) -> bool:
        """Return whether a value is a parameter, or computed from one alone, such as a cast or view of it."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return node.name in self._parameters

    def _saved_bytes(self) -> float:
        return sum(float(self._numbers[self._cost.allocation_bytes[allocation]]) for allocation in self.savers)

    def _size(self, name: str) -> float:
        return float(self._numbers[self._cost.bytes[name]])

    def _larger_than_sources(self) -> frozenset[str]:
        """Return the views, and the nodes larger than the saved values that they are computed from, without contractions with weights.

        A dropout mask is recomputed if it is larger than the saved sources of the values that it is applied to.
        """
        masks = {name for name in self._within if self._nodes[name].target is dropout_mask}
        sources = self._sources(masks)
        masks = {name for name in masks if all(self._is_larger(name, reader, sources) for reader in self._nodes[name].users)}
        return frozenset(name for name, saved in self._sources(masks).items() if name in self._within and saved != {name})

    def _is_larger(self, mask: str, reader: fx.Node, sources: Mapping[str, frozenset[str]]) -> bool:
        """Return whether a mask is larger than the saved sources of the other operands of a call that reads it."""
        others = {value.name for value in reader.all_input_nodes} - {mask}
        return self._size(mask) > sum(map(self._size, frozenset[str]().union(*(sources[value] for value in others))))

    def _sources(self, recomputed_masks: Collection[str]) -> dict[str, frozenset[str]]:
        """Return node -> the saved values that it is recomputed from; the node itself if it is saved."""
        sources: dict[str, frozenset[str]] = {}
        for name, node in self._nodes.items():
            if name not in self._within:
                is_input = node.op == "placeholder" and name not in self._cost.gradients
                sources[name] = frozenset({name}) if is_input and node.users else frozenset()
                continue
            of_operands = frozenset[str]().union(*(sources[operand.name] for operand in node.all_input_nodes))
            is_view = not self._cost.nodes[name].forward.launches
            if node.target is dropout_mask:
                is_recomputed = name in recomputed_masks
            else:
                is_recomputed = is_view or self._size(name) > sum(map(self._size, of_operands))
            sources[name] = of_operands if is_recomputed and not self._is_expensive(node) else frozenset({name})
        return sources

    def _savers(self, *, gathered: bool) -> dict[int, set[str]]:
        """Return saved allocation -> the nodes whose backward needs it; ``gathered``: all as ops read them, else shards and sources."""
        savers: dict[int, set[str]] = {}
        sources: dict[int, Collection[int]] = {}  # many calls save the same
        for name, kept in self._cost.saved.items():
            if name in self._within:
                for allocation in kept:
                    if allocation not in sources:
                        sources[allocation] = {allocation} if gathered else self._saved_for(self._before_gather(allocation))
                    for saved in sources[allocation]:
                        savers.setdefault(saved, set()).add(name)
        return savers

    def before_gather(self, allocation: int, reader: str) -> int:
        """Return the shard from which a copy is gathered again for the weight gradients of a call.

        Return the copy itself if it is saved as it is, or was gathered for the recomputation of the call.
        """
        is_there = self.policy_of[reader] == "none" or reader in self.recomputed
        return allocation if is_there else self._before_gather(allocation)

    def _before_gather(self, allocation: int) -> int:
        """Return the shard that a gathered copy is made from; other received values, and parts of random numbers, stay as they are."""
        while allocation in self._cost.part_of and not (self._is_saved_as_received(allocation) or self._is_drawn(allocation)):
            allocation = self._cost.part_of[allocation]
        return allocation

    def enters_as_sum(self, name: str) -> bool:
        """Return whether other regions read a value as a sum over ranks, which is saved."""
        return name in self._cost.summed and name in self._entering

    def _is_drawn(self, allocation: int) -> bool:
        """Return whether a value consists of random numbers that are not drawn again."""
        maker = self._cost.maker[allocation]
        return draws(self._nodes[maker]) and maker not in self.recomputed

    def _is_saved_as_received(self, allocation: int) -> bool:
        """Return whether a copy from other ranks is saved instead of communicated again: under "selective", unless it was gathered.

        A parameter that is gathered once is always saved whole. Random numbers are drawn whole on every rank, which takes its part.
        """
        if allocation in self._cost.gathered_once:
            return True
        maker = self._cost.maker[allocation]
        if allocation not in self._cost.part_of or (self.policy_of[maker] != "selective" and not self.enters_as_sum(maker)):
            return False
        if draws(self._nodes[maker]):
            return False
        received, part = self._cost.allocation_bytes[allocation], self._cost.bytes[maker]
        is_no_gather = allocation in self._cost.exchanged or bool(self._numbers[received] < self._numbers[part])
        return self._cost.copies.get(allocation, is_no_gather)

    def _saved_for(self, allocation: int) -> set[int]:
        """Return the saved allocations that an allocation is recomputed from; itself if it is saved.

        Regions keep what they read of replicable values, such as a mask of attention.
        """
        if self._cost.maker[allocation] not in self.recomputed or self._is_saved_as_received(allocation):
            return {allocation}
        saved, seen, stack = set[int](), set[str](), [self._cost.maker[allocation]]
        while stack:
            name = stack.pop()
            if name in seen or name not in self._cost.nodes:
                continue
            seen.add(name)
            if name in self.recomputed or (name not in self._within and not self._cost.nodes[name].forward.launches):
                stack += [source.name for source in self._nodes[name].all_input_nodes]
            elif name in self._own:
                saved.add(self._received.get(self._own[name], self._own[name]))
        return saved
