"""Trace FlexAttention as the operations that it stands for, which rules cut over batch, heads and rows of queries like any attention.

    flex_attention(q, k, v, score_mod, block_mask)  softmax(where(mask_mod(b, h, i, j), score_mod(q @ k.T * scale, b, h, i, j), -inf)) @ v

PyTorch traces it through Dynamo alone, and computes its gradients on accelerators alone. Programs compute all scores, as PyTorch does
without ``torch.compile``: in the memory of attention with a mask.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from passes.ir.torch_private import HigherOrderOperator, indexing_by_tensors

_MODULE = "torch.nn.attention.flex_attention"
_INDICES = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))
"""The dimension (batch, head, query, key) of each level of ``vmap``, innermost first."""


def is_flex_attention(function: Any) -> bool:
    """Return whether a function is the operator that ``torch.nn.attention.flex_attention.flex_attention`` calls."""
    return isinstance(function, HigherOrderOperator) and function.name() == "flex_attention"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and logarithms to base two of sums and the largest scores, as the operator does."""
    module: Any = sys.modules[_MODULE]
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups, mask_mod = query.shape[1] // key.shape[1], block_mask[-1]
    key, value = (_for_all_queries(each, query, groups) for each in (key, value))
    scores = (query.to(precision) @ key.to(precision).transpose(-2, -1)) * scale
    indices = [torch.arange(size, device=query.device) for size in scores.shape]
    with indexing_by_tensors():
        if score_mod is not module._identity:  # noqa: SLF001
            scores = _for_all_indices(score_mod, (0,))(scores, *indices).to(precision)
        if mask_mod is not module.noop_mask:
            scores = torch.where(_for_all_indices(mask_mod, ())(*indices), scores, -math.inf)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key gives zeros
    weights = scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
    base = math.log(2)
    return weights.to(query.dtype) @ value.to(query.dtype), scores.logsumexp(-1) / base, scores.amax(-1) / base


def _for_all_queries(tensor: Tensor, query: Tensor, groups: int) -> Tensor:
    """Return keys or values with a head for each head of the queries, and their batch."""
    if groups > 1:
        batch, heads, length, width = tensor.shape
        tensor = tensor[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, heads * groups, length, width)
    return tensor if tensor.shape[0] == query.shape[0] else tensor.expand(query.shape[0], -1, -1, -1)


def _for_all_indices(function: Callable[..., Any], scores: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return a function of one score and its indices as one of all scores."""
    for dimensions in _INDICES:
        function = torch.vmap(function, in_dims=(*scores, *dimensions))
    return function
