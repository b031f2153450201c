"""Run calls on fake tensors. Equal calls run once, and their nodes share one fake tensor.

    linear_7 = linear(x_7, w_7, b_7)        (8, 2048, 1536), traced
    linear_8 = linear(x_8, w_8, b_8)        an equal call on tensors of equal strides: the same fake tensor

The values still have separate memory, which their nodes record (``passes.graph.aliasing.OWN_MEMORY``).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY, MemoryOf, memory_key, memory_keys, mutated_arguments, new_memory, tensors_of
from passes.graph.equivalence import IN_MEMORY, argument_key
from passes.graph.schemas import node_leaves, views_its_arguments, written_arguments
from passes.graph.symbolic_sizes import size_of
from passes.ir.torch_private import OpOverload, enable_python_dispatcher, without_saved_tensors_hooks

aten = torch.ops.aten


@contextlib.contextmanager
def plain_autograd() -> Iterator[None]:
    """Hide from a trace, or a trial of a loss, what the user set for the autograd of a call around it.

    Hooks on saved tensors (of a checkpoint around the call) would take fake tensors for those of the call; the detection of anomalies
    reads the values of gradients, which fake tensors do not have.
    """
    with torch.autograd.set_detect_anomaly(mode=False), without_saved_tensors_hooks():
        yield


@contextlib.contextmanager
def fake_mode(graph: fx.Graph) -> Iterator[None]:
    """Enter the fake mode that a graph was traced in: tensors that are created inside are fake, too.

    Inference mode becomes ``no_grad``: autograd tracks no tensor that was made in it, and graphs serve training, too.
    """
    is_tracked = torch.is_grad_enabled()
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in graph.nodes)
    mode = next((mode for mode in modes if mode is not None), contextlib.nullcontext())
    # Composite operations written in C++ (aten.pad) read sizes as numbers, which would fix the batch to the size that was traced;
    # the Python dispatcher takes their symbolic decompositions instead.
    with torch.inference_mode(mode=False), torch.set_grad_enabled(is_tracked), mode, enable_python_dispatcher(), plain_autograd():
        yield


class FakeTensorCache:
    """Give new nodes their fake results, running equal calls once. To be used inside the fake mode of the graph.

    Args:
        pieces_are_alike: whether slices of equal length count as equal calls, wherever they start.
    """

    def __init__(self, *, pieces_are_alike: bool = False) -> None:
        self._pieces_are_alike = pieces_are_alike
        self._known: dict[Hashable, tuple[Any, tuple[int, ...]]] = {}  # key of a call -> its fake result, and ``_memory_sources`` of it
        self._forms: dict[int, tuple[Any, Hashable]] = {}

    def add_traced(self, node: fx.Node, target: Callable[..., Any]) -> None:
        """Take a traced call's result for equal new calls of this target, where its memory is that of a run of the call."""
        inputs = _inputs(node)
        results = memory_keys(node)
        call_key = self._call_key(node, target, inputs)
        if call_key is not None and call_key not in self._known and results and all(_lies_as_run(node, each, inputs) for each in results):
            self._known[call_key] = node.meta["val"], _memory_sources([key for _, key in results], [key for _, key in inputs])

    def describe(self, node: fx.Node) -> None:
        """Set the fake result of a new node (``meta["val"]``), and its memory (``meta[OWN_MEMORY]``)."""
        if written := written_arguments(node):
            node.meta["val"] = written[0].meta["val"]
            node.meta[OWN_MEMORY] = MemoryOf(node.meta["val"], tuple(key for _, key in memory_keys(written[0])))
            return
        inputs = _inputs(node)
        call_key = self._call_key(node, node.target, inputs)
        if call_key is None or call_key not in self._known:
            node.meta["val"] = fake_result(node)
            sources = _memory_sources(list(map(memory_key, tensors_of(node))), [memory_key(tensor) for tensor, _ in inputs])
            if call_key is not None:
                self._known[call_key] = node.meta["val"], sources
        else:
            node.meta["val"], sources = self._known[call_key]
        allocated = {source: new_memory() for source in sources if source < 0}
        keys = tuple(inputs[source][1] if source >= 0 else allocated[source] for source in sources)
        node.meta[OWN_MEMORY] = MemoryOf(node.meta["val"], keys)

    def _call_key(self, node: fx.Node, target: Any, inputs: Sequence[tuple[Tensor, Hashable]]) -> Hashable:
        """Return a key, equal for calls with equal fake results: operator, numbers, strides, and which inputs share memory.

        None for a call that writes.
        """
        if mutated_arguments(node):
            return None
        arguments: Any = node.args
        if self._pieces_are_alike and node.target is aten.slice.Tensor and len(node.args) == 4:
            source, dimension, start, stop = node.args
            arguments = source, dimension, operator.sub(stop, start)
        memory = [key for _, key in inputs]
        return target, argument_key((arguments, node.kwargs), self._form_of), tuple(map(memory.index, memory))

    def _form_of(self, node: fx.Node) -> Hashable:
        """Return the key of a node's value, computed once."""
        value = node.meta["val"]
        if id(value) not in self._forms:
            self._forms[id(value)] = value, IN_MEMORY(value)  # the value is kept, so that no other one gets its id
        return self._forms[id(value)][1]


def fake_result(node: fx.Node) -> Any:
    """Run a call on the fake tensors of its arguments (inside ``fake_mode``); return its result, a list as a tuple.

    Results require no gradient, as those of a graph by torch.export, and no write makes its base require one: equal calls have equal
    results.
    """
    assert callable(node.target)
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with torch.no_grad():
        result = node.target(*arguments, **keywords)
    return tuple(result) if isinstance(result, list) else result


def call_like(graph: fx.Graph, like: fx.Node, function: Callable[..., Any], /, *arguments: Any) -> fx.Node:
    """Add a call to a graph, with the metadata of another node and its own fake result (inside ``fake_mode``)."""
    node = graph.call_function(function, arguments)
    node.meta = dict(like.meta)
    node.meta["val"] = fake_result(node)
    node.meta[OWN_MEMORY] = memory_among(node, node.all_input_nodes)
    return node


def memory_among(node: fx.Node, others: Sequence[fx.Node]) -> MemoryOf:
    """Return the memory of a value: that of the other node whose fake tensor it views, or of its own fake tensor."""
    keys = {memory_key(tensor): key for other in others for tensor, key in memory_keys(other)}
    return MemoryOf(node.meta["val"], tuple(keys.get(memory_key(tensor), memory_key(tensor)) for tensor in tensors_of(node)))


def _inputs(node: fx.Node) -> list[tuple[Tensor, Hashable]]:
    """Return the tensors that a node reads, in order, each with the key of its memory."""
    return [pair for source in node_leaves((node.args, node.kwargs)) for pair in memory_keys(source)]


def _lies_as_run(node: fx.Node, result: tuple[Tensor, Hashable], inputs: Sequence[tuple[Tensor, Hashable]]) -> bool:
    """Return whether a traced result has the memory of a run of the call: a view in its input's, or alone in memory of its size.

    Another pass may have written the call in place of one that had its result elsewhere.
    """
    (tensor, key), size = result, size_of(result[0].untyped_storage().nbytes())
    if any(key == other for _, other in inputs):
        return all(size == size_of(source.untyped_storage().nbytes()) for source, other in inputs if key == other)
    may_view = not isinstance(node.target, OpOverload) or views_its_arguments(node.target)
    return not may_view and tensor.storage_offset() == 0 and size == size_of(tensor.numel() * tensor.itemsize)


def _memory_sources(results: Sequence[Hashable], inputs: Sequence[Hashable]) -> tuple[int, ...]:
    """Return for each result, by keys of memory, the index of the input that it is a view of; -1, -2, ... for new allocations."""
    allocated: dict[Hashable, int] = {}
    return tuple(inputs.index(key) if key in inputs else allocated.setdefault(key, -1 - len(allocated)) for key in results)
