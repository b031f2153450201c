"""Rules of matrix products, convolutions, attention, normalisation, recurrent layers, resampling and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.rules import contractions, layers, patches, spatial

__all__ = ["CONTRACTIONS", "LAYERS", "LOSSES", "SPACE"]

aten = torch.ops.aten


def _whole(rank: int) -> str:
    """``(batch, channels, space*)`` to another space, each result of all of it."""
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
    contractions.attention: [aten.scaled_dot_product_attention],
    spatial.convolution(1): [aten.conv1d],
    spatial.convolution(2): [aten.conv2d],
    spatial.convolution(3): [aten.conv3d],
    spatial.convolution(1, transposed=True): [aten.conv_transpose1d],
    spatial.convolution(2, transposed=True): [aten.conv_transpose2d],
    spatial.convolution(3, transposed=True): [aten.conv_transpose3d],
    spatial.convolution_of_arguments: [aten.convolution],
}
"""Rule -> operators."""

LAYERS: Mapping[Any, list[Any]] = {
    layers.embedding: [aten.embedding],
    contractions.layer_norm: [aten.layer_norm, aten.rms_norm],
    layers.batch_norm: [aten.batch_norm],
    layers.instance_norm: [aten.instance_norm],
    "batch (groups channels!) space*!, (groups channels!), (groups channels!) -> batch (groups channels!) space*!; groups = num_groups": [
        aten.group_norm
    ],
    layers.weight_norm: [aten._weight_norm],  # noqa: SLF001
    layers.recurrent: [aten.gru, aten.lstm, aten.rnn_relu, aten.rnn_tanh],
    layers.recurrent_cell: [aten.gru_cell, aten.lstm_cell, aten.rnn_relu_cell, aten.rnn_tanh_cell],
}
"""Rule -> operators."""

SPACE: Mapping[Any, list[Any]] = {
    _whole(1): [aten.max_pool1d_with_indices, aten.adaptive_max_pool1d],
    _whole(2): [aten.max_pool2d_with_indices, aten.adaptive_max_pool2d, aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa],  # noqa: SLF001
    _whole(3): [aten.max_pool3d_with_indices, aten.adaptive_max_pool3d],
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
"""Rule -> operators."""

LOSSES: Mapping[Any, list[Any]] = {
    layers.elementwise_loss: [
        aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.hinge_embedding_loss, aten.huber_loss, aten.kl_div,
        aten.l1_loss, aten.margin_ranking_loss, aten.mse_loss, aten.poisson_nll_loss, aten.smooth_l1_loss, aten.soft_margin_loss,
    ],
    layers.vector_loss("anchor", "positive", "negative"): [aten.triplet_margin_loss],
    layers.classification: [aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss2d, aten.nll_loss_nd],
}  # fmt: skip
"""Rule -> operators."""
