"""A stage's graph, stepped through once for every number of rows, however often programs call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from cost_models.simulator.graph_reader import GraphReader
from cost_models.simulator.pricing import NodePrices
from cost_models.simulator.steps import Step, Transfer, gathered, merged
from cost_models.simulator.values import Held, Storage, storages_of
from passes.aliasing import memory_keys
from passes.ir.program import StageCall
from passes.size_expression import size_of

__all__ = ["Group", "StageTemplate", "read_stage", "template_of"]

Group: TypeAlias = tuple[int, ...]
"""The ranks of a collective."""


@dataclass(frozen=True)
class StageTemplate:
    """What a call of a stage does.

    Attributes:
        steps: of a call.
        given: for each argument, the storage that stands for the caller's; None for a number.
        state: what stays with the rank that the call reads, by its place in ``bound_names``, likewise.
        results: what it returns, in storages of its own and in those given.
    """

    steps: tuple[Step, ...]
    given: tuple[Storage | None, ...]
    state: Mapping[int, Storage]
    results: Any

    def call(
        self,
        name: str,
        section: str,
        arguments: Sequence[Any],
        state: Sequence[Held],
        number: Callable[[Group], Any],
        group_here: Callable[[Group], Group],
    ) -> tuple[list[Step], Any]:
        """The steps and the results of one call.

        Args:
            arguments: what it is called with.
            state: what stays with the rank, in the order of ``bound_names``.
            number: the key of the next collective of a group.
            group_here: the group that a group is where the call is made.
        """
        places: dict[int, Storage] = {id(storage): state[place].storage for place, storage in self.state.items()}
        for storage, argument in zip(self.given, arguments, strict=True):
            if storage is not None and isinstance(argument, Held):
                places[id(storage)] = argument.storage
        transfers: dict[int, Transfer] = {}

        def here(storage: Storage) -> Storage:
            found = places.get(id(storage))
            if found is None:
                found = places[id(storage)] = storage.of(name)
            return found

        def begun(transfer: Transfer) -> Transfer:
            found = transfers.get(id(transfer))
            if found is None:
                inputs, buffers = tuple(map(here, transfer.inputs)), tuple(map(here, transfer.buffers))
                group = group_here(transfer.group)
                found = Transfer(transfer.name, transfer.kind, group, number(group), transfer.bytes, inputs, buffers)
                transfers[id(transfer)] = found
            return found

        def moved(value: Any) -> Any:
            if isinstance(value, Held):
                return Held(here(value.storage), value.shape, value.dtype)
            return type(value)(moved(part) for part in value) if isinstance(value, tuple | list) else value

        steps = []
        for step in self.steps:
            made, dropped = [here(each) for each in step.made], [here(each) for each in step.dropped]
            transfer = begun(step.transfer) if step.transfer is not None else None
            title = name if step.kind == "compute" else step.name
            steps.append(Step(step.kind, title, section, step.seconds, made, dropped, transfer, step.rise))
        return steps, moved(self.results)


def read_stage(stage: StageCall, rows: int, prices: NodePrices, *, gives_gradients: bool) -> StageTemplate:
    """Step through a stage's graph.

    Args:
        rows: of the call.
        gives_gradients: whether the last of its results are the gradients of parameters.
    """
    reader = _StageReader(stage, rows, prices, gives_gradients=gives_gradients)
    results = reader.run()
    n_bound = len(stage.bound_names)
    state = {place: storage for place, storage in enumerate(reader.given[:n_bound]) if storage is not None}
    return template_of(reader.steps, reader.given[n_bound:], state, results)


def template_of(steps: list[Step], given: Sequence[Storage | None], state: Mapping[int, Storage], results: Any) -> StageTemplate:
    """What was read, in as few steps and storages as tell the same."""
    apart = [*(storage for storage in given if storage is not None), *state.values(), *storages_of(results)]
    return StageTemplate(tuple(gathered(merged(steps), apart)), tuple(given), state, results)


class _StageReader(GraphReader):
    """Arguments lie in storages of the caller, who holds them for as long as the call lasts."""

    def __init__(self, stage: StageCall, rows: int, prices: NodePrices, *, gives_gradients: bool) -> None:
        graph = stage.graph.graph
        returned: Any = graph.output_node().args[0]
        last = returned[-1] if gives_gradients and isinstance(returned, tuple | list) and returned else ()
        super().__init__(graph, prices, [node for node in last if isinstance(node, fx.Node)] if isinstance(last, tuple | list) else ())
        self._rows = rows
        self.given: list[Storage | None] = []

    def run(self) -> Any:
        """Step through the graph; returns its results."""
        for node in self.graph.nodes:
            if node.op == "output":
                return self.arguments(node.args[0])
            if node.op == "placeholder":
                self.values[node] = self._argument(node)
            else:
                self.visit(node, "")
        raise AssertionError("a graph ends with its output")

    def _argument(self, node: fx.Node) -> Any:
        fake = node.meta.get("val")
        if isinstance(fake, Tensor):
            storage = Storage(node.name, 0, "activations", stays=True)
            self.given.append(storage)
            numbers, ((_, key),) = self.numbers(node), memory_keys(node)
            return Held(storage, tuple(int(numbers[size_of(size)]) for size in fake.shape), fake.dtype, key)
        self.given.append(None)
        return int(self.numbers(node)[size_of(fake)]) if isinstance(fake, torch.SymInt) else fake

    def rows(self, node: fx.Node) -> int:
        return self._rows

    def function(self, node: fx.Node, arguments: Sequence[Any]) -> float:
        self.values[node] = self.traced(node)
        assert callable(node.target)
        return self.prices.function(node.target, arguments, self.values[node], sum(storage.bytes for storage in self.made))
