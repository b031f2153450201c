"""Which nodes share memory, and which write in it.

    mean -------- view -------- select          one alias set: mean, view, select, add_
      |                            |
      +---- linear               add_           ``add_`` writes it: ``linear``, if it stands behind, reads what was written

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

__all__ = [
    "OWN_MEMORY",
    "Aliasing",
    "Allocations",
    "MemoryOf",
    "aliasing",
    "allocations",
    "memory_key",
    "memory_keys",
    "mutated_arguments",
    "new_memory",
    "shares_memory",
    "tensors_of",
    "viewed_node",
    "writes_statistics",
]

aten = torch.ops.aten


def _shuffles_nothing(node: fx.Node) -> bool:
    """One group, or groups of one channel, keep the order of channels; the kernel of the CPU copies them even so."""
    value, groups = node.meta["val"], bound_arguments(node)["groups"]
    return value.device.type != "cpu" and groups in (1, value.shape[1])


def _never(_: fx.Node) -> bool:
    """New memory always, though fake tensors share theirs for some arguments."""
    return False


def _as_fake_tensors_say(_: fx.Node) -> None:
    """A view for some arguments, which the fake tensor of the result shares memory with exactly then."""


_UNANNOTATED_VIEWS: Mapping[Any, Callable[[fx.Node], bool | None]] = {
    **dict.fromkeys((aten.alpha_dropout, aten.dropout, aten.feature_alpha_dropout, aten.feature_dropout), drops_nothing),
    **dict.fromkeys((aten.channel_shuffle, aten.native_channel_shuffle), _shuffles_nothing),
    **dict.fromkeys(
        (
            aten._unsafe_view, aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.broadcast_tensors, aten.cartesian_prod,  # noqa: SLF001
            aten.conj_physical, aten.einsum, aten.meshgrid, aten.sum_to_size, aten.type_as, aten.unsafe_chunk, aten.unsafe_split,
            aten.unsafe_split_with_sizes,
        ),
        _as_fake_tensors_say,
    ),
    aten.native_dropout: _never,
}  # fmt: skip
"""Operators that may return their first tensor, or a view of it, though their schemas do not say so, and whether a call does."""

_MAY_COPY = frozenset({aten.contiguous, aten.flatten, aten.ravel, aten.reshape, aten.reshape_as, aten.to})
"""Operators whose schemas declare a view where they may return a copy; fake tensors know which."""

OWN_MEMORY = "memory"
"""Where in ``meta`` a node says of each of its tensors in which memory it lies, when its fake tensors are shared with other nodes."""


@dataclass(frozen=True, eq=False)
class MemoryOf:
    """In ``meta[OWN_MEMORY]``: holds for one value alone, not for what a pass puts in its place.

    Attributes:
        value: which.
        keys: of its tensors, in order.
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
"""Operation -> the flag that makes it write ``running_mean`` and ``running_var``, which the schemas do not mark."""

_ANNOTATED_STATISTICS_WRITERS = frozenset({aten._batch_norm_with_update, aten._native_batch_norm_legit})  # noqa: SLF001
"""Those whose schemas do mark them."""


@dataclass(frozen=True)
class Aliasing:
    """The memory of a graph.

    Attributes:
        storages: node -> the alias sets that its tensors lie in, numbered in graph order (a list of tensors may lie in several).
        writers: alias set -> the nodes that write in it, in graph order; absent for memory that is only read once computed.
        first: alias set -> the first node that lies in it.
    """

    storages: Mapping[str, frozenset[int]]
    writers: Mapping[int, tuple[str, ...]]
    first: Mapping[int, str]

    def written(self, node: fx.Node) -> bool:
        """Whether anybody writes in memory that this node's value lies in."""
        return any(storage in self.writers for storage in self.storages.get(node.name, ()))


@dataclass(frozen=True)
class Allocations:
    """The memory of a graph as the fake tensors have it: what a run allocates.

    Attributes:
        lies_in: node -> the allocations of its tensors, numbered in graph order.
        bytes: allocation -> its size: an int, or a sympy expression.
    """

    lies_in: Mapping[str, tuple[int, ...]]
    bytes: Mapping[int, Any]


def allocations(graph: fx.Graph) -> Allocations:
    """Which nodes share an allocation in a run, as far as fake tensors know, and the sizes of the allocations."""
    numbers: dict[Hashable, int] = {}
    sizes: dict[int, Any] = {}
    lies_in: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        found: dict[int, None] = {}
        for tensor, key in memory_keys(node):
            number = numbers.setdefault(key, len(numbers))
            if number not in sizes:
                sizes[number] = size_of(tensor.untyped_storage().nbytes())
            found[number] = None
        lies_in[node.name] = tuple(found)
    return Allocations(lies_in, sizes)


def aliasing(graph: fx.Graph) -> Aliasing:
    """The alias sets of all nodes and who writes them."""
    sets = _DisjointSets()
    lies_in: dict[str, set[Any]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        keys = {key for _, key in memory_keys(node)}
        lies_in[node.name] = keys
        for source in _memory_arguments(node):
            for key in keys:
                for other in lies_in[source.name]:
                    sets.join(key, other)
    numbers: dict[Any, int] = {}
    first: dict[int, str] = {}
    storages: dict[str, frozenset[int]] = {}
    for name, keys in lies_in.items():
        roots = sorted(numbers.setdefault(sets.root(key), len(numbers)) for key in keys)
        storages[name] = frozenset(roots)
        for root in roots:
            first.setdefault(root, name)
    writers: dict[int, list[str]] = {}
    for node in graph.nodes:
        for storage in sorted({storage for target in mutated_arguments(node) for storage in storages[target.name]}):
            writers.setdefault(storage, []).append(node.name)
    return Aliasing(storages, {storage: tuple(names) for storage, names in writers.items()}, first)


def viewed_node(node: fx.Node) -> fx.Node | None:
    """Return the node that a tensor is a view of, or is the same tensor as; None for a tensor with memory of its own.

    Unlike the alias sets of a graph it holds for these very arguments: as the operator does, as the fake tensor says, or as the schema
    must have it.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return None
    call = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or call.op != "call_function" or mutated_arguments(call):
        return None
    sources = [source for source in call.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    if (is_view := _UNANNOTATED_VIEWS.get(packet(call.target), _as_fake_tensors_say)(call)) is not None:
        return sources[0] if is_view else None
    own = {key for _, key in memory_keys(node)}
    found = next((source for source in sources if any(key in own for _, key in memory_keys(source))), None)
    if found is None and isinstance(call.target, OpOverload) and packet(call.target) not in _MAY_COPY:
        found = next(iter(viewed_arguments(call)), None)
    return found


def mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose memory this node writes: as its schema says, and running statistics in training."""
    mutated = written_arguments(node)
    flag = _STATISTICS_WRITERS.get(packet(node.target))
    if flag is not None:
        bound = bound_arguments(node)
        if bound[flag]:
            mutated += node_leaves((bound["running_mean"], bound["running_var"]))
    return tuple(dict.fromkeys(mutated))


def writes_statistics(node: fx.Node) -> bool:
    """Whether a call is of a normalisation that updates the running statistics that it is given."""
    return packet(node.target) in _STATISTICS_WRITERS or packet(node.target) in _ANNOTATED_STATISTICS_WRITERS


def shares_memory(node: fx.Node) -> bool:
    """Whether all tensors of a node lie in memory of its arguments, as far as fake tensors know, and it writes none of it: a view."""
    own = {key for _, key in memory_keys(node)}
    theirs = {key for argument in node.all_input_nodes for _, key in memory_keys(argument)}
    return bool(own) and own <= theirs and not mutated_arguments(node)


def memory_key(tensor: torch.Tensor) -> Hashable:
    """What tensors that lie in one storage have in common, for as long as one of them is there."""
    return "storage", StorageWeakRef(tensor.untyped_storage())  # alone, it cannot be compared with keys of other kinds


def new_memory() -> Hashable:
    """The key of memory that nothing else lies in."""
    return object()


class _DisjointSets:
    """Union-find over hashable keys."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def root(self, key: Any) -> Any:
        path = []
        while (parent := self._parent.get(key, key)) != key:
            path.append(key)
            key = parent
        self._parent.update(dict.fromkeys(path, key))
        return key

    def join(self, one: Any, other: Any) -> None:
        self._parent[self.root(other)] = self.root(one)


def memory_keys(node: fx.Node) -> list[tuple[torch.Tensor, Hashable]]:
    """The tensors of a node's value, and for each what all have in common that lie in the same memory."""
    tensors = list(tensors_of(node))
    own = node.meta.get(OWN_MEMORY)
    if isinstance(own, MemoryOf):
        own = own.keys if own.value is node.meta["val"] else None
    return list(zip(tensors, own, strict=True)) if own is not None else [(tensor, memory_key(tensor)) for tensor in tensors]


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The strided tensors of a node's value; other layouts own no single storage and are never views here."""
    value = node.meta.get("val")
    for leaf in (value,) if isinstance(value, torch.Tensor) else tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf


def _memory_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory this node's value may lie in."""
    if node.op != "call_function" or node.target is operator.getitem:
        return []  # an item keeps its own storage: joining it with its list would join all items
    is_draw = node.target is draw_alike  # draw_alike(function, group, *arguments): asked is the function that it calls
    target, arguments = (node.args[0], node.args[2:]) if is_draw else (node.target, node.args)
    may_view = _UNANNOTATED_VIEWS.get(packet(target), _never) is not _never
    if may_view:
        first = next(nodes for argument in arguments if (nodes := node_leaves(argument)))
        return [] if packet(target) is aten.einsum and len(first) > 1 else first  # a product lies in memory of its own
    if is_draw and isinstance(target, OpOverload) and not views_its_arguments(target):
        return []
    return viewed_arguments(node)
