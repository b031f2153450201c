"""Functions that programs call to cut a batch into microbatches, concatenate results and accumulate gradients.

batch 9 in 4 microbatches:   | 3 | 2 | 2 | 2 |      (the first ones are larger, as torch.tensor_split cuts)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ir.torch_private import foreach_add_, pytree


def microbatch_sizes(batch: int, n_microbatches: int) -> tuple[int, ...]:
    """Return the number of rows of each microbatch.

    >>> microbatch_sizes(9, 4)
    (3, 2, 2, 2)
    """
    size, larger = divmod(batch, n_microbatches)
    return tuple(size + (index < larger) for index in range(n_microbatches))


def microbatch_weights(sizes: Sequence[int], reduction: str, parts: int = 1) -> tuple[float, ...]:
    """Return the weight of each microbatch's loss in the loss of the batch: its fraction of the rows for a mean, 1 for a sum.

    Args:
        parts: over how many ranks the batch is sharded; ``sizes`` are the rows of one rank.
    """
    rows = sum(sizes) * parts
    return tuple(size / rows if reduction == "mean" else 1.0 for size in sizes)


def split_batch(value: Tensor, sizes: Sequence[int], dim: int, parts: int = 1) -> list[Tensor]:
    """Return the rows of each microbatch. A dimension that holds several entries a row (batch times sequence) is cut between rows.

    Args:
        parts: over how many ranks the batch is sharded: the value has the rows of all ranks, rank after rank, and ``sizes`` are those
            of one rank. Two ranks, two microbatches: rows ``a0 a1 b0 b1`` become ``a0 b0`` and ``a1 b1``.
    """
    per_row = value.shape[dim] // (sum(sizes) * parts)
    entries = [size * per_row for size in sizes]
    by_rank = [torch.split(rank_rows, entries, dim) for rank_rows in torch.chunk(value, parts, dim)]
    return [torch.cat(rows, dim) if parts > 1 else rows[0].contiguous() for rows in zip(*by_rank, strict=True)]


def split_target(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the target of each microbatch: tensors whose first dimension is the batch are cut, everything else is passed whole."""
    rows = sum(sizes)

    def split_leaf(leaf: Any) -> list[Any]:
        holds_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return split_batch(leaf, sizes, 0) if holds_batch else [leaf] * len(sizes)

    leaves, tree = pytree.tree_flatten(target)
    of_leaves = [split_leaf(leaf) for leaf in leaves]
    return [pytree.tree_unflatten([parts[index] for parts in of_leaves], tree) for index in range(len(sizes))]


def take_part(value: Tensor, dim: int, sizes: Sequence[int] | int, index: int) -> Tensor:
    """Return one part of a tensor along a dimension, in memory of its own: a view that is saved would keep the whole tensor alive.

    Args:
        sizes: of all parts, or the number of equal parts.
    """
    size = value.shape[dim] // sizes if isinstance(sizes, int) else sizes[index]
    start = index * size if isinstance(sizes, int) else sum(sizes[:index])
    return value.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


def concatenate(values: Sequence[Tensor], dim: int, parts: int = 1) -> Tensor:
    """Return the value over the batch from its values over microbatches, its rows in their order: the inverse of ``split_batch``.

    Args:
        parts: over how many ranks the batch is sharded: each value has the rows of all ranks, rank after rank.
    """
    if len(values) == 1:
        return values[0]
    by_rank = zip(*(torch.chunk(value, parts, dim) for value in values), strict=True)
    return torch.cat([rows for microbatches in by_rank for rows in microbatches], dim)


def total(values: Sequence[Tensor]) -> Tensor:
    """Return the sum, added from first to last."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def weighted_total(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean over the batch from the means over microbatches."""
    return values[0] if len(values) == 1 else total([value * weight for value, weight in zip(values, weights, strict=True)])


def add_gradients(gradients: Sequence[Tensor], more: Sequence[Tensor], new: Sequence[int]) -> list[Tensor]:
    """Return sums of gradients.

    Args:
        new: indices of the sums in new memory, because other values may alias the gradient; all others are added in place.
    """
    sums = [gradients[index] + more[index] if index in new else gradients[index] for index in range(len(gradients))]
    in_place = [index for index in range(len(gradients)) if index not in new]
    add_gradients_in_place([sums[index] for index in in_place], [more[index] for index in in_place])
    return sums


def add_gradients_in_place(gradients: Sequence[Tensor], more: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add to gradients, which no other value may alias."""
    if gradients:
        foreach_add_(list(gradients), list(more))
    return gradients
