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

__all__ = ["Scaling", "apply_scaling", "merge_statistics", "tile_statistics"]

aten = torch.ops.aten

Statistics: TypeAlias = tuple[fx.Node, fx.Node]
"""Mean and variance."""

Scaling: TypeAlias = tuple[fx.Node, fx.Node]
"""Scale and shift of each channel: an element becomes ``x * scale + shift``."""

Emit: TypeAlias = Callable[..., fx.Node]


def tile_statistics(write: TileWriter, node: fx.Node, x: fx.Node, label: str) -> Statistics:
    """Write the mean and variance of one tile: over the batch and space for batch_norm, else over space and the channels of a group."""
    grouped = _grouped(write, node, x)
    dims = [0] if packet(node.target) is aten.batch_norm else []
    dims += range(2, grouped.meta["val"].dim())
    both = write.emit(aten.var_mean.correction, (grouped, dims), f"{node.name}_statistics_{label}", node, correction=0, keepdim=True)
    variance, mean = (write.emit(operator.getitem, (both, index), f"{both.name}_{index}", node) for index in (0, 1))
    return mean, variance


def merge_statistics(write: TileWriter, node: fx.Node, tiles: Sequence[tuple[float, Statistics]]) -> Scaling:
    """Write the statistics of all tiles, update the running statistics, and return the scale and shift that normalize an element.

    Args:
        tiles: for each tile its fraction of the elements, and its statistics.
    """

    def emit(function: Any, *args: Any) -> fx.Node:
        return write.emit(function, args, f"{node.name}_{function.__name__.partition('.')[0]}", node)

    add = functools.partial(emit, aten.add.Tensor)
    mean = functools.reduce(add, [emit(aten.mul.Tensor, each, share) for share, (each, _) in tiles])
    spreads = []
    for share, (each, variance) in tiles:
        distance = emit(aten.sub.Tensor, each, mean)
        spreads.append(emit(aten.mul.Tensor, emit(aten.add.Tensor, variance, emit(aten.mul.Tensor, distance, distance)), share))
    variance = functools.reduce(add, spreads)
    if packet(node.target) is aten.batch_norm and bound_arguments(node)["running_mean"] is not None:
        _store(write, node, mean, variance, emit)
    return _scaling(write, node, mean, variance, emit)


def _store(write: TileWriter, node: fx.Node, mean: fx.Node, variance: fx.Node, emit: Emit) -> None:
    """Write the update of the running statistics; the running variance is the unbiased one, with n - 1 in its denominator."""
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
    of_sample = emit(aten.mul.Tensor, variance, emit(aten.div.Tensor, count, emit(aten.sub.Tensor, count, 1)))
    for name, new in (("running_mean", mean), ("running_var", of_sample)):
        stored = write.whole[arguments[name]]
        flat = emit(aten.detach.default, emit(aten.reshape.default, new, [-1]))
        kept = emit(aten.mul.Tensor, stored, 1.0 - momentum)
        emit(aten.copy_.default, stored, emit(aten.add.Tensor, kept, emit(aten.mul.Tensor, flat, momentum)))


def _scaling(write: TileWriter, node: fx.Node, mean: fx.Node, variance: fx.Node, emit: Emit) -> Scaling:
    """Write scale = weight / sqrt(variance + eps) and shift = bias - mean * scale, by channel; groups repeat theirs for each channel."""
    arguments = bound_arguments(node)
    shape = node.meta["val"].shape
    upright = [1, -1, *[1] * (len(shape) - 2)]
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, arguments["eps"]))
    if packet(node.target) is aten.group_norm:
        groups, channels = arguments["num_groups"], int(shape[1])

        def of_channels(of_groups: fx.Node) -> fx.Node:
            rows = emit(aten.reshape.default, of_groups, [-1, groups])
            repeated = emit(aten.repeat_interleave.self_int, rows, channels // groups, 1)
            return emit(aten.reshape.default, repeated, [-1, channels, *upright[2:]])

        scale, mean = of_channels(scale), of_channels(mean)
    if arguments["weight"] is not None:
        scale = emit(aten.mul.Tensor, scale, emit(aten.reshape.default, write.whole[arguments["weight"]], upright))
    shift = emit(aten.neg.default, emit(aten.mul.Tensor, mean, scale))
    if arguments["bias"] is not None:
        shift = emit(aten.add.Tensor, shift, emit(aten.reshape.default, write.whole[arguments["bias"]], upright))
    return scale, shift


def apply_scaling(write: TileWriter, node: fx.Node, x: fx.Node, scaling: Scaling, label: str) -> fx.Node:
    """Write one normalized tile, ``x * scale + shift``, as one op: no other value of the tile's size is allocated."""
    scale, shift = scaling
    return write.emit(aten.addcmul.default, (shift, x, scale), f"{node.name}_{label}", node)


def _grouped(write: TileWriter, node: fx.Node, x: fx.Node) -> fx.Node:
    """Split the channels into groups for group_norm, [batch, group, channel, *space]; return ``x`` as it is for other normalizations."""
    if packet(node.target) is not aten.group_norm:
        return x
    groups = bound_arguments(node)["num_groups"]
    return write.emit(aten.unflatten.int, (x, 1, [groups, -1]), f"{x.name}_groups", node)
