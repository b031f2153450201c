"""Operations that sum products: matrix products, einsum, attention."""

from __future__ import annotations

from passes.rules.bind import MisfitError, dimension, numbered, whole, write
from passes.rules.call import Call, Operand
from passes.rules.language import ANY_DIMENSION

__all__ = ["attention", "einsum", "inner", "layer_norm", "matmul", "tensordot"]


def matmul(call: Call) -> str:
    """Vectors, matrices and batches of matrices, in every combination."""
    left, right = call.operand("self"), call.operand("other")
    rows, columns = len(left.shape) > 1, len(right.shape) > 1
    batch = ["batch*"]
    return write(
        [
            [*(batch * (len(left.shape) > 2)), *(["rows"] * rows), "in"],
            [*(batch * (len(right.shape) > 2)), "in", *(["columns"] * columns)],
        ],
        [[*(batch * (max(len(left.shape), len(right.shape)) > 2)), *(["rows"] * rows), *(["columns"] * columns)]],
        "linear self | other",
    )


def tensordot(call: Call) -> str:
    """The listed dimensions of both operands are summed over, in pairs."""
    left, right = call.operand("self"), call.operand("other")
    terms = [numbered(len(left.shape), name="left"), numbered(len(right.shape), name="right")]
    kept = [list(term) for term in terms]
    for pair, (one, other) in enumerate(zip(call["dims_self"], call["dims_other"], strict=True)):
        for term, rest, place in zip(terms, kept, (one, other), strict=True):
            index = dimension(len(term), place)
            rest.remove(term[index])
            term[index] = f"in{pair}"
    return write(terms, [[*kept[0], *kept[1]]], "linear self | other")


def inner(call: Call) -> str:
    """The last dimensions of both operands are summed over."""
    left, right = (numbered(len(call.operand(name).shape) - 1, name=kept) for name, kept in (("self", "left"), ("other", "right")))
    return write([[*left, "in"], [*right, "in"]], [[*left, *right]], "linear self | other")


def einsum(call: Call) -> str:
    """Letters are factors; one that occurs twice in an operand is a diagonal, which is not cut."""
    equation = call["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        right = ("..." if "..." in left else "") + "".join(letter for letter in letters if left.count(letter) == 1)
    whole = {letter for term in terms for letter in term if letter != "." and term.count(letter) > 1}
    names = {letter: f"{ANY_DIMENSION}_{letter}{'!' if letter in whole else ''}" for letter in equation if letter.isalpha()}

    def spelled(term: str) -> list[str]:
        front, dots, back = term.partition("...")
        return [*(names[letter] for letter in front), *(["batch*"] if dots else []), *(names[letter] for letter in back)]

    if "..." in left and "..." not in right:
        raise MisfitError("an ellipsis is summed over")
    sets = " | ".join(f"tensors.{index}" for index in range(len(terms)))
    return write([spelled(term) for term in terms], [spelled(right)], f"linear {sets}")


def attention(call: Call) -> str:
    """Each query is compared with all keys; with ``enable_gqa`` groups of query heads share a head of keys.

    With ``is_causal`` a query looks at its own position: queries are not cut either.
    """
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
    """A mask may lack leading dimensions."""
    mask = call["attn_mask"]
    if not isinstance(mask, Operand):
        return ""
    rank = len(mask.shape)
    return " ".join([*(["batch*"] * (rank > 3 or (rank == 3 and not heads))), *([heads] * (rank > 2)), "queries"[: 9 * (rank > 1)], "keys"])


def layer_norm(call: Call) -> str:
    """Statistics over the last dimensions: those are not cut."""
    count = len(call["normalized_shape"])
    features = ["features!"] if count == 1 else whole(count, name="features")
    return write([["batch*", *features], features, features], [["batch*", *features]])
