"""A joint graph with its nodes sorted: what is given, forward, backward, and shared memory.

placeholders      (parameters, x | dy)       bound, inputs, tangents
nodes             y = f(x)                   forward: all before the first node that reads a gradient
                  dx, dw = ...               backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from passes.analysis.axes import is_item
from passes.autograd.trace_joint import Joint
from passes.graph.aliasing import aliasing, mutated_arguments
from passes.graph.dependencies import with_ancestors
from passes.graph.schemas import bound_arguments, draws
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.functional import COLLECTIVES, all_gather, replicate, take, vary
from passes.ir.mesh import GATHERED_AGAIN, GATHERED_ONCE

aten = torch.ops.aten

_CAST = aten._to_copy.default  # noqa: SLF001  what a conversion comes down to

_GATHERS = frozenset({all_gather, replicate})

_MAY_BE_ARGUMENT = frozenset({take, vary})
"""Operators between layouts whose result shares the memory of their argument once they are lowered."""


class JointNodes:
    """The nodes of a joint graph.

    Args:
        again: value of the forward -> the node that gives the same to the backward (``passes.autograd.recompute``).

    Attributes:
        position: of each node in the graph.
        inputs: placeholders of the stage: what is bound to it, and its arguments.
        tangents: placeholders of gradients.
        bound: parameters, buffers and constants.
        forward: computing nodes of the forward.
        backward: computing nodes of the backward.
        bound_views: views of bound tensors, and bound tensors that are gathered from the ranks with their parts, also casts of such parts.
            A gathered buffer that is written later is not among them: gathered again, it would have the new value.
        uneven_sizes: sizes of parts of values that differ between ranks, the same numbers on all of them.
    """

    def __init__(self, joint: Joint, again: Mapping[fx.Node, fx.Node]) -> None:
        self.again = again
        nodes = list(joint.graph.nodes)
        self.position = {node: index for index, node in enumerate(nodes)}
        self.tangents = set(joint.gradient_placeholders)
        self.inputs = [node for node in nodes if node.op == "placeholder" and node not in self.tangents]
        self.bound = set(self.inputs[: len(joint.stage.bound)])
        self._aliasing = aliasing(joint.graph)
        self._by_name = {node.name: node for node in nodes}
        start = _first_backward(nodes, self.tangents)
        computing = [node for node in nodes if node.op not in ("placeholder", "output")]
        self.forward = {node: None for node in computing if self.position[node] < start}
        self.backward = {node: None for node in computing if self.position[node] >= start}
        self.bound_views = self._bound_views()
        counts = (node.meta["val"] for node in self.inputs if isinstance(node.meta.get("val"), torch.SymInt))
        self._rows = next((count for count in counts if count.node.expr.is_Symbol), None)
        self._sizes: dict[fx.Node, int] = {}
        self.uneven_sizes = frozenset(size for node in computing for size in self._uneven_sizes_of(node))

    def bytes_of(self, node: fx.Node) -> int:
        """Return the bytes of a value at the number of rows that the stage was traced with; 0 if it is no tensor."""
        if node not in self._sizes:
            value, rows = node.meta.get("val"), self._rows
            known = (None, 1) if rows is None else (rows.node.expr, int(rows.node.hint or 1))
            self._sizes[node] = bytes_of(value, *known) if isinstance(value, Tensor) else 0
        return self._sizes[node]

    @property
    def has_uneven_parts(self) -> bool:
        """Whether ranks have parts of different sizes of a value."""
        return bool(self.uneven_sizes)

    def _uneven_sizes_of(self, node: fx.Node) -> Iterator[int]:
        """Yield the sizes of parts that an operation between layouts says, if they differ."""
        given = bound_arguments(node) if node.target in COLLECTIVES and node not in self.bound_views else {}
        for name in ("sizes", "owned", "split_sizes", "concat_sizes"):
            sizes: Sequence[int] = given.get(name) or ()
            yield from sizes if any(size != sizes[0] for size in sizes) else ()

    def needed(self, results: Iterable[fx.Node], stop: Callable[[fx.Node], bool], *, in_backward: bool = False) -> set[fx.Node]:
        """Return the nodes that must run to get the results, in-place writers included.

        Args:
            stop: whether a value is there already.
            in_backward: whether the backward runs them, which has some values of the forward from nodes of its own.
        """

        def sources(node: fx.Node) -> list[fx.Node]:
            read = (*node.all_input_nodes, *self.earlier_writers(node))
            present = (self.again.get(source, source) for source in read) if in_backward else read
            return [source for source in present if not stop(source)]

        return with_ancestors((node for node in results if not stop(node)), sources)

    def read_in_backward(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the values that nodes read in the backward, which has its own copies of some values of the forward."""
        return {self.again.get(source, source) for node in nodes for source in node.all_input_nodes}

    def cannot_repeat(self, node: fx.Node) -> bool:
        """Return whether computing the node again would give another value, write a buffer again, or gather what is gathered once."""
        source = computed_by(node)
        if self._is_gathered_once(source):
            return True
        if any(draws(writer) or self._writes_input(writer) for writer in (source, *self.writers(source))):
            return True
        read_writers = (writer for value in source.all_input_nodes for writer in self.writers(value))
        return any(self.position[writer] > self.position[source] for writer in read_writers)

    def _is_gathered_once(self, node: fx.Node) -> bool:
        """Return whether a node gathers a parameter, or a view or cast of one, over a dimension of ``GATHERED_ONCE``."""
        if node.target not in _GATHERS or node.args[2] not in GATHERED_ONCE:
            return False
        source = node.all_input_nodes[0]
        while source not in self.bound and source in self.forward and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]
        return source in self.bound

    def _writes_input(self, node: fx.Node) -> bool:
        return any(self.share_memory(written, placeholder) for written in mutated_arguments(node) for placeholder in self.inputs)

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write in place into the memory of the node's value, or into its operand's for local operations.

        ``vary(buffer)`` has memory of its own for a fake tensor; on a device it is the buffer.
        """
        memory = self._aliasing.storages[node.name]
        if node.target in _MAY_BE_ARGUMENT:
            memory |= frozenset().union(*(self._aliasing.storages[source.name] for source in node.all_input_nodes))
        return [self._by_name[name] for storage in sorted(memory) for name in self._aliasing.writers.get(storage, ())]

    def earlier_writers(self, node: fx.Node) -> list[fx.Node]:
        """Return nodes of the same region that wrote the memory that this node reads, before it reads."""
        region = self.forward if node in self.forward else self.backward
        writers = {writer: None for source in node.all_input_nodes for writer in self.writers(source)}
        return [writer for writer in writers if writer in region and self.position[writer] < self.position[node]]

    def share_memory(self, first: fx.Node, second: fx.Node) -> bool:
        """Return whether two values share memory."""
        return not self._aliasing.storages[first.name].isdisjoint(self._aliasing.storages[second.name])

    def is_view(self, node: fx.Node) -> bool:
        """Return whether a value shares memory with its operands."""
        own = self._aliasing.storages[node.name]
        return bool(own) and own <= frozenset[int]().union(*(self._aliasing.storages[source.name] for source in node.all_input_nodes))

    def _is_cast_and_gathered(self, node: fx.Node) -> bool:
        """Return whether a value is cast to be gathered again: a parameter of which each rank has a part."""
        readers = list(node.users) if node.target is _CAST else []
        while readers:
            reader = readers.pop()
            if _is_gathered_again(reader):
                return True
            if reader.op == "call_function" and self.is_view(reader):
                readers += reader.users
        return False

    def _bound_views(self) -> set[fx.Node]:
        views: set[fx.Node] = set()
        for node in self.forward:
            sources = node.all_input_nodes
            of_bound = bool(sources) and all(source in self.bound or source in views for source in sources)
            is_gathered = _is_gathered_again(node) and not self.cannot_repeat(node)
            if of_bound and (self.is_view(node) or self._is_cast_and_gathered(node) or is_gathered):
                views.add(node)
        return views


def _first_backward(nodes: Sequence[fx.Node], gradients: set[fx.Node]) -> int:
    """Position of the first node that depends on a gradient: autograd runs nothing of the backward before it."""
    backward = (index for index, node in enumerate(nodes) if node.op == "call_function" and not gradients.isdisjoint(node.all_input_nodes))
    return next(backward, len(nodes))


def _is_gathered_again(node: fx.Node) -> bool:
    return node.target in _GATHERS and node.args[2] in GATHERED_AGAIN


def computed_by(node: fx.Node) -> fx.Node:
    """Return the operation that computes a value: for an item, the operation that returns the tuple."""
    source = node.args[0] if is_item(node) else node
    assert isinstance(source, fx.Node)
    return source
