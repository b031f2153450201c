"""What each function of a program gives, from what it is given."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from cost_models.simulator.storages import UNKNOWN, Category, Held
from passes.ir.comm import microbatch
from passes.ir.comm import primitives as communication
from passes.ir.comm.index_ranges import segments
from passes.ir.comm.semantics import collective_arguments, collective_spec
from passes.ir.tensor_spec import TensorSpec

__all__ = ["FUNCTIONS", "collected", "copied"]


class _Reader(Protocol):
    """Steps through a program.

    Attributes:
        sizes: the rows of each microbatch.
    """

    sizes: tuple[int, ...]

    def tensor(self, node: fx.Node, shape: Sequence[int], dtype: torch.dtype, category: Category | None = None) -> Held:
        """A new tensor."""


def _split(reader: _Reader, node: fx.Node, value: Any, sizes: Sequence[int], dim: int, parts: int = 1) -> Any:
    """The rows of each microbatch: views where rows come first."""
    if not isinstance(value, Held):
        return [UNKNOWN] * len(sizes)
    per_row = value.shape[dim] // sum(sizes)
    shapes = [(*value.shape[:dim], size * per_row, *value.shape[dim + 1 :]) for size in sizes]
    if parts == 1 and (dim == 0 or len(sizes) == 1):
        return [Held(value.storage, shape, value.dtype) for shape in shapes]
    return [reader.tensor(node, shape, value.dtype) for shape in shapes]


def _count(reader: _Reader, _node: fx.Node, batch: int, count: int) -> tuple[int, ...]:
    """The rows of each microbatch."""
    reader.sizes = microbatch.microbatch_sizes(batch, count)
    return reader.sizes


def _alike(reader: _Reader, node: fx.Node, value: Any, *_rest: Any, **_keywords: Any) -> Any:
    """New memory of a value's shape."""
    first = value[0] if isinstance(value, tuple | list) else value
    return reader.tensor(node, first.shape, first.dtype)


def _concatenated(reader: _Reader, node: fx.Node, values: Sequence[Held], dim: int, _parts: int = 1) -> Held:
    """All along one dimension."""
    first = values[0]
    if len(values) == 1:
        return first
    whole = sum(value.shape[dim] for value in values)
    return reader.tensor(node, (*first.shape[:dim], whole, *first.shape[dim + 1 :]), first.dtype)


def _part(reader: _Reader, node: fx.Node, value: Held, dim: int, sizes: Any, index: int) -> Held:
    """One part of a tensor: a view where it is cut along its first dimension."""
    size = value.shape[dim] // sizes if isinstance(sizes, int) else sizes[index]
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    return Held(value.storage, shape, value.dtype) if dim == 0 else reader.tensor(node, shape, value.dtype)


def _added(reader: _Reader, node: fx.Node, gradients: Sequence[Held], _more: Sequence[Held], new: Sequence[int]) -> list[Held]:
    """Sums, some of them in new memory."""
    return [reader.tensor(node, each.shape, each.dtype) if index in new else each for index, each in enumerate(gradients)]


FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    microbatch.microbatch_sizes: _count,
    microbatch.microbatch_weights: lambda _reader, _node, sizes, *_rest: (1.0,) * len(sizes),
    microbatch.split_batch: _split,
    microbatch.split_target: lambda _reader, _node, _target, sizes: [UNKNOWN] * len(sizes),
    microbatch.concatenate: _concatenated,
    microbatch.take_part: _part,
    microbatch.total: lambda reader, node, values: values[0] if len(values) == 1 else _alike(reader, node, values),
    microbatch.weighted_total: lambda reader, node, values, _weights: values[0] if len(values) == 1 else _alike(reader, node, values),
    microbatch.add_gradients: _added,
    microbatch.add_gradients_in_place: lambda _reader, _node, gradients, _more: gradients,
    operator.add: _alike,
    torch.zeros: lambda reader, node, shape, dtype, device: reader.tensor(node, shape, dtype),  # noqa: ARG005
    torch.zeros_like: _alike,
    torch.mul: _alike,
}
"""What each function of a program gives, from what it is given."""


# -- what a collective gives a rank ------------------------------------------------------------------------------------------------


def collected(
    function: Callable[..., Any], tensors: Sequence[Held], rest: Sequence[Any], keywords: Mapping[str, Any], place: int
) -> tuple[list[tuple[int, ...]], int]:
    """The shapes that a collective gives, and how many bytes it has as ``cost_models.collectives.alpha_beta`` counts them."""
    specs = [TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    arguments = collective_arguments(function, (specs, *rest), keywords)
    results = collective_spec(function, arguments, keywords["group"][place], operator.eq).results
    shapes = [tuple(map(int, result.shape)) for result in results]
    if function in (communication.halo_exchange, communication.halo_add):
        return shapes, _most_given(tensors, rest[0], keywords)
    if function is communication.all_gather:
        return shapes, sum(math.prod(shape) * tensor.dtype.itemsize for shape, tensor in zip(shapes, tensors, strict=True))
    return shapes, sum(tensor.bytes for tensor in tensors)


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


def _most_given(tensors: Sequence[Held], dims: Sequence[int], keywords: Mapping[str, Any]) -> int:
    """The most bytes that one rank gives another in a halo exchange."""
    most = 0
    for tensor, dim, owned, wanted in zip(tensors, dims, keywords["owned"], keywords["wanted"], strict=True):
        counts = [
            sum(copy.count for copy in copies)
            for reader, each in enumerate(segments(tuple(owned), wanted))
            for owner, copies in enumerate(each)
            if owner != reader
        ]
        most += tensor.bytes // tensor.shape[dim] * max(counts, default=0)
    return most
