"""Operations that sum products: matrix products, einsum, attention, bilinear forms."""

from __future__ import annotations

from torch import fx

from passes.analysis.batch.call import Call
from passes.analysis.batch.role import Role

__all__ = ["attention", "einsum", "linear", "matmul", "matmul_with_bias"]


def linear(call: Call) -> Role:
    """``(batch*, in) @ (out, in)``."""
    return call.aligned({call["input"]: call.leading(call["input"], 1)})


def _factors(call: Call, left: fx.Node, right: fx.Node) -> dict[fx.Node, list[int | None]]:
    """Dimensions of the result that those of two factors run with: rows of the left, columns of the right, leading ones of both."""
    rank = len(call.results[0])
    matrix_left, matrix_right = call.rank(left) > 1, call.rank(right) > 1
    trailing = matrix_left + matrix_right
    dimensions: dict[fx.Node, list[int | None]] = {}
    for factor, is_matrix in ((left, matrix_left), (right, matrix_right)):
        inner = 2 if is_matrix else 1
        outer = call.rank(factor) - inner
        dimensions[factor] = [rank - trailing - outer + index for index in range(outer)]
    dimensions[left] += [rank - trailing, None] if matrix_left else [None]
    if right is left:
        return {left: [None] * call.rank(left)}
    dimensions[right] += [None, rank - 1] if matrix_right else [None]
    return dimensions


def matmul(call: Call) -> Role:
    """``(batch*, n, k) @ (batch*, k, m)``, either without its batch or its outer matrix dimension."""
    left, right = call["self"], next(call[name] for name in ("other", "mat2", "vec", "tensor") if name in call.arguments)
    return call.aligned(_factors(call, left, right))


def matmul_with_bias(call: Call) -> Role:
    """``addmm``, ``baddbmm``: a bias is broadcast to a product."""
    left, right = (call[first] if first in call.arguments else call[second] for first, second in (("mat1", "batch1"), ("mat2", "batch2")))
    dimensions = _factors(call, left, right)
    if call["self"] in dimensions:
        return call.mixed
    return call.aligned({**dimensions, call["self"]: call.from_the_right(call["self"])})


def einsum(call: Call) -> Role:
    """Letters say which dimensions run together; a letter that the result lacks is summed over."""
    equation = call["equation"].replace(" ", "")
    tensors = list(call["tensors"])
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(set(tensors)) != len(tensors) or len(terms) != len(tensors):
        return call.mixed
    result_rank = len(call.results[0])
    if not arrow:
        letters = sorted(set(left) - set(",."))
        right = ("..." if "..." in left else "") + "".join(letter for letter in letters if left.count(letter) == 1)
    target = _positions(right, result_rank)
    dimensions = {}
    for tensor, term in zip(tensors, terms, strict=True):
        found = _positions(term, call.rank(tensor))
        dimensions[tensor] = [target.get(symbol) for symbol in sorted(found, key=found.__getitem__)]
        if len(found) != call.rank(tensor):
            return call.mixed
    return call.aligned(dimensions)


def _positions(term: str, rank: int) -> dict[str | int, int]:
    """Symbol -> dimension; dimensions under an ellipsis are numbered from its right end."""
    front, dots, back = term.partition("...")
    covered = rank - len(front) - len(back) if dots else 0
    positions: dict[str | int, int] = {letter: index for index, letter in enumerate(front)}
    positions.update({covered - 1 - index: len(front) + index for index in range(covered)})
    positions.update({letter: len(front) + covered + index for index, letter in enumerate(back)})
    return positions


def attention(call: Call) -> Role:
    """Scaled dot products: ``query (batch*, heads, n, d)``, ``key, value (batch*, heads, m, d)``, ``mask (batch*, heads, n, m)``."""
    query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    dimensions = {operand: call.leading(operand, 2) for operand in (query, key, value)}
    if isinstance(mask, fx.Node):
        aligned = call.from_the_right(mask)
        rank = len(call.results[0])
        dimensions[mask] = [None if target is None or target >= rank - 2 else target for target in aligned]
    return call.aligned(dimensions)
