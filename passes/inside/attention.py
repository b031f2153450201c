"""Causal attention of queries that are cut: a rank's own rows, each at its place in the whole, look at the keys up to there.

          keys 0 1 2 3            ``is_causal`` counts rows from 0: right for rank 0 alone. Every part has a mask of its own:
rank 0   0     x . . .
         1     x x . .            key - start of the part <= row of the part
rank 1   0     x x x .
         1     x x x x
"""

from __future__ import annotations

import torch
from torch import fx

from passes.inside.writer import InsideWriter

__all__ = ["causal_attention"]

aten = torch.ops.aten


def causal_attention(write: InsideWriter) -> fx.Node:
    """On a part of the queries and all keys."""
    query, key, value = write["query"], write["key"], write["value"]
    like = query.meta["val"]
    rows = write.call(aten.arange.default, write.own_size(), device=like.device)
    keys = write.from_own_start(write.call(aten.arange.default, write.count("keys"), device=like.device))
    seen = write.call(aten.le.Tensor, write.call(aten.unsqueeze.default, keys, 0), write.call(aten.unsqueeze.default, rows, -1))
    keywords = {"scale": write.arguments.get("scale"), "enable_gqa": bool(write.arguments.get("enable_gqa"))}
    return write.call(aten.scaled_dot_product_attention.default, query, key, value, seen, 0.0, False, **keywords)
