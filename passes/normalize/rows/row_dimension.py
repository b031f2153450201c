"""Dimension of rows in the result of a call that computes each row by itself, by the rules of operations."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.graph.schemas import tensor_operands
from passes.rules.registry import loops_of

__all__ = ["REDUCED", "UNREAD", "row_dimension"]

REDUCED = -1
"""The results have no rows: these are summed up."""

UNREAD = -2
"""The results have no rows: only the type of the operands is read, as by ``new_zeros``."""


def row_dimension(node: fx.Node, rows: Mapping[fx.Node, int]) -> int | None:
    """Return the dimension of the results in which the rows are, or REDUCED, or UNREAD.

    None: rows are mixed in another way, or there is no rule for them.

    Args:
        rows: operand -> the dimension in which its rows are, at least one of them.
    """
    loops = loops_of(node)
    if loops is None:
        return None
    operands = list(zip(tensor_operands(node), loops.operands, strict=True))
    of_rows = {
        dimensions[rows[operand]] if dimensions else ()
        for index, (operand, dimensions) in enumerate(operands)
        if operand in rows and index not in loops.unread
    }
    if not of_rows:
        return UNREAD
    if len(of_rows) != 1 or len(next(iter(of_rows))) != 1:
        return None
    (factor,) = of_rows.pop()
    if loops.factors[factor].reduction == "whole" or any(factor in (window.factor, window.part) for window in loops.windows):
        return None
    others = [
        factor in dimension for operand, dimensions in operands for place, dimension in enumerate(dimensions) if place != rows.get(operand)
    ]
    found = {tuple(place for place, dimension in enumerate(result) if factor in dimension) for result in loops.results}
    if any(others) or len(found) != 1:
        return None
    places = found.pop()
    if not places:
        return REDUCED
    is_alone = all(result[places[0]] == (factor,) for result in loops.results)
    return places[0] if len(places) == 1 and is_alone else None
