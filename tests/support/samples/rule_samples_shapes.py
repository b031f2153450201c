"""Sample calls of operations on shapes, indices, and along dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.samples.rule_samples_values import Sample, flags, positive, real, whole

aten: Any = torch.ops.aten


def views() -> Iterator[Sample]:
    for before, after in [
        ((4, 12, 6), (4, 3, 4, 6)), ((4, 12, 6), (48, -1)), ((4, 6, 5), (6, 4, 5)), ((6, 4), (2, 12)), ((6, 4), (4, 6)),
        ((2, 3, 1, 4), (6, 4, 1)), ((8, 3), (4, 6)), ((4, 6), (24,)), ((12,), (12, 1)), ((5, 7), (7, 5)), ((4, 9, 5), (6, 6, 5)),
        ((4, 6, 10, 3), (4, 15, 4, 3)),
    ]:  # fmt: skip
        for operator in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            yield Sample(operator, real(*before), list(after))
        yield Sample(aten.reshape_as.default, real(*before), real(*before).view(after))
    yield Sample(aten.view.dtype, real(3, 4), torch.int64)
    yield Sample(aten.view.dtype, whole(9, 3, 4), torch.float64)
    yield Sample(aten.view_as.default, real(6, 4), real(2, 12))
    yield Sample(aten.flatten.using_ints, real(3, 4, 5, 2), 1, 2)
    yield Sample(aten.ravel.default, real(3, 4))
    yield Sample(aten.unflatten.int, real(3, 12, 2), 1, [3, -1])
    yield Sample(aten.unflatten.int, real(3, 12), -1, [2, 2, 3])
    x = real(3, 4, 5)
    yield Sample(aten.permute.default, x, [2, 0, -2])
    for operator in (aten.movedim, aten.moveaxis):
        yield Sample(operator.int, x, 0, 2)
        yield Sample(operator.intlist, x, [0, 1], [-1, 0])
    for operator in (aten.transpose.int, aten.swapdims.default, aten.swapaxes.default):
        yield Sample(operator, x, 0, -1)
    yield Sample(aten.t.default, real(3, 4))
    yield Sample(aten.t.default, real(3))
    for operator in (aten.mT, aten.adjoint, aten.mH):
        yield Sample(operator.default, x)
    yield Sample(aten.matrix_H.default, real(3, 4))
    yield Sample(aten.numpy_T.default, x)
    yield Sample(aten.unsqueeze.default, x, 1)
    yield Sample(aten.unsqueeze.default, x, -1)
    yield Sample(aten.squeeze.default, real(3, 1, 4))
    yield Sample(aten.squeeze.dim, real(3, 1, 4), 1)
    yield Sample(aten.squeeze.dim, real(3, 1, 4), 2)
    yield Sample(aten.squeeze.dims, real(1, 3, 1, 4), [0, 2])
    for operator in (aten.expand, aten.broadcast_to):
        yield Sample(operator.default, real(3, 1), [4, 3, 5])
        yield Sample(operator.default, real(3, 4), [-1, -1])
    yield Sample(aten.expand_as.default, real(3, 1), real(4, 3, 5))
    yield Sample(aten.broadcast_tensors.default, [real(3, 1), real(5), real(4, 3, 1)])
    yield Sample(aten.contiguous.default, x)
    yield Sample(aten.clone.default, x)


def pieces() -> Iterator[Sample]:
    x = real(3, 12, 4)
    for operator in (aten.split, aten.unsafe_split):
        yield Sample(operator.Tensor, x, 4, 1)
        yield Sample(operator.Tensor, x, 5, 1)
    yield Sample(aten.split.sizes, x, [2, 4, 6], 1)
    for operator in (aten.split_with_sizes, aten.unsafe_split_with_sizes):
        yield Sample(operator.default, x, [4, 4, 4], 1)
        yield Sample(operator.default, x, [8, 4], 1)
        yield Sample(operator.default, x, [5, 7], 1)
    for operator in (aten.chunk, aten.unsafe_chunk):
        yield Sample(operator.default, x, 3, 1)
        yield Sample(operator.default, x, 5, 1)
        yield Sample(operator.default, real(3, 8), 5, 1)
    yield Sample(aten.tensor_split.sections, x, 3, 1)
    yield Sample(aten.tensor_split.sections, x, 5, 1)
    yield Sample(aten.tensor_split.indices, x, [4, 8], 1)
    yield Sample(aten.unbind.int, x, 1)
    yield Sample(aten.select.int, x, 1, 3)
    for start, end, step in [(0, 12, 1), (None, None, 1), (0, 2**63 - 1, 1), (4, 8, 1), (6, 12, 1), (-4, None, 1), (0, -1, 1), (3, 8, 1),
                             (0, None, 2), (1, None, 3), (2, 10, 2), (0, 0, 1)]:  # fmt: skip
        yield Sample(aten.slice.Tensor, x, 1, start, end, step)
    for start, length in ((0, 12), (4, 4), (3, 5)):
        yield Sample(aten.narrow.default, x, 1, start, length)
    yield Sample(aten.slice_scatter.default, x, real(3, 4, 4), 1, 2, 6)
    yield Sample(aten.select_scatter.default, x, real(3, 4), 1, 2)
    for operator in (aten.cat, aten.concat, aten.concatenate):
        yield Sample(operator.default, [real(3, 4), real(3, 6)], 1)
    yield Sample(aten.cat.default, [real(3, 4), real(3, 4), real(3, 4)], -1)
    yield Sample(aten.cat.default, [real(3, 4), real(3, 5), real(0)], 1)
    yield Sample(aten.stack.default, [real(3, 4), real(3, 4)], 1)
    yield Sample(aten.repeat.default, real(3, 4), [2, 1, 3])
    yield Sample(aten.repeat.default, real(3, 1), [1, 4])
    yield Sample(aten.tile.default, real(3, 4), [2, 3])
    yield Sample(aten.tile.default, real(3, 4), [3])
    for dim in (None, 0, 1):
        yield Sample(aten.repeat_interleave.self_int, real(3, 4), 3, dim)
    yield Sample(aten.repeat_interleave.self_Tensor, real(3, 4), torch.tensor([1, 2, 0]), 0)
    yield Sample(aten.flip.default, x, [1])
    yield Sample(aten.roll.default, x, [2], [1])
    yield Sample(aten.roll.default, x, [2])
    yield Sample(aten.constant_pad_nd.default, x, [1, 2, 0, 0])
    yield Sample(aten.constant_pad_nd.default, x, [1, 2], 1.0)
    yield Sample(aten.pad.default, x, [1, 2], "reflect")
    for kind in ("reflection", "replication"):
        yield Sample(getattr(aten, f"{kind}_pad1d").default, x, [1, 2])
        yield Sample(getattr(aten, f"{kind}_pad2d").default, real(2, 3, 4, 4), [1, 2, 1, 1])
        yield Sample(getattr(aten, f"{kind}_pad3d").default, real(2, 3, 4, 4, 4), [1, 2, 1, 1, 0, 0])
    yield Sample(aten.unfold.default, x, 1, 3, 2)
    yield Sample(aten.diagonal.default, x, 1, 0, 2)
    yield Sample(aten.meshgrid.default, [real(3), real(4)])
    yield Sample(aten.meshgrid.indexing, [real(3), real(4), real(5)], indexing="xy")
    yield Sample(aten.tril.default, real(2, 4, 5))
    yield Sample(aten.triu.default, real(2, 4, 5), 1)


def indexing() -> Iterator[Sample]:
    x = real(4, 5, 6)
    yield Sample(aten.embedding.default, real(10, 4), whole(10, 3, 5))
    yield Sample(aten.embedding.default, real(10, 4), whole(10, 3, 5), -1, True)
    yield Sample(aten.index_select.default, x, 1, whole(5, 7))
    yield Sample(aten.index_select.default, x, 1, torch.tensor(2))
    for operator in (aten.index_add, aten.index_copy):
        yield Sample(operator.default, x, 1, torch.tensor([3, 0, 2]), real(4, 3, 6))
    yield Sample(aten.index_add.default, x, 1, torch.tensor([3, 3, 2]), real(4, 3, 6), alpha=2)
    yield Sample(aten.gather.default, x, 1, whole(5, 4, 7, 6))
    yield Sample(aten.gather.default, x, 1, whole(5, 3, 7, 6))
    yield Sample(aten.take_along_dim.default, x, whole(5, 4, 7, 1), 1)
    yield Sample(aten.take_along_dim.default, x, whole(5, 7), None)
    index, smaller = torch.randperm(5)[:3].view(1, 3, 1).expand(4, 3, 6).contiguous(), torch.tensor([[[0]], [[2]]])
    yield Sample(aten.scatter.src, x, 1, index, real(4, 3, 6))
    yield Sample(aten.scatter.src, x, 1, index, real(4, 4, 7))
    yield Sample(aten.scatter.value, x, 1, index, 0.0)
    yield Sample(aten.scatter.value, x, 1, index, 2.0)
    yield Sample(aten.scatter.reduce, x, 1, index, real(4, 3, 6), reduce="multiply")
    yield Sample(aten.scatter_add.default, x, 1, whole(5, 4, 7, 6), real(4, 7, 6))
    yield Sample(aten.scatter_add.default, x, 1, smaller, real(4, 7, 6))
    yield Sample(aten.scatter_reduce.two, x, 1, whole(5, 4, 7, 6), real(4, 7, 6), "amax")
    picks: list[list[Tensor | None]] = [
        [whole(4, 7)], [None, whole(5, 7)], [None, whole(5, 7), whole(6, 3, 1)], [whole(4, 7), None, whole(6, 7)],
        [whole(4, 7, 1), whole(5, 3), whole(6, 1, 1)], [flags(4)], [flags(4, 5)], [None, flags(5), None],
    ]  # fmt: skip
    for indices in picks:
        yield Sample(aten.index.Tensor, x, indices)
        result = x[tuple(slice(None) if each is None else each for each in indices)]
        yield Sample(aten.index_put.default, x, indices, real())
        yield Sample(aten.index_put.default, x, indices, real(*result.shape), True)
        yield Sample(aten.index_put.default, x, indices, real(result.shape[-1]), True)
    yield Sample(aten.index_put.default, x, [torch.tensor([2, 0])], real(2, 5, 6))
    yield Sample(aten.masked_select.default, x, flags(4, 5, 6))
    yield Sample(aten.masked_scatter.default, x, flags(4, 5, 6), real(120))
    yield Sample(aten.nonzero.default, flags(4, 5))
    yield Sample(aten.where.default, flags(4, 5))
    yield Sample(aten.embedding_bag.default, real(10, 4), whole(10, 6), torch.tensor([0, 2]))
    yield Sample(aten.affine_grid_generator.default, real(2, 2, 3), [2, 1, 4, 5], False)
    yield Sample(aten.searchsorted.Tensor, torch.linspace(0, 1, 5, dtype=torch.float64), positive(4, 6))


def along() -> Iterator[Sample]:
    x = real(3, 4, 5)
    for operator in (aten.sum, aten.mean):
        dim = operator.dim_IntList if operator is aten.sum else operator.dim
        yield Sample(operator.default, x)
        yield Sample(operator.default, real())
        for dims, keep in (([1], False), ([0, -1], True), ([], False), (None, False)):
            yield Sample(dim, x, dims, keep)
    yield Sample(aten.sum.dim_IntList, x > 0, [1])
    yield Sample(aten.nansum.default, x, [1])
    yield Sample(aten.count_nonzero.dim_IntList, whole(2, 3, 4), [1])
    for operator in (aten.amax, aten.amin, aten.std, aten.var, aten.std_mean, aten.var_mean, aten.logsumexp):
        yield Sample(getattr(operator, "dim" if "dim" in operator.overloads() else "default"), x, [1, 2], keepdim=True)
    yield Sample(aten.var.correction, x, [1], correction=0)
    for operator in (aten.any, aten.all):
        yield Sample(operator.default, flags(3, 4))
        yield Sample(operator.dim, flags(3, 4), 1)
    for operator in (aten.max, aten.min):
        yield Sample(operator.default, x)
        yield Sample(operator.dim, x, 1)
        yield Sample(operator.other, x, real(4, 1))
    yield Sample(aten.aminmax.default, x, dim=1)
    for operator in (aten.argmax, aten.argmin):
        yield Sample(operator.default, x, 1)
        yield Sample(operator.default, x)
    for operator in (aten.median, aten.nanmedian, aten.mode):
        yield Sample(getattr(operator, "default" if operator is aten.mode else "dim"), x, 1)
    yield Sample(aten.linalg_vector_norm.default, x, 2, [1])
    yield Sample(aten.norm.ScalarOpt_dim, x, 2, [1])
    yield Sample(aten.norm.Scalar, x)
    for operator in (aten.quantile, aten.nanquantile):
        yield Sample(operator.scalar, x, 0.25, 1)
        yield Sample(operator.scalar, x, 0.5, None, True)
    yield Sample(aten.nanmean.default, x, [1])
    yield Sample(aten.prod.default, x)
    yield Sample(aten.prod.dim_int, x, 1)
    for operator in (aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp, aten.argsort, aten.sort):
        yield Sample(operator.default, x, 1)
    yield Sample(aten.sort.stable, x, stable=True, dim=1)
    yield Sample(aten.topk.default, x, 2, 1)
    yield Sample(aten.kthvalue.default, x, 2, 1)
    yield Sample(aten.kthvalue.default, x, 2, 1, True)
    yield Sample(aten.diff.default, x, 1, 1)
    yield Sample(aten.diff.default, x, 1, 1, real(3, 1, 5), real(3, 2, 5))
    yield Sample(aten.glu.default, x, 1)
    yield Sample(aten.linalg_norm.default, x, None, [1])
    yield Sample(aten.cosine_similarity.default, x, real(4, 1), 1)
    yield Sample(aten.linalg_vecdot.default, x, real(3, 1, 5), dim=0)
    yield Sample(aten.pairwise_distance.default, x, real(4, 5))
    yield Sample(aten.pairwise_distance.default, x, real(4, 5), 2.0, 1e-6, True)
    yield from spectra(x)


def spectra(x: Tensor) -> Iterator[Sample]:
    complex_ = torch.complex(x, x.flip(0))
    for name in ("fft", "ifft"):
        yield Sample(getattr(aten, f"fft_{name}").default, complex_, None, 1)
        yield Sample(getattr(aten, f"fft_{name}2").default, complex_, None, [0, 2])
        yield Sample(getattr(aten, f"fft_{name}n").default, complex_)
        yield Sample(getattr(aten, f"fft_{name}shift").default, x, [1])
    yield Sample(aten.fft_rfft.default, x, None, 1)
    for window in (None, positive(4)):
        yield Sample(aten.stft.default, real(3, 16), 4, 2, window=window, return_complex=True)
        yield Sample(aten.istft.default, torch.complex(real(2, 3, 7), real(2, 3, 7)), 4, 2, window=window, center=True)
    yield Sample(aten.stft.center, real(16), 4, return_complex=True)
    yield Sample(aten.fft_rfft2.default, x)
    yield Sample(aten.fft_rfftn.default, x, None, [0, 1])
    yield Sample(aten.fft_irfft.default, complex_, None, 1)
    yield Sample(aten.fft_irfft2.default, complex_)
    yield Sample(aten.fft_irfftn.default, complex_, None, [0, 1])
