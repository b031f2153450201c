"""Equality of values, calls and graphs: computations with equal keys do the same to inputs with equal keys.

    h_1 = relu(linear(h, w_0))        inputs (8, 64), (64, 64)    linear(0, 1), relu(2) -> 3
    h_2 = relu(linear(h_1, w_1))      the same key

A key numbers nodes instead of naming them. It contains targets, arguments, keyword arguments, and a ``ValueKey`` of each input. Constants
count by type and digits; tensors, functions and other objects by identity; a nested graph by its own key. If calls write, the key also
says which inputs share memory, and how.

Equal keys make equal programs, so a program may be reused. Equal values are less: two calls that draw random numbers have equal keys, and
equal results only from equal states of the generator (``schemas.is_deterministic``); so have reads before and after a write
(``aliasing.aliasing``). A cache of values checks both.

Keys hold for one process. ``graph_digest`` and ``weights_digest`` are texts that processes and saved plans compare.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.graph.aliasing import memory_keys, mutated_arguments
from passes.graph.symbolic_sizes import size_of, traced_size
from passes.ir.graph import ModelGraph


class ByIdentity:
    """Key of an object that equals no other. It keeps the object alive, so that no later one has its address."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _ByValue:
    """Key of a tensor that equals those with the same elements; on the meta device, those of the same shape and dtype."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ByValue) or hash(self) != hash(other):
            return False
        left, right = self._value, other._value
        return left is right or left.is_meta or right.is_meta or torch.equal(left, right)

    def __hash__(self) -> int:
        return hash((self._value.dtype, self._value.shape))


@dataclass(frozen=True)
class ValueKey:
    """Return the key of a traced value. Shape, dtype and layout always count, sizes as expressions; the other fields on request.

    Attributes:
        strides: strides, device, and whether elements are stored conjugated or negated. Sparse tensors then count by identity.
        storage: offset and size of the storage, and the class of the tensor.
        requires_grad: whether the tensor requires a gradient.
        size: the expression of a size: ``traced_size``, or ``size_of`` to take counts of received rows by their expectation.
    """

    strides: bool = False
    storage: bool = False
    requires_grad: bool = False
    size: Callable[[int | torch.SymInt], int | sympy.Expr] = traced_size

    def __call__(self, value: Any) -> Hashable:
        if isinstance(value, tuple | list):
            return tuple(map(self, value))
        if isinstance(value, torch.SymInt):
            return "size", self.size(value)
        if not isinstance(value, Tensor):
            return constant_key(value)
        sizes, fields = [*value.shape], [value.dtype, value.layout, value.requires_grad if self.requires_grad else None]
        if self.strides and value.layout != torch.strided:
            return ByIdentity(value)
        if self.strides:
            sizes += value.stride()
            fields += value.device, value.is_conj(), value.is_neg()
        if self.storage:
            sizes += value.storage_offset(), value.untyped_storage().nbytes()
            fields.append(type(value))
        return tuple(map(self.size, sizes)), *fields


TRACED = ValueKey(requires_grad=True)
"""Values of stages: a stage gets them contiguous on its device."""

COPY = ValueKey(requires_grad=True, size=size_of)
"""Values of copies of a block: costs and layouts do not depend on strides."""

LAID_OUT = ValueKey(strides=True)
"""Inputs of a region that autograd traces; the cache notes apart which of them it tracks."""

IN_MEMORY = ValueKey(strides=True, storage=True)
"""Arguments of a call that runs on fake tensors: all that its result may depend on."""


def constant_key(value: Any) -> Hashable:
    """Return the key of an argument that is no node. Numbers of different types (1, 1.0, True) or digits (0.0, -0.0) differ."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value), value.node.expr
    if isinstance(value, Tensor):
        return ByIdentity(value)
    compares_exactly = isinstance(value, Hashable) and not isinstance(value, float | complex)
    return type(value), value if compares_exactly else repr(value)


def by_value(value: Any) -> Hashable:
    """Return the key of a constant, with tensors by their elements: nothing writes them while keys are compared."""
    return _ByValue(value) if isinstance(value, Tensor) else constant_key(value)


def argument_key(argument: Any, node_key: Callable[[fx.Node], Hashable], constant: Callable[[Any], Hashable] = constant_key) -> Hashable:
    """Return the key of a nested argument: its nodes by ``node_key``, everything else by ``constant``; lists and tuples are equal."""
    if isinstance(argument, fx.Node):
        return "node", node_key(argument)
    if isinstance(argument, tuple | list):
        return tuple(argument_key(part, node_key, constant) for part in argument)
    if isinstance(argument, dict):
        return tuple((name, argument_key(part, node_key, constant)) for name, part in argument.items())
    if isinstance(argument, slice):
        return slice, argument_key((argument.start, argument.stop, argument.step), node_key, constant)
    return constant(argument)


def call_key(node: fx.Node, node_key: Callable[[fx.Node], Hashable], constant: Callable[[Any], Hashable] = constant_key) -> Hashable:
    """Return the key of a call: operation, target and arguments; of ``get_attr``, the attribute."""
    target = _attribute_key(node, constant) if node.op == "get_attr" else node.target
    return node.op, target, argument_key((node.args, node.kwargs), node_key, constant)


def _attribute_key(node: fx.Node, constant: Callable[[Any], Hashable]) -> Hashable:
    """Return the key of the attribute that a ``get_attr`` node reads: a nested graph by its calls, everything else as a constant."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    if not isinstance(value, fx.GraphModule):
        return constant(value)
    inputs = [each for each in value.graph.nodes if each.op == "placeholder"]
    return graph_key(dict.fromkeys(inputs), [each for each in value.graph.nodes if each not in inputs], (), constant=constant)


def graph_key(
    inputs: Mapping[fx.Node, Hashable],
    nodes: Sequence[fx.Node],
    outputs: Iterable[fx.Node],
    own: Callable[[fx.Node], Hashable] = lambda _: None,
    constant: Callable[[Any], Hashable] = constant_key,
) -> Hashable:
    """Return the key of consecutive nodes.

    Args:
        inputs: node that they read -> key of its value, in the order in which the inputs of equal graphs correspond.
        nodes: in order.
        outputs: those that are returned.
        own: a property in which corresponding nodes agree.
        constant: as in ``argument_key``.
    """
    places = {node: place for place, node in enumerate((*inputs, *nodes))}
    calls = tuple((call_key(node, places.__getitem__, constant), own(node)) for node in nodes)
    memory = _shared_memory(inputs) if any(map(mutated_arguments, nodes)) else ()
    return tuple(inputs.values()), calls, tuple(places[node] for node in outputs), memory


def _shared_memory(nodes: Iterable[fx.Node]) -> Hashable:
    """Return for each tensor the number of its memory, with offset and strides; None for memory of its own."""
    tensors = [pair for node in nodes for pair in memory_keys(node)]
    users, numbers = Counter(key for _, key in tensors), dict[Hashable, int]()
    return tuple(
        (numbers.setdefault(key, len(numbers)), *map(traced_size, (tensor.storage_offset(), *tensor.stride()))) if users[key] > 1 else None
        for tensor, key in tensors
    )


# -- digests -------------------------------------------------------------------------------------------------------------------------


_PROCESS_SPECIFIC = re.compile(r"device\(type='\w+'(?:, index=\d+)?\)|\bat 0x[0-9a-f]+")
"""A device, and the address of an object."""


def graph_digest(graph: ModelGraph, *, requires_grad: bool = False) -> str:
    """Return a short digest of a graph, by names, calls and sizes: equal in every process that traces the same model with the same inputs.

    It leaves out devices, the name of the batch symbol, and addresses of functions.

    Args:
        requires_grad: whether it counts which values require a gradient.
    """
    lines = [f"{graph.batch is None} {graph.batch_size} {graph.training} {graph.autocast and graph.autocast.dtype} {weights_digest(graph)}"]
    lines += [
        f"{node.op} {node.name} {target_name(node)} {node.args} {node.kwargs} {_sizes(node, requires_grad)}" for node in graph.graph.nodes
    ]
    text = _PROCESS_SPECIFIC.sub("", "\n".join(lines))
    if graph.batch is not None:
        text = re.sub(rf"\b{re.escape(str(graph.batch))}\b", "batch", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def target_name(node: fx.Node) -> str:
    """Return the name of the target of a node; for a Python function without the address that ``str`` prints."""
    return f"{node.target.__module__}.{node.target.__qualname__}" if isinstance(node.target, FunctionType) else str(node.target)


def _sizes(node: fx.Node, requires_grad: bool) -> str:
    """Return dtype, shape and, if asked for, ``requires_grad`` of each tensor of a node's value."""
    value = node.meta.get("val")
    leaves = value if isinstance(value, tuple | list) else (value,)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}{leaf.requires_grad if requires_grad else ''}" for leaf in tensors)


def weights_digest(graph: ModelGraph) -> str:
    """Return a short digest of the names and shapes of a model's weights, equal on every machine.

    It leaves out nodes: a model has fewer nodes in evaluation, and a plan that was made in training still fits.
    """
    shapes = {node.name: tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.op == "placeholder" and node.name != "batch"}
    weights = sorted((name, str(shapes.get(key))) for key, name in graph.weights.items())
    return hashlib.sha256(repr((weights, sorted(graph.aliases.items()))).encode()).hexdigest()[:16]
