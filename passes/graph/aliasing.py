"""Find the nodes that share memory, and the nodes that write it.

    mean -------- view -------- select          one alias set: mean, view, select, add_
      |                            |
      +---- linear               add_           ``add_`` writes it: a later ``linear`` reads the new values

Two sources are joined: the storages of the fake tensors that tracing left in ``meta["val"]``, and the alias annotations of operator
schemas, which also know views that a fake tensor had to copy. An alias set may be larger than in a run, never smaller.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from passes.graph.schemas import (
    bound_arguments,
    drops_nothing,
    node_leaves,
    packet,
    viewed_arguments,
    views_its_arguments,
    written_arguments,
)
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.primitives import draw_alike
from passes.ir.torch_private import OpOverload, tree_leaves

aten = torch.ops.aten


def _keeps_channel_order(node: fx.Node) -> bool:
    """Return whether a channel shuffle returns its input: one group, or one channel a group. The CPU kernel always copies."""
    value, groups = node.meta["val"], bound_arguments(node)["groups"]
    return value.device.type != "cpu" and groups in (1, value.shape[1])


def _never_views(_: fx.Node) -> bool:
    """Return False: the result always has new memory, although fake tensors share theirs for some arguments."""
    return False


def _decided_by_fake_tensors(_: fx.Node) -> None:
    """Return None: the call returns a view for some arguments, and exactly then its fake tensor shares their memory."""


_UNANNOTATED_VIEWS: Mapping[Any, Callable[[fx.Node], bool | None]] = {
    **dict.fromkeys((aten.alpha_dropout, aten.dropout, aten.feature_alpha_dropout, aten.feature_dropout), drops_nothing),
    **dict.fromkeys((aten.channel_shuffle, aten.native_channel_shuffle), _keeps_channel_order),
    **dict.fromkeys(
        (
            aten._unsafe_view, aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.broadcast_tensors, aten.cartesian_prod,  # noqa: SLF001
            aten.conj_physical, aten.einsum, aten.meshgrid, aten.sum_to_size, aten.type_as, aten.unsafe_chunk, aten.unsafe_split,
            aten.unsafe_split_with_sizes,
        ),
        _decided_by_fake_tensors,
    ),
    aten.native_dropout: _never_views,
}  # fmt: skip
"""Operator that may return its first tensor or a view of it, unannotated -> whether a call does; None: as its fake tensors share memory."""

_MAY_COPY = frozenset({aten.contiguous, aten.flatten, aten.ravel, aten.reshape, aten.reshape_as, aten.to})
"""Operators whose schemas declare a view where they may return a copy; fake tensors know which."""

OWN_MEMORY = "memory"
"""The key in ``meta`` of the memory of each of a node's tensors, set where nodes with separate memory share one fake tensor."""


@dataclass(frozen=True, eq=False)
class MemoryOf:
    """The entry ``meta[OWN_MEMORY]``; ignored once a pass has replaced ``meta["val"]``.

    Attributes:
        value: the ``meta["val"]`` that it describes.
        keys: for each tensor of the value, in order, the key of its memory.
    """

    value: Any
    keys: tuple[Hashable, ...]


_STATISTICS_WRITERS: Mapping[Any, str] = {
    aten.batch_norm: "training",
    aten.cudnn_batch_norm: "training",
    aten.instance_norm: "use_input_stats",
    aten.miopen_batch_norm: "training",
    aten.native_batch_norm: "training",
}
"""Op -> the flag with which it writes ``running_mean`` and ``running_var``, unannotated in its schema."""

_ANNOTATED_STATISTICS_WRITERS = frozenset({aten._batch_norm_with_update, aten._native_batch_norm_legit})  # noqa: SLF001
"""Ops whose schemas annotate these writes."""


@dataclass(frozen=True)
class Aliasing:
    """The memory of a graph.

    Attributes:
        storages: node -> the alias sets of its tensors, numbered in graph order (a list of tensors may have several).
        writers: alias set -> the nodes that write in it, in graph order; absent for memory that is only read once computed.
        first: alias set -> the first node with it.
    """

    storages: Mapping[str, frozenset[int]]
    writers: Mapping[int, tuple[str, ...]]
    first: Mapping[int, str]

    def written(self, node: fx.Node) -> bool:
        """Return whether any node writes into the memory of this node's value."""
        return any(storage in self.writers for storage in self.storages.get(node.name, ()))


@dataclass(frozen=True)
class Allocations:
    """The allocations that a run makes, as the fake tensors show them.

    Attributes:
        allocations_of: node -> the allocations of its tensors, numbered in graph order.
        bytes: allocation -> its size: an int, or a sympy expression.
    """

    allocations_of: Mapping[str, tuple[int, ...]]
    bytes: Mapping[int, Any]


def allocations(graph: fx.Graph) -> Allocations:
    """Return the allocation of each tensor, shared by views as the fake tensors share storages, and the sizes of all allocations."""
    numbers: dict[Hashable, int] = {}
    sizes: dict[int, Any] = {}
    allocations_of: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        node_allocations: dict[int, None] = {}
        for tensor, key in memory_keys(node):
            number = numbers.setdefault(key, len(numbers))
            if number not in sizes:
                sizes[number] = size_of(tensor.untyped_storage().nbytes())
            node_allocations[number] = None
        allocations_of[node.name] = tuple(node_allocations)
    return Allocations(allocations_of, sizes)


def aliasing(graph: fx.Graph) -> Aliasing:
    """Return the alias sets of all nodes, and the nodes that write in them."""
    sets = _DisjointSets()
    keys_of: dict[str, set[Any]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        keys = {key for _, key in memory_keys(node)}
        keys_of[node.name] = keys
        for source in _memory_arguments(node):
            for key in keys:
                for source_key in keys_of[source.name]:
                    sets.join(key, source_key)
    numbers: dict[Any, int] = {}
    first: dict[int, str] = {}
    storages: dict[str, frozenset[int]] = {}
    for name, keys in keys_of.items():
        roots = sorted(numbers.setdefault(sets.root(key), len(numbers)) for key in keys)
        storages[name] = frozenset(roots)
        for root in roots:
            first.setdefault(root, name)
    writers: dict[int, list[str]] = {}
    for node in graph.nodes:
        written = frozenset[int]().union(*(storages[target.name] for target in mutated_arguments(node)))
        for storage in sorted(written):
            writers.setdefault(storage, []).append(node.name)
    return Aliasing(storages, {storage: tuple(names) for storage, names in writers.items()}, first)


def viewed_node(node: fx.Node) -> fx.Node | None:
    """Return the node that a tensor is a view of, or the same tensor as; None for a tensor with memory of its own.

    It holds for this call alone, where alias sets cover every call that a schema allows. Checked in order: the known behaviour of the
    operator, the fake tensors, the schema.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return None
    call = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or call.op != "call_function" or mutated_arguments(call):
        return None
    sources = [source for source in call.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    if (is_view := _UNANNOTATED_VIEWS.get(packet(call.target), _decided_by_fake_tensors)(call)) is not None:
        return sources[0] if is_view else None
    own = {key for _, key in memory_keys(node)}
    viewed = next((source for source in sources if any(key in own for _, key in memory_keys(source))), None)
    if viewed is None and isinstance(call.target, OpOverload) and packet(call.target) not in _MAY_COPY:
        viewed = next(iter(viewed_arguments(call)), None)
    return viewed


def mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes whose memory this node writes: those of its schema, and running statistics in training."""
    mutated = written_arguments(node)
    flag = _STATISTICS_WRITERS.get(packet(node.target))
    if flag is not None:
        bound = bound_arguments(node)
        if bound[flag]:
            mutated += node_leaves((bound["running_mean"], bound["running_var"]))
    return tuple(dict.fromkeys(mutated))


def writes_statistics(node: fx.Node) -> bool:
    """Return whether a node calls a normalisation that may update the running statistics among its arguments."""
    return packet(node.target) in _STATISTICS_WRITERS or packet(node.target) in _ANNOTATED_STATISTICS_WRITERS


def shares_memory(node: fx.Node) -> bool:
    """Return whether a node is a view: all its fake tensors share memory with its arguments, and it writes none of it."""
    own = {key for _, key in memory_keys(node)}
    of_arguments = {key for argument in node.all_input_nodes for _, key in memory_keys(argument)}
    return bool(own) and own <= of_arguments and not mutated_arguments(node)


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors in one storage, as long as one of them is alive."""
    return "storage", StorageWeakRef(tensor.untyped_storage())  # tagged: a bare StorageWeakRef compares with its own kind only


def new_memory() -> Hashable:
    """Return a key of memory that no other tensor uses."""
    return object()


class _DisjointSets:
    """Union-find over hashable keys."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def root(self, key: Any) -> Any:
        """Return the key that stands for the set of ``key``; all keys on the way there point to it from now on."""
        path = []
        while (parent := self._parent.get(key, key)) != key:
            path.append(key)
            key = parent
        self._parent.update(dict.fromkeys(path, key))
        return key

    def join(self, first: Any, second: Any) -> None:
        self._parent[self.root(second)] = self.root(first)


def memory_keys(node: fx.Node) -> list[tuple[torch.Tensor, Hashable]]:
    """Return the tensors of a node's value, each with the key of its memory; tensors in the same memory have equal keys."""
    tensors = list(tensors_of(node))
    keys = node.meta.get(OWN_MEMORY)
    if isinstance(keys, MemoryOf):
        keys = keys.keys if keys.value is node.meta["val"] else None
    return list(zip(tensors, keys, strict=True)) if keys is not None else [(tensor, memory_key(tensor)) for tensor in tensors]


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the strided tensors of a node's value. Tensors of other layouts have no single storage, and count as no views."""
    value = node.meta.get("val")
    for leaf in (value,) if isinstance(value, torch.Tensor) else tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf


def _memory_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory this node's value may share."""
    if node.op != "call_function" or node.target is operator.getitem:
        return []  # an item keeps its own storage: joining it with its list would join all items
    is_draw = node.target is draw_alike  # draw_alike(function, group, *arguments) gives the result of the function
    target, arguments = (node.args[0], node.args[2:]) if is_draw else (node.target, node.args)
    may_view = _UNANNOTATED_VIEWS.get(packet(target), _never_views) is not _never_views
    if may_view:
        first = next(nodes for nodes in map(node_leaves, arguments) if nodes)
        return [] if packet(target) is aten.einsum and len(first) > 1 else first  # einsum of several operands has new memory
    if is_draw and isinstance(target, OpOverload) and not views_its_arguments(target):
        return []
    return viewed_arguments(node)
