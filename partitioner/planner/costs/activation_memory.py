"""What the units of a model hold: all the time, from their first backward on, and for each microbatch in flight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from cost_models.memory.optimizer_state import optimizer_states
from partitioner.planner.costs.checkpoint_selection import CheckpointSelection
from partitioner.planner.costs.cut_points import CutPoints
from partitioner.planner.costs.transient_memory import WorkingMemory
from partitioner.planner.solvers.stage_problem import Shared, Working
from passes.autograd.recompute import Recompute
from passes.ir.graph import ModelGraph

__all__ = ["UnitMemory"]


class UnitMemory:
    """The memory of units, whatever the microbatch size.

    Args:
        optimizer: whose state is held for every parameter that trains.
        policy: what the backward computes again instead of keeping it.

    Attributes:
        again: the nodes that it computes again.
        fixed: what stages hold all the time, whatever the batch: parameters, buffers, optimizer state.
        gradients: what they hold from their first backward on.
    """

    def __init__(self, graph: ModelGraph, cost: GraphCost, points: CutPoints, optimizer: str, policy: Recompute) -> None:
        self._cost, self._points, self._policy = cost, points, policy
        self._nodes = {node.name: node for node in graph.graph.nodes}
        self._unit_of = points.unit_of
        lasting = dict.fromkeys((*graph.parameters, *graph.buffers, *graph.constants))
        found = ((name, Shared(int(cost.bytes[name]), self._holders(name))) for name in lasting)
        held = {name: item for name, item in found if item.amount and item.units}
        trained = {name: item for name, item in held.items() if name in graph.parameters and name in cost.gradients}
        copies = 1 + optimizer_states(optimizer)
        self.fixed = tuple(item._replace(amount=item.most * copies) if name in trained else item for name, item in held.items())
        self.gradients = tuple(trained.values())

        # Inputs of a step are held in any case, whoever reads them: they are no activations that a backward saves.
        self._inputs = tuple(name for name, node in self._nodes.items() if node.op == "placeholder" and name not in lasting)
        of_inputs = frozenset(key for key, maker in cost.maker.items() if maker in self._inputs and key not in cost.part_of)
        selection = CheckpointSelection(graph, cost, frozenset(self._unit_of), policy)
        self.again = selection.again
        saved = {key: readers for key, readers in selection.savers.items() if key not in of_inputs}
        self._savers = {key: tuple(sorted({self._unit_of[reader] for reader in readers})) for key, readers in saved.items()}
        self._working = WorkingMemory(graph.parameters, of_inputs, cost, points.units, selection, policy)

    def given(self, numbers: Numbers) -> tuple[Shared, ...]:
        """The inputs of a step, which the stages that read them hold all the time.

        Args:
            numbers: sizes at the rows of the whole step.
        """
        sizes = ((round(numbers[self._cost.bytes[name]]), self._holders(name)) for name in self._inputs)
        return tuple(Shared(size, units) for size, units in sizes if size and units)

    def kept(self, numbers: Numbers, share: float) -> tuple[Shared, ...]:
        """What is kept for a microbatch.

        Args:
            numbers: sizes at its rows.
            share: what they are multiplied with.
        """
        cost = self._cost
        kept = [Shared(round(numbers[cost.allocation_bytes[key]] * share), units) for key, units in self._savers.items()]
        besides: dict[int, float] = {}
        for name, each in cost.nodes.items():
            if name in self._unit_of and name not in self.again:
                besides[self._unit_of[name]] = besides.get(self._unit_of[name], 0.0) + numbers[each.keeps] * share
        # From the loss of a microbatch to its backward, the gradients of what the model returned.
        returned = sum(float(numbers[cost.allocation_bytes[key]]) for key in cost.returned if cost.maker[key] in cost.gradients)
        besides[len(self._points.units) - 1] = besides.get(len(self._points.units) - 1, 0.0) + returned * share
        if self._policy != "none":
            # What a stage receives is kept whether or not some operation of its own would keep it: everything starts from it.
            sizes = ((value, round(numbers[cost.bytes[value.node]] * share)) for value in self._points.values)
            kept += [Shared(size, value.readers, value.producer) for value, size in sizes]
        return (*kept, *(Shared(round(amount), (unit,)) for unit, amount in sorted(besides.items()) if amount))

    def working(self, numbers: Numbers, share: float, kept: Iterable[Shared], *, alone: bool, called: bool) -> Working:
        """What units hold while they compute.

        Args:
            numbers, share: as above.
            kept: what is.
            alone: whether there is but one microbatch.
            called: whether backwards are calls of their programs.
        """
        made, trained = np.zeros((2, len(self._points.units)))
        for item in kept:
            if item.producer < 0:  # what a stage receives is there before
                made[item.units[0]] += item.most
        for item in self.gradients:
            trained[item.units[-1]] += item.most
        return self._working.at(numbers, share, made, trained, alone=alone, called=called)

    def _holders(self, placeholder: str) -> tuple[int, ...]:
        """The units that need a placeholder, directly or through replicated nodes."""
        units = set[int]()
        for user in self._nodes[placeholder].users:
            units.update([self._unit_of[user.name]] if user.name in self._unit_of else self._points.replicated.get(user.name, ()))
        return tuple(sorted(units))
