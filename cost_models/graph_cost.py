"""What every node of a model costs, and which values its backward keeps alive.

Repeated layers are priced once: the price of a node depends on its operator and on the sizes of what it touches, nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy
from torch import fx
from torch._ops import OpOverload

from cost_models.node_work import described
from cost_models.operations import OperationCost, operation_cost, tensor_shapes
from cost_models.sizes import Size, TensorShape
from passes.aliasing import Allocations, allocations, mutated_arguments
from passes.gradient_flow import may_require_gradient
from passes.ir.collectives import COLLECTIVES
from passes.ir.graph import ModelGraph
from passes.operators import bound_arguments, node_leaves

__all__ = ["GraphCost", "Parts", "Reading", "graph_cost", "nodes_with_gradient", "read_graph"]


class Parts(Protocol):
    """The shapes that one rank has of a graph whose axes are cut, in its own rows."""

    def results(self, node: fx.Node) -> tuple[TensorShape, ...]:
        """The part of what a node gives."""

    def operands(self, call: fx.Node) -> Mapping[fx.Node, tuple[TensorShape, ...]]:
        """The parts that a call reads, by what gives them."""

    @property
    def gathered_again(self) -> frozenset[str]:
        """Parameters that the backward gathers once more instead of keeping them whole."""


@dataclass(frozen=True)
class GraphCost:
    """The price of a model, as formulas in its batch symbol.

    Attributes:
        batch: the symbol; None when all is numbers.
        nodes: computing node -> its price.
        saved: computing node -> the allocations that its backward keeps.
        allocation_bytes: allocation -> its size.
        bytes: node -> the size of the tensors that it gives, or that the rank holds of it.
        maker: allocation -> the node that makes it.
        part_of: allocation of a value as somebody reads it, gathered -> the allocation in which the rank has its part.
        touched: computing node -> the allocations that it reads or makes, as it reads them, but for those that are there all the time.
        returned: the allocations of what the model returns.
        gathered_again: those that the backward reads, and gathers once more instead of keeping them.
        gradients: nodes whose gradient the backward computes.
        unknown: operators that are not in the table, by name, sorted: priced by their bytes alone.
    """

    batch: sympy.Symbol | None
    nodes: Mapping[str, OperationCost]
    saved: Mapping[str, tuple[int, ...]]
    allocation_bytes: Mapping[int, Size]
    bytes: Mapping[str, Size]
    maker: Mapping[int, str]
    part_of: Mapping[int, int]
    touched: Mapping[str, tuple[int, ...]]
    returned: frozenset[int]
    gathered_again: frozenset[int]
    gradients: frozenset[str]
    unknown: tuple[str, ...]


def nodes_with_gradient(graph: ModelGraph) -> frozenset[str]:
    """The nodes whose gradient a training step computes: parameters that require one, and what depends on them differentiably."""
    trained = {
        node.name for node in graph.graph.nodes if node.name in graph.parameters and getattr(node.meta.get("val"), "requires_grad", False)
    }
    untrained = [node.name for node in graph.graph.nodes if node.op == "placeholder" and node.name not in trained]
    return frozenset(node.name for node in may_require_gradient(graph.graph, without=untrained))


@dataclass(frozen=True)
class _ReadCall:
    """What is known of one call whatever its sizes.

    Attributes:
        node: the call.
        bound: its arguments by name.
        gradients: see ``operation_cost``.
        is_view: whether its results lie in the memory of its arguments.
        held: the arguments that are parameters.
    """

    node: fx.Node
    bound: Mapping[str, Any]
    gradients: Mapping[str, str]
    is_view: bool
    held: frozenset[str]


@dataclass(frozen=True)
class Reading:
    """What the prices of all parts of a graph have in common: nothing of it depends on sizes.

    Attributes:
        calls: those that compute.
        memory: which nodes share an allocation.
        stationary: the allocations that are there all the time.
        flowing: nodes whose gradient the backward computes.
        priced: the prices of calls so far, by all that they depend on: parts have many in common.
    """

    calls: tuple[_ReadCall, ...]
    memory: Allocations
    stationary: frozenset[int]
    flowing: frozenset[str]
    priced: dict[Any, OperationCost] = field(default_factory=dict)


def read_graph(graph: ModelGraph, *, differentiate: bool) -> Reading:
    """Read a graph, for ``graph_cost``.

    Args:
        differentiate: whether there is a backward.
    """
    flowing = nodes_with_gradient(graph) if differentiate else frozenset[str]()
    memory, weights = allocations(graph.graph), _parameter_values(graph)
    lasting = (*graph.parameters, *graph.buffers, *graph.constants)
    stationary = frozenset(allocation for name in lasting for allocation in memory.lies_in.get(name, ()))
    calls = []
    for node in graph.computing_nodes():
        bound = bound_arguments(node) if isinstance(node.target, OpOverload) else {}
        held = frozenset(name for name, value in bound.items() if any(leaf.name in graph.parameters for leaf in node_leaves(value)))
        calls.append(_ReadCall(node, bound, _gradients(node, bound, flowing, weights), _is_view(node, memory.lies_in), held))
    return Reading(tuple(calls), memory, stationary, flowing)


def graph_cost(graph: ModelGraph, *, differentiate: bool, parts: Parts | None = None, reading: Reading | None = None) -> GraphCost:
    """Price every node.

    Args:
        differentiate: whether there is a backward.
        parts: the shapes of one rank; None: the whole model's.
        reading: of the graph, where it is priced often.
    """
    reading = reading or read_graph(graph, differentiate=differentiate)
    shapes = {node: tensor_shapes(node.meta.get("val")) if parts is None else parts.results(node) for node in graph.graph.nodes}
    kept = _Kept(reading.memory, shapes, reading.stationary, parts)
    priced = reading.priced
    nodes: dict[str, OperationCost] = {}
    saved: dict[str, tuple[int, ...]] = {}
    touched: dict[str, tuple[int, ...]] = {}
    again: set[int] = set()
    for call in reading.calls:
        node, bound = call.node, call.bound
        read = shapes if parts is None else {**_sizes_of(node, shapes), **parts.operands(node)}
        arguments = {name: described(value, read) for name, value in bound.items()}
        key = (node.target, shapes[node], tuple(arguments.items()), tuple(call.gradients.items()), call.is_view, call.held)
        if key not in priced:
            priced[key] = operation_cost(node, shapes[node], arguments, call.gradients, is_view=call.is_view, weights=call.held)
        nodes[node.name] = priced[key]
        leaves = [leaf for name in priced[key].saves for leaf in ([node] if name.startswith("result") else node_leaves(bound[name]))]
        saved[node.name] = kept.allocations(leaves, read)
        again.update(kept.needed(leaves, read).difference(saved[node.name]))
        touched[node.name] = kept.touched(node, read)
    calls = [node for node in graph.computing_nodes() if node.target not in COLLECTIVES]
    unknown = {str(node.target) for node in calls if not nodes[node.name].known}
    sizes = {node.name: sum((shape.bytes for shape in shapes[node]), start=0) for node in graph.graph.nodes}
    flowing, named = reading.flowing, tuple(sorted(unknown))
    last = graph.graph.output_node().all_input_nodes
    returned = frozenset(each for value in last for each in reading.memory.lies_in[value.name]) - reading.stationary
    memory = (kept.bytes, sizes, kept.maker, kept.part_of, touched, returned, frozenset(again))
    return GraphCost(graph.batch, nodes, saved, *memory, flowing, named)


class _Kept:
    """The allocations that a backward keeps, and their sizes.

    Args:
        memory: which nodes share an allocation, and the sizes in the whole model.
        shapes: of what each node gives.
        stationary: allocations that are there all the time.
        parts: of the shapes that are a rank's: allocations then have the size of what their makers give, and a value that is read in
            another shape than it lies in is another allocation.
    """

    def __init__(
        self, memory: Allocations, shapes: Mapping[fx.Node, tuple[TensorShape, ...]], stationary: AbstractSet[int], parts: Parts | None
    ) -> None:
        self._memory, self._shapes, self._stationary, self._parts = memory, shapes, stationary, parts
        self.maker: dict[int, str] = {}
        for name, lies_in in memory.lies_in.items():
            for allocation in lies_in:
                self.maker.setdefault(allocation, name)
        self.bytes: dict[int, Size] = dict(memory.bytes)
        if parts is not None:
            by_name = {node.name: shapes[node] for node in shapes}
            for allocation, name in self.maker.items():
                self.bytes[allocation] = sum((shape.bytes for shape in by_name[name]), start=0) / len(memory.lies_in[name])
        self.part_of: dict[int, int] = {}
        self._moved: dict[tuple[int, tuple[TensorShape, ...]], int] = {}

    def allocations(self, leaves: Sequence[fx.Node], read: Mapping[fx.Node, tuple[TensorShape, ...]]) -> tuple[int, ...]:
        """What is kept of these values, as a call reads them."""
        again: Collection[str] = () if self._parts is None else self._parts.gathered_again
        return tuple(self._as_read(leaves, read, without=again))

    def needed(self, leaves: Sequence[fx.Node], read: Mapping[fx.Node, tuple[TensorShape, ...]]) -> set[int]:
        """What the backward needs of these values, as a call reads them."""
        return set(self._as_read(leaves, read))

    def touched(self, node: fx.Node, read: Mapping[fx.Node, tuple[TensorShape, ...]]) -> tuple[int, ...]:
        """What a call reads, as it reads it, and makes."""
        found = self._as_read(node.all_input_nodes, read)
        found.update(dict.fromkeys(each for each in self._memory.lies_in[node.name] if each not in self._stationary))
        return tuple(found)

    def _as_read(
        self, leaves: Iterable[fx.Node], read: Mapping[fx.Node, tuple[TensorShape, ...]], without: Collection[str] = ()
    ) -> dict[int, None]:
        """The allocations of values as a call reads them; none of those ``without`` that it reads in another shape than they lie in."""
        found: dict[int, None] = {}
        for leaf in leaves:
            shapes = read.get(leaf, self._shapes[leaf])
            for allocation in self._memory.lies_in[leaf.name]:
                if self._parts is not None and shapes != self._shapes[leaf]:
                    if leaf.name not in without:
                        found[self._another(allocation, leaf, shapes)] = None
                elif allocation not in self._stationary:
                    found[allocation] = None
        return found

    def _another(self, allocation: int, leaf: fx.Node, shapes: tuple[TensorShape, ...]) -> int:
        """The allocation of a value in the shape that somebody reads it in."""
        key = (allocation, shapes)
        if key not in self._moved:
            self._moved[key] = number = len(self.bytes)
            self.bytes[number] = sum((shape.bytes for shape in shapes), start=0)
            self.maker[number] = leaf.name
            self.part_of[number] = allocation
        return self._moved[key]


def _sizes_of(call: fx.Node, shapes: Mapping[fx.Node, tuple[TensorShape, ...]]) -> dict[fx.Node, tuple[TensorShape, ...]]:
    """The shapes that a call's arguments have where they lie."""
    return {argument: shapes[argument] for argument in call.all_input_nodes}


def _parameter_values(graph: ModelGraph) -> frozenset[str]:
    """Parameters, and what is computed from them alone: their gradients belong to the weight half."""
    values = set(graph.parameters)
    for node in graph.computing_nodes():
        if node.all_input_nodes and all(argument.name in values for argument in node.all_input_nodes):
            values.add(node.name)
    return frozenset(values)


def _gradients(node: fx.Node, bound: Mapping[str, Any], flowing: frozenset[str], weights: frozenset[str]) -> dict[str, str]:
    """Argument -> which half of the backward computes its gradient; empty when the node takes no part in the backward."""
    if node.name not in flowing:
        return {}
    gradients = {}
    for name, value in bound.items():
        leaves = [leaf for leaf in node_leaves(value) if leaf.name in flowing]
        if leaves:
            gradients[name] = "weight" if all(leaf.name in weights for leaf in leaves) else "activation"
    return gradients


def _is_view(node: fx.Node, lies_in: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the node's tensors lie in memory of its arguments, and it writes none of it."""
    if not lies_in.get(node.name) or mutated_arguments(node):
        return False
    sources = {allocation for argument in node.all_input_nodes for allocation in lies_in.get(argument.name, ())}
    return sources.issuperset(lies_in[node.name])
