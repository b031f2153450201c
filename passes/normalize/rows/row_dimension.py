"""Dimension of rows in the result of a call that computes each row by itself, by the rules of operations."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.graph.schemas import tensor_operands
from passes.rules.registry import loops_of

REDUCED = -1
"""The results have no rows: these are summed up."""

UNREAD = -2
"""The results have no rows: only the type of the operands is read, as by ``new_zeros``."""


def row_dimension(node: fx.Node, rows: Mapping[fx.Node, int]) -> int | None:
    """Return the dimension of the results that holds the rows; None if the call mixes rows, or has no rule.

    With the rows of x in dimension 0:

    relu(x), sum(x, 1)             0
    transpose(x, 0, 1)             1
    sum(x, 0)                      REDUCED
    new_zeros(x, [3])              UNREAD
    softmax(x, 0)                  None

    Args:
        rows: operand -> the dimension that holds its rows; at least one of the operands.
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
    in_other_dimensions = [
        factor in dimension for operand, dimensions in operands for place, dimension in enumerate(dimensions) if place != rows.get(operand)
    ]
    found = {tuple(place for place, dimension in enumerate(result) if factor in dimension) for result in loops.results}
    if any(in_other_dimensions) or len(found) != 1:
        return None
    result_dims = found.pop()
    if not result_dims:
        return REDUCED
    is_alone = all(result[result_dims[0]] == (factor,) for result in loops.results)
    return result_dims[0] if len(result_dims) == 1 and is_alone else None
