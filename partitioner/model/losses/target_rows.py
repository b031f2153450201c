"""Find the batch in a target, and put it first, as programs cut it.

    results (length, batch, classes), target (length, batch)      target -> (batch, length), and loss_fn takes it as it was

The dimension is the one that ``batch_dims`` names; else the first, if it has the size of the batch; else that of the results. If both have
this size, it is that of the results. A leaf that is named as without a batch is kept beside the target, and is never cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.inputs.batch_dims import TARGET, BatchDims, argument_of, target_dims
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import pytree


@dataclass(eq=False)
class RowsFirst:
    """A loss of targets whose batch was put first.

    Attributes:
        loss_fn: of the targets as the user passes them.
        dims: for each leaf of the target, where its batch was; None: it was not moved.
        whole: index of a leaf -> the leaf, which has no batch. A list of pairs.
        training: the mode of a loss that is a module.
    """

    loss_fn: Callable[..., Tensor]
    dims: tuple[int | None, ...]
    whole: list[Any]
    training: bool = field(init=False)

    def __post_init__(self) -> None:
        self.training = self.loss_fn.training if isinstance(self.loss_fn, nn.Module) else True

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a target whose batch is first."""
        leaves, tree = pytree.tree_flatten(target, is_leaf=lambda value: value is None)
        device = next((leaf.device for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), torch.device("cpu"))
        moved = [leaf if dim is None or leaf is None else leaf.movedim(0, dim) for dim, leaf in zip(self.dims, leaves, strict=True)]
        for index, leaf in zip(self.whole[::2], self.whole[1::2], strict=True):
            moved[index] = leaf.to(device)
        return self.loss_fn(output, pytree.tree_unflatten(moved, tree))


def rows_first(
    given: BatchDims, graph: ModelGraph, target: Any, loss_fn: Callable[..., Tensor], rows: int
) -> tuple[Any, Callable[..., Tensor]]:
    """Return a target with its batch first, and the loss of it; both unchanged where the batch is first.

    Args:
        given: ``batch_dims`` of ``partition``.
        graph: the model; its results say where the batch is.
        rows: that this process passes.

    Raises:
        ConfigError: ``given`` names a leaf that there is not, or a dimension of another size; or results differ in where the batch is, and
            so may a leaf.
    """
    of_results = {output.batch_dim for output in graph.leaves if output.combine == "concatenate" and output.batch_dim is not None}
    if not of_results - {0} and not any(argument_of(name) == TARGET for name in given):
        return target, loss_fn
    with_paths, tree = pytree.tree_flatten_with_path(target, is_leaf=lambda value: value is None)
    leaves = {f"{TARGET}{pytree.keystr(path)}": leaf for path, leaf in with_paths}
    named = target_dims(given, leaves) if target is not None else {}
    dims: list[int | None] = []
    moved: list[Any] = []
    whole: list[Any] = []
    for index, (name, leaf) in enumerate(leaves.items()):
        if name in named and named[name] is None:
            whole += [index, leaf]
            dims.append(None)
            moved.append(None)
            continue
        dim = _batch_dim(name, leaf, named, of_results, rows) if isinstance(leaf, Tensor) else 0
        dims.append(dim or None)
        moved.append(leaf.movedim(dim, 0) if dim else leaf)
    if not whole and not any(dims):
        return target, loss_fn
    return pytree.tree_unflatten(moved, tree), RowsFirst(loss_fn, tuple(dims), whole)


def _batch_dim(name: str, leaf: Tensor, named: BatchDims, of_results: set[int], rows: int) -> int:
    """Return the batch dimension of a leaf of the target; 0 if none is found: a later check refuses it, if the batch is cut."""
    dim = named.get(name)
    if dim is not None:
        if leaf.shape[dim] != rows:
            raise ConfigError(
                f"batch_dims says that dimension {dim} of {name} is the batch, and it has {leaf.shape[dim]} rows there, not {rows}",
                remedy="name the dimension that holds the samples; a leaf of the target by its path: batch_dims={\"target['labels']\": 1}",
            )
        return dim
    fitting = [dim for dim in sorted(of_results | {0}) if leaf.dim() > dim and leaf.shape[dim] == rows]
    if len(fitting) > 1 and len(of_results) > 1:
        raise ConfigError(
            f"{name} has shape {tuple(leaf.shape)}, the batch has {rows} rows, and results have it in dimensions "
            f"{' and '.join(map(str, sorted(of_results)))}: it may be any of {', '.join(map(str, fitting))}",
            remedy=f'name it: partition(..., batch_dims={{"{name}": {fitting[-1]}}})',
        )
    of_both = [dim for dim in fitting if dim in of_results]
    return (of_both or fitting or [0])[0]
