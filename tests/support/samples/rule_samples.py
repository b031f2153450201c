"""Sample calls of every operation that has a rule, in float64: what the proof of the table executes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from passes.rules.ops.channel_statistics import channel_statistics
from passes.rules.ops.grouped_mm import grouped_mm, grouped_outer
from tests.support.samples.rule_samples_shapes import along, indexing, pieces, views
from tests.support.samples.rule_samples_values import Sample, flags, positive, real, whole

aten = torch.ops.aten


def samples() -> Iterator[Sample]:
    """Yield every call that is written by hand."""
    yield from itertools.chain(
        products(), matrices(), attention(), convolutions(), normalisations(), recurrent(), space(), losses(), creation(), elementwise(),
        views(), pieces(), indexing(), along(),
    )  # fmt: skip


def automatic_samples(operator: OpOverload) -> list[Sample]:
    """Return calls made from the schema alone: broadcast tensors, numbers where they must be given. Empty when that is no valid call."""
    shapes = [(4, 3, 5), (3, 1), (5,), (1, 5)]
    for make in (positive, functools.partial(whole, 5), flags):
        made = iter(shapes)
        args: list[Any] = []
        for argument in operator._schema.arguments:
            kind = str(argument.type)
            if argument.kwarg_only or argument.has_default_value():
                break
            if kind == "Tensor":
                args.append(make(*next(made)))
            elif kind in ("number", "int", "float"):
                args.append(2)
            else:
                return []
        if not any(isinstance(value, Tensor) for value in args):
            return []
        try:
            result = operator(*args)
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            continue  # no operation of such numbers: the next kind is tried; no row of the table may be left without a sample
        return [Sample(operator, *args)] if isinstance(result, Tensor | tuple) else []
    return []


def products() -> Iterator[Sample]:
    x, weight, bias = real(4, 5, 6), real(7, 6), real(7)
    yield Sample(aten.linear.default, x, weight, bias)
    yield Sample(aten.linear.default, x, weight)
    yield Sample(aten.linear.default, real(6), weight, bias)
    for left, right in itertools.product([(6,), (5, 6), (4, 5, 6), (2, 1, 5, 6)], [(6,), (6, 3), (4, 6, 3), (1, 4, 6, 3)]):
        yield Sample(aten.matmul.default, real(*left), real(*right))
    yield Sample(aten.mm.default, real(4, 6), real(6, 5))
    yield Sample(aten.bmm.default, real(3, 4, 6), real(3, 6, 5))
    yield Sample(aten.mv.default, real(4, 6), real(6))
    yield Sample(aten.dot.default, real(6), real(6))
    yield Sample(aten.vdot.default, real(6), real(6))
    yield Sample(aten.outer.default, real(4), real(5))
    yield Sample(aten.ger.default, real(4), real(5))
    yield Sample(aten.inner.default, real(2, 4, 6), real(3, 6))
    for added in [(4, 5), (5,), (1, 5), (4, 1), ()]:
        yield Sample(aten.addmm.default, real(*added), real(4, 6), real(6, 5), beta=2, alpha=3)
    yield Sample(aten.baddbmm.default, real(3, 1, 5), real(3, 4, 6), real(3, 6, 5), beta=2)
    yield Sample(aten.addbmm.default, real(4, 5), real(3, 4, 6), real(3, 6, 5))
    yield Sample(aten.addmv.default, real(4), real(4, 6), real(6))
    yield Sample(aten.addr.default, real(4, 5), real(4), real(5))
    yield Sample(aten.bilinear.default, real(3, 4, 5), real(3, 4, 6), real(7, 5, 6), real(7))
    yield Sample(aten.bilinear.default, real(4, 5), real(4, 6), real(7, 5, 6))
    yield Sample(aten.cdist.default, real(2, 4, 3), real(2, 5, 3))
    yield Sample(aten.tensordot.default, real(4, 5, 6), real(6, 3, 5), [1, 2], [2, 0])
    yield Sample(aten.einsum.default, "bij,bjk->bik", [real(3, 4, 5), real(3, 5, 6)])
    yield Sample(aten.einsum.default, "...ij,jk", [real(2, 3, 4), real(4, 5)])
    yield Sample(aten.einsum.default, "bhid,bhjd->bhij", [real(2, 3, 4, 5), real(2, 3, 6, 5)])
    yield Sample(aten.einsum.default, "bii,i->b", [real(3, 4, 4), real(4)])
    yield Sample(aten.einsum.default, "i,j,k->ijk", [real(3), real(4), real(5)])
    for group in (whole(3, 7), whole(9, 7) - 2):  # also of groups without a matrix
        yield Sample(grouped_mm, real(7, 6), real(3, 6, 5), group)
        yield Sample(grouped_mm, real(7, 6), real(3, 5, 6), group, transposed=True)
        yield Sample(grouped_outer, real(7, 6), real(7, 5), group, 3)


def matrices() -> Iterator[Sample]:
    tall, wide = real(2, 3, 5, 4), real(3, 4, 5)
    square = tall.mT @ tall + torch.eye(4)
    for operator in (
        *(
            aten.det,
            aten.linalg_det,
            aten.logdet,
            aten.linalg_slogdet,
            aten.slogdet,
            aten.linalg_eigh,
            aten.linalg_eigvalsh,
            aten.matrix_exp,
        ),
        *(aten.inverse, aten.linalg_inv, aten.linalg_cholesky, aten.cholesky, aten.linalg_matrix_exp),
    ):
        yield Sample(operator.default, square)
        yield Sample(operator.default, square[0, 0])
    for operator in (aten.linalg_matrix_power, aten.matrix_power):
        yield Sample(operator.default, square, 2)
    for x in (tall, wide, square):
        yield Sample(aten.linalg_pinv.atol_rtol_tensor, x)
        yield Sample(aten.linalg_svdvals.default, x)
        for is_full in (False, True):
            yield Sample(aten.linalg_svd.default, x, is_full)
        for mode in ("reduced", "complete"):
            yield Sample(aten.linalg_qr.default, x, mode)
        for order in ("fro", "nuc"):
            yield Sample(aten.linalg_matrix_norm.str_ord, x, order)
        yield Sample(aten.linalg_matrix_norm.default, x, 2, [0, -1], True)
    for right in (real(2, 3, 4, 6), real(3, 4, 6), real(4, 6)):
        yield Sample(aten.cholesky_solve.default, right, square)
        yield Sample(aten.linalg_solve.default, square, right)
        yield Sample(aten.linalg_solve_triangular.default, square, right, upper=False)
    yield Sample(aten.linalg_solve.default, square, real(2, 3, 4))
    yield Sample(aten.linalg_solve_triangular.default, square[0, :, :3, :3], real(3, 3), upper=True)
    for offset in (0, -1):
        yield Sample(aten.diag_embed.default, real(2, 3, 4), offset)
    for operator in (aten.cross, aten.linalg_cross):
        yield Sample(operator.default, real(4, 3, 5), real(1, 3, 5), dim=-2)


def attention() -> Iterator[Sample]:
    query, key, value = real(2, 4, 5, 8), real(2, 4, 6, 8), real(2, 4, 6, 3)
    call = aten.scaled_dot_product_attention.default
    yield Sample(call, query, key, value)
    for mask in [(5, 6), (1, 6), (2, 4, 5, 6), (2, 1, 1, 6), (1, 4, 5, 6), (4, 5, 6)]:
        yield Sample(call, query, key, value, real(*mask))
    yield Sample(call, query, key, value, flags(5, 6) | torch.eye(5, 6, dtype=torch.bool))
    yield Sample(call, query, key, value, None, 0.0, True)
    yield Sample(call, query, key, value, scale=0.3)
    yield Sample(call, real(2, 6, 5, 8), real(2, 3, 6, 8), real(2, 3, 6, 4), enable_gqa=True)
    yield Sample(call, real(2, 6, 5, 8), real(2, 3, 6, 8), real(2, 3, 6, 4), real(2, 6, 5, 6), enable_gqa=True)
    yield Sample(call, real(4, 5, 8), real(4, 6, 8), real(4, 6, 3), real(5, 6))
    yield Sample(call, real(2, 2, 3, 5, 8), real(2, 2, 3, 6, 8), real(2, 2, 3, 6, 4))


def convolutions() -> Iterator[Sample]:
    for rank, operator, transposed, general in [
        (1, aten.conv1d, aten.conv_transpose1d.default, aten.convolution.default),
        (2, aten.conv2d, aten.conv_transpose2d.input, aten.convolution.default),
        (3, aten.conv3d, aten.conv_transpose3d.input, aten.convolution.default),
    ]:
        x, ones, none = real(2, 4, *[5] * rank), [1] * rank, [0] * rank
        kernel = [3] * rank
        yield Sample(operator.default, x, real(6, 4, *kernel), real(6))
        yield Sample(operator.default, x, real(6, 4, *kernel), None, [2] * rank, ones)
        yield Sample(operator.default, x, real(6, 2, *kernel), real(6), ones, ones, ones, 2)
        yield Sample(operator.default, x, real(8, 1, *kernel), real(8), ones, ones, ones, 4)
        yield Sample(operator.default, x[0], real(6, 4, *kernel), real(6))
        yield Sample(operator.padding, x, real(6, 4, *kernel), real(6), ones, "same")
        yield Sample(transposed, x, real(4, 6, *kernel), real(6), [2] * rank)
        yield Sample(transposed, x, real(4, 3, *kernel), real(6), ones, none, none, 2)
        yield Sample(general, x, real(6, 2, *kernel), real(6), ones, ones, ones, False, none, 2)
        yield Sample(general, x, real(4, 3, *kernel), real(6), ones, none, ones, True, none, 2)


def normalisations() -> Iterator[Sample]:
    x, c = real(4, 6, 5), [real(6), real(6), real(6), positive(6)]
    yield Sample(aten.layer_norm.default, x, [5], real(5), real(5))
    yield Sample(aten.layer_norm.default, x, [6, 5], real(6, 5), real(6, 5))
    yield Sample(aten.layer_norm.default, x, [5])
    yield Sample(aten.rms_norm.default, x, [5], real(5))
    for training in (True, False):
        yield Sample(aten.batch_norm.default, x, *c, training, 0.1, 1e-5, False)
        yield Sample(aten.batch_norm.default, x[..., 0], *c, training, 0.1, 1e-5, False)
        yield Sample(aten.batch_norm.default, x, c[0], None, c[2], c[3], training, 0.1, 1e-5, False)
        yield Sample(aten.instance_norm.default, x, *c, training, 0.1, 1e-5, False)
    yield Sample(channel_statistics, x)
    yield Sample(channel_statistics, x[..., 0])
    yield Sample(aten.instance_norm.default, x, c[0], c[1], None, None, True, 0.1, 1e-5, False)
    yield Sample(aten.group_norm.default, x, 3, real(6), real(6))
    yield Sample(aten.group_norm.default, real(4, 6, 3, 3), 6)
    yield Sample(aten._weight_norm.default, real(4, 3, 2), positive(4, 1, 1), 0)
    yield Sample(aten._weight_norm.default, real(4, 3, 2), positive(1, 1, 2), 2)
    for stack in (aten.softmax.int, aten.log_softmax.int):
        yield Sample(stack, x, 1)
    for stack in (aten._softmax.default, aten._log_softmax.default):
        yield Sample(stack, x, -1, False)


def recurrent() -> Iterator[Sample]:
    def weights(gates: int) -> list[Tensor]:
        return [real(gates * 3, 4), real(gates * 3, 3), real(gates * 3), real(gates * 3)]

    for batch_first, shape in ((True, (5, 6, 4)), (False, (6, 5, 4))):
        flagged = (True, 1, 0.0, False, False, batch_first)
        yield Sample(aten.lstm.input, real(*shape), [real(1, 5, 3), real(1, 5, 3)], weights(4), *flagged)
        for operator, gates in ((aten.gru, 3), (aten.rnn_tanh, 1), (aten.rnn_relu, 1)):
            yield Sample(operator.input, real(*shape), real(1, 5, 3), weights(gates), *flagged)
    yield Sample(aten.lstm_cell.default, real(5, 4), [real(5, 3), real(5, 3)], *weights(4))
    for operator, gates in ((aten.gru_cell, 3), (aten.rnn_tanh_cell, 1), (aten.rnn_relu_cell, 1)):
        yield Sample(operator.default, real(5, 4), real(5, 3), *weights(gates))


def space() -> Iterator[Sample]:
    line, image, volume = real(2, 4, 6), real(2, 4, 6, 6), real(2, 4, 4, 4, 4)
    for rank, x in ((1, line), (2, image), (3, volume)):
        two, sizes = [2] * rank, [8] * rank
        for name in ("avg_pool", "max_pool"):
            yield Sample(getattr(aten, f"{name}{rank}d").default, x, two, two)
            yield Sample(getattr(aten, f"{name}{rank}d").default, x[0], two, two)
        for name in ("adaptive_avg_pool", "adaptive_max_pool"):
            yield Sample(getattr(aten, f"{name}{rank}d").default, x, two)
        yield Sample(getattr(aten, f"max_pool{rank}d_with_indices").default, x, two)
        for name in ("upsample_nearest", "_upsample_nearest_exact"):
            yield Sample(getattr(aten, f"{name}{rank}d").vec, x, sizes, None)
    yield Sample(aten.upsample_linear1d.vec, line, [9], False, None)
    for operator in (aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa):
        yield Sample(operator.vec, image, [9, 9], False, None)
    yield Sample(aten.upsample_trilinear3d.vec, volume, [5, 5, 5], False, None)
    yield Sample(aten.pixel_shuffle.default, real(2, 8, 3, 5), 2)
    for rank in (3, 4):
        pooled, places = F.max_pool2d(real(2, 3, 6, 8)[(0,) * (4 - rank)], 2, return_indices=True)
        yield Sample(aten.max_unpool2d.default, pooled, places, [6, 8])
    yield Sample(aten.pixel_unshuffle.default, real(2, 3, 4, 6), 2)
    yield Sample(aten.channel_shuffle.default, real(2, 12, 3), 3)
    yield Sample(aten.native_channel_shuffle.default, real(2, 12, 3, 2), 3)
    grid = real(2, 5, 3, 2).clamp(-1, 1)
    for operator in (aten.grid_sampler, aten.grid_sampler_2d):
        yield Sample(operator.default, image, grid, 0, 0, False)
    yield Sample(aten.grid_sampler_3d.default, volume, real(2, 5, 3, 2, 3).clamp(-1, 1), 0, 0, False)
    yield Sample(aten.im2col.default, image, [2, 2], [1, 1], [0, 0], [1, 1])
    yield Sample(aten.im2col.default, real(2, 3, 9, 7), [3, 2], [2, 1], [2, 1], [2, 3])
    yield Sample(aten.col2im.default, real(2, 16, 25), [6, 6], [2, 2], [1, 1], [0, 0], [1, 1])
    yield Sample(aten.col2im.default, real(2, 18, 15), [9, 7], [3, 2], [2, 1], [2, 1], [2, 3])


def losses() -> Iterator[Sample]:
    probability = positive(4, 5) / 2
    for reduction in (0, 1, 2):
        for operator in (aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div, aten.soft_margin_loss):
            yield Sample(operator.default, real(4, 5), positive(4, 5), reduction)
        yield Sample(aten.hinge_embedding_loss.default, real(4, 5), flags(4, 5) * 2.0 - 1, 1.0, reduction)
        yield Sample(aten.poisson_nll_loss.default, real(4, 5), positive(4, 5), True, False, 1e-8, reduction)
        yield Sample(aten.margin_ranking_loss.default, real(4, 5), real(4, 5), flags(4, 5) * 2.0 - 1, 0.0, reduction)
        yield Sample(aten.binary_cross_entropy.default, probability, positive(4, 5) / 2, positive(5), reduction)
        yield Sample(aten.binary_cross_entropy_with_logits.default, real(4, 5), positive(4, 5) / 2, None, positive(5), reduction)
        yield Sample(aten.triplet_margin_loss.default, real(4, 5), real(4, 5), real(4, 5), reduction=reduction)
        yield Sample(aten.cosine_embedding_loss.default, real(4, 5), real(4, 5), flags(4) * 2.0 - 1, 0.1, reduction)
        yield Sample(aten.cosine_embedding_loss.default, real(5), real(5), flags() * 2.0 - 1, 0.1, reduction)
        yield Sample(aten.multi_margin_loss.default, real(4, 5), whole(5, 4), 1, 1.0, positive(5), reduction)
        yield Sample(aten.multi_margin_loss.default, real(5), whole(5, 1), 1, 1.0, None, reduction)
        yield Sample(aten.multilabel_margin_loss.default, real(4, 5), whole(5, 4, 5), reduction)
        yield Sample(aten.multilabel_margin_loss.default, real(5), whole(5, 5), reduction)
        yield Sample(aten.cross_entropy_loss.default, real(4, 5), whole(5, 4), None, reduction)
        yield Sample(aten.cross_entropy_loss.default, real(4, 5, 3), whole(5, 4, 3), positive(5), reduction, 2)
        yield Sample(aten.cross_entropy_loss.default, real(4, 5, 3), positive(4, 5, 3), positive(5), reduction, -100, 0.1)
        yield Sample(aten.cross_entropy_loss.default, real(5), whole(5), None, reduction)
        yield Sample(aten.nll_loss.default, real(4, 5), whole(5, 4), positive(5), reduction)
        yield Sample(aten.nll_loss_nd.default, real(4, 5, 3, 2), whole(5, 4, 3, 2), None, reduction)
        yield Sample(aten.nll_loss2d.default, real(4, 5, 3, 2), whole(5, 4, 3, 2), None, reduction)
    yield Sample(aten.mse_loss.default, real(4, 1), real(1, 5))


def creation() -> Iterator[Sample]:
    for operator in (aten.zeros, aten.ones, aten.rand, aten.randn):
        yield Sample(operator.default, [3, 4])
    yield Sample(aten.empty.memory_format, [3, 4])
    yield Sample(aten.full.default, [3, 4], 2.0)
    yield Sample(aten.randint.low, 2, 7, [3, 4])
    for operator in (aten.zeros_like, aten.ones_like, aten.empty_like, aten.rand_like, aten.randn_like):
        yield Sample(operator.default, real(3, 4))
    yield Sample(aten.full_like.default, real(3, 4), 2.0)
    yield Sample(aten.randint_like.default, real(3, 4), 5)
    for operator in (aten.new_zeros, aten.new_ones, aten.new_empty):
        yield Sample(operator.default, real(5, 6), [3, 4])
    yield Sample(aten.new_full.default, real(5, 6), [3, 4], 2.0)
    yield Sample(aten.arange.default, 5)
    yield Sample(aten.arange.start_step, 1, 9, 2)
    yield Sample(aten.eye.default, 4)
    yield Sample(aten.linspace.default, 0.0, 1.0, 5)
    yield Sample(aten.logspace.default, 0.0, 1.0, 5)
    yield Sample(aten.randperm.default, 5)
    yield Sample(aten.scalar_tensor.default, 2.0)
    for operator in (aten.fft_fftfreq, aten.fft_rfftfreq):
        yield Sample(operator.default, 5)
    for operator in (aten.tril_indices, aten.triu_indices):
        yield Sample(operator.default, 4, 4)
    yield Sample(aten.one_hot.default, whole(5, 3, 4), 5)
    yield Sample(aten.histc.default, real(7), 4, -1, 1)
    yield Sample(aten.histc.default, real(7), 4)
    yield Sample(aten.bincount.default, whole(4, 7), None, 4)


def elementwise() -> Iterator[Sample]:
    x, y = real(4, 3, 5), real(3, 1)
    yield Sample(aten.where.self, flags(4, 3, 5), x, y)
    yield Sample(aten.where.ScalarOther, flags(4, 3, 5), x, 0.0)
    yield Sample(aten.where.ScalarOther, flags(4, 3, 5), x, 1.0)
    yield Sample(aten.where.ScalarSelf, flags(4, 3, 5), 0.0, x)
    yield Sample(aten.masked_fill.Scalar, x, flags(3, 5), 0.0)
    yield Sample(aten.masked_fill.Scalar, x, flags(3, 5), -1.0)
    yield Sample(aten.masked_fill.Tensor, x, flags(3, 5), real())
    yield Sample(aten.add.Tensor, x, y, alpha=2)
    yield Sample(aten.add.Tensor, x, 2.0)
    yield Sample(aten.sub.Tensor, y, x)
    yield Sample(aten.rsub.Scalar, x, 0)
    yield Sample(aten.mul.Tensor, x, 2.0)
    yield Sample(aten.div.Tensor_mode, x, y, rounding_mode="floor")
    yield Sample(aten.to.dtype, x, torch.float32)
    yield Sample(aten.to.dtype, x, torch.int64)
    yield Sample(aten.to.other, x, y)
    yield Sample(aten.type_as.default, x, whole(3, 7))
    yield Sample(aten._to_copy.default, x, dtype=torch.float32)
    yield Sample(aten.copy.default, x, y)
    for p, train in ((0.5, True), (0.0, True), (0.5, False)):
        for operator in (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout):
            yield Sample(operator.default, x, p, train)
    yield Sample(aten.bernoulli.default, positive(3, 4))
    yield Sample(aten.geometric.default, x, 0.5)
    yield Sample(aten.prelu.default, x, positive(3))
    yield Sample(aten.prelu.default, x, positive(1))
    yield Sample(aten.clamp.Tensor, x, y, None)
    yield Sample(aten.isin.Tensor_Scalar, whole(5, 4, 3), 2)
    yield Sample(aten.isin.Tensor_Tensor, whole(5, 4, 3), whole(5, 2, 2))
    yield Sample(aten.clip.default, x, -0.5, 0.5)
    yield Sample(aten.divide.Tensor, x, y)
    yield Sample(aten.lerp.Scalar, x, y, 0.3)
    yield Sample(aten.complex.default, x, y)
    yield Sample(aten.polar.default, positive(3, 4), x[0, 0, :4])
    yield Sample(aten.view_as_real.default, torch.complex(real(3, 4), real(3, 4)))
    yield Sample(aten.view_as_complex.default, real(3, 4, 2))
    yield Sample(aten._conj.default, torch.complex(real(3, 4), real(3, 4)))
    for name in ("real", "imag"):
        yield Sample(getattr(aten, name).default, torch.complex(real(3, 4), real(3, 4)))
    yield Sample(aten.bucketize.Tensor, x, torch.linspace(-1, 1, 6, dtype=torch.float64))
    yield Sample(aten.add_.Tensor, x, y)
    yield Sample(aten.relu_.default, x)
    yield Sample(aten.copy_.default, x, y)
