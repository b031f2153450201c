"""Operations over classes, words or scores that are cut: no rank ever holds all of them.

lookup          each rank looks up the rows that it holds, zeros elsewhere; the parts are summed
softmax         the greatest score and the sum of exponentials are reduced; each rank keeps its own scores
cross entropy   the same, and the score of the target comes from the rank that holds it: three numbers a row are reduced, no logits

Causal attention of queries that are cut: a rank's own rows, each at its place in the whole, look at the keys up to there.

          keys 0 1 2 3            ``is_causal`` counts rows from 0: right for rank 0 alone. Every part has a mask of its own:
rank 0   0     x . . .
         1     x x . .            key - start of the part <= row of the part
rank 1   0     x x x .
         1     x x x x
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.schemas import MEAN, NO_REDUCTION
from passes.spmd.decompose.builder import InsideWriter

__all__ = ["causal_attention", "cross_entropy", "embedding", "log_softmax", "softmax"]

aten = torch.ops.aten


def embedding(write: InsideWriter) -> fx.Node:
    """Rows of a table that is cut by rows; a part of a sum."""
    index, inside = write.local_index(write["indices"])
    found = write.call(aten.embedding.default, write["weight"], index)
    padding = write["padding_idx"]
    if padding is not None and padding >= 0:
        is_padding = write.call(aten.unsqueeze.default, write.call(aten.eq.Scalar, write["indices"], padding), -1)
        found = write.call(aten.where.self, is_padding, write.call(aten.detach.default, found), found)
    return write.call(aten.mul.Tensor, found, write.call(aten.unsqueeze.default, inside, -1))


def _exponentials(write: InsideWriter, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Scores less the greatest of all, their exponentials, and the sum of these over all parts."""
    greatest = write.greatest(write.call(aten.amax.default, x, [dim], True))
    shifted = write.call(aten.sub.Tensor, x, greatest)
    exponentials = write.call(aten.exp.default, shifted)
    return shifted, exponentials, write.total(write.call(aten.sum.dim_IntList, exponentials, [dim], True))


def softmax(write: InsideWriter) -> fx.Node:
    """Along a dimension that is cut."""
    _, exponentials, total = _exponentials(write, _converted(write), write["dim"])
    return write.call(aten.div.Tensor, exponentials, write.vary(total))


def log_softmax(write: InsideWriter) -> fx.Node:
    """Along a dimension that is cut."""
    shifted, _, total = _exponentials(write, _converted(write), write["dim"])
    return write.call(aten.sub.Tensor, shifted, write.vary(write.call(aten.log.default, total)))


def _converted(write: InsideWriter) -> fx.Node:
    x: fx.Node = write["self"]
    dtype = write.arguments.get("dtype")
    return x if dtype is None else write.call(aten.to.dtype, x, dtype)


def cross_entropy(write: InsideWriter) -> fx.Node:
    """Of class numbers, without weights and smoothing."""
    x, target, ignored = write["self"], write["target"], write["ignore_index"]
    dim = 1 if write.rank("self") > 1 else 0
    shifted, _, total = _exponentials(write, x, dim)
    counted = write.call(aten.ne.Scalar, target, ignored)
    known = write.call(aten.mul.Tensor, target, counted)
    index, inside = write.local_index(known)
    picked = write.call(aten.gather.default, shifted, dim, write.call(aten.unsqueeze.default, index, dim))
    picked = write.total(write.call(aten.mul.Tensor, write.call(aten.squeeze.dim, picked, dim), inside))
    losses = write.call(aten.sub.Tensor, write.call(aten.squeeze.dim, write.call(aten.log.default, total), dim), picked)
    losses = write.call(aten.mul.Tensor, losses, counted)
    if write["reduction"] == NO_REDUCTION:
        return losses
    loss = write.call(aten.sum.default, losses)
    return write.call(aten.div.Tensor, loss, write.call(aten.sum.default, counted)) if write["reduction"] == MEAN else loss


# -- causal attention of queries that are cut --------------------------------------------------------------------------------------


def causal_attention(write: InsideWriter) -> fx.Node:
    """On a part of the queries and all keys."""
    query, key, value = write["query"], write["key"], write["value"]
    like = query.meta["val"]
    rows = write.call(aten.arange.default, write.own_size(), device=like.device)
    keys = write.from_own_start(write.call(aten.arange.default, write.count("keys"), device=like.device))
    seen = write.call(aten.le.Tensor, write.call(aten.unsqueeze.default, keys, 0), write.call(aten.unsqueeze.default, rows, -1))
    keywords = {"scale": write.arguments.get("scale"), "enable_gqa": bool(write.arguments.get("enable_gqa"))}
    return write.call(aten.scaled_dot_product_attention.default, query, key, value, seen, 0.0, False, **keywords)
