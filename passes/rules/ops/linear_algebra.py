"""Rules of decompositions, solutions and products of matrices in the last two dimensions: the dimensions before them are cut.

linalg_solve    batch* rows! columns!, batch* columns! right -> batch* rows! right
"""

from __future__ import annotations

from collections.abc import Callable

from passes.rules.bind import MisfitError, dimension, numbered, write
from passes.rules.call import Call


def singular_values(call: Call) -> str:
    """Decompose matrices into singular vectors and values; there may be more vectors than values."""
    left, right = ("left", "right") if call["full_matrices"] else ("values", "values")
    return f"batch* rows! columns! -> batch* rows! {left}!, batch* values!, batch* {right}! columns!"


def orthogonal_triangular(call: Call) -> str:
    """Decompose matrices into an orthogonal and a triangular one."""
    if call["mode"] == "r":
        raise MisfitError("without the orthogonal matrix the first result is empty")
    return "batch* rows! columns! -> batch* rows! vectors!, batch* vectors! columns!"


def solved(*, vectors: bool) -> Callable[[Call], str]:
    """Return the rule of solving ``A X = B``; columns of ``B`` may be cut.

    Args:
        vectors: whether ``B`` may be one vector for each matrix.
    """

    def rule(call: Call) -> str:
        if not call["left"]:
            raise MisfitError("rows of B are solved for, not columns")
        matrix, right = (operand.shape for operand in call.operands)
        if vectors and (right == matrix[:-1] or len(right) == 1):
            return "batch* rows! columns!, batch* rows! -> batch* columns!"
        return "batch* rows! columns!, batch* rows! right -> batch* columns! right"

    return rule


def diagonal_matrices(call: Call) -> str:
    """Write vectors into the diagonals of matrices."""
    if (call["dim1"], call["dim2"]) != (-2, -1):
        raise MisfitError("the matrices are in other dimensions than the last two")
    return "batch* elements! -> batch* rows! columns!; linear self"


def crossed(call: Call) -> str:
    """Multiply vectors of three elements, along a dimension that is not cut."""
    if call.get("dim") is None:
        raise MisfitError("no dimension is named")
    rank = len(call.operands[0].shape)
    term = numbered(rank, {dimension(rank, call["dim"]): "!"})
    return write([term, term], [term])
