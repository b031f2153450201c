"""The rules of all ops, as tables: rule -> ops. A rule is a line (``passes.rules.language``), or a function that returns one for a call.

Ops that PyTorch tags as pointwise and that are not linear need no rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.rules.call import Call
from passes.rules.ops import conv_pool as spatial
from passes.rules.ops import einsum as contractions
from passes.rules.ops import grouped_mm as grouped
from passes.rules.ops import indexing
from passes.rules.ops import linear_algebra as algebra
from passes.rules.ops import nn_layers as layers
from passes.rules.ops import shape as views
from passes.rules.ops import slice_concat as moving
from passes.rules.ops import unfold_fold as patches
from passes.rules.ops.channel_statistics import channel_statistics

aten = torch.ops.aten


def _uncut_space(rank: int) -> str:
    """Return the line of an op from ``(batch, channels, space*)`` to another space, where space is not cut."""
    before, after = (" ".join(f"{name}{prime}!" for name in spatial.space(rank)) for prime in ("", "'"))
    return f"batch* channels {before} -> batch* channels {after}"


CONTRACTIONS: Mapping[Any, list[Any]] = {
    "batch* in, out in, +out -> batch* out; linear input | weight": [aten.linear],
    contractions.matmul: [aten.matmul],
    "rows in, in columns -> rows columns; linear self | mat2": [aten.mm],
    "batch rows in, batch in columns -> batch rows columns; linear self | mat2": [aten.bmm],
    "rows in, in -> rows; linear self | vec": [aten.mv],
    "in, in ->; linear self | other": [aten.vdot],
    "in, in ->; linear self | tensor": [aten.dot],
    "rows, columns -> rows columns; linear self | vec2": [aten.outer, aten.ger],
    "+rows? columns?, rows in, in columns -> rows columns; linear mat1 | mat2": [aten.addmm],
    "+batch? rows? columns?, batch rows in, batch in columns -> batch rows columns; linear batch1 | batch2": [aten.baddbmm],
    "+rows? columns?, batch rows in, batch in columns -> rows columns; linear batch1 | batch2": [aten.addbmm],
    "+rows?, rows in, in -> rows; linear mat | vec": [aten.addmv],
    "+rows? columns?, rows, columns -> rows columns; linear vec1 | vec2": [aten.addr],
    "batch* left, batch* right, out left right, +out -> batch* out; linear input1 | input2 | weight": [aten.bilinear],
    "batch* rows features!, batch* columns features! -> batch* rows columns": [aten.cdist],
    contractions.inner: [aten.inner],
    contractions.tensordot: [aten.tensordot],
    contractions.einsum: [aten.einsum],
    grouped.product: [grouped.grouped_mm],
    "rows in, rows out, rows -> experts! in out; experts = n_groups; linear input | other": [grouped.grouped_outer],
    contractions.attention: [aten.scaled_dot_product_attention],
    spatial.convolution(1): [aten.conv1d],
    spatial.convolution(2): [aten.conv2d],
    spatial.convolution(3): [aten.conv3d],
    spatial.convolution(1, transposed=True): [aten.conv_transpose1d],
    spatial.convolution(2, transposed=True): [aten.conv_transpose2d],
    spatial.convolution(3, transposed=True): [aten.conv_transpose3d],
    spatial.convolution_of_arguments: [aten.convolution],
}
"""Matrix products, attention and convolutions."""

LAYERS: Mapping[Any, list[Any]] = {
    layers.embedding: [aten.embedding],
    contractions.layer_norm: [aten.layer_norm, aten.rms_norm],
    layers.batch_norm: [aten.batch_norm],
    "batch! channels space*! -> pair! channels": [channel_statistics],
    layers.instance_norm: [aten.instance_norm],
    "batch (groups channels!) space*!, (groups channels!), (groups channels!) -> batch (groups channels!) space*!; groups = num_groups": [
        aten.group_norm
    ],
    layers.weight_norm: [aten._weight_norm],  # noqa: SLF001
    layers.recurrent: [aten.gru, aten.lstm, aten.rnn_relu, aten.rnn_tanh],
    layers.recurrent_cell: [aten.gru_cell, aten.lstm_cell, aten.rnn_relu_cell, aten.rnn_tanh_cell],
}
"""Embedding, normalization and recurrent layers."""

SPACE: Mapping[Any, list[Any]] = {
    _uncut_space(1): [aten.max_pool1d_with_indices, aten.adaptive_max_pool1d],
    _uncut_space(2): [aten.max_pool2d_with_indices, aten.adaptive_max_pool2d, aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa],  # noqa: SLF001
    "batch* channels height! width!, batch* channels height! width! -> batch* channels height'! width'!": [aten.max_unpool2d],
    _uncut_space(3): [aten.max_pool3d_with_indices, aten.adaptive_max_pool3d],
    spatial.pool(1, "max"): [aten.max_pool1d],
    spatial.pool(2, "max"): [aten.max_pool2d],
    spatial.pool(3, "max"): [aten.max_pool3d],
    spatial.pool(1, "avg"): [aten.avg_pool1d],
    spatial.pool(2, "avg"): [aten.avg_pool2d],
    spatial.pool(3, "avg"): [aten.avg_pool3d],
    spatial.adaptive_pool(1): [aten.adaptive_avg_pool1d],
    spatial.adaptive_pool(2): [aten.adaptive_avg_pool2d],
    spatial.adaptive_pool(3): [aten.adaptive_avg_pool3d],
    spatial.interpolate(1, "nearest"): [aten.upsample_nearest1d],
    spatial.interpolate(2, "nearest"): [aten.upsample_nearest2d],
    spatial.interpolate(3, "nearest"): [aten.upsample_nearest3d],
    spatial.interpolate(1, "nearest_exact"): [aten._upsample_nearest_exact1d],  # noqa: SLF001
    spatial.interpolate(2, "nearest_exact"): [aten._upsample_nearest_exact2d],  # noqa: SLF001
    spatial.interpolate(3, "nearest_exact"): [aten._upsample_nearest_exact3d],  # noqa: SLF001
    spatial.interpolate(1, "linear"): [aten.upsample_linear1d],
    spatial.interpolate(2, "linear"): [aten.upsample_bilinear2d],
    spatial.interpolate(3, "linear"): [aten.upsample_trilinear3d],
    spatial.interpolate(2, "cubic"): [aten.upsample_bicubic2d],
    "batch* (channels up! across!) height width -> batch* channels (height up!) (width across!)"
    "; up = upscale_factor; across = upscale_factor; linear self": [aten.pixel_shuffle],
    "batch* channels (height down!) (width across!) -> batch* (channels down! across!) height width"
    "; down = downscale_factor; across = downscale_factor; linear self": [aten.pixel_unshuffle],
    "batch (groups channels) space* -> batch (channels groups) space*; groups = groups; linear self": [
        aten.channel_shuffle, aten.native_channel_shuffle,
    ],
    "batch channels height! width!, batch height' width' pair! -> batch channels height' width'; linear input": [
        aten.grid_sampler, aten.grid_sampler_2d,
    ],
    "batch channels depth! height! width!, batch depth' height' width' triple! -> batch channels depth' height' width'; linear input": [
        aten.grid_sampler_3d,
    ],
    patches.unfold: [aten.im2col],
    patches.fold: [aten.col2im],
}  # fmt: skip
"""Pooling, resampling and patches of images."""

LOSSES: Mapping[Any, list[Any]] = {
    layers.elementwise_loss: [
        aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.hinge_embedding_loss, aten.huber_loss, aten.kl_div,
        aten.l1_loss, aten.margin_ranking_loss, aten.mse_loss, aten.poisson_nll_loss, aten.smooth_l1_loss, aten.soft_margin_loss,
    ],
    layers.vector_loss("anchor", "positive", "negative"): [aten.triplet_margin_loss],
    layers.vector_loss("input1", "input2"): [aten.cosine_embedding_loss],
    layers.vector_loss("self", "target"): [aten.multilabel_margin_loss],
    layers.vector_loss("self", "weight"): [aten.multi_margin_loss],
    layers.classification: [aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss2d, aten.nll_loss_nd],
}  # fmt: skip
"""Losses."""


RESHAPES: Mapping[Any, list[Any]] = {
    views.reshape("size"): [aten.view.default, aten._unsafe_view],  # noqa: SLF001
    views.reshape("shape"): [aten.reshape],
    views.reshape(None): [aten.flatten, aten.ravel],
    views.unflatten: [aten.unflatten],
    views.shaped_like: [aten.reshape_as, aten.view_as],
}
"""Ops that give the same elements in the same order another shape."""

SHAPES: Mapping[Any, list[Any]] = {
    moving.permute: [aten.permute],
    moving.move: [aten.movedim, aten.moveaxis],
    moving.swap("dim0", "dim1"): [aten.transpose, aten.swapdims],
    moving.swap("axis0", "axis1"): [aten.swapaxes],
    moving.swap(0, 1): [aten.t],
    moving.swap(-2, -1): [aten.mT, aten.adjoint, aten.matrix_H, aten.mH],
    moving.reverse: [aten.numpy_T],
    moving.unsqueeze: [aten.unsqueeze],
    moving.squeeze: [aten.squeeze],
    "dim* -> dim*; shape size; linear self": [aten.broadcast_to, aten.expand],
    "dim*, dim* -> dim*; linear self": [aten.expand_as],
    "...": [aten.broadcast_tensors],
    "dim* -> dim*": [aten.view.dtype],
    moving.repeat("repeats"): [aten.repeat],
    moving.repeat("dims"): [aten.tile],
    moving.repeat_interleave: [aten.repeat_interleave],
    moving.select: [aten.select, aten.unbind],
    moving.slice_: [aten.slice],
    moving.narrow: [aten.narrow],
    moving.slice_scatter: [aten.slice_scatter],
    moving.select_scatter: [aten.select_scatter],
    moving.split("split_size"): [aten.split, aten.unsafe_split],
    moving.split("split_sizes"): [aten.split_with_sizes, aten.unsafe_split_with_sizes],
    moving.split(None): [aten.chunk, aten.unsafe_chunk, aten.tensor_split],
    moving.cat: [aten.cat, aten.concat, aten.concatenate],
    moving.stack: [aten.stack],
    spatial.flip: [aten.flip],
    spatial.roll: [aten.roll],
    spatial.padded_space: [
        aten.constant_pad_nd, aten.pad, aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d,
        aten.replication_pad2d, aten.replication_pad3d,
    ],
    moving.unfold: [aten.unfold],
    moving.diagonal: [aten.diagonal],
    moving.meshgrid: [aten.meshgrid],
    "batch* rows! columns! -> batch* rows! columns!; linear self": [aten.tril, aten.triu],
}  # fmt: skip
"""Ops that move, copy or drop elements."""

INDEXING: Mapping[Any, list[Any]] = {
    indexing.index_select: [aten.index_select],
    indexing.index_rows(added=True): [aten.index_add],
    indexing.index_rows(added=False): [aten.index_copy],
    indexing.gather: [aten.gather],
    indexing.take_along: [aten.take_along_dim],
    indexing.scatter: [aten.scatter, aten.scatter_add, aten.scatter_reduce],
    indexing.index: [aten.index],
    indexing.index_put: [aten.index_put],
}
"""Ops that read or write elements at indices."""

MATRICES: Mapping[Any, list[Any]] = {
    "batch* rows! columns! -> batch*": [aten.det, aten.linalg_det, aten.logdet],
    "batch* rows! columns! -> batch*, batch*": [aten.linalg_slogdet, aten.slogdet],
    "batch* rows! columns! -> batch* rows! columns!": [
        aten.inverse, aten.linalg_inv, aten.linalg_cholesky, aten.cholesky, aten.linalg_matrix_exp, aten.matrix_exp,
        aten.linalg_matrix_power, aten.matrix_power,
    ],
    "batch* rows! columns! -> batch* columns! rows!": [aten.linalg_pinv],
    "batch* rows! columns! -> batch* values!": [aten.linalg_eigvalsh, aten.linalg_svdvals],
    "batch* rows! columns! -> batch* values!, batch* rows! columns!": [aten.linalg_eigh],
    "batch* rows! right, batch* rows! columns! -> batch* rows! right": [aten.cholesky_solve],
    algebra.solved(vectors=True): [aten.linalg_solve],
    algebra.solved(vectors=False): [aten.linalg_solve_triangular],
    algebra.singular_values: [aten.linalg_svd],
    algebra.orthogonal_triangular: [aten.linalg_qr],
    algebra.diagonal_matrices: [aten.diag_embed],
    algebra.crossed: [aten.cross, aten.linalg_cross],
}  # fmt: skip
"""Decompositions, solutions and functions of matrices in the last two dimensions, and products of vectors."""

ALONG: Mapping[Any, list[Any]] = {
    layers.reduced("sum", "linear self"): [aten.sum],
    layers.reduced("sum"): [aten.nansum, aten.count_nonzero],
    layers.reduced("mean", "linear self"): [aten.mean],
    layers.reduced("max"): [aten.amax, aten.any, aten.max.default],
    layers.reduced("min"): [aten.amin, aten.all, aten.min.default],
    layers.reduced("whole"): [
        aten.aminmax,
        aten.argmax, aten.argmin, aten.linalg_matrix_norm, aten.linalg_norm, aten.linalg_vector_norm, aten.logsumexp, aten.max.dim,
        aten.median, aten.min.dim, aten.mode, aten.nanmean, aten.norm, aten.prod, aten.std, aten.std_mean, aten.var, aten.var_mean,
        aten.nanmedian, aten.quantile.scalar, aten.nanquantile.scalar,
    ],
    "...": [aten.max.other, aten.min.other],
    layers.along(): [
        aten._log_softmax, aten._softmax, aten.argsort, aten.cummax, aten.cummin, aten.cumprod, aten.log_softmax,  # noqa: SLF001
        aten.logcumsumexp, aten.softmax, aten.sort,
    ],
    layers.along("dim", "linear self"): [aten.cumsum],
    layers.compared: [aten.cosine_similarity, aten.linalg_vecdot, aten.pairwise_distance],
    layers.transformed: [
        aten.fft_fft, aten.fft_fft2, aten.fft_fftn, aten.fft_ifft, aten.fft_ifft2, aten.fft_ifftn, aten.fft_irfft, aten.fft_irfft2,
        aten.fft_irfftn, aten.fft_rfft, aten.fft_rfft2, aten.fft_rfftn, aten.fft_fftshift, aten.fft_ifftshift,
    ],
    "batch* samples!, window! -> batch* frequencies! frames!; linear self": [aten.stft],
    "batch* frequencies! frames!, window! -> batch* samples!; linear self": [aten.istft],
    layers.glu: [aten.glu],
    layers.selected_along: [aten.topk, aten.kthvalue],
    layers.difference: [aten.diff],
}  # fmt: skip
"""Reductions, and ops along a dimension."""


def _division(call: Call) -> str:
    """Elementwise; linear if the quotient is not rounded."""
    return "..." if call.get("rounding_mode") is not None else "...; linear self"


ELEMENTWISE: Mapping[Any, list[Any]] = {
    "...": [
        aten.alpha_dropout, aten.bernoulli, aten.bitwise_and, aten.bitwise_not, aten.bitwise_or, aten.bitwise_xor, aten.clamp, aten.clip,
        aten.fill, aten.floor_divide, aten.hardtanh, aten.isclose, aten.isfinite, aten.isinf, aten.logical_and, aten.logical_not,
        aten.logical_or, aten.logical_xor, aten.masked_fill.Tensor, aten.nan_to_num, aten.normal_functional, aten.rrelu, aten.selu,
        aten.celu, aten.relu6, aten.softplus, aten.square, aten.zero, aten.__and__, aten.__or__, aten.__xor__, aten.absolute, aten.greater,
        aten.greater_equal, aten.less, aten.less_equal, aten.not_equal, aten.log_sigmoid, aten.hardswish, aten.hardsigmoid, aten.mish,
        aten.silu, aten.float_power, aten.isnan, aten.isreal, aten.polar, aten.special_expit, aten.fix, aten.arccos, aten.arctan2,
        aten.__lshift__, aten.__rshift__, aten.cauchy, aten.exponential, aten.geometric, aten.log_normal, aten.random, aten.uniform,
    ],
    "...; linear self": [
        aten.neg, aten.negative, aten.positive, aten.real, aten.imag, aten.conj, aten.conj_physical,
        aten._conj, aten._neg_view, aten.resolve_conj, aten.resolve_neg, aten.deg2rad, aten.rad2deg,  # noqa: SLF001
        aten._to_copy, aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh_copy, aten.lift_fresh,  # noqa: SLF001
        aten.ldexp,
    ],
    "...; linear self other": [aten.add, aten.sub, aten.rsub, aten.subtract, aten.where],
    "...; linear self | other": [aten.mul, aten.multiply],
    _division: [aten.div, aten.divide, aten.true_divide],
    "...; linear self value": [aten.masked_fill],
    "...; linear self end": [aten.lerp],
    "...; linear self tensor1 | self tensor2": [aten.addcmul],
    "...; linear self tensor1": [aten.addcdiv],
    "...; linear real imag": [aten.complex],
    "dim* -> dim* parts!; linear self": [aten.view_as_real],
    "dim* parts! -> dim*; linear self": [aten.view_as_complex],
    "dim*, _ -> dim*; linear self": [aten.to, aten.type_as],
    "dim*, dim* -> dim*; linear src": [aten.copy],
    layers.dropout: [aten.dropout],
    "dim*, boundaries! -> dim*": [aten.bucketize.Tensor],
    "dim*, tested*! -> dim*": [aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar],
    layers.feature_dropout: [aten.feature_dropout, aten.feature_alpha_dropout],
    layers.prelu: [aten.prelu],
}  # fmt: skip
"""Ops that compute each element from one element of each operand."""

CREATION: Mapping[Any, list[Any]] = {
    "-> dim*; shape size": [aten.empty, aten.full, aten.ones, aten.rand, aten.randint, aten.randn, aten.zeros],
    "_ -> dim*; shape size": [aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros],
    "dim* -> dim*": [
        aten.empty_like, aten.full_like, aten.ones_like, aten.rand_like, aten.randint_like, aten.randn_like, aten.zeros_like,
    ],
    "-> dim*!": [
        aten.arange, aten.eye, aten.fft_fftfreq, aten.fft_rfftfreq, aten.linspace, aten.logspace, aten.randperm,
        aten.scalar_tensor, aten.tril_indices, aten.triu_indices,
    ],
    "dim* -> dim* classes!": [aten.one_hot],
    indexing.histogram: [aten.histc],
    indexing.bincount: [aten.bincount],
    indexing.all_whole: [
        aten.affine_grid_generator, aten.embedding_bag, aten.masked_scatter, aten.masked_select, aten.nonzero, aten.searchsorted,
        aten.where.default,
    ],
}  # fmt: skip
"""Ops that create tensors or count, and ops that are never cut."""
