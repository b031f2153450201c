"""Decompose pooling and interpolation whose windows differ from step to step: averages that exclude padding, resizing by any factor.

The decomposition computes the elements and weights of each step from its index in the whole dimension, by the formulas of the operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.graph.schemas import packet
from passes.ir.comm.index_ranges import length
from passes.ir.errors import PartitionError
from passes.rules.ops.conv_pool import scales_of, spread
from passes.rules.window import Reach
from passes.spmd.decompose.builder import PartWriter

aten = torch.ops.aten


@dataclass(frozen=True)
class Along:
    """One spatial dimension of a shard.

    Attributes:
        dim: the dimension, counted from the end.
        reach: the elements that a step reads.
        start, stop: the interval of steps to compute.
        steps: number of steps of the whole dimension.
        first: index, in the whole dimension, of the first local element.
        is_fetched: whether the local elements are those that the steps read, with padding; else they are the whole dimension.
    """

    dim: int
    reach: Reach
    start: int
    stop: int
    steps: int
    first: int
    is_fetched: bool


@dataclass(frozen=True)
class WindowWriter(PartWriter):
    """Emits the decomposition of an op on a shard of its spatial dimensions, ``space``."""

    space: tuple[Along, ...]

    @property
    def x(self) -> fx.Node:
        """Return the input."""
        x: fx.Node = self.arguments["self"] if "self" in self.arguments else self.arguments["input"]
        return x

    def steps(self, along: Along, dtype: torch.dtype) -> fx.Node:
        """Emit the indices of the steps in the whole dimension."""
        return self.call(aten.arange.start, along.start, along.stop, dtype=dtype, device=self.x.meta["val"].device)

    def select(self, x: fx.Node, along: Along, index: fx.Node) -> fx.Node:
        """Emit the selection of elements by their indices in the whole dimension; those beyond the local ones are clamped."""
        size = int(x.meta["val"].shape[along.dim])
        local = self.call(aten.sub.Scalar, index, along.first) if along.first else index
        return self.call(aten.index_select.default, x, along.dim, self.call(aten.clamp.default, local, 0, size - 1))

    def broadcast(self, vector: fx.Node, along: Along) -> fx.Node:
        """Reshape a vector with one number for each step, so that it broadcasts along the dimension."""
        return self.call(aten.reshape.default, vector, [-1, *[1] * (-along.dim - 1)])


def write_windows(node: fx.Node, write: WindowWriter) -> fx.Node:
    """Emit the decomposition of a call whose windows differ from step to step."""
    writer = _WRITERS.get(packet(node.target))
    if writer is None:
        raise PartitionError(
            f"nothing writes a part of {node.target}", remedy="passes/spmd/decompose/pooling_resize.py lacks the case that its rule allows"
        )
    return writer(write)


# -- averages --------------------------------------------------------------------------------------------------------------------------


def _average(write: WindowWriter) -> fx.Node:
    """Emit the sums of windows, with zeros as padding, divided by the number of elements that each counts."""
    x, rank = write.x, len(write.space)
    for along in write.space:
        if not along.is_fetched:
            x = _padded(write, x, along)
    kernel, stride, padding = (list(spread(write.arguments[name], rank)) for name in ("kernel_size", "stride", "padding"))
    stride = stride or kernel
    function = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}[rank]
    if rank == 1:  # the only one without a divisor among its arguments
        result = write.call(aten.mul.Tensor, write.call(function, x, kernel, stride, [0]), float(kernel[0]))
    else:
        result = write.call(function, x, kernel, stride, [0] * rank, False, True, 1)
    for along, size, step, before in zip(write.space, kernel, stride, padding, strict=True):
        counts = _counts(write, along, size, step, before)
        result = write.call(aten.div.Tensor, result, write.broadcast(counts, along))
    return result


def _padded(write: WindowWriter, x: fx.Node, along: Along) -> fx.Node:
    """Pad a dimension that is not sharded."""
    runs = along.reach.reads(0, along.steps)
    before = runs[0].count if runs[0].step == 0 else 0
    whole = int(x.meta["val"].shape[along.dim])
    after = length(runs) - before - whole
    return write.call(aten.constant_pad_nd.default, x, [*[0] * (2 * (-along.dim - 1)), before, after])


def _counts(write: WindowWriter, along: Along, kernel: int, stride: int, padding: int) -> fx.Node:
    """Emit the divisor of each window: how many elements it has, with or without padding."""
    size = along.reach.size
    steps = write.steps(along, write.x.meta["val"].dtype)
    first = write.call(aten.sub.Scalar, write.call(aten.mul.Scalar, steps, stride), padding)
    last = write.call(aten.clamp.default, write.call(aten.add.Scalar, first, kernel), None, size + padding)
    if not write.arguments["count_include_pad"]:
        first, last = write.call(aten.clamp.default, first, 0), write.call(aten.clamp.default, last, None, size)
    return write.call(aten.sub.Tensor, last, first)


def _adaptive_average(write: WindowWriter) -> fx.Node:
    """Average windows from ``floor(o n / m)`` to ``ceil((o + 1) n / m)``, for step o of m and n elements, offset by offset."""
    x = write.x
    for along in write.space:
        size, steps = along.reach.size, along.steps
        index = write.steps(along, torch.int64)
        first = write.call(aten.div.Tensor_mode, write.call(aten.mul.Scalar, index, size), steps, rounding_mode="floor")
        rounded_up = write.call(aten.add.Scalar, write.call(aten.mul.Scalar, index, size), size + steps - 1)
        stop = write.call(aten.div.Tensor_mode, rounded_up, steps, rounding_mode="floor")
        counts = write.call(aten.sub.Tensor, stop, first)
        terms = []
        for offset in range(-(-size // steps) + 1):
            elements = write.select(x, along, write.call(aten.add.Scalar, first, offset))
            inside = write.call(aten.gt.Scalar, counts, offset)
            terms.append(write.call(aten.mul.Tensor, elements, write.broadcast(inside, along)))
        total = functools.reduce(functools.partial(write.call, aten.add.Tensor), terms)
        x = write.call(aten.div.Tensor, total, write.broadcast(counts, along))
    return x


# -- interpolation ---------------------------------------------------------------------------------------------------------------------


def _nearest(write: WindowWriter, *, exact: bool) -> fx.Node:
    """Select the nearest element of each step; like the op, compute indices in float32 whatever the dtype."""
    x = write.x
    for along, scale in zip(write.space, _scales(write), strict=True):
        steps = write.steps(along, torch.float32)
        steps = write.call(aten.add.Scalar, steps, 0.5) if exact else steps
        place = write.call(aten.floor.default, write.call(aten.mul.Scalar, steps, scale))
        index = write.call(aten.clamp.default, write.call(aten.to.dtype, place, torch.int64), 0, along.reach.size - 1)
        x = write.select(x, along, index)
    return x


def _linear(write: WindowWriter) -> fx.Node:
    """Interpolate linearly between the two elements around each step: ``below * (1 - weight) + above * weight``, in each dimension."""
    x = write.x
    for along, scale in zip(write.space, _scales(write), strict=True):
        centre = write.call(aten.clamp.default, _centres(write, along, scale), 0.0)
        floor = write.call(aten.clamp.default, write.call(aten.floor.default, centre), None, float(along.reach.size - 1))
        weight = write.broadcast(write.call(aten.sub.Tensor, centre, floor), along)
        index = write.call(aten.to.dtype, floor, torch.int64)
        next_index = write.call(aten.clamp.default, write.call(aten.add.Scalar, index, 1), None, along.reach.size - 1)
        below, above = write.select(x, along, index), write.select(x, along, next_index)
        weighted_below = write.call(aten.mul.Tensor, below, write.call(aten.rsub.Scalar, weight, 1.0))
        x = write.call(aten.add.Tensor, weighted_below, write.call(aten.mul.Tensor, above, weight))
    return x


_SHARPNESS = -0.75
"""The parameter a of PyTorch's cubic convolution; Keys, "Cubic convolution interpolation for digital image processing", 1981, has -0.5."""


def _cubic(write: WindowWriter) -> fx.Node:
    """Interpolate between the four elements around each step, by cubic convolution."""
    x = write.x
    for along, scale in zip(write.space, _scales(write), strict=True):
        centre = _centres(write, along, scale)
        below = write.call(aten.floor.default, centre)
        part = write.call(aten.sub.Tensor, centre, below)
        rest = write.call(aten.rsub.Scalar, part, 1.0)
        index = write.call(aten.to.dtype, below, torch.int64)
        weights = [_far(write, part), _near(write, part), _near(write, rest), _far(write, rest)]
        terms = []
        for offset, weight in zip((-1, 0, 1, 2), weights, strict=True):
            shifted = write.call(aten.clamp.default, write.call(aten.add.Scalar, index, offset), 0, along.reach.size - 1)
            terms.append(write.call(aten.mul.Tensor, write.select(x, along, shifted), write.broadcast(weight, along)))
        x = functools.reduce(functools.partial(write.call, aten.add.Tensor), terms)
    return x


def _near(write: WindowWriter, distance: fx.Node) -> fx.Node:
    """Emit the weight ``((a + 2) d - (a + 3)) d² + 1`` of an element at a distance ``d`` below one."""
    inner = write.call(aten.sub.Scalar, write.call(aten.mul.Scalar, distance, _SHARPNESS + 2), _SHARPNESS + 3)
    square = write.call(aten.mul.Tensor, distance, distance)
    return write.call(aten.add.Scalar, write.call(aten.mul.Tensor, inner, square), 1.0)


def _far(write: WindowWriter, distance: fx.Node) -> fx.Node:
    """Emit the weight ``((a e - 5 a) e + 8 a) e - 4 a`` of an element at a distance ``e = d + 1`` from one to two."""
    beyond = write.call(aten.add.Scalar, distance, 1.0)
    result = write.call(aten.sub.Scalar, write.call(aten.mul.Scalar, beyond, _SHARPNESS), 5 * _SHARPNESS)
    result = write.call(aten.add.Scalar, write.call(aten.mul.Tensor, result, beyond), 8 * _SHARPNESS)
    return write.call(aten.sub.Scalar, write.call(aten.mul.Tensor, result, beyond), 4 * _SHARPNESS)


def _centres(write: WindowWriter, along: Along, scale: float) -> fx.Node:
    """Emit the position of each step in the elements' coordinates, a fractional index."""
    dtype = torch.float64 if write.x.meta["val"].dtype == torch.float64 else torch.float32
    steps = write.steps(along, dtype)
    if write.arguments.get("align_corners"):
        return write.call(aten.mul.Scalar, steps, scale)
    middle = write.call(aten.mul.Scalar, write.call(aten.add.Scalar, steps, 0.5), scale)
    return write.call(aten.sub.Scalar, middle, 0.5)


def _scales(write: WindowWriter) -> list[float]:
    """Return the ratio of elements to steps of each dimension."""
    ratios = []
    for along, scale in zip(write.space, scales_of(write.arguments, len(write.space)), strict=True):
        size, steps = along.reach.size, along.steps
        if write.arguments.get("align_corners"):
            ratios.append((size - 1) / (steps - 1) if steps > 1 else 0.0)
        else:
            ratios.append(1.0 / scale if scale else size / steps)
    return ratios


_WRITERS: Mapping[Any, Callable[[WindowWriter], fx.Node]] = {
    **dict.fromkeys((aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d), _average),
    **dict.fromkeys((aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d), _adaptive_average),
    **dict.fromkeys(
        (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d), lambda write: _nearest(write, exact=False)
    ),
    **dict.fromkeys(
        (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d),  # noqa: SLF001
        lambda write: _nearest(write, exact=True),
    ),
    **dict.fromkeys((aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d), _linear),
    aten.upsample_bicubic2d: _cubic,
}
"""Operator -> the writer of its decomposition."""
