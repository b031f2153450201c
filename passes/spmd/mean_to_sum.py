"""Rewrite a mean over the batch as a sum of terms, so that microbatches add up to it exactly.

Means over microbatches, weighted by their numbers of rows, give the mean over the batch only if every row has the same weight. A cross
entropy divides by its number of targets that are not ignored, which differs between microbatches. So the divisor is computed from the
whole batch, before it is split:

    before   loss = cross_entropy(logits, labels, reduction=mean)               out: "mean"
    after    loss = cross_entropy(logits, labels, reduction=sum) / loss_total   out: "sum"
             loss_total = count(labels != -100), over the whole batch

A mean weighted by the model's own code is rewritten alike: ``(loss * mask).sum() / mask.sum().clamp(min=1)`` divides by the clamped sum of
the mask of the whole batch.

Ranks that cut the sequence, or space, have parts of each row: the sums of their parts add up as well.

    before   loss = mse_loss(x, y)                                              out: "mean"
    after    loss = mse_loss(x, y) * batch / batch_total                        out: "sum"

This is done for results that are linear combinations of such means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from passes.analysis.batch_semantics import COUNTED_LOSSES, MEANS_ADDED, MEANS_KEPT, MEANS_SCALED
from passes.analysis.replicable import replicable_nodes
from passes.graph.dependencies import with_ancestors
from passes.graph.fake_tensors import fake_mode
from passes.graph.lazy_graph_module import LazyGraphModule, rewritten
from passes.graph.schemas import MEAN, SUM, bound_arguments
from passes.ir.graph import WEIGHTED, Input, ModelGraph, Total

__all__ = ["counted_means", "divisor_of", "with_totals"]

aten = torch.ops.aten


def with_totals(graph: ModelGraph) -> ModelGraph:
    """Return the graph with every result that is a linear combination of means over the batch as a sum over microbatches."""
    replicable = replicable_nodes(graph)
    nodes = {node.name: node for node in graph.graph.nodes}
    means: dict[fx.Node, None] = {}
    summed: set[str] = set()
    for output in graph.outputs:
        if output.combine == "mean" and output.node is not None:
            terms = _means(nodes[output.node], graph)
            if terms is not None and all(_can_count(mean, graph, replicable) for mean in terms):
                means.update(dict.fromkeys(terms))
                summed.add(output.node)
    return _rewrite(graph, list(means), summed) if means else graph


def counted_means(graph: ModelGraph) -> list[fx.Node]:
    """Return the calls that compute a mean over the targets that are not ignored, or a weighted mean."""
    return [
        node for node in graph.computing_nodes() if WEIGHTED in node.meta or (_counts_targets(node) and _loss_arguments(node)[1] == MEAN)
    ]


def divisor_of(mean: fx.Node, total: Tensor) -> Tensor:
    """Return the divisor of a mean of ``counted_means`` for a total of its weights."""
    for call in _calls_to_divisor(mean):
        total = call.target(total, *call.args[1:], **call.kwargs)  # type: ignore[operator]  # an operator
    return total


def _means(node: fx.Node, graph: ModelGraph) -> list[fx.Node] | None:
    """Return the means of which a result is a linear combination; None if it is no such combination."""
    if WEIGHTED in node.meta:
        return [node]
    if node.target in MEANS_ADDED:
        parts = [_means(part, graph) if isinstance(part, fx.Node) else None for part in node.args[:2]]
        return None if any(part is None for part in parts) else [mean for part in parts if part is not None for mean in part]
    if node.target in MEANS_SCALED | MEANS_KEPT:
        source, *others = node.args
        is_scaled_by_node = node.target in MEANS_SCALED and bool(others) and isinstance(others[0], fx.Node)
        return _means(source, graph) if isinstance(source, fx.Node) and not is_scaled_by_node else None
    return [node] if node.op == "call_function" else None


def _can_count(node: fx.Node, graph: ModelGraph, replicable: frozenset[str]) -> bool:
    """Return whether the divisor of a mean depends on the inputs alone, so that it can be computed before the batch is split."""
    if WEIGHTED in node.meta:
        return True
    if node.target in COUNTED_LOSSES and _loss_arguments(node)[1] != MEAN:
        return False
    if not _counts_targets(node):
        return True
    known = replicable | graph.buffers.keys() | graph.constants.keys() | {leaf.placeholder for leaf in graph.inputs}
    weight = _loss_arguments(node)[0]
    return all(isinstance(part, fx.Node) and part.name in known for part in (node.args[1], weight) if part is not None)


# -- rewrite -----------------------------------------------------------------------------------------------------------------------


def _rewrite(graph: ModelGraph, means: Sequence[fx.Node], summed: set[str]) -> ModelGraph:
    """Return the graph with means divided by totals, which are new inputs; the results ``summed`` are marked as sums."""
    target = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    totals: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op != "placeholder" and not totals:
            totals = {mean: _total_placeholder(graph, target, mean) for mean in means}
        copies[node] = target.node_copy(node, copies.__getitem__)
        if node in totals:
            copies[node] = _emit_term(graph, target, node, copies, totals[node])
    divisors = with_ancestors(cast(fx.Node, mean.args[1]) for mean in means if WEIGHTED in mean.meta)
    for node in reversed(graph.computing_nodes()):
        if node in divisors and not copies[node].users:  # the total of the batch has replaced it
            target.erase_node(copies[node])
    result = rewritten(graph, target, {node.name: copy.name for node, copy in copies.items()})
    pairs = zip(graph.outputs, result.outputs, strict=True)
    return dataclasses.replace(
        result,
        inputs=(*graph.inputs, *(Input(total.name, total.name, None, (), total.meta["val"].dtype, None) for total in totals.values())),
        outputs=tuple(dataclasses.replace(output, combine="sum") if before.node in summed else output for before, output in pairs),
        totals=tuple(Total(total.name, *_counting_graph(graph, mean), mean.name) for mean, total in totals.items()),
    )


def _total_placeholder(graph: ModelGraph, target: fx.Graph, mean: fx.Node) -> fx.Node:
    """Add the placeholder for the total of a mean: its divisor over the whole batch."""
    placeholder = target.placeholder(f"{mean.name}_total")
    with fake_mode(graph.graph):
        placeholder.meta = {"val": torch.empty((), dtype=_dtype_of_total(mean), device=mean.meta["val"].device)}
    return placeholder


def _dtype_of_total(mean: fx.Node) -> torch.dtype:
    """Return the dtype of the total of a mean: that of the weights that it adds up, integers where it counts."""
    if WEIGHTED in mean.meta:
        dtype: torch.dtype = _total_of_weights(mean).meta["val"].dtype
        return dtype
    return torch.int64


def _emit_term(graph: ModelGraph, target: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], total: fx.Node) -> fx.Node:
    """Emit the term of one microbatch in a mean over the batch: its sum divided by the total of the batch."""
    term = copies[node]
    if WEIGHTED in node.meta:
        with target.inserting_before(term):
            for call in _calls_to_divisor(node):
                function: Any = call.target
                divisor = _named(target, f"{node.name}_{call.name}", function, (total, *call.args[1:]), call.kwargs)
                divisor.meta = dict(call.meta)
                total = divisor
        term.args = (term.args[0], total)
        del term.meta[WEIGHTED]
        return term
    if _counts_targets(node):
        weight, _, ignore_index = _loss_arguments(node)
        term.args = (*term.args[:2], copies.get(weight, weight), SUM, ignore_index, *term.args[5:])
        term.kwargs = {name: value for name, value in term.kwargs.items() if name == "label_smoothing"}
    else:
        batch = next((other for other in copies.values() if other.op == "placeholder" and other.target == "batch"), None)
        rows = graph.batch_size if batch is None else batch
        term = _named(target, f"{node.name}_of_rows", aten.mul.Tensor, (term, rows))
        term.meta = dict(node.meta)
    term = _named(target, f"{node.name}_term", aten.div.Tensor, (term, total))
    term.meta = dict(node.meta)
    return term


def _named(target: fx.Graph, name: str, function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any] | None = None) -> fx.Node:
    """Emit a call with a name that begins with that of the mean: plans name the operations that backwards repeat (``source_name``)."""
    return target.create_node("call_function", function, arguments, dict(keywords or {}), name=name)


def _counting_graph(graph: ModelGraph, mean: fx.Node) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return the graph that computes the divisor of a mean over the batch, and the names of its arguments."""
    target = fx.Graph()
    if WEIGHTED not in mean.meta and not _counts_targets(mean):
        batch = target.placeholder("batch")
        # It counts all rows of a rank; a graph of a fixed batch size is that of one microbatch, and does not know how many there are.
        batch.meta = {"val": next((node.meta["val"] for node in graph.graph.nodes if node.target == "batch"), None)}
        target.output(target.call_function(aten.scalar_tensor.default, (batch,), {"dtype": torch.int64}))
        return LazyGraphModule({}, target, class_name="Total"), ("batch",)
    is_weighted = WEIGHTED in mean.meta
    weight, ignore_index = (None, None) if is_weighted else _loss_arguments(mean)[::2]
    results = [part for part in ([_total_of_weights(mean)] if is_weighted else [mean.args[1], weight]) if isinstance(part, fx.Node)]
    needed = with_ancestors(results)
    copies: dict[fx.Node, fx.Node] = {}
    in_order = [node for node in graph.graph.nodes if node in needed]
    of_call = {"batch", *(leaf.placeholder for leaf in graph.inputs)}
    for node in sorted(in_order, key=lambda node: (node.op != "placeholder", node.target in of_call)):  # what is bound comes first
        copies[node] = target.node_copy(node, copies.__getitem__)
    names = tuple(str(node.target) for node in target.nodes if node.op == "placeholder")
    if is_weighted:
        target.output(copies[results[0]])
        return LazyGraphModule({}, target, class_name="Total"), names
    labels, *weights = (copies[node] for node in results)
    counted = target.call_function(aten.ne.Scalar, (labels, ignore_index))
    if weights:
        # An ignored target may be no class at all: class 0 stands in for it and its weight is masked.
        classes = target.call_function(aten.mul.Tensor, (labels, counted))
        target_weights = target.call_function(aten.index.Tensor, (weights[0], [classes]))
        counted = target.call_function(aten.mul.Tensor, (target_weights, counted))
    target.output(target.call_function(aten.sum.default, (counted,)))
    return LazyGraphModule({}, target, class_name="Total"), names


def _calls_to_divisor(mean: fx.Node) -> list[fx.Node]:
    """Return the calls from the total of a weighted mean to its divisor, in order; of any other mean none: it divides by the total."""
    calls: list[fx.Node] = []
    for _ in range(mean.meta.get(WEIGHTED, 0)):
        calls.insert(0, cast(fx.Node, calls[0].args[0] if calls else mean.args[1]))
    return calls


def _total_of_weights(mean: fx.Node) -> fx.Node:
    """Return the total by which a weighted mean divides, before the calls to its divisor."""
    calls = _calls_to_divisor(mean)
    return cast(fx.Node, calls[0].args[0] if calls else mean.args[1])


def _counts_targets(node: fx.Node) -> bool:
    """Return whether a mean divides by its number of targets that are not ignored, not by rows; False for probabilities as targets."""
    if node.target not in COUNTED_LOSSES:
        return False
    target = node.args[1]
    return isinstance(target, fx.Node) and not target.meta["val"].is_floating_point()


def _loss_arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return ``weight``, ``reduction`` and ``ignore_index`` of a cross entropy."""
    arguments = bound_arguments(node)
    return arguments["weight"], arguments["reduction"], arguments["ignore_index"]
