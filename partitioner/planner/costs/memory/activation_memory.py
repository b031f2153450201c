"""Memory of the units of a model: permanent, from their first backward on, and for each microbatch in flight."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from cost_models.memory.optimizer_state import optimizer_states
from partitioner.planner.costs.cut_points import CutPoints
from partitioner.planner.costs.memory.checkpoint_selection import CheckpointSelection
from partitioner.planner.costs.memory.transient_memory import Gradient, WorkingMemory
from partitioner.planner.solvers.stage_memory import Floats, TransientMemory
from partitioner.planner.solvers.stage_problem import Shared
from passes.autograd.recompute import Recompute
from passes.graph.schemas import is_cast_or_view, packet
from passes.ir.graph import ModelGraph
from passes.ir.plan import Region

aten = torch.ops.aten

GRADIENTS_AT_ONCE = frozenset({aten.layer_norm, aten.batch_norm, aten.group_norm, aten.rms_norm, aten.lstm, aten.gru})
GRADIENTS_AT_ONCE |= {aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution}
GRADIENTS_AT_ONCE |= {aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d}
"""Operations whose backward computes the gradients of values and of weights in one call."""

OF_PARAMETERS = frozenset({aten.t, aten.transpose, aten.permute, aten.view, aten.to, aten._to_copy})  # noqa: SLF001  the operator's own name
"""Views and casts through which operations read parameters."""


class GatheredAgain(NamedTuple):
    """A value that a backward gathers again.

    Attributes:
        maker: the call that makes the shard, if the backward computes it again; empty: the shard is saved.
        readers: the calls whose backward reads the value.
    """

    maker: str
    readers: tuple[str, ...]


class UnitMemory:
    """The memory of units, for any microbatch size.

    Args:
        optimizer: its state is stored for every trained parameter.
        policy: of recomputation.
        regions: of recomputation, of the whole model.

    Attributes:
        recomputed: the nodes that the backward recomputes.
        selected: those of them whose policy is ``"selective"``.
        unread: those of them of which the backward reads the statistics alone.
        region_of: node -> the number of its region.
        fixed: permanent memory that does not depend on the batch: parameters, buffers, optimizer state.
        gradients: parameter gradients, held from the first backward on.
        added: the same in a step of several microbatches: those that are scattered once are whole until then.
        gathered: parameters that such a step gathers once, for all microbatches.
    """

    def __init__(
        self, graph: ModelGraph, cost: GraphCost, points: CutPoints, optimizer: str, policy: Recompute, regions: Sequence[Region] = ()
    ) -> None:
        self._points, self._policy = points, policy
        self._nodes = {node.name: node for node in graph.graph.nodes}
        self._unit_of = points.unit_of
        lasting = dict.fromkeys((*graph.parameters, *graph.buffers, *graph.constants))
        items = ((name, Shared(int(cost.bytes[name]), points.readers(self._nodes[name]))) for name in lasting)
        stored = {name: item for name, item in items if item.amount and item.units}
        trained = {name: item for name, item in stored.items() if name in graph.parameters and name in cost.gradients}
        copies = 1 + optimizer_states(optimizer)
        self.fixed = tuple(item._replace(amount=item.most * copies) if name in trained else item for name, item in stored.items())
        self.gradients = tuple(trained.values())
        whole = cost.scattered_once
        self.added = tuple(item._replace(amount=int(whole[name])) if name in whole else item for name, item in trained.items())
        self._trained = tuple(trained)

        # Inputs of a step are permanent memory of their readers' stages, not saved activations.
        self._inputs = tuple(name for name, node in self._nodes.items() if node.op == "placeholder" and name not in lasting)
        of_inputs = frozenset(key for key, maker in cost.maker.items() if maker in self._inputs and key not in cost.part_of)
        self._selection = selection = CheckpointSelection(graph, cost, frozenset(self._unit_of), policy, regions)
        self._cost = cost = _without_derived(cost, selection)
        self.recomputed = selection.recomputed
        self.region_of = selection.region_of
        self.unread = selection.unread
        self.selected = frozenset(name for name in selection.recomputed if selection.policy_of[name] == "selective")
        self._touching: dict[int, list[str]] = {}
        for name, steps in cost.touched.items():
            for key in itertools.chain.from_iterable(steps):
                self._touching.setdefault(key, []).append(name)
                source = key
                while source in cost.part_of:
                    source = cost.part_of[source]
                    self._touching.setdefault(source, []).append(name)
        saved = {key: readers for key, readers in selection.savers.items() if key not in of_inputs}
        self._savers = {key: tuple(sorted({self._unit_of[reader] for reader in readers})) for key, readers in saved.items()}
        if policy != "none":
            self._savers = {key: self._readers(key) or units for key, units in self._savers.items()}
        once = [key for key in self._savers if key in cost.gathered_once]
        self.gathered = tuple(Shared(int(cost.allocation_bytes[key]), self._savers[key]) for key in once)
        self._savers_of = {cost.maker[key]: frozenset(units) for key, units in self._savers.items()}
        casts = {cost.maker[each] for each in (*cost.gathered, *cost.gathered_once)}.difference(graph.parameters)
        widths = {name: float(self._itemsize(name, graph.parameters) / self._itemsize(name)) for name in casts}
        self._working = WorkingMemory(graph.parameters, widths, of_inputs, cost, points.units, selection)

    def _readers(self, allocation: int) -> tuple[int, ...]:
        """Return the units that read an allocation, or a copy of it from other ranks, such as its sum over them.

        A stage without them recomputes what is made from it from other values.
        """
        maker = self._cost.maker[allocation]
        calls = (name for name in self._touching.get(allocation, ()) if name != maker and name in self._unit_of)
        return tuple(sorted({self._unit_of[name] for name in calls}))

    def last_need(self, position: Mapping[str, int]) -> Mapping[str, int]:
        """Return recomputed node -> the last ``position`` of a call whose backward needs it, itself or to compute another again."""
        return self._selection.last_need(position)

    def gathered_again(self, reader: str) -> GatheredAgain | None:
        """Return what the backward of a call gathers again of its operands; None: nothing."""
        whole = (key for key in self._cost.saved.get(reader, ()) if key in self._cost.part_of)
        shards = {shard: key for key in whole if (shard := self._selection.before_gather(key, reader)) != key}
        if not shards:
            return None
        saved = next((shard for shard in shards if shard in self._savers), None)
        shard = next(iter(shards)) if saved is None else saved
        return GatheredAgain("" if saved is not None else self._cost.maker[shard], self._readers_of_saved[shards[shard]])

    def is_saved_before_casts(self, value: str) -> bool:
        """Return whether a value is saved, or is a view or cast of one that is."""
        node = self._nodes[value]
        while node.name in self.recomputed and is_cast_or_view(node):
            node = node.all_input_nodes[0]
        return node.name not in self.recomputed

    def is_received_again(self, value: str, reader: str) -> bool:
        """Return whether the backward sends a value to its reader again: to a recomputed call, or for what that call's backward reads."""
        if reader in self.recomputed:
            return reader not in self.selected and not self._selection.enters_as_sum(value)
        is_read = any(self._cost.maker[key] == value for key in self._cost.saved.get(reader, ()))
        return is_read and value in self.recomputed and value not in self.selected

    @cached_property
    def _readers_of_saved(self) -> dict[int, tuple[str, ...]]:
        """Allocation that is a copy of another rank's -> the calls whose backward reads it."""
        found: dict[int, tuple[str, ...]] = {}
        for name, keys in self._cost.saved.items():
            for key in keys:
                if key in self._cost.part_of:
                    found[key] = (*found.get(key, ()), name)
        return found

    def inputs(self, numbers: Numbers) -> tuple[Shared, ...]:
        """Return the inputs of a step, permanent memory of the stages that read them; ``numbers``: sizes at the step's whole batch."""
        sizes = ((round(numbers[self._cost.bytes[name]]), self._points.readers(self._nodes[name])) for name in self._inputs)
        return tuple(Shared(size, units) for size, units in sizes if size and units)

    def kept(self, numbers: Numbers, share: float, *, alone: bool) -> tuple[Shared, ...]:
        """Return the saved activations of a microbatch.

        Args:
            numbers: sizes at its rows.
            share: 1; of a graph with a fixed batch size, whose numbers do not depend on rows: the microbatch's fraction of the batch.
            alone: whether there is one microbatch; several share what is gathered once.
        """
        cost = self._cost
        own = ((key, units) for key, units in self._savers.items() if alone or key not in cost.gathered_once)
        kept = [Shared(round(numbers[cost.allocation_bytes[key]] * share), units) for key, units in own]
        of_units: dict[int, float] = {}  # internal buffers that ops save, such as statistics of a normalization
        for name, each in cost.nodes.items():
            if name in self._unit_of and name not in self.recomputed:
                of_units[self._unit_of[name]] = of_units.get(self._unit_of[name], 0.0) + numbers[each.keeps] * share
        # The gradients of the model's results, alive from the loss of a microbatch to its backward.
        returned = sum(float(numbers[cost.allocation_bytes[key]]) for key in cost.returned if cost.maker[key] in cost.gradients)
        of_units[len(self._points.units) - 1] = of_units.get(len(self._points.units) - 1, 0.0) + returned * share
        if self._policy != "none":
            # Recomputation starts from received values, so a stage keeps them whether or not an op of its own saves them.
            for value in self._points.values:
                readers = tuple(unit for unit in value.readers if unit not in self._savers_of.get(value.node, ()))
                kept += [Shared(round(numbers[cost.bytes[value.node]] * share), readers, value.producer)] if readers else []
        return (*kept, *(Shared(round(amount), (unit,)) for unit, amount in sorted(of_units.items()) if amount))

    def working(self, numbers: Numbers, share: float, kept: Iterable[Shared], *, alone: bool, n_stages: int = 1) -> TransientMemory:
        """Return the transient memory of units.

        Args:
            numbers, share: as in ``kept``.
            kept: the saved activations.
            alone: whether there is one microbatch.
            n_stages: number of stages.
        """
        saved = np.zeros(len(self._points.units))
        for item in kept:
            if item.producer < 0:  # received values exist before the stage computes
                saved[item.units[0]] += item.most
        items = zip(self._trained, self.gradients if alone else self.added, strict=True)
        gradients = [Gradient(item.units[-1], tuple(user.name for user in self._nodes[name].users), item.most) for name, item in items]
        return self._working.at(numbers, share, saved, gradients, self._for_weights(numbers, share), alone=alone, n_stages=n_stages)

    def _for_weights(self, numbers: Numbers, share: float) -> Floats:
        """Return (N,) bytes that the gradients of each unit's weights are computed from: operands, and gradients of results."""
        sizes = self._cost.allocation_bytes
        found, seen = np.zeros(len(self._points.units)), set[int]()
        for name, unit in self._unit_of.items():
            node = self._nodes[name]
            if packet(node.target) in GRADIENTS_AT_ONCE or self._is_trained(node) or not any(map(self._is_trained, node.all_input_nodes)):
                continue
            given = (self._selection.before_gather(key, name) for key in self._cost.saved.get(name, ()))
            operands = [key for key in given if self._cost.maker[key] in self._unit_of]
            operands = [key for key in operands if not self._is_trained(self._nodes[self._cost.maker[key]])]
            sources = [key for key in operands if key not in seen]
            seen.update(sources)
            found[unit] += float(numbers[self._cost.bytes[name]]) + sum(float(numbers[sizes[key]]) for key in sources)
        return found * share

    def _is_trained(self, node: fx.Node) -> bool:
        """Return whether a value is a trained parameter, or a view or cast of one."""
        while node.op == "call_function" and packet(node.target) in OF_PARAMETERS and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node.name in self._trained

    def _itemsize(self, name: str, sources: Collection[str] = ()) -> int:
        """Return the bytes of an element of a value; with ``sources``, of the first of these that its first tensors are made from."""
        node = self._nodes[name]
        while sources and node.name not in sources:
            node = next(each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor))
        return int(node.meta["val"].dtype.itemsize)


def _without_derived(cost: GraphCost, selection: CheckpointSelection) -> GraphCost:
    """Return costs whose calls keep no values that selective recomputation derives from others."""
    selective = (name for name in cost.nodes if selection.policy_of.get(name) == "selective")
    derived = {name: cost.nodes[name] for name in selective if cost.nodes[name].derived != 0}
    changed = {name: replace(each, keeps=each.keeps - each.derived, derived=0) for name, each in derived.items()}
    return replace(cost, nodes={**cost.nodes, **changed}) if changed else cost
