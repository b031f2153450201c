"""The results of operators on fake tensors that PyTorch finds by decomposing the operator, where they are plain to see.

    native_group_norm(x, ...)      x (s0, 64, 32, 32), contiguous      PyTorch: a dozen fake calls, reshape, var_mean, rsqrt, mul, add, ...
                                                                       here: (s0, 64, 32, 32), (s0, 32), (s0, 32)

PyTorch decomposes them whenever a size is open, which took a third of an export. Results are given for tensors of floating point that
fill their memory, and where what the operator requires of its arguments can be read off them, as expressions in the open sizes: nothing is
assumed of these. All other calls are decomposed, and raise their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor

from passes.graph.symbolic_sizes import traced_size
from passes.ir.torch_private import FakeResult

__all__ = ["PLAIN_RESULTS"]

aten = torch.ops.aten

Results: TypeAlias = Sequence[FakeResult] | None
"""The results of a call; None: they are not plain."""


def _of_each_element(x: Tensor) -> Results:
    return [_like(x)] if _is_plain(x) or _is_permuted(x) else None


def _scaled(x: Tensor, number: Any) -> Results:
    return _of_each_element(x) if type(number) in (int, float) else None


def _gelu(x: Tensor, *, approximate: str = "none") -> Results:
    return _of_each_element(x) if approximate in ("none", "tanh") else None


def _native_dropout(x: Tensor, p: float, train: bool | None) -> Results:
    if not (train and 0 < p < 1 and (_is_plain(x) or _is_permuted(x))):
        return None
    return [_like(x), _like(x)._replace(dtype=torch.bool)]


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Results:
    return [_like(x)] if _is_plain(x) and dtype in (None, x.dtype) and -x.dim() <= dim < x.dim() else None


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Results:
    return None if half_to_float else _safe_softmax(x, dim)


def _native_layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Results:
    del eps
    kept = x.dim() - len(normalized_shape)
    if not (_is_plain(x) or _is_permuted(x)) or kept < 0 or not normalized_shape or x.dtype not in _OWN_STATISTICS:
        return None
    sizes = (x.shape[kept:], *(each.shape for each in (weight, bias) if each is not None))
    if not all(_are_equal(each, normalized_shape) for each in sizes) or not _are_alike(x, weight, bias):
        return None
    statistics = FakeResult((*x.shape[:kept], *(1 for _ in normalized_shape)), x.dtype)
    return [FakeResult(x.shape, x.dtype), statistics, statistics]


def _native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Any, channels: Any, inner: Any, groups: int, eps: float
) -> Results:
    del eps
    if not (_is_plain(x) or _is_channels_last(x)) or x.dim() < 2 or x.dtype not in _OWN_STATISTICS:
        return None
    if not isinstance(channels, int) or channels % groups:
        return None
    sizes = (each.shape for each in (weight, bias) if each is not None)
    if not all(_are_equal(each, (channels,)) for each in sizes) or not _are_alike(x, weight, bias):
        return None
    if not _are_equal(x.shape[:2], (rows, channels)) or _product(x.shape[2:]) != traced_size(inner):
        return None
    statistics = FakeResult((rows, groups), x.dtype)
    return [_like(x), statistics, statistics]


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Results:
    del beta, alpha
    if not _is_plain(x) or (x.dim(), weight.dim()) != (2, 2) or not _are_alike(x, weight, bias):
        return None
    if not _are_equal(x.shape[1:], weight.shape[:1]) or not _are_equal(bias.shape, weight.shape[1:]):
        return None
    return [FakeResult((x.shape[0], weight.shape[1]), x.dtype)]


def _view(x: Tensor, shape: Sequence[Any]) -> Results:
    known = [size for size in shape if not (type(size) is int and size == -1)]
    if x.layout != torch.strided or x.is_conj() or x.is_neg() or len(shape) - len(known) > 1 or 0 in map(traced_size, x.shape):
        return None
    if len(known) < len(shape) and 0 not in known:
        shape = [x.numel() // math.prod(known) if type(size) is int and size == -1 else size for size in shape]
    strides = _strides_of_view(x, shape)
    return None if strides is None else [FakeResult(shape, x.dtype, strides, x)]


def _strides_of_view(x: Tensor, shape: Sequence[Any]) -> Sequence[Any] | None:
    """Return the strides of a view; None if there is none, or none for all open sizes.

    Dimensions of the tensor that lie in memory as one, the last first, are as many elements as some last dimensions of the view.
    """
    strides, left = list[Any](), list(shape)
    for total, stride in _runs_of_memory(x):
        elements: Any = 1
        while left and (elements != total or traced_size(left[-1]) == 1):
            size = left.pop()
            strides.insert(0, stride)
            stride, elements = stride * size, elements * traced_size(size)  # noqa: PLW2901  of the next dimension
        if elements != total:
            return None
    return strides if x.dim() and not left else None


def _runs_of_memory(x: Tensor) -> Iterator[tuple[Any, Any]]:
    """Yield the elements and the last stride of dimensions that lie in memory as one, the last first."""
    run: tuple[Any, Any] | None = None
    for size, stride in zip(map(traced_size, reversed(x.shape)), reversed(x.stride()), strict=True):
        if run is not None and traced_size(stride) == run[0] * traced_size(run[1]):
            run = run[0] * size, run[1]
        else:
            if run is not None:
                yield run
            run = size, stride
    if run is not None:
        yield run


_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_OWN_STATISTICS = (torch.float32, torch.float64)
"""Types whose mean and variance have the same type, on every device."""


def _like(x: Tensor) -> FakeResult:
    return FakeResult(x.shape, x.dtype, x.stride())


def _is_plain(x: Tensor) -> bool:
    """Return whether a tensor is of floating point and contiguous, whatever its open sizes are."""
    if x.dtype not in _FLOATING or x.layout != torch.strided:
        return False
    strides = list(map(traced_size, x.stride()))
    return strides == [_product(x.shape[dimension + 1 :]) for dimension in range(x.dim())]


def _is_permuted(x: Tensor) -> bool:
    """Return whether a tensor is a contiguous one of floating point in another order of its dimensions, and in no second one."""
    if x.dtype not in _FLOATING or x.layout != torch.strided:
        return False
    sizes = dict(zip(map(traced_size, x.stride()), map(traced_size, x.shape), strict=True))
    expected: Any = 1
    for _ in x.shape:
        size = sizes.pop(expected, 1)
        if size == 1:
            return False
        expected *= size
    return True


def _is_channels_last(x: Tensor) -> bool:
    """Return whether a tensor of images is stored with its channels last: each operator keeps that order."""
    if x.dim() != 4 or not _is_permuted(x):
        return False
    _, channels, height, width = map(traced_size, x.shape)
    return list(map(traced_size, x.stride())) == [channels * height * width, 1, channels * width, channels]


def _are_alike(x: Tensor, *others: Tensor | None) -> bool:
    return all(each is None or (each.dtype == x.dtype and each.device == x.device) for each in others)


def _are_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    return [*map(traced_size, sizes)] == [*map(traced_size, others)]


def _product(sizes: Sequence[Any]) -> int | sympy.Expr:
    return math.prod(map(traced_size, sizes))


PLAIN_RESULTS: Mapping[Any, Callable[..., Results]] = {
    aten._safe_softmax.default: _safe_softmax,  # noqa: SLF001
    aten._softmax.default: _softmax,  # noqa: SLF001
    aten.addmm.default: _addmm,
    aten.gelu.default: _gelu,
    aten.mul.Scalar: _scaled,
    aten.native_dropout.default: _native_dropout,
    aten.native_group_norm.default: _native_group_norm,
    aten.native_layer_norm.default: _native_layer_norm,
    **dict.fromkeys((aten._unsafe_view.default, aten.view.default), _view),  # noqa: SLF001
    **dict.fromkeys((aten.relu.default, aten.sigmoid.default, aten.silu.default, aten.tanh.default), _of_each_element),
}
"""Operator -> the function of its arguments to its results."""
