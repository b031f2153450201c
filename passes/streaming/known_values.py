"""What calls on tiles give: a call on tiles of equal sizes is looked at once, and all of them share its fake tensors.

    conv2d_tile0_1 = conv2d(x[.., 14:31], w)      1 x 64 x 15 x 15, traced
    conv2d_tile0_2 = conv2d(x[.., 29:46], w)      the same call on equal sizes: the same fake tensor

Tiles have memory of their own all the same: nodes say so themselves (``passes.aliasing.OWN_MEMORY``).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from passes.aliasing import OWN_MEMORY, memory_key, memory_keys, mutated_arguments, new_memory, tensors_of
from passes.operators import draws, node_leaves, written_arguments

__all__ = ["KnownValues"]

aten = torch.ops.aten


class KnownValues:
    """The values of calls on fake tensors, each kind of call computed once. To be used inside the fake mode of the graph."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def describe(self, node: fx.Node) -> None:
        """Set what a new node gives (``meta["val"]``) and the memory that it lies in."""
        if written := written_arguments(node):
            node.meta["val"] = written[0].meta["val"]
            node.meta[OWN_MEMORY] = tuple(key for _, key in memory_keys(written[0]))
            return
        key = None if draws(node) or mutated_arguments(node) else (node.target, _alike(node, node.args), _alike(node, node.kwargs))
        if key is None or key not in self._known:
            assert callable(node.target)
            found = node.target(*fx.map_arg(node.args, _value), **fx.map_arg(node.kwargs, _value))
            node.meta["val"] = tuple(found) if isinstance(found, list) else found
            if key is not None:
                self._known[key] = node.meta["val"]
        else:
            node.meta["val"] = self._known[key]
        node.meta[OWN_MEMORY] = _memory(node)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _alike(node: fx.Node, arguments: Any) -> Hashable:
    """What calls that give alike have in common: values are told apart by identity, and pieces by their lengths."""
    if arguments is node.args and node.target is aten.slice.Tensor and len(node.args) == 4:
        source, dimension, start, stop = node.args
        return _plain(source), dimension, stop - start
    return _plain(arguments)


def _plain(argument: Any) -> Hashable:
    if isinstance(argument, fx.Node):
        value = argument.meta["val"]
        return ("value", id(value)) if not isinstance(value, int | float | bool) else (type(value), value)
    if isinstance(argument, tuple | list):
        return tuple(_plain(part) for part in argument)
    if isinstance(argument, dict):
        return tuple((name, _plain(part)) for name, part in argument.items())
    return type(argument), argument if isinstance(argument, Hashable) else str(argument)


def _memory(node: fx.Node) -> tuple[Hashable, ...]:
    """For each tensor: the memory of the argument that it is a view of, or new memory."""
    given = {memory_key(tensor): key for source in reversed(node_leaves((node.args, node.kwargs))) for tensor, key in memory_keys(source)}
    made: dict[Hashable, Hashable] = {}
    found = []
    for tensor in tensors_of(node):
        seen = memory_key(tensor)
        found.append(given[seen] if seen in given else made.setdefault(seen, new_memory()))
    return tuple(found)
