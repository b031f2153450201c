"""What calls on fake tensors give: calls that are alike are looked at once, and all of them share fake tensors.

    linear_7 = linear(x_7, w_7, b_7)        (8, 2048, 1536), traced
    linear_8 = linear(x_8, w_8, b_8)        the same call on tensors that lie alike: the same fake tensor

Values have memory of their own all the same: nodes say so themselves (``passes.graph.aliasing.OWN_MEMORY``).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY, MemoryOf, memory_key, memory_keys, mutated_arguments, new_memory, tensors_of
from passes.graph.schemas import argument_form, draws, node_leaves, written_arguments
from passes.graph.symbolic_sizes import size_of
from passes.ir.torch_private import enable_python_dispatcher

__all__ = ["FakeTensorCache", "call_like", "fake_mode", "fake_result", "memory_among"]

aten = torch.ops.aten


@contextlib.contextmanager
def fake_mode(graph: fx.Graph) -> Iterator[None]:
    """The mode that a graph was traced in: inside it every tensor is fake, those that the graph creates too."""
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in graph.nodes)
    mode = next((mode for mode in modes if mode is not None), contextlib.nullcontext())
    # Composite operations written in C++ (aten.pad) read sizes as numbers, which would fix the batch to the size that was traced;
    # the Python dispatcher takes their symbolic decompositions instead.
    with mode, enable_python_dispatcher():
        yield


class FakeTensorCache:
    """The values of calls on fake tensors, each kind of call computed once. To be used inside the fake mode of the graph.

    Args:
        pieces_are_alike: whether slices of one length are, wherever they begin.
        shared: whether values share fake tensors; else each call is looked at by itself.
    """

    def __init__(self, *, pieces_are_alike: bool = False, shared: bool = True) -> None:
        self._pieces_are_alike, self._shared = pieces_are_alike, shared
        self._known: dict[Hashable, tuple[Any, tuple[int, ...]]] = {}
        self._forms: dict[int, tuple[Any, Hashable]] = {}

    @staticmethod
    def like(graph: fx.Graph) -> FakeTensorCache:
        """For a graph that is written like another: where that writes in place, tensors come to require gradients, each on its own."""
        return FakeTensorCache(shared=not any(node.op == "call_function" and mutated_arguments(node) for node in graph.nodes))

    def describe(self, node: fx.Node) -> None:
        """Set what a new node gives (``meta["val"]``) and the memory that it lies in."""
        if not self._shared:
            node.meta["val"] = fake_result(node)
            return
        if written := written_arguments(node):
            node.meta["val"] = written[0].meta["val"]
            node.meta[OWN_MEMORY] = MemoryOf(node.meta["val"], tuple(key for _, key in memory_keys(written[0])))
            return
        given = [pair for source in node_leaves((node.args, node.kwargs)) for pair in memory_keys(source)]
        key = None if draws(node) or mutated_arguments(node) else self._call(node, [key for _, key in given])
        if key is None or key not in self._known:
            node.meta["val"] = fake_result(node)
            places = _places(node, [tensor for tensor, _ in given])
            if key is not None:
                self._known[key] = node.meta["val"], places
        else:
            node.meta["val"], places = self._known[key]
        made = {place: new_memory() for place in places if place < 0}
        keys = tuple(given[place][1] if place >= 0 else made[place] for place in places)
        node.meta[OWN_MEMORY] = MemoryOf(node.meta["val"], keys)

    def _call(self, node: fx.Node, memory: Sequence[Hashable]) -> Hashable:
        """What calls that give alike have in common: operator, numbers, how tensors lie, which of them share memory."""
        arguments: Any = node.args
        if self._pieces_are_alike and node.target is aten.slice.Tensor and len(node.args) == 4:
            source, dimension, start, stop = node.args
            arguments = source, dimension, operator.sub(stop, start)
        shared = tuple(map(list(memory).index, memory))
        forms = argument_form((arguments, node.kwargs), self._form_of)
        return node.target, forms, shared, torch.is_grad_enabled()

    def _form_of(self, node: fx.Node) -> Hashable:
        value = node.meta["val"]
        if id(value) not in self._forms:
            self._forms[id(value)] = value, _form(value)  # its identity tells it apart while it lives
        return self._forms[id(value)][1]


def fake_result(node: fx.Node) -> Any:
    """Return what a call gives for the fake tensors of its arguments (inside ``fake_mode``); a list as a tuple."""
    assert callable(node.target)
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    found = node.target(*arguments, **keywords)
    return tuple(found) if isinstance(found, list) else found


def call_like(graph: fx.Graph, like: fx.Node, function: Callable[..., Any], /, *arguments: Any) -> fx.Node:
    """Write a call with the metadata of another node and its own fake result (inside ``fake_mode``)."""
    node = graph.call_function(function, arguments)
    node.meta = dict(like.meta)
    node.meta["val"] = fake_result(node)
    node.meta[OWN_MEMORY] = memory_among(node, node.all_input_nodes)
    return node


def memory_among(node: fx.Node, others: Sequence[fx.Node]) -> MemoryOf:
    """Return the memory of a value: that of the other node whose fake tensor it views, or of its own fake tensor."""
    keys = {memory_key(tensor): key for other in others for tensor, key in memory_keys(other)}
    return MemoryOf(node.meta["val"], tuple(keys.get(memory_key(tensor), memory_key(tensor)) for tensor in tensors_of(node)))


def _form(value: Any) -> Hashable:
    """All that an operator may see of a fake tensor."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        sizes = tuple(map(size_of, (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())))
        return sizes, value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg(), type(value)
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    if isinstance(value, torch.SymInt):
        return "size", size_of(value)
    return ("object", id(value)) if isinstance(value, Tensor) else (type(value), value)


def _places(node: fx.Node, given: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor that a node gives: the place of the argument that it is a view of, or a negative number for memory of its own."""
    memory = [memory_key(tensor) for tensor in given]
    made: dict[Hashable, int] = {}
    found = []
    for tensor in tensors_of(node):
        key = memory_key(tensor)
        found.append(memory.index(key) if key in memory else made.setdefault(key, -1 - len(made)))
    return tuple(found)
