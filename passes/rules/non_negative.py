"""Integers that are never negative by the ops that compute them: ``x.argmax(1)``, ``torch.zeros(8, dtype=torch.int64)``.

A cross entropy with such targets ignores none of them if ``ignore_index`` is negative, so that it is a mean over all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.graph.aliasing import aliasing
from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_of
from passes.rules.mean_losses import COUNTED_LOSSES, counts_targets, loss_arguments

aten = torch.ops.aten

_POSITIONS = frozenset({aten.argmax, aten.argmin, aten.argsort})
"""Ops that return positions."""

_WITH_POSITIONS = frozenset({aten.kthvalue, aten.max, aten.median, aten.min, aten.mode, aten.sort, aten.topk})
"""Ops whose second result is positions."""

_ZEROS_AND_ONES = frozenset({aten.new_ones, aten.new_zeros, aten.ones, aten.ones_like, aten.zeros, aten.zeros_like})

_FILLED = frozenset({aten.full, aten.full_like, aten.new_full})

_MOVED = frozenset(
    {
        aten.alias, aten.cat, aten.clone, aten.contiguous, aten.detach, aten.expand, aten.flatten, aten.gather, aten.index, aten.permute,
        aten.repeat, aten.reshape, aten.select, aten.slice, aten.squeeze, aten.stack, aten.t, aten.transpose, aten.unflatten,
        aten.unsqueeze, aten.view,
    }
)  # fmt: skip
"""Ops that return elements of their first argument."""

_CAST = frozenset({aten.to, aten._to_copy})  # noqa: SLF001


def ignores_nothing(loss: fx.Node, known: Collection[str], batch: sympy.Symbol | None) -> bool:
    """Return whether a cross entropy is the mean over all of its targets, as many for each row in every call.

    Args:
        known: the ``non_negative`` values.
        batch: the symbol of the batch size; other symbols in the targets' sizes are lengths, which differ between calls.
    """
    if not counts_targets(loss):
        return False
    weight, _, ignore_index = loss_arguments(loss)
    target = loss.args[1]
    if weight is not None or ignore_index >= 0 or not isinstance(target, fx.Node) or target.name not in known:
        return False
    sizes = [sympy.sympify(size_of(size)) for size in target.meta["val"].shape]
    return all(size.free_symbols <= {batch} for size in sizes)


def non_negative(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the integers that are never negative, if a loss of the graph counts targets."""
    if not any(node.target in COUNTED_LOSSES for node in graph.nodes):
        return frozenset()
    memory = aliasing(graph)
    found: set[str] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not memory.written(node) and _is_non_negative(node, value, found):
            found.add(node.name)
    return frozenset(found)


def _is_non_negative(node: fx.Node, value: Tensor, found: Collection[str]) -> bool:
    """Return whether a value is never negative; ``found``: the names of earlier ones."""
    if value.dtype in (torch.bool, torch.uint8):
        return True
    if value.dtype != torch.int64 or node.op != "call_function":  # a cast to fewer bits may wrap
        return False
    kind: Any = packet(node.target)
    if node.target is operator.getitem:
        source, position = node.args
        return isinstance(source, fx.Node) and packet(source.target) in _WITH_POSITIONS and isinstance(position, int) and position == 1
    if kind in _FILLED:
        number = bound_arguments(node)["fill_value"]
        return isinstance(number, int) and number >= 0
    if kind in _MOVED:
        moved = node.args[0]
        sources = moved if isinstance(moved, list | tuple) else [moved]  # a view of another dtype reads the bytes as other numbers
        return all(isinstance(each, fx.Node) and each.name in found and each.meta["val"].dtype == value.dtype for each in sources)
    if kind in _CAST:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.name in found
    return kind in _POSITIONS | _ZEROS_AND_ONES
