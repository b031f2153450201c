"""The operations of ``torch.autocast("cuda")``, for values on the CPU that stand for those of a GPU.

A model on the meta device is planned for devices that the machine may not have, and PyTorch without CUDA has no fake values of a GPU that
require gradients. While such a model is traced, the kernels of ``torch.autocast("cpu")`` cast as those of ``torch.autocast("cuda")`` do.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from passes.ir.graph import Autocast, without_autocast
from passes.ir.torch_private import OpOverload, pytree, registered_operators

_LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention lstm.input gru.input rnn_tanh.input rnn_relu.input
"""
"""Recurrent layers among them: autocast casts all that cuDNN computes them from."""
_SINGLE = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
SINGLE_UNLESS_SAID = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "norm.Scalar", "norm.ScalarOpt_dim"),
)
"""Operations that autocast gives ``dtype=torch.float32``, where the call names none."""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

CastTo = Literal["lower precision", "float32", "float32 unless a dtype is named", "widest dtype", "refused"]

CUDA_OPERATIONS: dict[str, CastTo] = {
    **dict.fromkeys(_LOWER.split(), "lower precision"),
    **dict.fromkeys(_SINGLE.split(), "float32"),
    **dict.fromkeys(SINGLE_UNLESS_SAID, "float32 unless a dtype is named"),
    **dict.fromkeys(_WIDEST.split(), "widest dtype"),
    "binary_cross_entropy": "refused",
}
"""Name of an overload -> what ``torch.autocast("cuda")`` casts its arguments to (the lists of ATen's ``autocast_mode.h``)."""

_INSTALLED = threading.RLock()
"""Held while kernels are replaced: they are those of the whole process."""


@contextlib.contextmanager
def operations_of(autocast: Autocast | None) -> Iterator[None]:
    """Inside it, autocast follows the list of the device that a model on the meta device is planned for. Not to be nested."""
    if autocast is None or autocast.planned_for != "cuda":
        yield
        return
    with _INSTALLED:
        library = _library()
        try:
            yield
        finally:
            del library  # which puts the kernels of PyTorch back


@contextlib.contextmanager
def traced_in(autocast: Autocast | None) -> Iterator[None]:
    """Inside it, operations compute in a mixed precision, whatever autocast the caller is in."""
    with operations_of(autocast), without_autocast() if autocast is None else autocast.enabled():
        yield


def _library() -> Library:
    library = Library("aten", "IMPL")
    registered = registered_operators("AutocastCPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that kernels are replaced, which is meant
        for name in registered:
            if name.removeprefix("aten::") not in CUDA_OPERATIONS:
                library.impl(name.removeprefix("aten::"), fallthrough_kernel, "AutocastCPU")
        for name, cast_to in CUDA_OPERATIONS.items():
            if (operation := overload(name)) is not None:
                library.impl(name, _kernel(operation, cast_to), "AutocastCPU")
    return library


def overload(name: str) -> OpOverload | None:
    """Return the overload of ATen of this name; None where this version of PyTorch has none."""
    packet, _, suffix = name.partition(".")
    found: OpOverload | None = getattr(getattr(torch.ops.aten, packet, None), suffix or "default", None)
    return found


def _kernel(operation: OpOverload, cast_to: CastTo) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _dtype(cast_to, pytree.tree_leaves((args, kwargs)))
        if dtype is not None:
            args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if may_be_cast(leaf) else leaf, (args, kwargs))
        torch.set_autocast_enabled("cpu", False)  # and no torch.autocast, which a trace would record
        try:
            return operation(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cpu", True)

    return kernel


def _dtype(cast_to: CastTo, leaves: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype that a call casts its floating-point arguments to; None: it casts nothing."""
    if cast_to == "refused":
        raise RuntimeError(
            "binary_cross_entropy and BCELoss are unsafe under torch.autocast('cuda'): "
            "use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
        )
    if cast_to == "float32 unless a dtype is named":
        return None if any(isinstance(leaf, torch.dtype) for leaf in leaves) else torch.float32
    is_single = cast_to == "float32" or any(may_be_cast(leaf) and leaf.dtype == torch.float32 for leaf in leaves)
    return torch.float32 if is_single and cast_to != "lower precision" else torch.get_autocast_dtype("cpu")


def may_be_cast(value: Any) -> bool:
    """Return whether autocast may cast a value: a floating-point tensor, but not one of double precision."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
