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

This is done for results that are linear combinations of such means. A value that is equal for all rows is the mean of itself: as a term,
it is weighted by rows; as a factor of a mean, it stays.

    before   loss = cross_entropy(logits, labels) * scale + penalty
    after    loss = cross_entropy(...) / loss_total * scale + penalty * batch / batch_total
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx

from passes.analysis.replicable import replicable_nodes
from passes.graph.dependencies import with_ancestors
from passes.graph.fake_tensors import fake_mode
from passes.graph.lazy_graph_module import LazyGraphModule, rewritten
from passes.graph.schemas import MEAN, SUM
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import WEIGHTED, Input, ModelGraph, Total
from passes.rules.mean_losses import COUNTED_LOSSES, MeanTerms, counted_leaves, loss_arguments, mean_terms, values_of_rows
from passes.rules.non_negative import ignores_nothing, non_negative

aten = torch.ops.aten


def with_totals(graph: ModelGraph) -> ModelGraph:
    """Return the graph with every result that is a linear combination of means over the batch as a sum over microbatches."""
    replicable, known = replicable_nodes(graph), non_negative(graph.graph)
    nodes = {node.name: node for node in graph.graph.nodes}
    counted = counted_means(graph)
    combinations: dict[str, MeanTerms] = {}
    for output in graph.outputs:
        if output.combine == "mean" and output.node is not None:
            terms = mean_terms(nodes[output.node], counted)
            if terms is not None and all(
                _can_count(mean, graph, replicable, known) if mean in counted else _is_mean(mean) for mean in terms.means
            ):
                combinations[output.node] = terms
    return _rewrite(graph, combinations, known) if combinations else graph


def counted_means(graph: ModelGraph) -> tuple[fx.Node, ...]:
    """Return the calls that compute a mean over the targets that are not ignored, or a weighted mean."""
    return counted_leaves(graph.graph, _with_rows(graph), lambda node: WEIGHTED in node.meta)


def rows_read(graph: ModelGraph) -> frozenset[fx.Node]:
    """Return the values that are computed from the batch size, or from inputs that have rows."""
    return values_of_rows(graph.graph, _with_rows(graph))


def _with_rows(graph: ModelGraph) -> list[str]:
    """Return the placeholders of the inputs that have rows."""
    return [leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None and leaf.batch_dim is not None]


def divisor_of(mean: fx.Node, total: Tensor) -> Tensor:
    """Return the divisor of a mean of ``counted_means`` for a total of its weights."""
    for call in _calls_to_divisor(mean):
        total = call.target(total, *call.args[1:], **call.kwargs)  # type: ignore[operator]  # an operator
    return total


def _can_count(mean: fx.Node, graph: ModelGraph, replicable: frozenset[str], non_negative: Collection[str]) -> bool:
    """Return whether the divisor of a mean over targets depends on the inputs alone: it is computed before the batch is split."""
    if WEIGHTED in mean.meta or ignores_nothing(mean, non_negative, graph.batch):
        return True
    known = replicable | graph.buffers.keys() | graph.constants.keys() | {leaf.placeholder for leaf in graph.inputs}
    weight = loss_arguments(mean)[0]
    return all(isinstance(part, fx.Node) and part.name in known for part in (mean.args[1], weight) if part is not None)


def _is_mean(node: fx.Node) -> bool:
    """Return whether a term is a mean over rows, and not a sum of losses that the fixed number of rows divides later."""
    return node.target not in COUNTED_LOSSES or loss_arguments(node)[1] == MEAN


# -- rewrite -----------------------------------------------------------------------------------------------------------------------


def _rewrite(graph: ModelGraph, combinations: Mapping[str, MeanTerms], non_negative: Collection[str]) -> ModelGraph:
    """Return the graph with means divided by totals, which are new inputs; the results in ``combinations`` are marked as sums."""
    target = fx.Graph()
    means = list(dict.fromkeys(mean for terms in combinations.values() for mean in terms.means))
    operands = {node: positions for terms in combinations.values() for node, positions in terms.operands.items()}
    counted = set(counted_means(graph))
    copies: dict[fx.Node, fx.Node] = {}
    parts: dict[fx.Node, fx.Node] = {}  # mean -> its term; other calls read the mean itself
    totals: dict[fx.Node, fx.Node] = {}

    def part_of(node: fx.Node) -> fx.Node:
        return parts[node] if node in parts else copies[node]

    for node in graph.graph.nodes:
        if node.op != "placeholder" and not totals:
            totals = {mean: _total_placeholder(graph, target, mean) for mean in means}
            parts = {mean: _emit_term(graph, target, mean, copies, totals[mean], counted) for mean in means if mean.op == "placeholder"}
        returned = {mean: part for mean, part in parts.items() if mean.name in combinations} if node.op == "output" else {}
        copies[node] = target.node_copy(node, {**copies, **returned}.__getitem__ if returned else copies.__getitem__)
        for position in operands.get(node, ()):
            copies[node].update_arg(position, part_of(cast(fx.Node, node.args[position])))
        if node in totals:
            parts[node] = _emit_term(graph, target, node, copies, totals[node], counted)
            if node in counted:
                copies[node] = parts[node]  # its call is now that of a sum
    _erase_divisors(graph, target, means, copies)
    names = {node.name: (part_of(node) if node.name in combinations else copies[node]).name for node in copies}
    result = rewritten(graph, target, names)
    pairs = zip(graph.outputs, result.outputs, strict=True)
    return dataclasses.replace(
        result,
        inputs=(*graph.inputs, *(Input(total.name, total.name, None, (), total.meta["val"].dtype, None) for total in totals.values())),
        outputs=tuple(dataclasses.replace(output, combine="sum") if before.node in combinations else output for before, output in pairs),
        totals=tuple(
            Total(total.name, *_counting_graph(graph, mean, mean in counted, non_negative), mean.name) for mean, total in totals.items()
        ),
    )


def _erase_divisors(graph: ModelGraph, target: fx.Graph, means: Iterable[fx.Node], copies: Mapping[fx.Node, fx.Node]) -> None:
    """Erase the calls that computed divisors which the totals of the batch have replaced."""
    divisors = with_ancestors(cast(fx.Node, mean.args[1]) for mean in means if WEIGHTED in mean.meta)
    for node in reversed(graph.computing_nodes()):
        if node in divisors and not copies[node].users:
            target.erase_node(copies[node])


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


def _emit_term(
    graph: ModelGraph, target: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], total: fx.Node, counted: Collection[fx.Node]
) -> fx.Node:
    """Emit the term of one microbatch in a mean over the batch: its sum divided by the total of the batch.

    Args:
        counted: the ``counted_means``; any other mean is one over rows.
    """
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
    if node in counted:
        weight, _, ignore_index = loss_arguments(node)
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


def _counting_graph(
    graph: ModelGraph, mean: fx.Node, is_counted: bool, non_negative: Collection[str]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return the graph that computes the divisor of a mean over the batch, and the names of its arguments."""
    target = fx.Graph()
    if not is_counted or (WEIGHTED not in mean.meta and ignores_nothing(mean, non_negative, graph.batch)):
        batch = target.placeholder("batch")
        # It counts all rows of a rank; a graph of a fixed batch size is that of one microbatch, and does not know how many there are.
        batch.meta = {"val": next((node.meta["val"] for node in graph.graph.nodes if node.target == "batch"), None)}
        per_row = _targets_per_row(graph, mean) if is_counted else 1
        number = target.call_function(operator.mul, (batch, per_row)) if per_row != 1 else batch
        target.output(target.call_function(aten.scalar_tensor.default, (number,), {"dtype": torch.int64}))
        return LazyGraphModule({}, target, class_name="Total"), ("batch",)
    is_weighted = WEIGHTED in mean.meta
    weight, ignore_index = (None, None) if is_weighted else loss_arguments(mean)[::2]
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


def _targets_per_row(graph: ModelGraph, mean: fx.Node) -> int:
    """Return how many targets of a loss each row of the batch has."""
    targets = mean.args[1]
    assert isinstance(targets, fx.Node)
    number = sympy.sympify(math.prod(size_of(size) for size in targets.meta["val"].shape))
    return int(number.subs(graph.batch, 1)) if graph.batch is not None else int(number) // graph.batch_size


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
