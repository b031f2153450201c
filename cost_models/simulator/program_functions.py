"""What each function of a program gives, from what it is given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from cost_models.simulator.values import UNKNOWN, Category, Held
from passes.ir import microbatch

__all__ = ["FUNCTIONS"]


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
