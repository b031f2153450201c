"""Normalisations whose statistics run over what is cut: sums of parts are added, and every rank normalises its own part.

mean = all_reduce(sum(x)) / n
variance = all_reduce(sum((x - mean)^2)) / n             two small sums, and the numbers of one device
normalize(x, mean, variance, weight, bias, ...)          which knows the way back: here statistics are constants

Normalisation by statistics of a whole, of which a rank has a part, as one operator with a backward of its own.

    statistics of the whole, as constants        normalize(x, mean, variance, ...)        one kernel

Autograd of the formula written out would go back through the statistics, kernel after kernel over all of x. To this operator they are
constants, and its backward adds what they move. With s = 1 / sqrt(variance + eps), y = (x - mean) s, n elements that share statistics, and
D the gradient of the result times the weight:

    gradient of x              s (D - sum(D) / n - y sum(D y) / n)        sums over all ranks' parts: one small message
    gradient of weight, bias   of this rank's part; summed as those of other parameters are

(Ioffe, Szegedy, "Batch Normalization", 2015, section 3.) The kernels are those of batch normalisation with stored statistics: one forward;
back one for the first term and all sums, one for the other two, and what adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.traceback import annotate, get_current_meta

from passes.ir.comm.functional import GRADIENT, all_reduce
from passes.spmd.decompose.builder import InsideWriter

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize", "rms_norm"]

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
    grouped = write.call(aten.unflatten.int, x, 1, [-1, write.own.get("channels", 1)])
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
    """Write the mean and variance over all ranks, without gradients; the variance takes a second pass, with the mean of all ranks."""
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
    write: InsideWriter, x: fx.Node, mean: fx.Node, variance: fx.Node, count: object, *, weighted: bool = True, centred: bool = True
) -> fx.Node:
    """Emit ``normalize`` of this rank's part; ``weighted``: with weight and bias; ``centred``: whether the mean is a statistic."""
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


# -- normalisation by statistics of a whole, of which a rank has a part ------------------------------------------------------------


torch.library.define(
    "partitioner::normalize",
    "(Tensor x, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps, SymInt count, str[] over, bool centred) -> Tensor",
)

normalize = torch.ops.partitioner.normalize.default
"""``x``, (rows, channels, ...), normalised by statistics of the whole: ``mean`` and ``variance``, (groups,) or (rows, groups), each of
neighbouring channels; times ``weight`` and plus ``bias``, (channels,). ``count``: how many elements of the whole share statistics;
``over``: the mesh dimensions that cut these; ``centred``: whether the mean is one of the statistics, or zero."""


def _run(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    count: Any,  # noqa: ARG001  the backward reads it
    over: list[str],  # noqa: ARG001
    centred: bool,  # noqa: ARG001
) -> Tensor:
    channels = _Channels(x, mean)
    means, variances = (channels.of_statistics(each) for each in (mean, variance))
    return F.batch_norm(channels.flat(x), means, variances, channels.of_weight(weight), channels.of_weight(bias), eps=eps).view(x.shape)


class _Channels:
    """Every number that has statistics of its own as a channel of a batch normalisation: where rows have theirs, all rows' in one row."""

    def __init__(self, x: Tensor, mean: Tensor) -> None:
        self._rows, self._channels = x.shape[:2]
        self._by_row = mean.dim() == 2
        self._groups = tuple(mean.shape)
        self._group = self._channels // mean.shape[-1]

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(0) if self._by_row else x

    def of_statistics(self, value: Tensor) -> Tensor:
        """One number for each channel."""
        return value.reshape(-1) if self._group == 1 else _repeated(value.unsqueeze(-1), (*self._groups, self._group))

    def of_weight(self, value: Tensor | None) -> Tensor | None:
        """The same of a parameter."""
        return value if value is None or not self._by_row else _repeated(value, (self._rows, self._channels))

    def in_statistics(self, sums: Tensor) -> Tensor:
        """Sums of channels, (kinds, channels), for each of the statistics."""
        return sums.view(-1, *self._groups, self._group).sum(-1) if self._group != 1 else sums.view(-1, *self._groups)

    def in_weight(self, sums: Tensor) -> Tensor:
        """Sums of channels for each number of a parameter."""
        return sums.view(self._rows, self._channels).sum(0) if self._by_row else sums


def _repeated(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A vector of its own memory: ``native_batch_norm_backward`` on CPU reads a weight of stride 0 as if its stride were 1."""
    return value.expand(shape).clone(memory_format=torch.contiguous_format).view(-1)


def _fake(x: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  the names that torch calls it by
    x, mean, variance, weight, bias, *ctx.rest = inputs
    ctx.save_for_backward(x, mean, variance, weight)
    ctx.has_bias = bias is not None
    ctx.about = get_current_meta().get("custom", {})


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, mean, variance, weight = ctx.saved_tensors
    eps, count, over, centred = ctx.rest
    channels = _Channels(x, mean)
    flat, factor = channels.flat(x), channels.of_weight(weight)
    means, variances = (channels.of_statistics(each) for each in (mean, variance))
    direct, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        channels.flat(grad), flat, factor, means, variances, None, None, False, eps, [True, True, True]
    )
    sums = torch.stack([of_weight, of_bias] if centred else [of_weight])
    sums = channels.in_statistics(sums if factor is None else sums * factor)
    for dimension in over:
        with annotate({**ctx.about, GRADIENT: True}):
            sums = all_reduce(sums, dimension, "sum")
    moved = [channels.of_statistics(each) for each in (sums * (torch.rsqrt(variance + eps) / -count)).unbind(0)]
    through = F.batch_norm(flat, means, variances, moved[0], moved[1] if centred else None, eps=eps)
    of_parameters = (None if weight is None else channels.in_weight(of_weight), channels.in_weight(of_bias) if ctx.has_bias else None)
    return ((direct + through).view(x.shape), None, None, *of_parameters, *(None for _ in ctx.rest))


torch.library.impl(normalize.name(), "CompositeExplicitAutograd", _run)
torch.library.register_fake(normalize.name(), _fake)
torch.library.register_autograd(normalize.name(), _backward, setup_context=_remember)
