"""How many bytes a collective moves: between ranks, into its message, and out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cost_models.simulator.storages import Held
from passes.ir.comm import primitives as communication
from passes.ir.comm.index_ranges import largest_message


def moved_bytes(
    function: Callable[..., Any],
    tensors: Sequence[Held],
    shapes: Sequence[tuple[int, ...]],
    rest: Sequence[Any],
    keywords: Mapping[str, Any],
) -> int:
    """Return the size of a collective in bytes, as ``cost_models.collectives.alpha_beta`` counts them.

    Args:
        shapes: of what the collective gives.
        rest: its arguments after the tensors.
        keywords: its arguments by name.
    """
    if function in (communication.halo_exchange, communication.halo_add):
        return _most_given(tensors, rest[0], keywords)
    if function is communication.all_gather:
        return sum(math.prod(shape) * tensor.dtype.itemsize for shape, tensor in zip(shapes, tensors, strict=True))
    return sum(tensor.bytes for tensor in tensors)


def copied_bytes(
    function: Callable[..., Any], tensors: Sequence[Held], shapes: Sequence[tuple[int, ...]], dims: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Return the bytes that a rank copies into the message of a collective, and out of it.

    What is summed is summed in a copy. A single tensor whose parts are runs of memory is sent without a copy, and stays where it is
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
    """Return whether parts along the dimension are contiguous."""
    return math.prod(shape[:dim]) == 1


def _most_given(tensors: Sequence[Held], dims: Sequence[int], keywords: Mapping[str, Any]) -> int:
    """Return the most bytes that one rank gives another in a halo exchange."""
    halos = zip(tensors, dims, keywords["owned"], keywords["wanted"], strict=True)
    return sum(tensor.bytes // tensor.shape[dim] * largest_message(tuple(owned), wanted) for tensor, dim, owned, wanted in halos)
