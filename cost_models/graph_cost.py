"""Price every node of a model, and list the values that its backward keeps alive.

Repeated layers are priced once: the price of a node depends on its operator and on the sizes of what it touches, nothing else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import sympy
import torch
from torch import Tensor, fx

from cost_models.ops.cost import OperationCost, described, operation_cost, tensor_shapes
from cost_models.ops.loss_function import copies_in_loss
from cost_models.ops.work import Work
from passes.graph.aliasing import Allocations, allocations, mutated_arguments
from passes.graph.dependencies import may_require_gradient, parameter_values
from passes.graph.schemas import bound_arguments, node_leaves, packet
from passes.ir.comm.functional import COLLECTIVES
from passes.ir.graph import ModelGraph
from passes.ir.tensor_spec import Size, TensorSpec
from passes.ir.torch_private import OpOverload

aten = torch.ops.aten

Shapes: TypeAlias = Mapping[fx.Node, tuple[TensorSpec, ...]]
"""Of the tensors of nodes."""


@dataclass(frozen=True)
class Fetched:
    """Temporary copy of an operand for a call that reads beyond the rank's part: halo elements, padding.

    Attributes:
        shape: of the copy.
        runs: what each rank has in it: calls that read alike share one copy.
        is_sent: whether other ranks send some of it.
        is_beside: whether the call reads what it was made from, too: the copy has the borders alone.
    """

    shape: TensorSpec
    runs: str
    is_sent: bool
    is_beside: bool = False


class Parts(Protocol):
    """The shapes of one rank of a sharded graph, in its own rows."""

    def results(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        """Return the rank's part of a node's results."""

    def operands(self, call: fx.Node) -> Shapes:
        """Return the parts that a call reads, by their nodes."""

    def fetched(self, call: fx.Node) -> Mapping[fx.Node, tuple[Fetched, ...]]:
        """Return the temporary copies (halos, gathers) of a call's operands, in order."""

    @property
    def gathered_again(self) -> frozenset[str]:
        """Parameters, and casts of them, that the backward gathers once more instead of keeping them whole."""

    @property
    def gathered_once(self) -> frozenset[str]:
        """Those that are gathered once a step, and kept whole until its last backward."""

    @property
    def summed(self) -> frozenset[str]:
        """The calls whose results are the sums of what ranks compute."""

    @property
    def scattered_once(self) -> Mapping[str, Size]:
        """Parameter -> bytes of its whole gradient, if gradients are added over microbatches before they are scattered."""


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
        part_of: allocation of a value as it is read, gathered -> the allocation in which the rank has its part.
        copies: those of them that calls make for themselves, and whether they hold elements that neighbours sent.
        exchanged: those of them in which a dimension is longer and another one shorter than in the rank's part.
        touched: computing node, and the output -> step by step the allocations that it reads or makes, as it reads them, but for those
            that are there all the time.
        differentiated: computing node with a kernel for the gradient of each operand -> the allocations of each as it reads them, in
            the order of the kernels (``cost_models.ops.gradient_order``).
        returned: the allocations of what the model returns, as it does, each with the copies of it that a loss function holds.
        gathered: whole parameters, and casts of them, that are not kept whole.
        gathered_again: those that the backward reads, and gathers once more instead of keeping them -> the calls whose backward does.
        gathered_once: whole parameters, and casts of them, that are gathered once a step, and kept whole until its last backward.
        scattered_once: parameter -> bytes of its whole gradient, of those whose gradients are added over microbatches before they are
            scattered.
        summed: calls whose results are the sums of what ranks compute.
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
    copies: Mapping[int, bool]
    exchanged: frozenset[int]
    touched: Mapping[str, tuple[tuple[int, ...], ...]]
    differentiated: Mapping[str, tuple[tuple[int, ...], ...]]
    returned: Mapping[int, int]
    gathered: frozenset[int]
    gathered_again: Mapping[int, Collection[str]]
    gathered_once: frozenset[int]
    scattered_once: Mapping[str, Size]
    summed: frozenset[str]
    gradients: frozenset[str]
    unknown: tuple[str, ...]


def nodes_with_gradient(graph: ModelGraph) -> frozenset[str]:
    """Return the nodes whose gradient a training step computes: trained parameters and their differentiable dependents."""
    trained = {
        node.name for node in graph.graph.nodes if node.name in graph.parameters and getattr(node.meta.get("val"), "requires_grad", False)
    }
    untrained = [node.name for node in graph.graph.nodes if node.op == "placeholder" and node.name not in trained]
    return frozenset(node.name for node in may_require_gradient(graph.graph, without=untrained))


@dataclass(frozen=True)
class _ReadCall:
    """Facts of one call that do not depend on sizes.

    Attributes:
        node: the call.
        kind: a number for all that its price depends on beside shapes: the operator, and ``gradients``, ``is_view`` and ``held``.
        bound: its arguments by name.
        inputs: the nodes among them, each once.
        gradients: see ``operation_cost``.
        is_view: whether its results share the memory of its arguments.
        held: the arguments that are parameters.
    """

    node: fx.Node
    kind: int
    bound: Mapping[str, Any]
    inputs: tuple[fx.Node, ...]
    gradients: Mapping[str, str]
    is_view: bool
    held: frozenset[str]


@dataclass(frozen=True)
class Reading:
    """Facts shared by the prices of all parts of a graph; none depends on sizes.

    Attributes:
        calls: those that compute.
        shapes: of the tensors that nodes give, in the whole model.
        memory: which nodes share an allocation.
        maker: allocation -> the node that makes it.
        stationary: the allocations that are there all the time.
        flowing: nodes whose gradient the backward computes.
        gradients_added: node -> the readers whose gradients are added, and the type in which they are added.
        priced: the prices of calls so far, by all that they depend on: parts have many in common.
    """

    calls: tuple[_ReadCall, ...]
    shapes: Shapes
    memory: Allocations
    maker: Mapping[int, str]
    stationary: frozenset[int]
    flowing: frozenset[str]
    gradients_added: Mapping[str, tuple[tuple[fx.Node, ...], torch.dtype]]
    priced: dict[Any, OperationCost] = field(default_factory=dict)


def read_graph(graph: ModelGraph, *, differentiate: bool) -> Reading:
    """Read a graph, for ``graph_cost``.

    Args:
        differentiate: whether there is a backward.
    """
    flowing = nodes_with_gradient(graph) if differentiate else frozenset[str]()
    memory, of_weights = allocations(graph.graph), parameter_values(graph)
    lasting = (*graph.parameters, *graph.buffers, *graph.constants)
    stationary = frozenset(allocation for name in lasting for allocation in memory.allocations_of.get(name, ()))
    calls, kinds = list[_ReadCall](), dict[Hashable, int]()
    for node in graph.computing_nodes():
        bound = bound_arguments(node) if isinstance(node.target, OpOverload) else {}
        held = frozenset(name for name, value in bound.items() if any(leaf.name in graph.parameters for leaf in node_leaves(value)))
        gradients, is_view = _half_by_argument(node, bound, flowing, of_weights), _is_view(node, memory.allocations_of)
        kind = kinds.setdefault((node.target, tuple(bound), tuple(gradients.items()), is_view, held), len(kinds))
        calls.append(_ReadCall(node, kind, bound, tuple(node.all_input_nodes), gradients, is_view, held))
    shapes = {node: tensor_shapes(node.meta.get("val")) for node in graph.graph.nodes}
    maker: dict[int, str] = {}
    for name, own in memory.allocations_of.items():
        for allocation in own:
            maker.setdefault(allocation, name)
    return Reading(tuple(calls), shapes, memory, maker, stationary, flowing, _gradients_added(calls))


def _gradients_added(calls: Sequence[_ReadCall]) -> Mapping[str, tuple[tuple[fx.Node, ...], torch.dtype]]:
    """Return for each call whose value several calls differentiate, these calls, and the type in which their gradients are added.

    Gradients of readers of a cast are added in the wider type (``passes.autograd.precision``).
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for call in calls:
        for name in call.gradients:
            for leaf in node_leaves(call.bound[name]):
                readers.setdefault(leaf, []).append(call.node)
    added: dict[str, tuple[tuple[fx.Node, ...], torch.dtype]] = {}
    for call in calls:
        value = call.node.meta.get("val")
        if len(readers.get(call.node, ())) > 1 and call.gradients and isinstance(value, Tensor):
            source = call.inputs[0].meta.get("val") if packet(call.node.target) in _CASTS else None
            dtypes = [value.dtype, *([source.dtype] if isinstance(source, Tensor) else [])]
            added[call.node.name] = tuple(readers[call.node]), max(dtypes, key=lambda dtype: dtype.itemsize)
    return added


def _sums_of_gradients(node: fx.Node, readers: Sequence[fx.Node], dtype: torch.dtype, read: Mapping[fx.Node, Shapes]) -> tuple[_Sum, ...]:
    """Return the shapes and types of the sums of gradients of a call's readers: of those that read equal parts first, as they read them.

    Parts that ranks exchange have gradients of the type of the value; a cast does not follow their sum.

    Args:
        dtype: of the sums of gradients of the result.
        read: call -> the shapes of its arguments as it reads them, and of its own result.
    """
    own, groups = read[node][node], Counter(read[reader][node] for reader in readers)
    of_groups = [(shapes, dtype if shapes == own else own[0].known_dtype) for shapes, count in groups.items() for _ in range(count - 1)]
    return (*of_groups, *[(own, dtype)] * (len(groups) - 1))


_Sum: TypeAlias = tuple[tuple[TensorSpec, ...], torch.dtype]
"""Shapes and type of a sum of gradients."""

_CASTS = (aten.to, aten._to_copy)  # noqa: SLF001  what a conversion comes down to


def _with_additions(cost: OperationCost, sums: Sequence[_Sum]) -> OperationCost:
    """Return the price of a call, with that of adding the gradients of its readers, each cast first if they are added in a wider type."""
    kernels = list[Work]()
    for shapes, dtype in sums:
        elements, own = sum((shape.numel for shape in shapes), start=0), shapes[0].known_dtype.itemsize
        kernels.append(Work(0, 3 * elements * dtype.itemsize, 1, "pointwise"))
        if dtype.itemsize > own:
            kernels.append(Work(0, elements * (own + dtype.itemsize), 1, "pointwise"))
    first, *others = kernels
    work = cost.backward_input
    return replace(
        cost, backward_input=replace(work, then=(*work.then, first, *others)) if work.launches else replace(first, then=(*others,))
    )


def graph_cost(graph: ModelGraph, *, differentiate: bool, parts: Parts | None = None, reading: Reading | None = None) -> GraphCost:
    """Price every node.

    Args:
        differentiate: whether there is a backward.
        parts: the shapes of one rank; None: the whole model's.
        reading: of the graph, where it is priced often.
    """
    reading = reading or read_graph(graph, differentiate=differentiate)
    shapes = reading.shapes if parts is None else {node: parts.results(node) for node in graph.graph.nodes}
    sizes = {node.name: sum((shape.bytes for shape in shapes[node]), start=0) for node in graph.graph.nodes}
    kept = _Kept(reading, shapes, sizes, parts)
    priced = reading.priced
    nodes: dict[str, OperationCost] = {}
    saved: dict[str, tuple[int, ...]] = {}
    touched: dict[str, tuple[tuple[int, ...], ...]] = {}
    differentiated: dict[str, tuple[tuple[int, ...], ...]] = {}
    again: dict[int, set[str]] = {}
    reads = {call.node: _read_by(call.node, call.inputs, shapes, parts) for call in reading.calls}
    for call in reading.calls:
        node, bound, read = call.node, call.bound, reads[call.node]
        arguments = {name: described(value, read) for name, value in bound.items()}
        sums = _sums_of_gradients(node, *reading.gradients_added[node.name], reads) if node.name in reading.gradients_added else ()
        key = (call.kind, shapes[node], sums, *arguments.values())
        cost = priced.get(key)
        if cost is None:
            cost = operation_cost(node, shapes[node], arguments, call.gradients, is_view=call.is_view, weights=call.held)
            cost = priced[key] = _with_additions(cost, sums) if sums else cost
        nodes[node.name] = cost
        leaves = [leaf for name in cost.saves for leaf in ([node] if name.startswith("result") else node_leaves(bound[name]))]
        saved[node.name] = kept.allocations(node, leaves, read)
        if parts is not None and parts.gathered_again:
            for each in kept.needed(node, leaves, read).difference(saved[node.name]):
                again.setdefault(each, set()).add(node.name)
        touched[node.name] = kept.touched(node, call.inputs, read)
        if len(cost.gradient_order) > 1:
            differentiated[node.name] = tuple(kept.read(node, node_leaves(bound[name]), read) for name in cost.gradient_order)
    output = graph.graph.output_node()
    results = tuple(output.all_input_nodes)
    of_output = _read_by(output, results, shapes, parts)
    touched[output.name] = kept.touched(output, results, of_output)
    returned = {
        allocation: copies_in_loss(shapes[each][0].known_dtype)
        for each in results
        for allocation in kept.touched(output, (each,), of_output)[-1]
    }
    return GraphCost(
        batch=graph.batch,
        nodes=nodes,
        saved=saved,
        allocation_bytes=kept.bytes,
        bytes=sizes,
        maker=kept.maker,
        part_of=kept.part_of,
        copies=kept.copies,
        exchanged=frozenset(kept.exchanged),
        touched=touched,
        differentiated=differentiated,
        returned=returned,
        gathered=kept.made_by(frozenset() if parts is None else parts.gathered_again),
        gathered_again=again,
        gathered_once=kept.made_by(frozenset() if parts is None else parts.gathered_once),
        scattered_once={} if parts is None else parts.scattered_once,
        summed=frozenset() if parts is None else parts.summed,
        gradients=reading.flowing,
        unknown=_unknown(reading, nodes),
    )


def _unknown(reading: Reading, costs: Mapping[str, OperationCost]) -> tuple[str, ...]:
    """Return the operators that are not in the table, sorted."""
    nodes = (call.node for call in reading.calls)
    return tuple(sorted({str(node.target) for node in nodes if not (costs[node.name].known or node.target in COLLECTIVES)}))


class _Kept:
    """Allocations that a backward keeps, and their sizes.

    Args:
        reading: of the graph.
        shapes: of what each node gives.
        sizes: node -> the bytes of these.
        parts: of the shapes that are a rank's: allocations then have the size of what their makers give, and a value that is read in
            another shape than its own is another allocation.
    """

    def __init__(self, reading: Reading, shapes: Shapes, sizes: Mapping[str, Size], parts: Parts | None) -> None:
        self._memory, self._shapes, self._stationary, self._parts = reading.memory, shapes, reading.stationary, parts
        self.maker: dict[int, str] = dict(reading.maker)
        self.bytes: dict[int, Size] = dict(reading.memory.bytes)
        if parts is not None:
            for allocation, name in self.maker.items():
                count = len(reading.memory.allocations_of[name])
                self.bytes[allocation] = sizes[name] if count == 1 else sizes[name] / count
        self.part_of: dict[int, int] = {}
        self.copies: dict[int, bool] = {}
        self.exchanged: set[int] = set()
        self._reshaped: dict[Hashable, int] = {}
        self._fetched: dict[fx.Node, Mapping[fx.Node, tuple[Fetched, ...]]] = {}

    def allocations(self, call: fx.Node, leaves: Sequence[fx.Node], read: Shapes) -> tuple[int, ...]:
        """Return the allocations that the backward keeps of a call's values, without those that it gathers again."""
        again: Collection[str] = () if self._parts is None else self._parts.gathered_again
        return tuple(self._as_read(call, leaves, read, without=again))

    def read(self, call: fx.Node, leaves: Sequence[fx.Node], read: Shapes) -> tuple[int, ...]:
        """Return the allocations of values as a call reads them."""
        return tuple(self._as_read(call, leaves, read))

    def needed(self, call: fx.Node, leaves: Sequence[fx.Node], read: Shapes) -> set[int]:
        """Return the allocations that the backward reads of a call's values, with those that it gathers again."""
        return set(self.read(call, leaves, read))

    def touched(self, call: fx.Node, inputs: Sequence[fx.Node], read: Shapes) -> tuple[tuple[int, ...], ...]:
        """Return the allocations in use step by step: for each fetched copy its source and itself, then what the call reads or makes."""
        copies = [
            pair for leaf in inputs if leaf in self._fetches(call) for pair in itertools.pairwise(self._fetch_chain(call, leaf, read))
        ]
        found = self._as_read(call, inputs, read)
        if call.op != "output":
            found.update(dict.fromkeys(each for each in self._memory.allocations_of[call.name] if each not in self._stationary))
        return (*copies, tuple(found))

    def made_by(self, names: Collection[str]) -> frozenset[int]:
        """Return the allocations of values that calls read in another layout than the stored one."""
        return frozenset(allocation for allocation in self.part_of if self.maker[allocation] in names)

    def _as_read(self, call: fx.Node, leaves: Iterable[fx.Node], read: Shapes, without: Collection[str] = ()) -> dict[int, None]:
        """Return the allocations of values as a call reads them, in order; none of values ``without`` if read in another shape."""
        found: dict[int, None] = {}
        for leaf in leaves:
            fetched = self._fetches(call).get(leaf, ())
            if fetched:
                beside = 1 + sum(1 for copy in fetched if copy.is_beside)
                found.update(dict.fromkeys(self._fetch_chain(call, leaf, read)[-beside:]))
            else:
                found.update(dict.fromkeys(self._allocations_read(leaf, read, without)))
        return found

    def _allocations_read(self, leaf: fx.Node, read: Shapes, without: Collection[str] = ()) -> Iterator[int]:
        """Yield a value's allocations if they are not stationary; where it is read in another shape, those of that shape instead."""
        shapes = read.get(leaf, self._shapes[leaf])
        for allocation in self._memory.allocations_of[leaf.name]:
            if self._parts is not None and shapes != self._shapes[leaf]:
                if leaf.name not in without:
                    yield self._reshaped_allocation(allocation, leaf, shapes)
            elif allocation not in self._stationary:
                yield allocation

    def _fetches(self, call: fx.Node) -> Mapping[fx.Node, tuple[Fetched, ...]]:
        """Return ``Parts.fetched`` of a call, cached."""
        if call not in self._fetched:
            self._fetched[call] = {} if self._parts is None else self._parts.fetched(call)
        return self._fetched[call]

    def _fetch_chain(self, call: fx.Node, leaf: fx.Node, read: Shapes) -> tuple[int, ...]:
        """Return the allocations of a value and of the copies that a call fetches of it, each made from the one before."""
        found = [*self._allocations_read(leaf, read)]
        for copy in self._fetches(call).get(leaf, ()):
            origin = found[-1] if found else self._memory.allocations_of[leaf.name][0]
            found.append(self._reshaped_allocation(origin, leaf, (copy.shape,), copy.runs))
            self.copies[found[-1]] = copy.is_sent or self.copies.get(origin, False)
        return tuple(found)

    def _reshaped_allocation(self, allocation: int, leaf: fx.Node, shapes: tuple[TensorSpec, ...], runs: str = "") -> int:
        """Return the allocation of a value in a shape other than its own, made from ``allocation``; one for each shape."""
        key = (allocation, shapes, runs)
        if key not in self._reshaped:
            self._reshaped[key] = number = len(self.bytes)
            self.bytes[number] = sum((shape.bytes for shape in shapes), start=0)
            self.maker[number] = leaf.name
            self.part_of[number] = allocation
            if not runs and any(itertools.starmap(_is_exchanged, zip(self._shapes[leaf], shapes, strict=True))):
                self.exchanged.add(number)
        return self._reshaped[key]


def _is_exchanged(part: TensorSpec, read: TensorSpec) -> bool:
    """Return whether a dimension is longer in what is read than in the rank's part, and another one shorter."""
    pairs = [(sympy.sympify(before), sympy.sympify(after)) for before, after in zip(part.shape, read.shape, strict=True)]
    ratios = [after / before for before, after in pairs if before not in (after, 0)]
    return any(ratio.is_number and ratio < 1 for ratio in ratios) and any(ratio.is_number and ratio > 1 for ratio in ratios)


def _read_by(call: fx.Node, inputs: Sequence[fx.Node], shapes: Shapes, parts: Parts | None) -> Shapes:
    """Return the shapes of a call's arguments as it reads them, and of its own result."""
    return shapes if parts is None else {**{each: shapes[each] for each in (call, *inputs)}, **parts.operands(call)}


def _half_by_argument(node: fx.Node, bound: Mapping[str, Any], flowing: frozenset[str], of_weights: frozenset[str]) -> dict[str, str]:
    """Return argument -> which half of the backward computes its gradient; empty if the node takes no part in the backward.

    A half is ``"weight"`` if the argument's gradient flows to parameters alone, else ``"activation"`` (``operation_cost``).

    Args:
        bound: the node's arguments by name.
        flowing: the nodes whose gradient the backward computes.
        of_weights: parameters, and values computed from parameters alone.
    """
    if node.name not in flowing:
        return {}
    halves = {}
    for name, value in bound.items():
        leaves = [leaf for leaf in node_leaves(value) if leaf.name in flowing]
        if leaves:
            halves[name] = "weight" if all(leaf.name in of_weights for leaf in leaves) else "activation"
    return halves


def _is_view(node: fx.Node, allocations_of: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the node's results share memory with its arguments, and it writes none of it."""
    if not allocations_of.get(node.name) or mutated_arguments(node):
        return False
    sources = {allocation for argument in node.all_input_nodes for allocation in allocations_of.get(argument.name, ())}
    return sources.issuperset(allocations_of[node.name])
