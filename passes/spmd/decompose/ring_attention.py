"""Decompose attention whose queries, keys and values are sharded: keys and values go round the ring of ranks, a block at a time.

rank 0   queries 0, keys 0   |  queries 0, keys 3   |  queries 0, keys 2   |  queries 0, keys 1        4 ranks: n = 4 steps
rank 1   queries 1, keys 1   |  queries 1, keys 0   |  queries 1, keys 3   |  queries 1, keys 2
         own                    K, V of the rank before, while the last block is computed

The sums of a row go on from block to block, by the online softmax (Milakov, Gimelshein, 2018; Liu, Zaharia, Abbeel, "Ring attention with
blockwise transformers", 2023):

    top'    = max(top, max(scores))
    sums'   = sums  exp(top - top') + exp(scores - top') V
    total'  = total exp(top - top') + sum(exp(scores - top'))           at the end: sums / total

Autograd would keep every block of keys, values and scores. So the steps are written without gradients, and end in an operator of our own,
``finish_attention``, whose backward goes round the ring once more. It saves queries, own keys and values, the result O and the logarithm L
of the totals, and computes for each block (Dao et al., "FlashAttention", 2022)

    P = exp(scores - L)        D = sum(dO O)        dS = P (dO V^T - D)        dQ += dS K        dK += dS^T Q        dV += P^T dO

Keys and values are sent with the gradients that were added to them so far, own ones come last, so that gradients are then at home. Forward,
2 (n - 1) blocks leave a rank, and backward 4 (n - 1). All ranks have parts of one size, and so one graph; which block a rank has at a step
only shows in positions, of which each takes its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.traceback import annotate

from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.functional import GRADIENT, halo_exchange, take
from passes.spmd.decompose.builder import PartWriter

__all__ = ["RING", "RING_STATE", "can_ring", "ring_attention"]

aten = torch.ops.aten

RING = "ring"
"""The key in ``meta["custom"]`` that marks messages of a ring, for reports."""

_EMPTY = -math.inf
"""The logarithm of a sum of no terms: of a row that attends to nothing, whose result is zero."""

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Ring:
    """One attention call on a ring, as forward and backward share it: on nodes that are emitted, or on tensors.

    Queries of heads that share keys lie behind each other, as more rows of one head: (..., heads of keys, group x queries, features).

    Attributes:
        call: emits a call, or runs it: ``call(function, *arguments, **keywords)``.
        value_of: gives the tensor that a node stands for; of a tensor, itself.
        mask: of own queries and all keys, boolean or added to scores; None: none.
        group: the number of heads of queries for each head of keys.
        n_queries, n_keys: number of own queries, and of own keys.
        over, count: the mesh dimension, and its ranks.
    """

    call: Callable[..., Any]
    value_of: Callable[[Any], Tensor]
    mask: Any
    is_causal: bool
    scale: float
    group: int
    n_queries: int
    n_keys: int
    over: str
    count: int

    def by_rows(self, heads: Any) -> Any:
        """Return queries, or what has their shape, with heads that share keys as rows of one head."""
        if self.group == 1:
            return heads
        shape = [self.value_of(heads).shape[-3] // self.group, self.group]
        return self.call(aten.flatten.using_ints, self.call(aten.unflatten.int, heads, -3, shape), -3, -2)

    def by_heads(self, rows: Any) -> Any:
        """Return the inverse of ``by_rows``."""
        if self.group == 1:
            return rows
        return self.call(aten.flatten.using_ints, self.call(aten.unflatten.int, rows, -2, [self.group, self.n_queries]), -4, -3)

    def rotated(self, block: Any) -> Any:
        """Send a block to the next rank, and receive that of the rank before."""
        value = self.value_of(block)
        size = int(value.shape[-2])
        starts = [(rank - 1) % self.count * size for rank in range(self.count)]
        wanted = "|".join(f"{start}:{start + size}" for start in starts)
        return self.call(halo_exchange, block, value.dim() - 2, self.over, [size] * self.count, wanted, size, size, 0.0)

    def scores(self, query: Any, key: Any, step: int) -> Any:
        """Return the scores of own queries and the keys of a step; minus infinity where a query does not attend to a key."""
        products = self.call(aten.matmul.default, query, self.call(aten.transpose.int, key, -2, -1))
        scores = self.call(aten.mul.Tensor, self.precise(products), self.scale)
        mask = self._mask(query, step)
        if mask is None:
            return scores
        if self.group > 1:
            scores = self.call(aten.unflatten.int, scores, -2, [self.group, self.n_queries])
        if self.value_of(mask).dtype == torch.bool:
            scores = self.call(aten.masked_fill.Scalar, scores, mask, _EMPTY)
        else:
            scores = self.call(aten.add.Tensor, scores, mask)
        return self.call(aten.flatten.using_ints, scores, -3, -2) if self.group > 1 else scores

    def _mask(self, query: Any, step: int) -> Any:
        """Return what is added to the scores of a step, or is true where they do not count; None: all count."""
        if self.is_causal:
            rows, columns = self._positions(query, self.n_queries, 0), self._positions(query, self.n_keys, step)
            return self.call(aten.gt.Tensor, self.call(aten.unsqueeze.default, columns, 0), self.call(aten.unsqueeze.default, rows, 1))
        if self.mask is None:
            return None
        mask, shape = self.mask, self.value_of(self.mask).shape
        if self.group > 1 and len(shape) > 2:
            grouped = shape[-3] != 1
            mask = self.call(aten.unflatten.int, mask, -3, [-1, self.group]) if grouped else self.call(aten.unsqueeze.default, mask, -3)
        if shape[-1] != 1:
            mask = self.call(aten.index_select.default, mask, -1, self._positions(query, self.n_keys, step))
        return self.call(aten.logical_not.default, mask) if self.value_of(mask).dtype == torch.bool else mask

    def _positions(self, like: Any, size: int, step: int) -> Any:
        """Return the positions of the block that this rank has at a step: that of the rank ``step`` before it."""
        every = self.call(aten.arange.default, size * self.count, device=self.value_of(like).device)
        shifted = self.call(aten.roll.default, every, [step * size]) if step else every
        return self.call(take, shifted, 0, self.over, self.count, [], 0)

    def precise(self, x: Any) -> Any:
        """Return a value in single precision if it is of half precision: sums over blocks, and of exponentials, need it."""
        return self.call(aten.to.dtype, x, torch.float32) if self.value_of(x).dtype in _HALF else x

    def like(self, x: Any, other: Any) -> Any:
        """Return a value in the dtype of another."""
        dtype = self.value_of(other).dtype
        return x if self.value_of(x).dtype == dtype else self.call(aten.to.dtype, x, dtype)


def can_ring(node: fx.Node, operands: Sequence[fx.Node], with_gradient: Collection[fx.Node]) -> bool:
    """Return whether a call is attention that can be computed block by block: without dropout, or a mask that has a gradient.

    Args:
        operands: its tensors, in the order of the schema.
        with_gradient: values whose gradient may be asked for.
    """
    if packet(node.target) is not aten.scaled_dot_product_attention:
        return False
    arguments, shapes = bound_arguments(node), [tuple(map(size_of, operand.meta["val"].shape)) for operand in operands[:3]]
    same_heads = shapes[0][-3:-2] == shapes[1][-3:-2] or (bool(arguments["enable_gqa"]) and len(shapes[0]) > 3)
    is_batched = len({shape[:-3] for shape in shapes}) == 1 and shapes[1][-3:-2] == shapes[2][-3:-2] and same_heads
    return is_batched and not arguments["dropout_p"] and arguments["attn_mask"] not in with_gradient


def ring_attention(write: PartWriter, over: str, count: int) -> fx.Node:
    """Emit attention of own queries, keys and values, with blocks that go round the ranks of a mesh dimension."""
    given = write.arguments
    query, key, value = (write.call(aten.detach.default, given[name]) for name in ("query", "key", "value"))
    heads, kv_heads = (each.meta["val"].shape[-3] if each.meta["val"].dim() > 3 else 1 for each in (query, key))
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.meta["val"].shape[-1]) if scale is None else scale
    group, n_queries, n_keys = int(heads // kv_heads), int(query.meta["val"].shape[-2]), int(key.meta["val"].shape[-2])
    sizes = (group, n_queries, n_keys, over, count)
    ring = _Ring(write.call, lambda node: node.meta["val"], given["attn_mask"], bool(given["is_causal"]), scale, *sizes)
    sums, top, total = _forward(ring, write.call(aten.contiguous.default, ring.by_rows(query)), key, value)
    log_total = write.call(log_sum_exp, top, total)
    arguments = (sums, total, log_total, given["query"], given["key"], given["value"], given["attn_mask"])
    return write.call(finish_attention, *arguments, ring.is_causal, scale, *sizes)


def _forward(ring: _Ring, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return the sums of values with weights, the largest score and the sum of weights of each row, over all blocks."""
    call, sums, top, total = ring.call, None, None, None
    for step in range(ring.count):
        following = (ring.rotated(key), ring.rotated(value)) if step < ring.count - 1 else None
        scores = ring.scores(query, key, step)
        own_top = call(aten.amax.default, scores, [-1], True)
        new_top = own_top if top is None else call(aten.maximum.default, top, own_top)
        finite = call(aten.masked_fill.Scalar, new_top, call(aten.eq.Scalar, new_top, _EMPTY), 0.0)
        weights = call(aten.exp.default, call(aten.sub.Tensor, scores, finite))
        own_total = call(aten.sum.dim_IntList, weights, [-1], True)
        own_sums = ring.precise(call(aten.matmul.default, ring.like(weights, value), value))
        if top is None:
            sums, total = own_sums, own_total
        else:
            factor = call(aten.exp.default, call(aten.sub.Tensor, top, finite))
            sums = call(aten.add.Tensor, call(aten.mul.Tensor, sums, factor), own_sums)
            total = call(aten.add.Tensor, call(aten.mul.Tensor, total, factor), own_total)
        top = new_top
        if following is not None:
            key, value = following
    return sums, top, total


# -- operators -------------------------------------------------------------------------------------------------------------------------

torch.library.define("partitioner::log_sum_exp", "(Tensor top, Tensor total) -> Tensor")

log_sum_exp = torch.ops.partitioner.log_sum_exp.default
"""The logarithm of the sum of exponentials of each row, from the largest score and the sum of what exceeds it; infinite for no terms."""

torch.library.define(
    "partitioner::finish_attention",
    "(Tensor sums, Tensor total, Tensor log_total, Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, "
    "int group, int n_queries, int n_keys, str over, int count) -> Tensor",
)

finish_attention = torch.ops.partitioner.finish_attention.default
"""Divide the sums of a ring by their totals, and give zeros for rows that attend to nothing. The backward is that of the whole ring.

``log_total``: ``log_sum_exp`` of the rows; the other arguments are those of ``_Ring``.
"""

RING_STATE = (log_sum_exp, finish_attention)
"""What the backward of a ring reads of its forward: to compute it again, blocks would go round once more."""


def _log_sum_exp(top: Tensor, total: Tensor) -> Tensor:
    return (top + total.log()).masked_fill(total == 0, math.inf)  # then exp(score - it) is zero


def _finish(sums: Tensor, total: Tensor, _log_total: Tensor, query: Tensor, _key: Tensor, value: Tensor, *_rest: Any) -> Tensor:
    result = sums / total.masked_fill(total == 0, 1.0)
    return result.view(*query.shape[:-1], value.shape[-1]).to(query.dtype)


def _fake_finish(_sums: Tensor, _total: Tensor, _log_total: Tensor, query: Tensor, _key: Tensor, value: Tensor, *_rest: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, log_total, query, key, value, mask, *ctx.rest = inputs
    ctx.save_for_backward(output, log_total, query, key, value, mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of queries, keys and values, by the formulas above."""
    result, log_total, query, key, value, mask = ctx.saved_tensors

    def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        with annotate({GRADIENT: True, RING: True}) if function is halo_exchange else contextlib.nullcontext():
            return function(*arguments, **keywords)

    ring = _Ring(call, lambda tensor: tensor, mask, *ctx.rest)
    rows, of_rows, result_rows = (ring.by_rows(each).contiguous() for each in (query, grad, result))  # every step reads them
    grads = _gradients(ring, rows, of_rows, result_rows, log_total, key, value)
    return (None, None, None, *grads, None, *(None for _ in ctx.rest))


def _gradients(
    ring: _Ring, query: Tensor, grad: Tensor, result: Tensor, log_total: Tensor, own_key: Tensor, own_value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, own keys and own values: of others' blocks first, whose gradients so come home at the end."""
    moved = (ring.precise(grad) * ring.precise(result)).sum(-1, keepdim=True)
    key, value, of_query, of_key, of_value = own_key, own_value, None, None, None
    for step in (*range(1, ring.count), 0):
        if step:
            key, value = ring.rotated(key), ring.rotated(value)
        else:
            key, value = own_key, own_value
        if of_key is not None and of_value is not None:
            of_key, of_value = ring.rotated(of_key), ring.rotated(of_value)
        weights = (ring.scores(query, key, step) - log_total).exp()
        added_value = ring.like(weights, value).mT @ grad
        of_scores = ring.like(weights * (ring.precise(grad @ value.mT) - moved) * ring.scale, query)
        added_query, added_key = ring.precise(of_scores @ key), of_scores.mT @ query
        of_query = added_query if of_query is None else of_query + added_query
        of_key = added_key if of_key is None else of_key + added_key
        of_value = added_value if of_value is None else of_value + added_value
    assert of_query is not None
    assert of_key is not None
    assert of_value is not None
    return ring.by_heads(ring.like(of_query, query)), of_key, of_value


torch.library.impl(log_sum_exp.name(), "CompositeExplicitAutograd", _log_sum_exp)
torch.library.register_fake(log_sum_exp.name(), lambda top, _total: torch.empty_like(top))
torch.library.impl(finish_attention.name(), "CompositeExplicitAutograd", _finish)
torch.library.register_fake(finish_attention.name(), _fake_finish)
torch.library.register_autograd(finish_attention.name(), _backward, setup_context=_setup_context)
