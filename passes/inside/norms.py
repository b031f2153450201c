"""Normalisations whose statistics run over what is cut: sums of parts are added, and every rank normalises its own part."""

from __future__ import annotations

import torch
from torch import fx

from passes.inside.writer import InsideWriter

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]

aten = torch.ops.aten


def batch_norm(write: InsideWriter) -> fx.Node:
    """Statistics of the whole batch, as on one device (SyncBatchNorm); stored statistics move alike on every rank.

    The variance is the mean of squared distances from the whole mean: two small sums, and the numbers of one device.
    """
    x, rank = write["input"], write.rank("input")
    dims = [dim for dim in range(rank) if dim != 1]
    count = write.count(*(name for name in write.factors if name != "channels"))
    centred, mean, variance = _standardize(write, x, dims, count)
    result = _by_channel(write, _scale(write, centred, variance, write["eps"]))
    if write["running_mean"] is not None:
        of_all = write.call(aten.mul.Tensor, variance, write.call(aten.div.Tensor, _number(write, count), _number(write, count, less=1)))
        for name, new in (("running_mean", mean), ("running_var", of_all)):
            stored, momentum = write[name], write["momentum"]
            flat = write.call(aten.detach.default, write.call(aten.reshape.default, new, [-1]))
            kept = write.call(aten.mul.Tensor, stored, 1.0 - momentum)
            write.call(aten.copy_.default, stored, write.call(aten.add.Tensor, kept, write.call(aten.mul.Tensor, flat, momentum)))
    return result


def layer_norm(write: InsideWriter) -> fx.Node:
    """Statistics over the last dimensions."""
    dims, names = _normalized(write)
    centred, _, variance = _standardize(write, write["input"], dims, write.count(*names))
    return _affine(write, _scale(write, centred, variance, write["eps"]))


def rms_norm(write: InsideWriter) -> fx.Node:
    """The root of the mean square over the last dimensions."""
    dims, names = _normalized(write)
    x = write["input"]
    squares = write.total(write.call(aten.sum.dim_IntList, write.call(aten.mul.Tensor, x, x), dims, True))
    mean = write.call(aten.div.Tensor, squares, write.count(*names))
    eps = write["eps"] if write["eps"] is not None else torch.finfo(x.meta["val"].dtype).eps
    return _affine(write, _scale(write, x, mean, eps))


def group_norm(write: InsideWriter) -> fx.Node:
    """Statistics over the channels of a group and all of space; another mesh dimension may leave this rank some of the groups."""
    x = write["input"]
    channels = next((cut.own for cut in reversed(write.cuts) if cut.factor == "channels"), write.factors.get("channels", 1))
    unfolded = write.call(aten.unflatten.int, x, 1, [-1, channels])
    dims = list(range(2, write.rank("input") + 1))
    names = [name for name in write.factors if name not in ("batch", "groups")]
    centred, _, variance = _standardize(write, unfolded, dims, write.count(*names))
    return _by_channel(write, write.call(aten.flatten.using_ints, _scale(write, centred, variance, write["eps"]), 1, 2))


def instance_norm(write: InsideWriter) -> fx.Node:
    """Statistics over all of space, of each channel of each image."""
    names = [name for name in write.factors if name.startswith("space")]
    centred, _, variance = _standardize(write, write["input"], list(range(2, write.rank("input"))), write.count(*names))
    return _by_channel(write, _scale(write, centred, variance, write["eps"]))


def _by_channel(write: InsideWriter, result: fx.Node) -> fx.Node:
    """Times the weight, plus the bias, of each channel."""
    sizes = [-1 if dim == 1 else 1 for dim in range(write.rank("input"))]
    for name, function in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if write[name] is not None:
            result = write.call(function, result, write.call(aten.reshape.default, write[name], sizes))
    return result


def _normalized(write: InsideWriter) -> tuple[list[int], list[str]]:
    count = len(write["normalized_shape"])
    return list(range(-count, 0)), [name for name in write.factors if name.startswith("features")]


def _standardize(write: InsideWriter, x: fx.Node, dims: list[int], count: object) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Distances from the mean, the mean, the variance."""
    mean = write.call(aten.div.Tensor, write.total(write.call(aten.sum.dim_IntList, x, dims, True)), count)
    centred = write.call(aten.sub.Tensor, x, write.vary(mean))
    squares = write.call(aten.sum.dim_IntList, write.call(aten.mul.Tensor, centred, centred), dims, True)
    return centred, mean, write.call(aten.div.Tensor, write.total(squares), count)


def _scale(write: InsideWriter, x: fx.Node, variance: fx.Node, eps: float) -> fx.Node:
    return write.call(aten.mul.Tensor, x, write.vary(write.call(aten.rsqrt.default, write.call(aten.add.Tensor, variance, eps))))


def _affine(write: InsideWriter, result: fx.Node) -> fx.Node:
    if write["weight"] is not None:
        result = write.call(aten.mul.Tensor, result, write["weight"])
    bias = write.arguments.get("bias")
    return result if bias is None else write.call(aten.add.Tensor, result, bias)


def _number(write: InsideWriter, count: object, less: int = 0) -> fx.Node:
    """A number of elements as a tensor: it may depend on the batch size."""
    like = write["running_mean"].meta["val"]
    number = write.call(aten.scalar_tensor.default, count, dtype=like.dtype, device=like.device)
    return write.call(aten.sub.Tensor, number, less) if less else number
