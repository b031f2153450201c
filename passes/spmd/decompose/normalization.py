"""Decompose normalisations whose statistics are over a sharded axis: add the sums of all ranks, then normalise each shard.

mean = all_reduce(sum(x)) / n                                              over n elements
variance = all_reduce(m (var(x) + (sum(x) / m - mean)^2)) / n              over m elements of each rank (Chan et al., 1979)
normalize(x, mean, variance, weight, bias, ...)

Two small messages, and three kernels that read x and write nothing of its size but the result. Of half precision, the sums are those of a
copy in float32, which lives no longer; ``normalize`` reads x itself, computes in float32 and rounds its result, as torch's kernels do.

Autograd of these formulas would go back through the statistics, kernel after kernel over all of x. So ``normalize`` takes them as
constants, and its backward contains their gradients. With s = 1 / sqrt(variance + eps), y = (x - mean) s, n elements that share statistics,
and D the gradient of the result times the weight:

    gradient of x              s (D - sum(D) / n - y sum(D y) / n)        sums over all ranks: one small message
    gradient of weight, bias   of this rank's shard; summed over ranks as those of other parameters

(Ioffe, Szegedy, "Batch Normalization", 2015, section 3.) The kernels are those of batch normalisation with stored statistics: one in the
forward; in the backward one for the first term and all sums, one for the other two terms, and their addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.traceback import annotate, get_current_meta

from passes.ir.comm.functional import GRADIENT, all_reduce
from passes.spmd.decompose.builder import ReductionWriter

aten = torch.ops.aten


@dataclass(frozen=True)
class _Statistics:
    """The statistics of the whole, on every rank.

    Attributes:
        mean, variance: over ``count`` elements.
        count: a number, or the node that computes it.
    """

    mean: fx.Node
    variance: fx.Node
    count: object


def batch_norm(write: ReductionWriter) -> fx.Node:
    """Use the statistics of the whole batch, as on one device (SyncBatchNorm); update the running ones equally on every rank."""
    x, summed = write["input"], [name for name in write.factors if name != "channels"]
    statistics = _statistics(write, x, [dim for dim in range(write.rank("input")) if dim != 1], summed)
    if write["running_mean"] is not None:
        unbiased = _unbiased(write, statistics, write["running_mean"])
        for name, new in (("running_mean", statistics.mean), ("running_var", unbiased)):
            stored, momentum = write[name], write["momentum"]
            decayed = write.call(aten.mul.Tensor, stored, 1.0 - momentum)
            write.call(aten.copy_.default, stored, write.call(aten.add.Tensor, decayed, write.call(aten.mul.Tensor, new, momentum)))
    return _normalized(write, x, statistics)


def channel_statistics(write: ReductionWriter) -> fx.Node:
    """Use the mean and unbiased variance of the whole batch."""
    summed = [name for name in write.factors if name.startswith(("batch", "space"))]
    statistics = _statistics(write, write["input"], [dim for dim in range(write.rank("input")) if dim != 1], summed)
    return write.call(aten.stack.default, [statistics.mean, _unbiased(write, statistics, statistics.mean)])


def group_norm(write: ReductionWriter) -> fx.Node:
    """Use statistics over the channels of a group and all of space; another mesh dimension may shard the groups."""
    x, summed = write["input"], [name for name in write.factors if name not in ("batch", "groups")]
    grouped = write.call(aten.unflatten.int, x, 1, [-1, write.own.get("channels", 1)])
    return _normalized(write, x, _statistics(write, grouped, list(range(2, write.rank("input") + 1)), summed))


def instance_norm(write: ReductionWriter) -> fx.Node:
    """Use statistics over all of space, for each channel of each image."""
    x, summed = write["input"], [name for name in write.factors if name.startswith("space")]
    return _normalized(write, x, _statistics(write, x, list(range(2, write.rank("input"))), summed))


def layer_norm(write: ReductionWriter) -> fx.Node:
    """Use statistics over the last dimensions, which the weight has, too."""
    x, summed = _rows(write)
    return _affine(write, _normalized(write, x, _statistics(write, x, [2], summed), weighted=False))


def rms_norm(write: ReductionWriter) -> fx.Node:
    """Divide by the root of the mean square over the last dimensions: a variance around a mean of zero."""
    x, summed = _rows(write)
    count, detached = write.count(*summed), write.call(aten.detach.default, x)
    squares = write.call(aten.sum.dim_IntList, write.call(aten.mul.Tensor, detached, detached), [2])
    mean_square = write.call(aten.div.Tensor, write.total(squares), count)
    around_zero = _Statistics(write.call(aten.zeros_like.default, mean_square), mean_square, count)
    return _affine(write, _normalized(write, x, around_zero, weighted=False, centred=False))


def _rows(write: ReductionWriter) -> tuple[fx.Node, list[str]]:
    """Return the input as (rows, 1, elements of a row), and the factors of the elements of a row."""
    n_last = len(write["normalized_shape"])
    rows = write["input"] if n_last == 1 else write.call(aten.flatten.using_ints, write["input"], -n_last, -1)
    if write.rank("input") == n_last:
        rows = write.call(aten.unsqueeze.default, rows, 0)
    elif write.rank("input") - n_last > 1:
        rows = write.call(aten.flatten.using_ints, rows, 0, -2)
    return write.call(aten.unsqueeze.default, rows, 1), [name for name in write.factors if name.startswith("features")]


def _statistics(write: ReductionWriter, x: fx.Node, dims: Sequence[int], summed: Sequence[str]) -> _Statistics:
    """Write the mean and variance over all ranks, without gradients, from those of each rank (Chan et al., 1979).

    The second message has the squares around the mean of all ranks, which is known by then: differences of large sums would lose digits.

    Args:
        summed: the factors over which the statistics are.
    """
    x = write.in_float32(write.call(aten.detach.default, x))
    count, own = write.count(*summed), write.own_count(*summed)
    total = write.call(aten.sum.dim_IntList, x, dims)
    mean = write.call(aten.div.Tensor, write.total(total), count)
    distance = write.call(aten.sub.Tensor, write.call(aten.div.Tensor, total, own), mean)
    variance = write.call(aten.var.correction, x, dims, correction=0)
    squares = write.call(aten.mul.Tensor, write.call(aten.add.Tensor, variance, write.call(aten.mul.Tensor, distance, distance)), own)
    return _Statistics(mean, write.call(aten.div.Tensor, write.total(squares), count), count)


def _normalized(write: ReductionWriter, x: fx.Node, statistics: _Statistics, *, weighted: bool = True, centred: bool = True) -> fx.Node:
    """Emit ``normalize`` of this rank's part; ``weighted``: with weight and bias; ``centred``: whether the mean is a statistic."""
    parameters = (write["weight"], write["bias"]) if weighted else (None, None)
    eps = write["eps"] if write["eps"] is not None else torch.finfo(x.meta["val"].dtype).eps
    over = [cut.over for cut in write.cuts]
    return write.call(normalize, x, statistics.mean, statistics.variance, *parameters, eps, statistics.count, over, centred)


def _affine(write: ReductionWriter, rows: fx.Node) -> fx.Node:
    """Emit rows in the shape of the input, times the weight, plus the bias."""
    result = write.call(aten.view_as.default, rows, write["input"])
    if write["weight"] is not None:
        result = write.call(aten.mul.Tensor, result, write["weight"])
    bias = write.arguments.get("bias")
    return result if bias is None else write.call(aten.add.Tensor, result, bias)


def _unbiased(write: ReductionWriter, statistics: _Statistics, like: fx.Node) -> fx.Node:
    """Emit ``variance * count / (count - 1)``, computed in the dtype of ``like``: with tensors, since the count may depend on the batch."""
    value = like.meta["val"]
    numbers = [write.call(aten.scalar_tensor.default, statistics.count, dtype=value.dtype, device=value.device) for _ in range(2)]
    numbers[1] = write.call(aten.sub.Tensor, numbers[1], 1)
    return write.call(aten.mul.Tensor, statistics.variance, write.call(aten.div.Tensor, *numbers))


# -- the operator normalize --------------------------------------------------------------------------------------------------------


torch.library.define(
    "partitioner::normalize",
    "(Tensor x, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps, SymInt count, str[] over, bool centred) -> Tensor",
)

normalize = torch.ops.partitioner.normalize.default
"""Normalise ``x``, a shard (rows, channels, ...), by the statistics of the whole.

``mean`` and ``variance``, (groups,) or (rows, groups), are each of adjacent channels; ``weight`` and ``bias`` are (channels,).
``count``: number of elements of the whole that share statistics; ``over``: the mesh dimensions that shard these; ``centred``: whether the
mean is a statistic, else zero.
"""


def _normalize(
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
    """Run ``normalize`` as a batch normalisation with stored statistics."""
    channels = _Channels(x, mean)
    means, variances = (channels.from_statistics(each) for each in (mean, variance))
    return F.batch_norm(channels.flat(x), means, variances, channels.from_weight(weight), channels.from_weight(bias), eps=eps).view(x.shape)


class _Channels:
    """Maps ``normalize`` to a batch normalisation: x (rows, channels, ...) with statistics by row becomes (1, rows x channels, ...)."""

    def __init__(self, x: Tensor, mean: Tensor) -> None:
        self._rows, self._channels = x.shape[:2]
        self._by_row = mean.dim() == 2
        self._groups = tuple(mean.shape)
        self._group_size = self._channels // mean.shape[-1]

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(0) if self._by_row else x

    def from_statistics(self, value: Tensor) -> Tensor:
        """Return statistics as one number for each channel of the batch normalisation."""
        return value.reshape(-1) if self._group_size == 1 else _repeated(value.unsqueeze(-1), (*self._groups, self._group_size))

    def from_weight(self, value: Tensor | None) -> Tensor | None:
        """Return the weight or the bias as one number for each of these channels."""
        return value if value is None or not self._by_row else _repeated(value, (self._rows, self._channels))

    def to_statistics(self, sums: Tensor) -> Tensor:
        """Return sums of (kinds, channels) with the channels of each group added: one sum for each statistic."""
        return sums.view(-1, *self._groups, self._group_size).sum(-1) if self._group_size != 1 else sums.view(-1, *self._groups)

    def to_weight(self, sums: Tensor) -> Tensor:
        """Return sums over these channels, added up for each element of the weight."""
        return sums.view(self._rows, self._channels).sum(0) if self._by_row else sums


def _repeated(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Expand and flatten, always as a copy: ``native_batch_norm_backward`` on CPU reads a weight of stride 0 as if it were 1."""
    return value.expand(shape).clone(memory_format=torch.contiguous_format).view(-1)


def _fake(x: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  torch passes them by these names
    x, mean, variance, weight, bias, *ctx.rest = inputs
    ctx.save_for_backward(x, mean, variance, weight)
    ctx.has_bias = bias is not None
    ctx.custom_meta = get_current_meta().get("custom", {})


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of ``x``, weight and bias, by the formulas of the module's docstring; there are none of the statistics."""
    x, mean, variance, weight = ctx.saved_tensors
    eps, count, over, centred = ctx.rest
    channels = _Channels(x, mean)
    flat, factor = channels.flat(x), channels.from_weight(weight)
    means, variances = (channels.from_statistics(each) for each in (mean, variance))
    scale = means.new_ones(means.shape) if factor is None and not x.is_cpu else factor  # CUDA has no sums without a weight
    direct, weight_sums, bias_sums = torch.ops.aten.native_batch_norm_backward(
        channels.flat(grad), flat, scale, means, variances, None, None, False, eps, [True, True, True]
    )
    sums = torch.stack([weight_sums, bias_sums] if centred else [weight_sums])
    sums = channels.to_statistics(sums if factor is None else sums * factor)
    for dimension in over:
        with annotate({**ctx.custom_meta, GRADIENT: True}):
            sums = all_reduce(sums, dimension, "sum")
    scales = [channels.from_statistics(each) for each in (sums * (torch.rsqrt(variance + eps) / -count)).unbind(0)]
    # batch_norm computes y * scales[0] + scales[1]: the terms of the gradient through the variance and through the mean.
    through_statistics = F.batch_norm(flat, means, variances, scales[0], scales[1] if centred else None, eps=eps)
    weight_grad = None if weight is None else channels.to_weight(weight_sums)
    bias_grad = channels.to_weight(bias_sums) if ctx.has_bias else None
    return ((direct + through_statistics).view(x.shape), None, None, weight_grad, bias_grad, *(None for _ in ctx.rest))


torch.library.impl(normalize.name(), "CompositeExplicitAutograd", _normalize)
torch.library.register_fake(normalize.name(), _fake)
torch.library.register_autograd(normalize.name(), _backward, setup_context=_setup_context)
