"""Prove what a loss function is over the rows of a batch: their mean, their sum, or a mean over targets that are not ignored.

The loss is traced as a model is, its arguments the model's results and the target, and the batch is followed through its graph
(``passes.analysis.batch_semantics``). What is proved holds for all values and for every batch size:

    cross_entropy(o, t)                     counted: a mean over the targets that are not ignored
    (o - t).pow(2).mean()                   mean
    mse_loss(o, t).sqrt()                   nothing: rows meet in sqrt
    o.mean() if o.sum() > 0 else o.max()    nothing: values decide what it computes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx, nn

from partitioner.model.losses.form import LossFunction, fake_tensors, without_warnings_of_fakes
from partitioner.model.losses.reachable_state import undisturbed
from partitioner.tracing.trace import trace
from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import with_ancestors
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.microbatch import split_target
from passes.ir.graph import ModelGraph, Output
from passes.ir.torch_private import pytree
from passes.spmd.mean_to_sum import counted_means, with_totals

__all__ = ["Counter", "Proof", "prove"]

_LEAST_ROWS = 3
"""Of the batch that a loss is traced with: the next number that is no other size of its arguments."""


@dataclass(frozen=True, eq=False)
class Proof:
    """What is proved of a loss.

    Attributes:
        kind: None: nothing.
        reason: why nothing is.
        counters: for ``"counted"``, of each mean over targets that are not ignored, what counts these.
        is_sole: whether the loss is one such mean: then microbatches may be weighted by its targets.
        is_fitted: whether all this holds for the rows of two traces alone, so that it should be looked at for others.
    """

    kind: Literal["mean", "sum", "counted"] | None
    reason: str = ""
    counters: tuple[Counter, ...] = ()
    is_sole: bool = True
    is_fitted: bool = False


@dataclass(frozen=True)
class Counter:
    """Counts the targets that a mean divides by.

    Attributes:
        module: the graph that counts.
        leaves: which leaves of the target are its arguments.
    """

    module: fx.GraphModule
    leaves: tuple[int, ...]

    def counts(self, target: Any, sizes: Sequence[int]) -> tuple[float, ...]:
        """How many targets each microbatch counts."""
        parts = [pytree.tree_leaves(part) for part in split_target(target, sizes)]
        return tuple(map(float, torch.stack([self.module(*(part[leaf] for leaf in self.leaves)) for part in parts]).tolist()))


def prove(model: ModelGraph, graph: ModelGraph, loss_fn: LossFunction, target: Any, rows: int, device: torch.device) -> Proof:
    """Trace a loss and follow the batch through it.

    Args:
        model: whole, as it was traced.
        graph: as a rank computes it: its outputs are those that the loss takes.
        target: for a batch of so many rows.
        device: where the loss is computed.
    """
    results = {output.node: output for output in graph.outputs if output.node is not None}
    if any(output.combine == "mean" for output in results.values()) and _counts(model):
        return Proof(None, "the model returns a mean that leaves targets out")
    try:
        loss = _Loss(graph, loss_fn)
        leaves = pytree.tree_leaves(target)
        batch = _rows_to_trace(graph, leaves, rows)
        given = [_example(graph, results[name], batch, device) for name in _in_order(graph)]
        tree = pytree.tree_structure(target)
        like = [_example_target(leaf, rows, batch, device) for leaf in leaves]
        with undisturbed(loss_fn, device), without_warnings_of_fakes():
            traced = trace(loss, (given, pytree.tree_unflatten(like, tree)), training=loss.training, autocast=graph.autocast)
        if _changes_state(loss, given, pytree.tree_unflatten(like, tree), device):
            return Proof(None, "it changes what later calls read")
    except Exception as error:  # noqa: BLE001  whatever a user's code, or a trace of it, raises: then nothing is proved
        return Proof(None, str(getattr(error, "problem", error)).replace("_Loss", "loss_fn").splitlines()[0])
    if any(
        isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch and traced.inputs[index].batch_dim != 0
        for index, leaf in enumerate([*given, *like])
    ):
        return Proof(None, "it fixes the number of rows")
    return _conclude(traced, n_results=len(given))


def _changes_state(loss: _Loss, results: Sequence[Tensor], target: Any, device: torch.device) -> bool:
    """Whether a call of a loss leaves anything for the next one. The first may: a GradScaler makes its scale."""
    with undisturbed(loss.loss_fn, device) as is_changed, fake_tensors() as faked:
        fake = faked((results, target))
        loss(*fake)
        is_changed()
        loss(*fake)
        return is_changed()


def _conclude(traced: ModelGraph, n_results: int) -> Proof:
    (output,) = traced.outputs
    if traced.mixing:
        return Proof(None, f"it mixes rows in {', '.join(traced.mixing.normalizations)}")
    if any(argument.op == "placeholder" for node in traced.computing_nodes() for argument in mutated_arguments(node)):
        return Proof(None, "it changes what later calls read")
    if output.combine == "same":
        return Proof("mean")  # a constant is the mean of itself
    if output.combine not in ("mean", "sum"):
        return Proof(None, _where(traced))
    if not counted_means(traced):
        return Proof(output.combine, is_fitted=traced.batch is None)
    parts = with_totals(traced)
    if parts.outputs[0].combine != "sum":
        return Proof(None, "it computes more than a weighted sum with a mean that leaves targets out")
    places = {leaf.placeholder: index - n_results for index, leaf in enumerate(traced.inputs)}
    counted = [total for total in parts.totals if total.arguments != ("batch",)]
    if any(places.get(name, -1) < 0 for total in counted for name in total.arguments):
        return Proof(None, "its rows are weighted by class")
    counters = tuple(Counter(total.module, tuple(places[name] for name in total.arguments)) for total in counted)
    return Proof("counted", "", counters, len(parts.totals) == 1, traced.batch is None)


def _where(traced: ModelGraph) -> str:
    """The operation in which rows meet."""
    reason = traced.notes[-1].partition(":")[0] if traced.notes else "rows of the batch meet"
    return reason.replace("module (the model itself), ", "").partition(", at ")[0]


def _counts(model: ModelGraph) -> bool:
    nodes = {node.name: node for node in model.graph.nodes}
    means = [nodes[output.node] for output in model.outputs if output.combine == "mean" and output.node is not None]
    return bool(set(counted_means(model)) & set(with_ancestors(means)))


class _Loss(nn.Module):
    """A loss as a model: results over the batch, whose rows come first, and the target."""

    def __init__(self, graph: ModelGraph, loss_fn: LossFunction) -> None:
        super().__init__()
        self.training = loss_fn.training if isinstance(loss_fn, nn.Module) else True
        self.loss_fn = loss_fn
        self._graph = (graph,)

    def forward(self, results: Sequence[Tensor], target: Any) -> Tensor:
        (graph,) = self._graph
        found: dict[str, Tensor] = {}
        for name, value in zip(_in_order(graph), results, strict=True):
            found[name] = _result(graph, next(output for output in graph.outputs if output.node == name), value)
        leaves = [_of_rows(output.constant, results) if output.node is None else found[output.node] for output in graph.outputs]
        loss: Tensor = self.loss_fn(pytree.tree_unflatten(leaves, graph.output_tree), target)
        return loss


def _of_rows(constant: Any, results: Sequence[Tensor]) -> Any:
    """A leaf that no node computes; where it is a size, for the batch of a trace."""
    if not isinstance(constant, sympy.Expr):
        return constant
    return sympy.lambdify(list(constant.free_symbols), constant)(results[0].shape[0])


def _in_order(graph: ModelGraph) -> list[str]:
    """The results, those that have rows first: the first argument of a trace says where the batch is."""
    return sorted(graph.returned, key=lambda name: graph.combine(name) == "same")


def _entries(graph: ModelGraph, output: Output) -> int:
    """How many entries of its batch dimension a row of a result has."""
    assert output.batch_dim is not None
    size = size_of(_value(graph, output).shape[output.batch_dim])
    return size // graph.batch_size if isinstance(size, int) else int(size.subs(graph.batch, 1))


def _value(graph: ModelGraph, output: Output) -> Tensor:
    value = next(node for node in graph.graph.nodes if node.name == output.node).meta["val"]
    assert isinstance(value, Tensor)
    return value


def _example(graph: ModelGraph, output: Output, batch: int, device: torch.device) -> Tensor:
    """What ``_result`` makes a result of: rows first, the other entries of the batch dimension second."""
    value = _value(graph, output)
    shape = [size_of(size) for size in value.shape]
    if output.combine == "concatenate" and output.batch_dim is not None:
        entries = _entries(graph, output)
        del shape[output.batch_dim]
        shape = [batch, *([entries] if entries > 1 else []), *shape]
    elif output.combine in ("mean", "sum"):
        shape = [batch, *shape]
    return torch.empty([int(size) for size in shape], dtype=value.dtype, device=device)


def _result(graph: ModelGraph, output: Output, value: Tensor) -> Tensor:
    """Return a result of the model, computed from its value for each row, so that the trace shows how it depends on the batch.

    Args:
        value: shaped as ``_example`` returns it.
    """
    if output.combine == "mean":
        return value.mean(0)
    if output.combine == "sum":
        return value.sum(0)
    if output.combine != "concatenate" or output.batch_dim is None:
        return value
    if _entries(graph, output) > 1:
        value = value.flatten(0, 1)
    return value if output.batch_dim == 0 else value.movedim(0, output.batch_dim)


def _rows_to_trace(graph: ModelGraph, leaves: Sequence[Any], rows: int) -> int:
    sizes = {size for output in graph.outputs if output.node is not None for size in map(size_of, _value(graph, output).shape)}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            sizes.update(leaf.shape[1:] if leaf.dim() > 0 and leaf.shape[0] == rows else leaf.shape)
    return next(number for number in range(_LEAST_ROWS, len(sizes) + _LEAST_ROWS + 1) if number not in sizes)


def _example_target(leaf: Any, rows: int, batch: int, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    has_rows = leaf.dim() > 0 and leaf.shape[0] == rows
    return torch.empty((batch, *leaf.shape[1:]) if has_rows else leaf.shape, dtype=leaf.dtype, device=device)
