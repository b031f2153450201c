"""Rules of operations that compute each element from one element of each operand, and of those that make tensors.

Operations that PyTorch tags as pointwise and that are not linear need no line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.rules import creation, layers
from passes.rules.call import Call

__all__ = ["CREATION", "ELEMENTWISE"]

aten = torch.ops.aten


def _divided(call: Call) -> str:
    """Rounding after the division ends linearity."""
    return "..." if call.get("rounding_mode") is not None else "...; linear self"


ELEMENTWISE: Mapping[Any, list[Any]] = {
    "...": [
        aten.alpha_dropout, aten.bernoulli, aten.bitwise_and, aten.bitwise_not, aten.bitwise_or, aten.bitwise_xor, aten.clamp, aten.clip,
        aten.fill, aten.floor_divide, aten.hardtanh, aten.isclose, aten.isfinite, aten.isinf, aten.logical_and, aten.logical_not,
        aten.logical_or, aten.logical_xor, aten.masked_fill.Tensor, aten.nan_to_num, aten.normal_functional, aten.rrelu, aten.selu,
        aten.celu, aten.relu6, aten.softplus, aten.square, aten.zero, aten.__and__, aten.__or__, aten.__xor__, aten.absolute, aten.greater,
        aten.greater_equal, aten.less, aten.less_equal, aten.not_equal, aten.log_sigmoid, aten.hardswish, aten.hardsigmoid, aten.mish,
        aten.silu, aten.float_power, aten.isnan, aten.isreal, aten.polar, aten.special_expit, aten.fix, aten.arccos, aten.arctan2,
        aten.__lshift__, aten.__rshift__,
    ],
    "...; linear self": [
        aten.neg, aten.negative, aten.positive, aten.real, aten.imag, aten.conj, aten.conj_physical,
        aten.resolve_conj, aten.resolve_neg, aten.deg2rad, aten.rad2deg,
        aten._to_copy, aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh_copy, aten.lift_fresh,  # noqa: SLF001
        aten.ldexp,
    ],
    "...; linear self other": [aten.add, aten.sub, aten.rsub, aten.subtract, aten.where],
    "...; linear self | other": [aten.mul, aten.multiply],
    _divided: [aten.div, aten.divide, aten.true_divide],
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
"""Rule -> operators."""

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
    creation.histogram: [aten.histc],
    creation.bincount: [aten.bincount],
    creation.everything: [
        aten.cosine_embedding_loss, aten.embedding_bag, aten.masked_scatter, aten.masked_select, aten.nonzero, aten.searchsorted,
        aten.where.default,
    ],
}  # fmt: skip
"""Rule -> operators."""
