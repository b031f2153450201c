"""Step through a graph as a run would: the value of every node, the memory that it makes and drops, the time that it takes.

A value is dropped behind its last use, as the executor does, and a storage is free when no value that is alive lies in it.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from cost_models.formulas import Numbers
from cost_models.simulator.masks import is_mask, is_part_of_mask, share_taken
from cost_models.simulator.pricing import NodePrices
from cost_models.simulator.steps import Step
from cost_models.simulator.values import UNKNOWN, Category, Held, Storage, leaves_of, storages_of
from passes.aliasing import memory_keys
from passes.ancestors import with_ancestors
from passes.operators import packet, viewed_arguments
from passes.size_expression import SIZE_OPERATORS, size_of

__all__ = ["GraphReader"]

aten = torch.ops.aten

_COPIES = frozenset({aten.clone, aten._to_copy})  # noqa: SLF001  the operator's own name
"""Their results are new whatever tracing says: passes write them with the meta of what they copy."""

_MAY_COPY = frozenset({aten.reshape, aten.contiguous, aten.flatten, aten.to, aten.type_as, aten.unflatten, aten.dropout, aten.einsum})
"""Their schemas say that they view; whether they do depends on how the argument lies, which tracing knows."""

_RESHAPES = frozenset({aten.reshape, aten.flatten, aten.unflatten, aten.contiguous})
"""Those of them that copy nothing where the argument lies densely, as what comes from another rank does."""

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
        self._last_use = _last_uses(graph)
        self._fused = prices.fused_works(graph)
        self._new: dict[Hashable, Storage] = {}
        self._numbers: dict[int, Numbers] = {}

    def mark_gradients(self, nodes: Iterable[fx.Node]) -> None:
        """More nodes whose values become gradients of parameters."""
        self._gradients |= _behind_views(nodes)

    # -- memory --------------------------------------------------------------------------------------------------------------------

    def category(self, node: fx.Node) -> Category:
        """What the memory of a node's value is for."""
        return "gradients" if node in self._gradients else "activations"

    def make(self, node: fx.Node, size: int, category: Category | None = None) -> Storage:
        """New memory."""
        storage = Storage(node.name, size, category or self.category(node))
        self.made.append(storage)
        return storage

    def tensor(self, node: fx.Node, shape: Sequence[int], dtype: torch.dtype, category: Category | None = None) -> Held:
        """A new tensor."""
        held = Held(Storage("", 0, "activations"), tuple(shape), dtype)
        held.storage = self.make(node, held.bytes, category)
        return held

    def begin(self) -> None:
        """Nothing is made yet by the next node."""
        self.made = []
        self._new = {}

    def end(self, node: fx.Node) -> list[Storage]:
        """Hold the node's value; returns the storages that nobody holds behind it, what it made for itself alone among them."""
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
        """One computing node: its value, its step."""
        self.begin()
        seconds = self._drawn(node, self.compute(node))
        made, dropped = self.made, self.end(node)
        if seconds or made or dropped:
            self.steps.append(Step("compute", node.name, section, seconds, made, dropped))

    def _drawn(self, node: fx.Node, seconds: float) -> float:
        """Fused kernels draw the part of a mask that they use."""
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
        """Arguments of a node with values in the place of nodes."""
        return fx.node.map_aggregate(arguments, lambda each: self.values[each] if isinstance(each, fx.Node) else each)

    def operator(self, node: fx.Node) -> float:
        """An ATen operator. What nobody traced (the few that count the rows of a batch) is unknown, and free."""
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
        """A node's traced value at the rows of this call.

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
        """Sizes at the rows of a node."""
        rows = self.rows(node)
        if rows not in self._numbers:
            self._numbers[rows] = Numbers(rows)
        return self._numbers[rows]

    @abstractmethod
    def rows(self, node: fx.Node) -> int:
        """What the batch symbol stands for at a node."""

    @abstractmethod
    def function(self, node: fx.Node, arguments: Sequence[Any]) -> float:
        """A function that is no ATen operator: set its value; returns its seconds."""


def _behind_views(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and those that they are views of."""
    return with_ancestors(nodes, _viewed)


def _viewed(node: fx.Node) -> Sequence[fx.Node]:
    if node.target is operator.getitem:
        return node.all_input_nodes
    return viewed_arguments(node) if node.op == "call_function" and isinstance(node.target, OpOverload) else ()


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody reads behind it."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for value in (*node.all_input_nodes, node):
            if value not in seen:
                seen.add(value)
                last.setdefault(node, []).append(value)
    return last


def _only_reshapes(node: fx.Node) -> bool:
    """Whether a node gives what lies densely another shape, which copies nothing."""
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return packet(node.target) in _RESHAPES and isinstance(source, Tensor) and source.is_contiguous()
