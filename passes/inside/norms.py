"""Normalisations whose statistics run over what is cut: sums of parts are added, and every rank normalises its own part.

mean = all_reduce(sum(x)) / n
variance = all_reduce(sum((x - mean)^2)) / n             two small sums, and the numbers of one device
normalize(x, mean, variance, weight, bias, ...)          which knows the way back: here statistics are constants
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from passes.inside.normalize import normalize
from passes.inside.writer import InsideWriter

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]

aten = torch.ops.aten


def batch_norm(write: InsideWriter) -> fx.Node:
    """Statistics of the whole batch, as on one device (SyncBatchNorm); stored statistics move alike on every rank."""
    x, count = write["input"], write.count(*(name for name in write.factors if name != "channels"))
    mean, variance = _statistics(write, x, [dim for dim in range(write.rank("input")) if dim != 1], count)
    if write["running_mean"] is not None:
        of_all = write.call(aten.mul.Tensor, variance, write.call(aten.div.Tensor, _number(write, count), _number(write, count, less=1)))
        for name, new in (("running_mean", mean), ("running_var", of_all)):
            stored, momentum = write[name], write["momentum"]
            kept = write.call(aten.mul.Tensor, stored, 1.0 - momentum)
            write.call(aten.copy_.default, stored, write.call(aten.add.Tensor, kept, write.call(aten.mul.Tensor, new, momentum)))
    return _normalized(write, x, mean, variance, count)


def group_norm(write: InsideWriter) -> fx.Node:
    """Statistics over the channels of a group and all of space; another mesh dimension may leave this rank some of the groups."""
    x, count = write["input"], write.count(*(name for name in write.factors if name not in ("batch", "groups")))
    channels = next((cut.own for cut in reversed(write.cuts) if cut.factor == "channels"), write.factors.get("channels", 1))
    grouped = write.call(aten.unflatten.int, x, 1, [-1, channels])
    return _normalized(write, x, *_statistics(write, grouped, list(range(2, write.rank("input") + 1)), count), count)


def instance_norm(write: InsideWriter) -> fx.Node:
    """Statistics over all of space, of each channel of each image."""
    x, count = write["input"], write.count(*(name for name in write.factors if name.startswith("space")))
    return _normalized(write, x, *_statistics(write, x, list(range(2, write.rank("input"))), count), count)


def layer_norm(write: InsideWriter) -> fx.Node:
    """Statistics over the last dimensions, along which weights differ, too."""
    x, count = _rows(write)
    return _affine(write, _normalized(write, x, *_statistics(write, x, [2], count), count, weighted=False))


def rms_norm(write: InsideWriter) -> fx.Node:
    """The root of the mean square over the last dimensions."""
    x, count = _rows(write)
    mean_square = _mean_square(write, write.call(aten.detach.default, x), [2], count)
    zero = write.call(aten.zeros_like.default, mean_square)
    return _affine(write, _normalized(write, x, zero, mean_square, count, weighted=False, centred=False))


def _rows(write: InsideWriter) -> tuple[fx.Node, object]:
    """What is normalised, as rows of one channel; and how many elements a whole row has."""
    n_last = len(write["normalized_shape"])
    count = write.count(*(name for name in write.factors if name.startswith("features")))
    rows = write["input"] if n_last == 1 else write.call(aten.flatten.using_ints, write["input"], -n_last, -1)
    if write.rank("input") - n_last > 1:
        rows = write.call(aten.flatten.using_ints, rows, 0, -2)
    return write.call(aten.unsqueeze.default, rows, 1), count


def _statistics(write: InsideWriter, x: fx.Node, dims: Sequence[int], count: object) -> tuple[fx.Node, fx.Node]:
    """The mean and the variance, of the whole: constants. The variance is the mean of squared distances from the whole mean."""
    x = write.call(aten.detach.default, x)
    mean = write.call(aten.div.Tensor, write.total(write.call(aten.sum.dim_IntList, x, dims)), count)
    spread = mean
    for dim in dims:
        spread = write.call(aten.unsqueeze.default, spread, dim)
    return mean, _mean_square(write, write.call(aten.sub.Tensor, x, spread), dims, count)


def _mean_square(write: InsideWriter, x: fx.Node, dims: Sequence[int], count: object) -> fx.Node:
    squares = write.call(aten.sum.dim_IntList, write.call(aten.mul.Tensor, x, x), dims)
    return write.call(aten.div.Tensor, write.total(squares), count)


def _normalized(
    write: InsideWriter,
    x: fx.Node,
    mean: fx.Node,
    variance: fx.Node,
    count: object,
    *,
    weighted: bool = True,
    centred: bool = True,
) -> fx.Node:
    """This rank's part, normalised."""
    parameters = (write["weight"], write["bias"]) if weighted else (None, None)
    eps = write["eps"] if write["eps"] is not None else torch.finfo(x.meta["val"].dtype).eps
    return write.call(normalize, x, mean, variance, *parameters, eps, count, [cut.over for cut in write.cuts], centred)


def _affine(write: InsideWriter, rows: fx.Node) -> fx.Node:
    """Rows as they were, times the weight, plus the bias."""
    result = write.call(aten.view_as.default, rows, write["input"])
    if write["weight"] is not None:
        result = write.call(aten.mul.Tensor, result, write["weight"])
    bias = write.arguments.get("bias")
    return result if bias is None else write.call(aten.add.Tensor, result, bias)


def _number(write: InsideWriter, count: object, less: int = 0) -> fx.Node:
    """A number of elements as a tensor: it may depend on the batch size."""
    like = write["running_mean"].meta["val"]
    number = write.call(aten.scalar_tensor.default, count, dtype=like.dtype, device=like.device)
    return write.call(aten.sub.Tensor, number, less) if less else number
