"""Prove that a loss function is a mean or a sum over the rows of a batch, or a mean weighted by its targets.

The loss is traced as a model is, its arguments the model's results and the target, and the batch is followed through its graph
(``passes.analysis.batch_semantics``). What is proved holds for all values, and for every batch size for which the trace is the loss:

    cross_entropy(o, t)                     counted: a mean over the targets that are not ignored
    cross_entropy(o, t, weight=w)           counted: a mean weighted by the classes of the targets
    cross_entropy(o, o.argmax(1))           counted: a mean over all targets, since none of them is negative
    cross_entropy(o, t) * exp(-s) + s       counted, if s has no rows: weights that add up to 1 leave s as it is
    (o - t).pow(2).mean()                   mean
    mse_loss(o, t).sqrt()                   nothing: sqrt mixes rows
    o.mean() if o.sum() > 0 else o.max()    nothing: values decide what it computes
    o.mean() if len(o) < 6 else o.max()     mean, of less than 6 rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx, nn

from partitioner.model.losses.form import LossFunction, fake_tensors, silence_fake_tensor_log
from partitioner.model.losses.reachable_state import preserve_state
from partitioner.model.losses.target_rows import RowsFirst
from partitioner.tracing.carried.attributes import CarriedValueError
from partitioner.tracing.export.guards import Assumptions
from partitioner.tracing.trace import source_of, trace_source
from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import with_ancestors
from passes.graph.schemas import draws
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.microbatch import split_target
from passes.ir.errors import PartitionError
from passes.ir.graph import WEIGHTED, ModelGraph, Output
from passes.ir.torch_private import pytree
from passes.spmd.mean_to_sum import counted_means, divisor_of, rows_read, with_totals

_LEAST_ROWS = 3
"""A loss is traced with a batch of at least this many rows."""

_FIXED_ROWS = "it fixes the number of rows, as len(target) does; target.shape[0] does not"


@dataclass(frozen=True, eq=False)
class Proof:
    """The proved reduction of a loss.

    Attributes:
        kind: the reduction; None: nothing is proved.
        reason: why nothing is proved.
        counters: for ``"counted"``, one for each mean over the targets that are not ignored, or weighted by class.
        row_means: for ``"counted"``, the names of the terms that are a mean over rows.
        adds_constants: for ``"counted"``, whether a term is equal for all rows.
        assumed: what the proof assumes of the number of rows; None: nothing is proved.
    """

    kind: Literal["mean", "sum", "counted"] | None
    reason: str = ""
    counters: tuple[Counter, ...] = ()
    row_means: tuple[str, ...] = ()
    adds_constants: bool = False
    assumed: Assumptions | None = None

    def first_unproved(self, sizes: Iterable[int]) -> int | None:
        """Return the first of these numbers of rows for which the loss may compute something else; None: there is none."""
        return next((rows for rows in sizes if self.assumed is not None and not self.assumed.hold_for(rows)), None)

    @property
    def is_one_mean(self) -> bool:
        """Whether the loss is a multiple of one mean over targets."""
        return len(self.counters) == 1 and not self.row_means and not self.adds_constants

    @property
    def divides_by_counts(self) -> bool:
        """Whether all means over targets divide by their counts."""
        return all(counter.divides_by_count for counter in self.counters)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The tensors by which the loss weighs targets. The proof holds only for functions that read the same tensors."""
        return tuple(each for counter in self.counters for each in counter.arguments if isinstance(each, Tensor))


@dataclass(frozen=True)
class Counter:
    """Counts the targets that a mean divides by, or adds up their weights.

    Attributes:
        module: the graph that counts.
        arguments: of the module: the index of a leaf of the target, a tensor that the loss reads (weights of classes), or ``"batch"``, the
            number of rows.
        mean: the call that computes the mean, in the graph of the loss.
    """

    module: fx.GraphModule
    arguments: tuple[int | Tensor | Literal["batch"], ...]
    mean: fx.Node

    def counts(self, target: Any, sizes: Sequence[int]) -> tuple[float, ...]:
        """Count the targets of each microbatch; ``sizes`` are the rows of these."""
        counts = []
        for part, rows in zip(split_target(target, sizes), sizes, strict=True):
            leaves = pytree.tree_leaves(part)
            device = self._device(leaves)
            counts.append(self.module(*(self._value(each, leaves, rows, device) for each in self.arguments)))
        return tuple(map(float, torch.stack(counts).tolist()))

    def _device(self, leaves: Sequence[Any]) -> torch.device:
        """Return where to count: where the target is, or where the loss creates its own targets from the number of rows."""
        creates_targets = any(isinstance(each, str) for each in self.arguments)
        value: Tensor = self.mean.meta["val"] if creates_targets else next(leaves[each] for each in self.arguments if isinstance(each, int))
        return value.device

    def _value(self, argument: int | Tensor | str, leaves: Sequence[Any], rows: int, device: torch.device) -> Any:
        """Return an argument for a part of the batch with these leaves of the target, and this number of rows."""
        if isinstance(argument, str):
            return rows
        return (leaves[argument] if isinstance(argument, int) else argument.detach()).to(device)

    def divisor(self, count: float) -> float:
        """Return the number that the mean divides by for a count: another one where the loss changes it, ``mask.sum().clamp(min=1)``."""
        return float(divisor_of(self.mean, torch.tensor(count, dtype=self.mean.meta["val"].dtype)))

    def can_weigh(self, count: float) -> bool:
        """Return whether a part of the batch with this count may be weighted by it: a part without weight may have a loss all the same."""
        return WEIGHTED not in self.mean.meta or self.divisor(count) != 0

    @property
    def divides_by_count(self) -> bool:
        """Whether that is the count."""
        return not self.mean.meta.get(WEIGHTED)


def prove(
    model: ModelGraph, graph: ModelGraph, requiring: frozenset[str], loss_fn: LossFunction, target: Any, rows: int, device: torch.device
) -> Proof:
    """Trace a loss and follow the batch through it.

    Args:
        model: the whole model, as it was traced.
        graph: the model as a rank computes it; the loss takes its outputs.
        requiring: nodes whose values autograd tracks, which a loss may ask.
        target: for a batch of ``rows`` rows.
        device: where the loss is computed.
    """
    results = {output.node: output for output in graph.loss_results if output.node is not None}
    names = _results_in_order(graph)
    try:
        loss = _Loss(graph, loss_fn)
        leaves, tree = pytree.tree_flatten(target)
        batch = _batch_to_trace(graph, leaves, rows)
        example_results = [_example_result(graph, results[name], batch, device).requires_grad_(name in requiring) for name in names]
        example_leaves = [_example_target_leaf(leaf, rows, batch, device) for leaf in leaves]
        with preserve_state(loss_fn, device), silence_fake_tensor_log():
            arguments = (example_results, pytree.tree_unflatten(example_leaves, tree))
            traced, opened = trace_source(source_of(loss, arguments, None, loss.training, graph.autocast))
        changed = _changed_state(loss, (example_results, pytree.tree_unflatten(example_leaves, tree)), device)
        if changed:
            return _changing(changed)
    except CarriedValueError as error:
        return _changing(error.names)
    except PartitionError as error:
        return Proof(None, error.problem.replace("_Loss", "loss_fn").splitlines()[0])
    for traced_input, leaf in zip(traced.inputs, [*example_results, *example_leaves], strict=False):
        if has_rows(leaf, batch) and traced_input.batch_dim != 0:
            return Proof(None, _FIXED_ROWS)
    read = {name for name, leaf in zip(names, traced.inputs, strict=False) if leaf.placeholder in _nodes_read(traced)}
    if read & _counted_results(model, graph):
        return Proof(None, "it reads a mean of the model's results that leaves targets out")
    proof = _conclude(traced, loss, n_results=len(example_results))
    return replace(proof, assumed=opened.exported.assumed if opened is not None else None)


def _changed_state(loss: _Loss, arguments: tuple[Sequence[Tensor], Any], device: torch.device) -> tuple[str, ...]:
    """Return the names of the state that the second call of a loss changes and later calls read.

    The first call may change some: a GradScaler creates its scale. The loss is called on fake tensors; on zeros if it reads values of
    tensors: ``history.append(loss.item())``.
    """
    with preserve_state(loss.loss_fn, device) as changed:
        try:
            with fake_tensors() as make_fake:
                return _changed_by_second_call(loss, make_fake(arguments), changed)
        except (RuntimeError, TypeError, ValueError):
            return _changed_by_second_call(loss, pytree.tree_map_only(Tensor, torch.zeros_like, arguments), changed)


def _changed_by_second_call(loss: _Loss, arguments: tuple[Any, Any], changed: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    loss(*arguments)
    changed()
    loss(*arguments)
    return changed()


def _changing(names: Sequence[str]) -> Proof:
    """Return the proof of a loss that changes state, under the names that its author knows."""
    return Proof(None, f"it changes what later calls read: {', '.join(name.removeprefix('loss_fn.') for name in names)}")


def _conclude(traced: ModelGraph, loss: nn.Module, n_results: int) -> Proof:
    """Read the reduction of a loss off its traced graph. The first ``n_results`` inputs are results of the model, the others the target."""
    (output,) = traced.leaves
    if traced.mixing:
        return Proof(None, f"it mixes rows in {', '.join(traced.mixing.normalizations)}")
    written = {
        argument.name: None for node in traced.computing_nodes() for argument in mutated_arguments(node) if argument.op == "placeholder"
    }
    if written:
        return _changing([traced.buffers.get(name, name) for name in written])
    if traced.batch is None:
        return Proof(None, _FIXED_ROWS)
    if any(map(draws, traced.computing_nodes())):
        return Proof(None, "it draws random numbers, and ranks and microbatches would draw the same for different rows")
    if output.combine == "same":
        return Proof("mean")  # a constant is the mean of itself
    if output.combine not in ("mean", "sum"):
        return Proof(None, _mixing_operation(traced))
    used = with_ancestors(traced.graph.output_node().all_input_nodes)
    means = {mean.name: mean for mean in counted_means(traced) if mean in used}
    if not means or output.combine == "sum":
        return Proof(output.combine)
    parts = with_totals(traced)
    if parts.leaves[0].combine != "sum":
        return Proof(None, "it computes more than a weighted sum with a mean that leaves targets out")
    known: dict[str, int | Tensor | Literal["batch"]] = {
        "batch": "batch",
        **{leaf.placeholder: index for index, leaf in enumerate(traced.inputs[n_results:]) if leaf.placeholder is not None},
        **traced.constants,
        **{placeholder: loss.get_buffer(name) for placeholder, name in traced.buffers.items()},
    }
    counted, others = ([total for total in parts.totals if (total.mean in means) == is_counted] for is_counted in (True, False))
    weighed = next((total.mean for total in counted if not set(total.arguments) <= known.keys()), None)
    if weighed is not None:
        return Proof(None, f"the rows of {weighed} are weighted by what the model returns")
    counters = tuple(Counter(total.module, tuple(known[name] for name in total.arguments), means[total.mean]) for total in counted)
    of_rows = {node.name for node in rows_read(traced)}
    row_means = tuple(total.mean for total in others if total.mean in of_rows)
    return Proof("counted", counters=counters, row_means=row_means, adds_constants=len(row_means) < len(others))


def _mixing_operation(traced: ModelGraph) -> str:
    """Name the operation that mixes rows, from the last note of the trace."""
    reason = traced.notes[-1].partition(":")[0] if traced.notes else "rows of the batch are mixed"
    return reason.replace("module (the model itself), ", "").partition(", at ")[0]


def _nodes_read(traced: ModelGraph) -> frozenset[str]:
    """Return the names of the nodes from which a traced loss is computed."""
    return frozenset(node.name for node in with_ancestors(traced.graph.output_node().all_input_nodes))


def _counted_results(model: ModelGraph, graph: ModelGraph) -> frozenset[str]:
    """Return the means that a rank's ``graph`` returns where the model computes them from a mean over targets that are not ignored."""
    nodes, counted = {node.name: node for node in model.graph.nodes}, set(counted_means(model))
    results = _by_place(graph)
    means = [(whole.node, results[place]) for place, whole in _by_place(model).items() if whole.combine == "mean" and place in results]
    return frozenset(own.node for node, own in means if node and own.node and counted & set(with_ancestors([nodes[node]])))


def _by_place(graph: ModelGraph) -> dict[object, Output]:
    """Return the results that a loss may read, by their index among the leaves, or by the attribute that has them."""
    return {index if output.destination is None else output.destination: output for index, output in enumerate(graph.loss_results)}


class _Loss(nn.Module):
    """A loss as a module, to be traced. It takes ``_results_in_order``, in the shapes of ``_example_result``, and the target."""

    def __init__(self, graph: ModelGraph, loss_fn: LossFunction) -> None:
        super().__init__()
        self.training = loss_fn.training if isinstance(loss_fn, nn.Module | RowsFirst) else True
        self.loss_fn = loss_fn
        self._graph = (graph,)

    def forward(self, results: Sequence[Tensor], target: Any) -> Tensor:
        (graph,) = self._graph
        outputs = {output.node: output for output in graph.loss_results}
        pairs = zip(_results_in_order(graph), results, strict=True)
        values = {name: _result_of_rows(graph, outputs[name], rows.clone()) for name, rows in pairs}  # a loss may change them in place
        target = pytree.tree_map_only(Tensor, torch.detach, target)  # it has no gradient, so that it may weigh rows
        leaves = [
            _constant_result(output.constant, results) if output.node is None else values[output.node] for output in graph.loss_results
        ]
        loss: Tensor = self.loss_fn(pytree.tree_unflatten(leaves, graph.loss_tree), target)
        return loss


def _constant_result(constant: Any, results: Sequence[Tensor]) -> Any:
    """Return a result that no node computes: a constant, or a size such as ``2 * batch`` at the batch of the trace."""
    if not isinstance(constant, sympy.Expr):
        return constant
    return sympy.lambdify(list(constant.free_symbols), constant)(results[0].shape[0])


def _results_in_order(graph: ModelGraph) -> list[str]:
    """Return the names of the results, those with rows first: a trace reads the batch from its first argument."""
    return sorted(graph.loss_nodes, key=lambda name: graph.combine(name) == "same")


def fake_value(graph: ModelGraph, output: Output) -> Tensor:
    """Return the fake tensor of a result that a node computes."""
    value = next(node for node in graph.graph.nodes if node.name == output.node).meta["val"]
    assert isinstance(value, Tensor)
    return value


def entries_per_row(graph: ModelGraph, output: Output) -> int:
    """Return how many entries of its batch dimension a result has for each row: ``s`` for logits of shape ``(batch * s, vocab)``."""
    assert output.batch_dim is not None
    size = size_of(fake_value(graph, output).shape[output.batch_dim])
    return size // graph.batch_size if isinstance(size, int) else int(size.subs(graph.batch, 1))


def has_rows(leaf: Any, rows: int) -> bool:
    """Return whether a leaf of a target is a tensor whose first dimension is the batch."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _example_result(graph: ModelGraph, output: Output, batch: int, device: torch.device) -> Tensor:
    """Return an argument of ``_result_of_rows``: a result with the batch first, then the other entries of a row, if there are any.

    Logits ``(batch * s, vocab)``: ``(batch, s, vocab)``; a mean or sum over the batch, ``()``: ``(batch,)``; without rows: unchanged.
    """
    value = fake_value(graph, output)
    shape = [size_of(size) for size in value.shape]
    if output.combine == "concatenate" and output.batch_dim is not None:
        entries = entries_per_row(graph, output)
        del shape[output.batch_dim]
        shape = [batch, *([entries] if entries > 1 else []), *shape]
    elif output.combine in ("mean", "sum"):
        shape = [batch, *shape]
    return torch.empty([int(size) for size in shape], dtype=value.dtype, device=device)


def _result_of_rows(graph: ModelGraph, output: Output, value: Tensor) -> Tensor:
    """Compute a result from a value in the shape of ``_example_result``, so that the trace shows how it depends on the batch."""
    if output.combine == "mean":
        return value.mean(0)
    if output.combine == "sum":
        return value.sum(0)
    if output.combine != "concatenate" or output.batch_dim is None:
        return value
    if entries_per_row(graph, output) > 1:
        value = value.flatten(0, 1)
    return value if output.batch_dim == 0 else value.movedim(0, output.batch_dim)


def _batch_to_trace(graph: ModelGraph, leaves: Sequence[Any], rows: int) -> int:
    """Return a batch size that is no other size of a result or of a target leaf, so that they differ in the trace."""
    values = [fake_value(graph, output) for output in graph.loss_results if output.node is not None]
    sizes = {size for value in values for size in map(size_of, value.shape)}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            sizes.update(leaf.shape[1:] if has_rows(leaf, rows) else leaf.shape)
    return next(number for number in range(_LEAST_ROWS, len(sizes) + _LEAST_ROWS + 1) if number not in sizes)


def _example_target_leaf(leaf: Any, rows: int, batch: int, device: torch.device) -> Any:
    """Return a leaf of the target with ``batch`` rows in place of ``rows``."""
    if not isinstance(leaf, Tensor):
        return leaf
    shape = (batch, *leaf.shape[1:]) if has_rows(leaf, rows) else leaf.shape
    return torch.empty(shape, dtype=leaf.dtype, device=device)
