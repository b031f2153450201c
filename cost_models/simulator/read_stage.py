"""Step through a graph as a run would: values, memory allocated and freed, and time.

A value is dropped after its last use, as in the executor. A storage is free when no live value uses it.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from cost_models.formulas.symbols import Numbers
from cost_models.simulator.pricing import NodePrices, is_mask, is_part_of_mask, share_taken
from cost_models.simulator.storages import Category, Held, Storage, leaves_of, storages_of
from cost_models.simulator.tasks import Step, Transfer, combine_storages, merge_compute_steps
from passes.graph.aliasing import memory_keys
from passes.graph.dependencies import last_uses, with_ancestors
from passes.graph.schemas import packet, viewed_arguments
from passes.graph.symbolic_sizes import SIZE_OPERATORS, size_of
from passes.ir.program import StageCall
from passes.ir.torch_private import OpOverload
from passes.verify.abstract_interpreter import UNKNOWN

aten = torch.ops.aten

_COPIES = frozenset({aten.clone, aten._to_copy})  # noqa: SLF001  the operator's own name
"""Their results are new memory although tracing says otherwise: passes write them with the meta of their operand."""

_MAY_COPY = frozenset({aten.reshape, aten.contiguous, aten.flatten, aten.to, aten.type_as, aten.unflatten, aten.dropout, aten.einsum})
"""Their schemas say that they view; whether they do depends on the strides of the argument, known from tracing."""

_RESHAPES = frozenset({aten.reshape, aten.flatten, aten.unflatten, aten.contiguous})
"""Those of them that copy nothing where the argument is contiguous, as received values are."""

_NO_SOURCES: Mapping[Hashable, Storage] = MappingProxyType({})


class GraphReader(ABC):
    """Steps through one graph.

    Args:
        graph: any whose operators carry traced values.
        prices: what its nodes cost.
        gradients: the nodes whose values become gradients of parameters.

    Attributes:
        values: of the nodes so far.
        steps: so far.
    """

    def __init__(self, graph: fx.Graph, prices: NodePrices, gradients: Iterable[fx.Node]) -> None:
        self.graph = graph
        self.prices = prices
        self.values: dict[fx.Node, Any] = {}
        self.steps: list[Step] = []
        self.made: list[Storage] = []
        self._gradients = _behind_views(gradients)
        self._last_use = last_uses(graph)
        self._fused = prices.fused_works(graph)
        self._new: dict[Hashable, Storage] = {}
        self._numbers: dict[int, Numbers] = {}

    def mark_gradients(self, nodes: Iterable[fx.Node]) -> None:
        """Mark more nodes whose values become gradients of parameters."""
        self._gradients |= _behind_views(nodes)

    # -- memory --------------------------------------------------------------------------------------------------------------------

    def category(self, node: fx.Node) -> Category:
        """Return the memory category of a node's value."""
        return "gradients" if node in self._gradients else "activations"

    def make(self, node: fx.Node, size: int, category: Category | None = None) -> Storage:
        """Allocate memory."""
        storage = Storage(node.name, size, category or self.category(node))
        self.made.append(storage)
        return storage

    def tensor(self, node: fx.Node, shape: Sequence[int], dtype: torch.dtype, category: Category | None = None) -> Held:
        """Allocate a new tensor."""
        held = Held(Storage("", 0, "activations"), tuple(shape), dtype)
        held.storage = self.make(node, held.bytes, category)
        return held

    def begin(self) -> None:
        """Forget the storages that the previous node made."""
        self.made = []
        self._new = {}

    def end(self, node: fx.Node) -> list[Storage]:
        """Hold the node's value; return the storages that are free after it, temporary ones included."""
        for storage in storages_of(self.values[node]):
            storage.holders += 1
        free = [storage for storage in self.made if not storage.holders and storage.bytes]
        for value in self._last_use.get(node, ()):
            for storage in storages_of(self.values[value]):
                storage.holders -= 1
                if storage.holders == 0 and not storage.stays:
                    free.append(storage)
        return free

    # -- nodes ---------------------------------------------------------------------------------------------------------------------

    def visit(self, node: fx.Node, section: str) -> None:
        """Process one computing node: its value, its step."""
        self.begin()
        seconds = self._drawn(node, self.compute(node))
        made, dropped = self.made, self.end(node)
        if seconds or made or dropped:
            self.steps.append(Step("compute", node.name, section, seconds, made, dropped))

    def _drawn(self, node: fx.Node, seconds: float) -> float:
        """Return a node's seconds; with fusion, a mask costs the part that is used, and taking a part costs nothing."""
        if self.prices.fusion == "none" or not seconds:
            return seconds
        if is_part_of_mask(node):
            return 0.0
        return self.prices.writing(share_taken(node) * sum(storage.bytes for storage in self.made)) if is_mask(node) else seconds

    def compute(self, node: fx.Node) -> float:
        """Set a node's value; returns its seconds."""
        arguments = self.arguments(node.args)
        if node.target is operator.getitem:
            value, index = arguments
            self.values[node] = UNKNOWN if value is UNKNOWN else value[index]
            return 0.0
        if node.target in SIZE_OPERATORS and all(isinstance(value, int) for value in arguments):
            assert callable(node.target)
            self.values[node] = node.target(*arguments)
            return 0.0
        return self.operator(node) if isinstance(node.target, OpOverload) else self.function(node, arguments)

    def arguments(self, arguments: Any) -> Any:
        """Return the arguments of a node with values for nodes."""
        return fx.node.map_aggregate(arguments, lambda each: self.values[each] if isinstance(each, fx.Node) else each)

    def operator(self, node: fx.Node) -> float:
        """Price an ATen operator. An untraced operator (the few that count the rows of a batch) is unknown, and free."""
        if "val" not in node.meta:
            self.values[node] = UNKNOWN
            return 0.0
        sources = {leaf.key: leaf.storage for source in node.all_input_nodes for leaf in leaves_of(self.values[source])}
        viewed = () if packet(node.target) in _MAY_COPY and not _only_reshapes(node) else viewed_arguments(node)
        fallback = next((leaf.storage for source in viewed for leaf in leaves_of(self.values[source])), None)
        self.values[node] = self.traced(node, {} if packet(node.target) in _COPIES else sources, fallback)
        if node in self._fused:
            dtype = next((leaf.dtype for leaf in leaves_of(self.values[node])), torch.float32)
            return self.prices.seconds(self._fused[node].at(self.numbers(node)), dtype)
        return self.prices.operator(node, self.values, self.values[node], is_view=not self.made)

    def traced(self, node: fx.Node, sources: Mapping[Hashable, Storage] = _NO_SOURCES, fallback: Storage | None = None) -> Any:
        """Return a node's traced value at the rows of this call.

        Args:
            sources: the storages of what the node reads, by the storage that tracing saw; the value is a view of those that it shares.
            fallback: what it is a view of in any case.
        """
        keys = {id(tensor): key for tensor, key in memory_keys(node)}
        return self._at_rows(node, node.meta.get("val"), keys, sources, fallback)

    def _at_rows(
        self, node: fx.Node, fake: Any, keys: Mapping[int, Hashable], sources: Mapping[Hashable, Storage], fallback: Storage | None
    ) -> Any:
        if isinstance(fake, Tensor):
            numbers, key = self.numbers(node), keys[id(fake)]
            shape = tuple(int(numbers[size_of(size)]) for size in fake.shape)
            storage = sources.get(key) or fallback or self._new.get(key)
            if storage is None:
                storage = self._new[key] = self.make(node, int(numbers[size_of(fake.untyped_storage().nbytes())]))
            return Held(storage, shape, fake.dtype, key)
        if isinstance(fake, tuple | list):
            return [self._at_rows(node, part, keys, sources, fallback) for part in fake]
        return int(self.numbers(node)[size_of(fake)]) if isinstance(fake, torch.SymInt) else fake

    def numbers(self, node: fx.Node) -> Numbers:
        """Return the evaluation of sizes at the rows of a node."""
        rows = self.rows(node)
        if rows not in self._numbers:
            self._numbers[rows] = Numbers(rows)
        return self._numbers[rows]

    @abstractmethod
    def rows(self, node: fx.Node) -> int:
        """Return the value of the batch symbol at a node."""

    @abstractmethod
    def function(self, node: fx.Node, arguments: Sequence[Any]) -> float:
        """Set the value of a function that is not an ATen operator; return its seconds."""


def _behind_views(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes, and the bases of their views."""
    return with_ancestors(nodes, _viewed)


def _viewed(node: fx.Node) -> Sequence[fx.Node]:
    if node.target is operator.getitem:
        return node.all_input_nodes
    return viewed_arguments(node) if node.op == "call_function" and isinstance(node.target, OpOverload) else ()


def _only_reshapes(node: fx.Node) -> bool:
    """Return whether a node reshapes a contiguous tensor, which copies nothing."""
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return packet(node.target) in _RESHAPES and isinstance(source, Tensor) and source.is_contiguous()


# -- a stage's graph, stepped through once for every number of rows, however often programs call it --------------------------------


Group: TypeAlias = tuple[int, ...]
"""The ranks of a collective."""


@dataclass(frozen=True)
class StageTemplate:
    """Steps of a call of a stage.

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
        """Return the steps and the results of one call.

        Args:
            arguments: what it is called with.
            state: what stays with the rank, in the order of ``bound_names``.
            number: the key of the next collective of a group.
            group_here: translates a group of the template to the ranks of the caller.
        """
        places: dict[int, Storage] = {id(storage): state[place].storage for place, storage in self.state.items()}
        for storage, argument in zip(self.given, arguments, strict=True):
            if storage is not None and isinstance(argument, Held):
                places[id(storage)] = argument.storage
        transfers: dict[int, Transfer] = {}

        def storage_in_call(storage: Storage) -> Storage:
            if id(storage) not in places:
                places[id(storage)] = storage.of(name)
            return places[id(storage)]

        def transfer_in_call(transfer: Transfer) -> Transfer:
            found = transfers.get(id(transfer))
            if found is None:
                inputs, buffers = tuple(map(storage_in_call, transfer.inputs)), tuple(map(storage_in_call, transfer.buffers))
                group = group_here(transfer.group)
                found = Transfer(transfer.name, transfer.kind, group, number(group), transfer.bytes, inputs, buffers)
                transfers[id(transfer)] = found
            return found

        def in_call(value: Any) -> Any:
            if isinstance(value, Held):
                return Held(storage_in_call(value.storage), value.shape, value.dtype)
            return type(value)(in_call(part) for part in value) if isinstance(value, tuple | list) else value

        steps = []
        for step in self.steps:
            made, dropped = [*map(storage_in_call, step.made)], [*map(storage_in_call, step.dropped)]
            transfer = transfer_in_call(step.transfer) if step.transfer is not None else None
            title = name if step.kind == "compute" else step.name
            rise = None if step.rise is None else replace(step.rise, gone=tuple(map(storage_in_call, step.rise.gone)))
            steps.append(Step(step.kind, title, section, step.seconds, made, dropped, transfer, rise))
        return steps, in_call(self.results)


Given: TypeAlias = tuple[tuple[int, int, Category] | None, ...]
"""For each argument of a call: the number, bytes and category of its storage if the stage drops it; None: the caller keeps it, or a number.

Arguments with equal numbers share a storage."""


class Arguments:
    """Storages of a template's arguments, created in order.

    Attributes:
        storages: of each argument so far; None for a number.
    """

    def __init__(self, handed: Given) -> None:
        self._handed = handed
        self._dropped: dict[int, Storage] = {}
        self.storages: list[Storage | None] = []

    def next(self, node: fx.Node) -> Storage | None:
        """Return the storage of the next argument, by its placeholder."""
        handed = self._handed[len(self.storages)]
        if not isinstance(node.meta.get("val"), Tensor):
            storage = None
        elif handed is None:
            storage = Storage(node.name, 0, "activations", stays=True)
        else:
            number, size, category = handed
            storage = self._dropped.setdefault(number, Storage(node.name, size, category))
            storage.holders += 1
        self.storages.append(storage)
        return storage


def read_stage(stage: StageCall, rows: int, handed: Given, prices: NodePrices, *, gives_gradients: bool) -> StageTemplate:
    """Step through a stage's graph.

    Args:
        rows: of the call.
        handed: the arguments that the stage drops.
        gives_gradients: whether the last of its results are the gradients of parameters.
    """
    n_bound = len(stage.bound_names)
    reader = _StageReader(stage, rows, (*(None,) * n_bound, *handed), prices, gives_gradients=gives_gradients)
    results = reader.run()
    given = reader.given.storages
    state = {place: storage for place, storage in enumerate(given[:n_bound]) if storage is not None}
    return template_of(reader.steps, given[n_bound:], state, results)


def template_of(steps: list[Step], given: Sequence[Storage | None], state: Mapping[int, Storage], results: Any) -> StageTemplate:
    """Return the template of a graph that was stepped through, with compute steps merged and storages combined."""
    apart = [*(storage for storage in given if storage is not None), *state.values(), *storages_of(results)]
    return StageTemplate(tuple(combine_storages(merge_compute_steps(steps), apart)), tuple(given), state, results)


class _StageReader(GraphReader):
    """Reads a stage that does not communicate: its parameters and arguments are in storages of the caller."""

    def __init__(self, stage: StageCall, rows: int, handed: Given, prices: NodePrices, *, gives_gradients: bool) -> None:
        graph = stage.graph.graph
        returned: Any = graph.output_node().args[0]
        last = returned[-1] if gives_gradients and isinstance(returned, tuple | list) and returned else ()
        super().__init__(graph, prices, [node for node in last if isinstance(node, fx.Node)] if isinstance(last, tuple | list) else ())
        self._rows = rows
        self.given = Arguments(handed)

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
        fake, storage = node.meta.get("val"), self.given.next(node)
        if isinstance(fake, Tensor):
            assert storage is not None
            numbers, ((_, key),) = self.numbers(node), memory_keys(node)
            return Held(storage, tuple(int(numbers[size_of(size)]) for size in fake.shape), fake.dtype, key)
        return int(self.numbers(node)[size_of(fake)]) if isinstance(fake, torch.SymInt) else fake

    def rows(self, node: fx.Node) -> int:
        return self._rows

    def function(self, node: fx.Node, arguments: Sequence[Any]) -> float:
        self.values[node] = self.traced(node)
        assert callable(node.target)
        return self.prices.function(node.target, arguments, self.values[node], sum(storage.bytes for storage in self.made))
