"""What programs do with a batch besides computing on it: cut it into microbatches, put results together, accumulate gradients.

batch 9 in 4 microbatches:   | 3 | 2 | 2 | 2 |      (the first ones are larger, as torch.tensor_split cuts)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ir.torch_private import foreach_add_, pytree

__all__ = [
    "add_gradients",
    "add_gradients_in_place",
    "concatenate",
    "microbatch_sizes",
    "microbatch_weights",
    "split_batch",
    "split_target",
    "take_part",
    "total",
    "weighted_total",
]


def microbatch_sizes(batch: int, n_microbatches: int) -> tuple[int, ...]:
    """How many rows each microbatch has.

    >>> microbatch_sizes(9, 4)
    (3, 2, 2, 2)
    """
    size, larger = divmod(batch, n_microbatches)
    return tuple(size + (index < larger) for index in range(n_microbatches))


def microbatch_weights(sizes: Sequence[int], reduction: str, parts: int = 1) -> tuple[float, ...]:
    """What each microbatch's loss counts in the loss of the batch: its part of the rows for a mean, 1 for a sum.

    Args:
        parts: how many ranks cut the batch alike: each one's rows are this part of all.
    """
    rows = sum(sizes) * parts
    return tuple(size / rows if reduction == "mean" else 1.0 for size in sizes)


def split_batch(value: Tensor, sizes: Sequence[int], dim: int, parts: int = 1) -> list[Tensor]:
    """Return the rows of each microbatch. A dimension that holds several entries a row (batch times sequence) is cut between rows.

    Args:
        parts: how many ranks cut the batch: the value has the rows of all of them, rank after rank, and ``sizes`` are those of one rank.
    """
    rows = sum(sizes) * parts
    per_row = value.shape[dim] // rows
    of_ranks = [torch.split(rank, [size * per_row for size in sizes], dim) for rank in torch.chunk(value, parts, dim)]
    return [torch.cat(of, dim) if parts > 1 else of[0].contiguous() for of in zip(*of_ranks, strict=True)]


def split_target(target: Any, sizes: Sequence[int]) -> list[Any]:
    """The target of each microbatch: every tensor in it whose first dimension is the batch is cut, everything else is passed whole."""
    rows = sum(sizes)
    leaves, tree = pytree.tree_flatten(target)
    cut = [
        split_batch(leaf, sizes, 0) if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([parts[index] for parts in cut], tree) for index in range(len(sizes))]


def take_part(value: Tensor, dim: int, sizes: Sequence[int] | int, index: int) -> Tensor:
    """One part of a tensor that is cut along a dimension: into parts of these sizes, or into so many equal ones."""
    if isinstance(sizes, int):
        size = value.shape[dim] // sizes
        return value.narrow(dim, index * size, size).contiguous()
    return value.narrow(dim, sum(sizes[:index]), sizes[index]).contiguous()


def concatenate(values: Sequence[Tensor], dim: int, parts: int = 1) -> Tensor:
    """Return the value over the batch from its values over microbatches, its rows in their order: the inverse of ``split_batch``.

    Args:
        parts: how many ranks cut the batch: each value has the rows of all of them, rank after rank.
    """
    if len(values) == 1:
        return values[0]
    of_ranks = zip(*(torch.chunk(value, parts, dim) for value in values), strict=True)
    return torch.cat([rows for rank in of_ranks for rows in rank], dim)


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum, first to last."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def weighted_total(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean over the batch from the means over microbatches."""
    return values[0] if len(values) == 1 else total([value * weight for value, weight in zip(values, weights, strict=True)])


def add_gradients(gradients: Sequence[Tensor], more: Sequence[Tensor], new: Sequence[int]) -> list[Tensor]:
    """Sums, some of them in new memory: what a backward returned may be in use elsewhere.

    Args:
        new: which; all others are added up in the memory of the first.
    """
    sums = [gradients[index] + more[index] if index in new else gradients[index] for index in range(len(gradients))]
    own = [index for index in range(len(gradients)) if index not in new]
    add_gradients_in_place([sums[index] for index in own], [more[index] for index in own])
    return sums


def add_gradients_in_place(gradients: Sequence[Tensor], more: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add to gradients that are nobody else's memory."""
    if gradients:
        foreach_add_(list(gradients), list(more))
    return gradients
