"""Attention to one block of keys: partial results that can be merged, their merge, and the gradients of one block.

    keys 0                           keys 1
    result, top, total          +    result, top, total           =    attention to keys 0 and 1
    softmax(q k0^T) v0               softmax(q k1^T) v1                the mean of both results, weighted by total exp(top)

A total is the sum of exp(score - top) of a row, where top is its greatest score, or near it. The gradients of a block need the result O,
and top and total of all blocks (Dao et al., "FlashAttention", 2022):

    P = exp(scores - top) / total      D = sum(dO O)      dS = P (dO V^T - D)      dQ += dS K      dK += dS^T Q      dV += P^T dO

which is what the backward of a fused kernel computes, if it is given them instead of its own. Kernels give and take top + log(total),
which is enough for a mask of true and false. A mask that is added may hide by the least number that there is: then all scores of a row may
be that, and only their number is left to tell them apart, which no logarithm beside it keeps. So these are computed by the formula, as are
masks on GPUs, and values that are wider or narrower than keys: with the scores of a block in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ir.torch_private import flash_attention, flash_attention_gradients

_BLOCK = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float scale"
_ROWS = "Tensor result, Tensor top, Tensor total"

torch.library.define("partitioner::attention_block", f"({_BLOCK}) -> (Tensor, Tensor, Tensor)")
torch.library.define("partitioner::attention_block_backward", f"(Tensor grad, {_ROWS}, {_BLOCK}) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "partitioner::join_blocks", f"({_ROWS}, Tensor other, Tensor other_top, Tensor other_total) -> (Tensor, Tensor, Tensor)"
)
torch.library.define("partitioner::row_totals", "(Tensor top, Tensor total) -> Tensor")

attention_block = torch.ops.partitioner.attention_block.default
"""The result of attention to a block of keys, and the top and total of each row, (..., heads, queries): a top of minus infinity for a row
that attends to none of them, whose result is zero. Heads of keys may be fewer than those of queries."""

attention_block_backward = torch.ops.partitioner.attention_block_backward.default
"""The gradients of the queries, keys and values of a block, where ``result``, ``top`` and ``total`` are those of all blocks
(``row_totals``)."""

join_blocks = torch.ops.partitioner.join_blocks.default
"""Result, tops and totals of two blocks together; the result in single precision, or double."""

row_totals = torch.ops.partitioner.row_totals.default
"""Tops and totals, side by side in the last dimension, as gradients read them: a top of infinity for rows that attend to nothing, so that
exp(score - top) is zero."""

_HALF = (torch.bfloat16, torch.float16)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over blocks, and of exponentials."""
    return torch.float32 if dtype in _HALF else dtype


def _group(query: Tensor, key: Tensor) -> int:
    """Return how many heads of queries share a head of keys."""
    return query.shape[-3] // key.shape[-3] if query.dim() > 3 else 1


def _by_rows(x: Tensor, group: int) -> Tensor:
    """Return queries, or a value of their shape, with those of heads that share keys as rows of one head."""
    return x if group == 1 else x.unflatten(-3, (-1, group)).flatten(-3, -2)


def _by_heads(x: Tensor, group: int) -> Tensor:
    """Return the inverse of ``_by_rows``."""
    return x if group == 1 else x.unflatten(-2, (group, -1)).flatten(-4, -3)


def _repeated(x: Tensor, group: int) -> Tensor:
    """Return keys or values once for each head of queries."""
    return x if group == 1 else x.repeat_interleave(group, -3)


def _summed(grad: Tensor, group: int) -> Tensor:
    """Return the gradient of a repeated value: the sum over its copies."""
    return grad if group == 1 else grad.unflatten(-3, (-1, group)).sum(-3)


def _hidden(mask: Tensor | None, query: Tensor, key: Tensor, *, is_causal: bool) -> Tensor | None:
    """Return the bias of the scores: minus infinity where a query does not attend to a key."""
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -math.inf)


def _takes_kernel(mask: Tensor | None) -> bool:
    return mask is None or mask.dtype == torch.bool


def _attention_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group = _group(query, key)
    if mask is None and not is_causal:
        result, top, total = _rows_of_block(_by_rows(query, group), key, value, None, is_causal=False, scale=scale)
        top, total = (_by_heads(each.unsqueeze(-1), group).squeeze(-1) for each in (top, total))
        return _by_heads(result, group).contiguous(), top.contiguous(), total.contiguous()
    rows = _rows_of_block(query, _repeated(key, group), _repeated(value, group), mask, is_causal=is_causal, scale=scale)
    return rows[0].contiguous(), rows[1].contiguous(), rows[2].contiguous()


def _rows_of_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``attention_block`` for equal numbers of query heads and key heads."""
    is_square = query.shape[-2] == key.shape[-2]
    added = _hidden(mask, query, key, is_causal=is_causal and not is_square)
    fused = None
    if _takes_kernel(mask):
        fused = flash_attention(query, key, value, added, is_causal=is_causal and is_square, scale=scale)
    if fused is not None:
        result, log_total = fused
        if added is not None:  # kernels differ in what they give for rows without keys
            is_empty = (added == -math.inf).all(-1).expand(log_total.shape)
            result, log_total = result.masked_fill(is_empty.unsqueeze(-1), 0), log_total.masked_fill(is_empty, -math.inf)
        return result, log_total, torch.ones_like(log_total)
    scores = _scores(query, key, _hidden(mask, query, key, is_causal=is_causal), scale)
    top = scores.amax(-1)
    weights = (scores - top.masked_fill(top == -math.inf, 0).unsqueeze(-1)).exp()
    total = weights.sum(-1)
    result = (weights.to(value.dtype) @ value).to(total.dtype) / total.masked_fill(total == 0, 1).unsqueeze(-1)
    return result.to(value.dtype), top, total


def _scores(query: Tensor, key: Tensor, added: Tensor | None, scale: float) -> Tensor:
    scores = (query @ key.mT).to(_precise(query.dtype)) * scale
    return scores if added is None else scores + added


def _attention_block_backward(
    grad: Tensor,
    result: Tensor,
    top: Tensor,
    total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    group = _group(query, key)
    rows = [grad, result, top.unsqueeze(-1), total.unsqueeze(-1), query]
    if mask is None and not is_causal:
        rows = [_by_rows(x, group) for x in rows]
        of_query, of_key, of_value = _gradients_of_rows(rows, key, value, None, is_causal=False, scale=scale)
        of_query = _by_heads(of_query, group)
    else:
        blocks = _repeated(key, group), _repeated(value, group)
        of_query, of_key, of_value = _gradients_of_rows(rows, *blocks, mask, is_causal=is_causal, scale=scale)
        of_key, of_value = _summed(of_key, group), _summed(of_value, group)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


def _gradients_of_rows(
    rows: Sequence[Tensor], key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``attention_block_backward`` for equal numbers of query heads and key heads.

    Args:
        rows: gradient, result, top and total, (..., queries, 1), and queries.
    """
    grad, result, top, total, query = rows
    is_square = query.shape[-2] == key.shape[-2]
    if _takes_kernel(mask):
        added = _hidden(mask, query, key, is_causal=is_causal and not is_square)
        whole = (grad, result, (top + total.log()).squeeze(-1))
        fused = flash_attention_gradients(*whole, query, key, value, added, is_causal=is_causal and is_square, scale=scale)
        if fused is not None:
            return fused
    weights = (_scores(query, key, _hidden(mask, query, key, is_causal=is_causal), scale) - top).exp() / total
    moved = (grad.to(weights.dtype) * result.to(weights.dtype)).sum(-1, keepdim=True)
    of_value = weights.to(value.dtype).mT @ grad
    of_scores = (weights * ((grad @ value.mT).to(weights.dtype) - moved) * scale).to(query.dtype)
    return of_scores @ key, of_scores.mT @ query, of_value


def _join_blocks(
    result: Tensor, top: Tensor, total: Tensor, other: Tensor, other_top: Tensor, other_total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    joined_top = torch.maximum(top, other_top)
    finite = joined_top.masked_fill(joined_top == -math.inf, 0)  # two blocks without a key for a row are none together
    totals = total * (top - finite).exp(), other_total * (other_top - finite).exp()
    joined_total = totals[0] + totals[1]
    shares = [(each / joined_total.masked_fill(joined_total == 0, 1)).unsqueeze(-1) for each in totals]
    return result * shares[0] + other * shares[1], joined_top, joined_total


def _row_totals(top: Tensor, total: Tensor) -> Tensor:
    is_empty = top == -math.inf
    return torch.stack([top.masked_fill(is_empty, math.inf), total.masked_fill(is_empty, 1)], -1)


def _fake_block(query: Tensor, _key: Tensor, value: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = query.shape[:-1], _precise(query.dtype)
    return value.new_empty((*rows, value.shape[-1])), query.new_empty(rows, dtype=dtype), query.new_empty(rows, dtype=dtype)


def _fake_block_backward(
    _grad: Tensor, _result: Tensor, _top: Tensor, _total: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (x.new_empty(x.shape) for x in (query, key, value))
    return of_query, of_key, of_value


def _fake_join(result: Tensor, top: Tensor, total: Tensor, *_other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return result.new_empty(result.shape, dtype=_precise(result.dtype)), torch.empty_like(top), torch.empty_like(total)


def _fake_totals(top: Tensor, _total: Tensor) -> Tensor:
    return top.new_empty((*top.shape, 2))


for _operator, _run, _fake in (
    (attention_block, _attention_block, _fake_block),
    (attention_block_backward, _attention_block_backward, _fake_block_backward),
    (join_blocks, _join_blocks, _fake_join),
    (row_totals, _row_totals, _fake_totals),
):
    torch.library.impl(_operator.name(), "CompositeExplicitAutograd", _run)
    torch.library.register_fake(_operator.name(), _fake)
