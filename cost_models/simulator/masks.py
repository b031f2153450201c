"""Masks of dropout in fused kernels: drawn where they are used, and no more of them than is used.

program                                  what a kernel written by hand draws

mask = dropout_mask((1, 96, s, s))       nothing: every rank of the program draws the mask of one device
own = take_part(mask, 1, 8, 3)           (1, 12, s, s), its own heads
y = x * own * (1 / (1 - p))
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.dropout_masks import dropout_mask, dropout_mask_again, dropout_mask_with_state
from passes.ir.communication import draw_alike
from passes.ir.microbatch import take_part

__all__ = ["is_mask", "is_part_of_mask", "share_taken"]

_MASKS = (dropout_mask, dropout_mask_again, dropout_mask_with_state)


def is_mask(node: fx.Node) -> bool:
    """Whether a node draws a mask, alone or with other ranks."""
    return node.target in _MASKS or (node.target is draw_alike and node.args[0] in _MASKS)


def is_part_of_mask(node: fx.Node) -> bool:
    """Whether a node takes a part of a mask."""
    source = node.args[0] if node.target is take_part else None
    while isinstance(source, fx.Node) and source.target in (operator.getitem, take_part):
        source = source.args[0]
    return isinstance(source, fx.Node) and is_mask(source)


def share_taken(node: fx.Node) -> float:
    """The part of a mask, or of a part, that is used."""
    return max((_share(user) for user in node.users if user.op != "output"), default=1.0)


def _share(user: fx.Node) -> float:
    if user.target is operator.getitem:
        return share_taken(user) if user.args[1] == 0 else 0.0
    if user.target is not take_part:
        return 1.0
    sizes: Any = user.args[2]
    here = 1 / sizes if isinstance(sizes, int) else sizes[user.args[3]] / sum(sizes)
    return float(here * share_taken(user))
