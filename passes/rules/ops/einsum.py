"""Rules of ops that contract dimensions: matrix products, einsum, attention; and of layer norm."""

from __future__ import annotations

from passes.rules.bind import MisfitError, dimension, numbered, whole, write
from passes.rules.call import Call, Operand
from passes.rules.language import ANY_DIMENSION


def matmul(call: Call) -> str:
    """Multiply: ``batch* rows in, batch* in columns -> batch* rows columns``; a vector has only ``in``, and a matrix no batch."""
    left_rank, right_rank = len(call.operand("self").shape), len(call.operand("other").shape)
    left_batch, right_batch, batch = (["batch*"] if rank > 2 else [] for rank in (left_rank, right_rank, max(left_rank, right_rank)))
    rows, columns = ["rows"] if left_rank > 1 else [], ["columns"] if right_rank > 1 else []
    return write([[*left_batch, *rows, "in"], [*right_batch, "in", *columns]], [[*batch, *rows, *columns]], "linear self | other")


def tensordot(call: Call) -> str:
    """Sum over pairs of dimensions of both operands."""
    terms = [numbered(len(call.operand(name).shape), name=prefix) for name, prefix in (("self", "left"), ("other", "right"))]
    remaining = [list(term) for term in terms]
    for pair, dims in enumerate(zip(call["dims_self"], call["dims_other"], strict=True)):
        for term, remaining_term, dim in zip(terms, remaining, dims, strict=True):
            index = dimension(len(term), dim)
            remaining_term.remove(term[index])
            term[index] = f"in{pair}"
    return write(terms, [[*remaining[0], *remaining[1]]], "linear self | other")


def inner(call: Call) -> str:
    """Sum over the last dimensions of both operands."""
    left = numbered(len(call.operand("self").shape) - 1, name="left")
    right = numbered(len(call.operand("other").shape) - 1, name="right")
    return write([[*left, "in"], [*right, "in"]], [[*left, *right]], "linear self | other")


def einsum(call: Call) -> str:
    """Read letters as factors; one that occurs twice in an operand is a diagonal, which is not cut."""
    equation = call["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:  # PyTorch's default: the letters that occur once, in alphabetical order
        letters = sorted(set(left) - set(",."))
        right = ("..." if "..." in left else "") + "".join(letter for letter in letters if left.count(letter) == 1)
    diagonals = {letter for term in terms for letter in term if letter != "." and term.count(letter) > 1}
    names = {letter: f"{ANY_DIMENSION}_{letter}{'!' if letter in diagonals else ''}" for letter in equation if letter.isalpha()}

    def to_term(subscripts: str) -> list[str]:
        before, dots, after = subscripts.partition("...")
        return [*(names[letter] for letter in before), *(["batch*"] if dots else []), *(names[letter] for letter in after)]

    if "..." in left and "..." not in right:
        raise MisfitError("an ellipsis is summed over")
    linear = " | ".join(f"tensors.{index}" for index in range(len(terms)))
    return write([to_term(term) for term in terms], [to_term(right)], f"linear {linear}")


def attention(call: Call) -> str:
    """Cut neither keys, nor queries with ``is_causal``; with ``enable_gqa`` groups of query heads share a head of keys."""
    grouped = bool(call.get("enable_gqa")) and call.operand("query").shape[-3] != call.operand("key").shape[-3]
    query_heads, heads = ("(heads group)", "heads") if grouped else ("heads", "heads")
    if any(len(call.operand(name).shape) < 3 for name in ("query", "key", "value")):
        query_heads = heads = ""
    queries = "queries!" if call.get("is_causal") else "queries"
    line = (
        f"batch* {query_heads} {queries} qk!, batch* {heads} keys! qk!, batch* {heads} keys! head, {_mask_term(call, query_heads)}"
        f" -> batch* {query_heads} queries head"
    )
    return line if call["dropout_p"] else f"{line}; linear value"


def _mask_term(call: Call, heads: str) -> str:
    """Return the term of the mask, the last dimensions of ``batch* heads queries keys``."""
    mask = call["attn_mask"]
    if not isinstance(mask, Operand):
        return ""
    rank = len(mask.shape)
    has_batch = rank > 3 or (rank == 3 and not heads)
    names = (("batch*", has_batch), (heads, rank > 2), ("queries", rank > 1), ("keys", True))
    return " ".join(name for name, is_present in names if is_present)


def layer_norm(call: Call) -> str:
    """Normalize the last dimensions: they are not cut."""
    count = len(call["normalized_shape"])
    features = ["features!"] if count == 1 else whole(count, name="features")
    return write([["batch*", *features], features, features], [["batch*", *features]])
