"""Decompose lookup, products with experts, softmax, cross entropy and causal attention whose classes, words or queries are sharded.

embedding       each rank looks up the rows that it stores, zeros for others; the partial results are summed
grouped_mm      each rank multiplies the rows of the experts that it stores, zeros for others; the partial results are summed
softmax         the maximum and the sum of exponentials are all_reduced; each rank keeps its own scores
cross entropy   the same, and the score of the target comes from the rank that has it: three numbers for each row instead of logits

Causal attention, 4 keys, 2 queries on each of two ranks: ``is_causal`` counts rows from 0, right on rank 0 only. So each rank has a mask.

          keys 0 1 2 3
rank 0   0     x . . .            key - start of the shard <= row of the shard
         1     x x . .
rank 1   0     x x x .
         1     x x x x
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.schemas import MEAN, NO_REDUCTION
from passes.rules.ops.grouped_mm import grouped_mm
from passes.spmd.decompose.builder import ReductionWriter

aten = torch.ops.aten


def embedding(write: ReductionWriter) -> fx.Node:
    """Look up rows in a table of which each rank stores some; the result is a partial sum."""
    index, inside = write.local_index(write["indices"])
    rows = write.call(aten.embedding.default, write["weight"], index)
    padding = write["padding_idx"]
    if padding is not None and padding >= 0:
        is_padding = write.call(aten.unsqueeze.default, write.call(aten.eq.Scalar, write["indices"], padding), -1)
        rows = write.call(aten.where.self, is_padding, write.call(aten.detach.default, rows), rows)
    return write.call(aten.mul.Tensor, rows, write.call(aten.unsqueeze.default, inside, -1))


def grouped_product(write: ReductionWriter) -> fx.Node:
    """Multiply the rows of the experts that this rank stores; other rows are zeros, and the result is a partial sum."""
    own = write.from_own_start(write["group"])
    return write.call(grouped_mm, write["input"], write["weight"], own, write.arguments.get("transposed", False))


def _exponentials(write: ReductionWriter, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return scores minus the maximum over all ranks, their exponentials, and the sum of these over all ranks."""
    greatest = write.greatest(write.call(aten.amax.default, x, [dim], True))
    shifted = write.call(aten.sub.Tensor, x, greatest)
    exponentials = write.call(aten.exp.default, shifted)
    return shifted, exponentials, write.total(write.call(aten.sum.dim_IntList, exponentials, [dim], True))


def softmax(write: ReductionWriter) -> fx.Node:
    """Divide exponentials by their sum over all ranks."""
    _, exponentials, total = _exponentials(write, _converted(write), write["dim"])
    return write.call(aten.div.Tensor, exponentials, write.vary(total))


def log_softmax(write: ReductionWriter) -> fx.Node:
    """Subtract the logarithm of the sum of exponentials over all ranks."""
    shifted, _, total = _exponentials(write, _converted(write), write["dim"])
    return write.call(aten.sub.Tensor, shifted, write.vary(write.call(aten.log.default, total)))


def _converted(write: ReductionWriter) -> fx.Node:
    """Return the input in the dtype that the call asks for."""
    x: fx.Node = write["self"]
    dtype = write.arguments.get("dtype")
    return x if dtype is None else write.call(aten.to.dtype, x, dtype)


def cross_entropy(write: ReductionWriter) -> fx.Node:
    """Compute ``log(sum(exp(scores))) - score of the target``; for class indices, without class weights or label smoothing."""
    x, target, ignored = write["self"], write["target"], write["ignore_index"]
    dim = 1 if write.rank("self") > 1 else 0
    shifted, _, total = _exponentials(write, x, dim)
    counted = write.call(aten.ne.Scalar, target, ignored)
    valid_target = write.call(aten.mul.Tensor, target, counted)  # class 0 for ignored ones
    index, inside = write.local_index(valid_target)
    picked = write.call(aten.gather.default, shifted, dim, write.call(aten.unsqueeze.default, index, dim))
    picked = write.total(write.call(aten.mul.Tensor, write.call(aten.squeeze.dim, picked, dim), inside))
    losses = write.call(aten.sub.Tensor, write.call(aten.squeeze.dim, write.call(aten.log.default, total), dim), picked)
    losses = write.call(aten.mul.Tensor, losses, counted)
    if write["reduction"] == NO_REDUCTION:
        return losses
    loss = write.call(aten.sum.default, losses)
    return write.call(aten.div.Tensor, loss, write.call(aten.sum.default, counted)) if write["reduction"] == MEAN else loss


def causal_attention(write: ReductionWriter) -> fx.Node:
    """Attend from this rank's queries to all keys up to each, by an explicit mask."""
    query, key, value = write["query"], write["key"], write["value"]
    like = query.meta["val"]
    rows = write.call(aten.arange.default, write.own_size(), device=like.device)
    keys = write.from_own_start(write.call(aten.arange.default, write.count("keys"), device=like.device))
    mask = write.call(aten.le.Tensor, write.call(aten.unsqueeze.default, keys, 0), write.call(aten.unsqueeze.default, rows, -1))
    keywords = {"scale": write.arguments.get("scale"), "enable_gqa": bool(write.arguments.get("enable_gqa"))}
    return write.call(aten.scaled_dot_product_attention.default, query, key, value, mask, 0.0, False, **keywords)
