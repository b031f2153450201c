"""Losses that are a mean over the targets that count, and the linear combinations of means that can be followed.

``passes.spmd.mean_to_sum`` divides such a loss by the targets of the whole batch. It finds the losses in a result by ``mean_terms``, and
``passes.analysis.batch_semantics`` calls a result a mean only if ``mean_terms`` finds them.

    cross_entropy(x, y) * exp(-s) + s        operands: add (0, 1), mul (0); means: cross_entropy, s
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.schemas import MEAN, bound_arguments

aten = torch.ops.aten

COUNTED_LOSSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default})
"""Losses whose mean is over the targets that are not ignored."""

MEANS_ADDED = frozenset({aten.add.Tensor, aten.sub.Tensor})
"""Ops that add two means, or a mean and a value that is equal for all rows: the mean of itself."""

MEANS_SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default})
"""Ops that multiply a mean by a number, or by a value that is equal for all rows."""

MEANS_KEPT = frozenset({aten.clone.default, aten.to.dtype, aten.alias.default, aten._to_copy.default})  # noqa: SLF001
"""Ops that return a mean unchanged, perhaps in another dtype."""


@dataclass(frozen=True)
class MeanTerms:
    """A result as a linear combination of means over the batch.

    Attributes:
        means: in order: means over rows or over the targets that count, and values that are equal for all rows.
        operands: call that combines means -> the positions of those among its arguments; the others are factors.
    """

    means: tuple[fx.Node, ...]
    operands: Mapping[fx.Node, tuple[int, ...]]


def loss_arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return ``weight``, ``reduction`` and ``ignore_index`` of a cross entropy."""
    arguments = bound_arguments(node)
    return arguments["weight"], arguments["reduction"], arguments["ignore_index"]


def counts_targets(node: fx.Node) -> bool:
    """Return whether a mean divides by its number of targets that are not ignored, not by rows; False for probabilities as targets."""
    if node.target not in COUNTED_LOSSES:
        return False
    target = node.args[1]
    return isinstance(target, fx.Node) and not target.meta["val"].is_floating_point()


def values_of_rows(graph: fx.Graph, with_rows: Iterable[str]) -> frozenset[fx.Node]:
    """Return the values that are computed from the batch size, or from inputs that have rows: their placeholders are ``with_rows``."""
    names = {"batch", *with_rows}
    return _readers(graph, [node for node in graph.nodes if node.op == "placeholder" and node.target in names])


def counted_leaves(graph: fx.Graph, with_rows: Iterable[str], is_weighted: Callable[[fx.Node], bool]) -> tuple[fx.Node, ...]:
    """Return the calls that compute a mean over the targets that count.

    A cross entropy of values without rows is not one of them: it is equal in every part of the batch, and parts of it do not add up.

    Args:
        with_rows: the placeholders of inputs that have rows.
        is_weighted: whether a call divides a sum over rows by a total of weights.
    """
    leaves = [node for node in graph.nodes if is_weighted(node) or (counts_targets(node) and loss_arguments(node)[1] == MEAN)]
    of_rows = values_of_rows(graph, with_rows) if leaves else ()
    return tuple(leaf for leaf in leaves if leaf in of_rows)


def mean_terms(result: fx.Node, leaves: Collection[fx.Node]) -> MeanTerms | None:
    """Return the means of which a result is a linear combination; None if it cannot be followed to them.

    Args:
        result: a mean over the batch.
        leaves: the ``counted_leaves`` of its graph.
    """
    counted = _readers(result.graph, leaves)
    means: dict[fx.Node, None] = {}
    operands: dict[fx.Node, tuple[int, ...]] = {}
    pending = [result]
    while pending:
        node = pending.pop()
        if node in leaves or (result in counted and node not in counted):
            means[node] = None
            continue
        positions = _mean_operands(node, counted)
        if positions:
            operands[node] = positions
            pending += [node.args[position] for position in reversed(positions)]  # type: ignore[misc]  # nodes, by their positions
        elif positions is None or node in counted or node.op != "call_function":
            return None
        else:
            means[node] = None
    return MeanTerms(tuple(means), operands)


def _readers(graph: fx.Graph, nodes: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return nodes and all values that are computed from them."""
    reached = set(nodes)
    for node in graph.nodes if reached else ():
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return frozenset(reached)


def _mean_operands(node: fx.Node, counted: Collection[fx.Node]) -> tuple[int, ...] | None:
    """Return the positions of the means that a call combines; () if it combines none, None if it is not linear in them."""
    operands = tuple(position for position, value in enumerate(node.args[:2]) if isinstance(value, fx.Node))
    if node.target in MEANS_ADDED:
        if len(operands) == 2:
            return operands if all(isinstance(value.meta["val"], Tensor) for value in node.all_input_nodes) else None
        return operands if node.args[1:2] == (0,) else None  # ``sum(losses)`` begins with 0; any other number would be added in every part
    if node.target not in MEANS_SCALED | MEANS_KEPT:
        return ()
    of_means = operands if len(operands) == 1 else tuple(position for position in operands if node.args[position] in counted)
    if len(of_means) != 1 or (of_means[0] == 1 and node.target is not aten.mul.Tensor):
        return None
    return of_means
