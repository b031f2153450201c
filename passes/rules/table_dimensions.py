"""Rules of operations on shapes: views, pieces, indices; and of those along dimensions: reductions, scans, sorts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.rules import indexing, moving, reductions, spatial, views

__all__ = ["ALONG", "INDEXING", "SHAPES"]

aten = torch.ops.aten

SHAPES: Mapping[Any, list[Any]] = {
    views.reshape("size"): [aten.view.default, aten._unsafe_view],  # noqa: SLF001
    views.reshape("shape"): [aten.reshape],
    views.reshape(None): [aten.flatten, aten.ravel],
    views.unflatten: [aten.unflatten],
    views.shaped_like: [aten.reshape_as, aten.view_as],
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
    moving.select: [aten.select],
    moving.slice_: [aten.slice],
    moving.narrow: [aten.narrow],
    moving.slice_scatter: [aten.slice_scatter],
    moving.select_scatter: [aten.select_scatter],
    moving.split("split_size"): [aten.split, aten.unsafe_split],
    moving.split("split_sizes"): [aten.split_with_sizes, aten.unsafe_split_with_sizes],
    moving.split(None): [aten.chunk, aten.unsafe_chunk, aten.tensor_split],
    moving.unbind: [aten.unbind],
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
"""Rule -> operators."""

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
"""Rule -> operators."""

ALONG: Mapping[Any, list[Any]] = {
    reductions.reduced("sum", "linear self"): [aten.sum],
    reductions.reduced("sum"): [aten.nansum, aten.count_nonzero],
    reductions.reduced("mean", "linear self"): [aten.mean],
    reductions.reduced("max"): [aten.amax, aten.any, aten.max.default],
    reductions.reduced("min"): [aten.amin, aten.all, aten.min.default],
    reductions.reduced("whole"): [
        aten.aminmax,
        aten.argmax, aten.argmin, aten.linalg_norm, aten.linalg_vector_norm, aten.logsumexp, aten.max.dim, aten.median, aten.min.dim,
        aten.mode, aten.nanmean, aten.norm, aten.prod, aten.std, aten.std_mean, aten.var, aten.var_mean, aten.nanmedian,
    ],
    "...": [aten.max.other, aten.min.other],
    reductions.along(): [
        aten._log_softmax, aten._softmax, aten.argsort, aten.cummax, aten.cummin, aten.cumprod, aten.log_softmax,  # noqa: SLF001
        aten.logcumsumexp, aten.softmax, aten.sort,
    ],
    reductions.along("dim", "linear self"): [aten.cumsum],
    reductions.compared: [aten.cosine_similarity, aten.pairwise_distance],
    reductions.transformed: [
        aten.fft_fft, aten.fft_fft2, aten.fft_fftn, aten.fft_ifft, aten.fft_ifft2, aten.fft_ifftn, aten.fft_irfft, aten.fft_irfft2,
        aten.fft_irfftn, aten.fft_rfft, aten.fft_rfft2, aten.fft_rfftn, aten.fft_fftshift, aten.fft_ifftshift,
    ],
    reductions.glu: [aten.glu],
    reductions.selected_along: [aten.topk, aten.kthvalue],
    reductions.difference: [aten.diff],
}  # fmt: skip
"""Rule -> operators."""
