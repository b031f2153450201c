"""What a collective gives a rank, and its bytes as ``cost_models.communication`` counts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cost_models.simulator.values import Held
from passes.ir import communication
from passes.ir.runs import from_text, length, segments

__all__ = ["collected", "copied"]


def collected(
    function: Callable[..., Any], tensors: Sequence[Held], rest: Sequence[Any], keywords: Mapping[str, Any], place: int
) -> tuple[list[tuple[int, ...]], int]:
    """The shapes that a collective gives, and how many bytes it has as ``cost_models.communication`` counts them."""
    n_ranks = len(keywords["group"])
    given = sum(tensor.bytes for tensor in tensors)
    if function is communication.all_reduce:
        return [tensor.shape for tensor in tensors], given
    if function in (communication.halo_exchange, communication.halo_add):
        return _halos(function, tensors, rest[0], keywords, place)
    sizes = keywords.get("sizes") or [None] * len(tensors)
    if function is communication.all_to_all:
        splits = keywords.get("split_sizes") or sizes
        joins = keywords.get("concat_sizes") or sizes
        shapes = []
        for tensor, split_dim, join_dim, split, join in zip(tensors, rest[0], rest[1], splits, joins, strict=True):
            shape = list(tensor.shape)
            shape[split_dim] = split[place] if split else shape[split_dim] // n_ranks
            shape[join_dim] = sum(join) if join else shape[join_dim] * n_ranks
            shapes.append(tuple(shape))
        return shapes, given
    shapes = []
    for tensor, dim, pieces in zip(tensors, rest[0], sizes, strict=True):
        whole = tensor.shape[dim] * n_ranks if function is communication.all_gather else tensor.shape[dim] // n_ranks
        if pieces:
            whole = sum(pieces) if function is communication.all_gather else pieces[place]
        shapes.append((*tensor.shape[:dim], whole, *tensor.shape[dim + 1 :]))
    if function is communication.reduce_scatter:
        return shapes, given
    results = [Held(tensor.storage, shape, tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=True)]
    return shapes, sum(result.bytes for result in results)


def copied(
    function: Callable[..., Any], tensors: Sequence[Held], shapes: Sequence[tuple[int, ...]], dims: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The bytes that a rank copies into the message of a collective, and out of it.

    What is summed is summed in a copy. A single tensor whose parts are runs of memory is sent from where it lies, and lies where it is
    received; all others are put together. What a halo is put together with is no part of the message, and not counted.

    Args:
        shapes: of what the collective gives.
        dims: for each tensor the dimension that is split, that is put together, or one of each.
    """
    given = sum(tensor.bytes for tensor in tensors)
    if function in (communication.halo_exchange, communication.halo_add):
        return 0, 0
    if function is communication.all_reduce:
        return given, 0
    first, taken = tensors[0], sum(Held(each.storage, shape, each.dtype).bytes for shape, each in zip(shapes, tensors, strict=True))
    bundled = len(tensors) > 1
    if function is communication.all_gather:
        return given * bundled, taken * (bundled or not _leads(shapes[0], dims[0][0]))
    goes_in = given * (bundled or not _leads(first.shape, dims[0][0]))
    if function is communication.reduce_scatter:
        return goes_in, 0
    return goes_in, taken * (bundled or not _leads(shapes[0], dims[1][0]))


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether parts along the dimension are runs of memory."""
    return math.prod(shape[:dim]) == 1


def _halos(
    function: Callable[..., Any], tensors: Sequence[Held], dims: Sequence[int], keywords: Mapping[str, Any], place: int
) -> tuple[list[tuple[int, ...]], int]:
    """The shapes that a halo exchange gives, and the most bytes that one rank gives another."""
    shapes, most = [], 0
    for tensor, dim, owned, wanted in zip(tensors, dims, keywords["owned"], keywords["wanted"], strict=True):
        read = segments(tuple(owned), wanted)
        size = length(from_text(wanted)[place]) if function is communication.halo_exchange else owned[place]
        shapes.append((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))
        counts = [
            sum(copy.count for copy in copies) for reader, each in enumerate(read) for owner, copies in enumerate(each) if owner != reader
        ]
        most += tensor.bytes // tensor.shape[dim] * max(counts, default=0)
    return shapes, most
