"""Normalize over space tile by tile: compute the statistics of each tile, merge them, and scale and shift the tiles.

From the mean ``m`` and variance ``v`` of each tile, and its fraction ``w`` of all elements, those of the whole are

    mean = sum of w m        variance = sum of w (v + (m - mean)^2)

(Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_of
from passes.tiling.builder import TileWriter

aten = torch.ops.aten

Statistics: TypeAlias = tuple[fx.Node, fx.Node]
"""Mean and variance."""

Scaling: TypeAlias = tuple[fx.Node, fx.Node]
"""Scale and shift of each channel: an element becomes ``x * scale + shift``."""

Emit: TypeAlias = Callable[..., fx.Node]


def tile_statistics(write: TileWriter, node: fx.Node, x: fx.Node, label: str) -> Statistics:
    """Write the mean and variance of one tile: over the batch and space for batch_norm, else over space and the channels of a group.

    Those of a type of 16 bits are computed in float32, as PyTorch's kernels do.
    """
    if x.meta["val"].dtype in (torch.bfloat16, torch.float16):
        x = write.emit(aten.to.dtype, (x, torch.float32), f"{x.name}_float", node)
    grouped = _grouped(write, node, x)
    dims = [0] if packet(node.target) is aten.batch_norm else []
    dims += range(2, grouped.meta["val"].dim())
    pair = write.emit(aten.var_mean.correction, (grouped, dims), f"{node.name}_statistics_{label}", node, correction=0, keepdim=True)
    variance, mean = (write.emit(operator.getitem, (pair, index), f"{pair.name}_{index}", node) for index in (0, 1))
    return mean, variance


def merge_statistics(write: TileWriter, node: fx.Node, tiles: Sequence[tuple[float, Statistics]]) -> Scaling:
    """Write the statistics of all tiles, update the running statistics, and return the scale and shift that normalize an element.

    Args:
        tiles: for each tile its fraction of the elements (its weight), and its statistics.
    """

    def emit(function: Any, *args: Any) -> fx.Node:
        return write.emit(function, args, f"{node.name}_{function.__name__.partition('.')[0]}", node)

    add = functools.partial(emit, aten.add.Tensor)
    mean = functools.reduce(add, [emit(aten.mul.Tensor, tile_mean, weight) for weight, (tile_mean, _) in tiles])
    weighted_variances = []
    for weight, (tile_mean, tile_variance) in tiles:
        distance = emit(aten.sub.Tensor, tile_mean, mean)
        around_mean = emit(aten.add.Tensor, tile_variance, emit(aten.mul.Tensor, distance, distance))
        weighted_variances.append(emit(aten.mul.Tensor, around_mean, weight))
    variance = functools.reduce(add, weighted_variances)
    if packet(node.target) is aten.batch_norm and bound_arguments(node)["running_mean"] is not None:
        _update_running_statistics(write, node, mean, variance, emit)
    return _scaling(write, node, mean, variance, emit)


def _update_running_statistics(write: TileWriter, node: fx.Node, mean: fx.Node, variance: fx.Node, emit: Emit) -> None:
    """Write ``running += momentum * (new - running)``; the running variance is unbiased, with n - 1 in its denominator."""
    arguments = bound_arguments(node)
    like, momentum = arguments["running_mean"].meta["val"], arguments["momentum"]
    batch, _, *space = (size_of(size) for size in node.meta["val"].shape)
    count = write.emit(
        aten.scalar_tensor.default,
        (write.size(math.prod(space) * batch),),
        f"{node.name}_count",
        node,
        dtype=like.dtype,
        device=like.device,
    )
    unbiased = emit(aten.mul.Tensor, variance, emit(aten.div.Tensor, count, emit(aten.sub.Tensor, count, 1)))
    for name, new in (("running_mean", mean), ("running_var", unbiased)):
        running = write.whole[arguments[name]]
        flat = emit(aten.detach.default, emit(aten.reshape.default, new, [-1]))
        decayed = emit(aten.mul.Tensor, running, 1.0 - momentum)
        emit(aten.copy_.default, running, emit(aten.add.Tensor, decayed, emit(aten.mul.Tensor, flat, momentum)))


def _scaling(write: TileWriter, node: fx.Node, mean: fx.Node, variance: fx.Node, emit: Emit) -> Scaling:
    """Write ``scale = weight / sqrt(variance + eps)`` and ``shift = bias - mean * scale`` by channel; groups repeat their statistics."""
    arguments = bound_arguments(node)
    shape = node.meta["val"].shape
    per_channel = [1, -1, *[1] * (len(shape) - 2)]  # broadcasts over [batch, channel, *space]
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, arguments["eps"]))
    if packet(node.target) is aten.group_norm:
        groups, channels = arguments["num_groups"], int(shape[1])

        def repeat_for_channels(of_groups: fx.Node) -> fx.Node:
            rows = emit(aten.reshape.default, of_groups, [-1, groups])
            repeated = emit(aten.repeat_interleave.self_int, rows, channels // groups, 1)
            return emit(aten.reshape.default, repeated, [-1, channels, *per_channel[2:]])

        scale, mean = repeat_for_channels(scale), repeat_for_channels(mean)
    if arguments["weight"] is not None:
        scale = emit(aten.mul.Tensor, scale, emit(aten.reshape.default, write.whole[arguments["weight"]], per_channel))
    shift = emit(aten.neg.default, emit(aten.mul.Tensor, mean, scale))
    if arguments["bias"] is not None:
        shift = emit(aten.add.Tensor, shift, emit(aten.reshape.default, write.whole[arguments["bias"]], per_channel))
    return scale, shift


def apply_scaling(write: TileWriter, node: fx.Node, x: fx.Node, scaling: Scaling, label: str) -> fx.Node:
    """Write one normalized tile, ``x * scale + shift``, as one op: no other value of its size is allocated, but for one of 16 bits."""
    (scale, shift), dtype = scaling, node.meta["val"].dtype
    tile = write.emit(aten.addcmul.default, (shift, x, scale), f"{node.name}_{label}", node)
    return tile if tile.meta["val"].dtype == dtype else write.emit(aten.to.dtype, (tile, dtype), f"{tile.name}_cast", node)


def _grouped(write: TileWriter, node: fx.Node, x: fx.Node) -> fx.Node:
    """Split the channels into groups for group_norm, [batch, group, channel, *space]; return ``x`` unchanged for other normalizations."""
    if packet(node.target) is not aten.group_norm:
        return x
    groups = bound_arguments(node)["num_groups"]
    return write.emit(aten.unflatten.int, (x, 1, [groups, -1]), f"{x.name}_groups", node)
