"""The products in an operation, forward and backward, as its rule has them: two operands, and the loops that run over each.

    linear  input batch in, weight out in -> batch out

    loops                  forward            gradient of input      gradient of weight
    batch  of both         -                  -                      -
    rows   of the first    batch              batch                  out
    columns of the second  out                in                     in
    inner  summed          in                 out                    batch

So the gradient of an operand is the product of the result with the other operand, over the same loops; nothing is said twice. Operations
that multiply no operands (pointwise, normalisation, pooling) move bytes and count no FLOPs, as in ``torch.utils.flop_counter``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from cost_models.ops.work import Product
from passes.ir.tensor_spec import Size, TensorSpec, numel
from passes.rules.call import Call
from passes.rules.loops import Dimension, Loops
from passes.rules.registry import loops_of_call

aten = torch.ops.aten


Products: TypeAlias = tuple[Product, ...]
"""Products of an operation, in order."""

Terms: TypeAlias = Sequence[frozenset[int]]
"""For each operand, and at last for the result, the loops that run over it."""


def contraction(*names: str, windowed: bool = False) -> Callable[[Call], Products]:
    """Contract the operands from left to right; a loop is summed as soon as neither the result nor a later operand has it.

    Args:
        names: the parameters that are multiplied.
        windowed: whether the second is a kernel that slides over the first.
    """

    def products(call: Call) -> Products:
        loops = loops_of_call(call)
        return () if loops is None else _contracted(*_terms(call, loops, names, windowed=windowed))

    return products


def operand_gradients(*names: str, windowed: bool = False) -> Callable[[Call], dict[str, Products]]:
    """Return the function that gives each parameter the products of its gradient.

    y = einsum("ij,jk->ik", a, b)
    gradient of a = einsum("ik,jk->ij", gradient of y, b)        the loops of y, of the other operands, and of a as the result
    """

    def gradients(call: Call) -> dict[str, Products]:
        """Parameter -> its products; none without a rule, and none for an operand that is multiplied by nothing."""
        loops = loops_of_call(call)
        found: dict[str, Products] = dict.fromkeys(names, ())
        if loops is None:
            return found
        terms, sizes = _terms(call, loops, names, windowed=windowed)
        owner = [name for name in names for _ in call.operand_indices(name)]
        for place, name in enumerate(owner):
            others = [term for index, term in enumerate(terms[:-1]) if index != place]
            if others:
                found[name] += _contracted([terms[-1], *others, terms[place]], sizes)
        return found

    return gradients


def attention(call: Call) -> Products:
    """Return the products of the scores, and of scores and values."""
    return _attention_products(call, ("query", "key", "scores"), ("scores", "value", "result"))


def as_attention(call: Call) -> Call:
    """Return a call of a fused attention kernel, or of attention to a block, as one of scaled_dot_product_attention."""
    plain = aten.scaled_dot_product_attention.default
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    known = {**call.arguments, "attn_mask": mask, "enable_gqa": call.shape("query")[-3:-2] != call.shape("key")[-3:-2]}
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, value = call.shape("query"), call.shape("value")
    result = TensorSpec((*query[:-1], value[-1]), call.arguments["query"].dtype)
    return Call.numbered(plain, [(name, known.get(name)) for name in names], (result,))


def attention_gradients(call: Call) -> Products:
    """Return five products: the scores again (FlashAttention, arXiv 2205.14135), and gradients of scores, queries, keys and values."""
    of_scores, of_queries, of_keys = ("result", "value", "scores"), ("scores", "key", "query"), ("scores", "query", "key")
    return _attention_products(call, ("query", "key", "scores"), of_scores, of_queries, of_keys, ("scores", "result", "value"))


def _attention_products(call: Call, *products: tuple[str, str, str]) -> Products:
    """Return products (one operand, the other, the result); scores have the unsummed loops of queries and keys.

    Fused kernels leave out the half of the scores that ``is_causal`` hides.
    """
    loops = loops_of_call(call)
    if loops is None:
        return ()
    terms = {name: _factors(loops.operands[call.operand_indices(name)[0]]) for name in ("query", "key", "value")}
    terms["result"] = _factors(loops.results[0])
    terms["scores"] = (terms["query"] & terms["result"]) | (terms["key"] & terms["value"])
    whole = tuple(_product(terms[one], terms[other], terms[made], _sizes(loops)) for one, other, made in products)
    is_half = call.arguments.get("is_causal") and call.shape("query")[-2] == call.shape("key")[-2]
    return tuple(replace(product, computed=0.5) for product in whole) if is_half else whole


def _terms(call: Call, loops: Loops, names: Sequence[str], *, windowed: bool) -> tuple[list[frozenset[int]], Sequence[Size]]:
    """Return the loops of operands and result, and their sizes; none over matrices of which each row picks one."""
    operands = [_factors(loops.operands[index]) for name in names for index in call.operand_indices(name)]
    terms, sizes = [*operands, _factors(loops.results[0])], _sizes(loops)
    if not windowed:
        picked = {place for place, factor in enumerate(loops.factors) if factor.reduction == "whole"}
        terms = [term - {place for place in picked if sum(place in other for other in terms) == 1} for term in terms]
    return _unfolded(call, loops, names[0], *terms) if windowed else (terms, sizes)


def _sizes(loops: Loops) -> Sequence[Size]:
    return [factor.size for factor in loops.factors]


def _factors(dimensions: Sequence[Dimension]) -> frozenset[int]:
    return frozenset(factor for dimension in dimensions for factor in dimension)


def _is_transposed(call: Call) -> bool:
    return bool(call.arguments.get("transposed", "conv_transpose" in call.operator.name()))


def _unfolded(
    call: Call, loops: Loops, name: str, source: frozenset[int], weight: frozenset[int], result: frozenset[int]
) -> tuple[list[frozenset[int]], Sequence[Size]]:
    """Return the terms of a convolution as a product over unfolded windows; a transposed one has windows of its result.

    No loop runs over the dimensions of the input that the kernel slides over: those of the result do.
    """
    kernel, places = weight - source - result, result - source - weight
    if not _is_transposed(call):
        return [source | places | kernel, weight, result], _sizes(loops)
    (operand,) = call.operand_indices(name)
    slid = {window.factor: call.shape(name)[window.dimension] for window in loops.windows if window.operand == operand}
    return [source | places, weight, result | kernel], [slid.get(factor, size) for factor, size in enumerate(_sizes(loops))]


def _contracted(terms: Terms, sizes: Sequence[Size]) -> Products:
    """Contract all terms but the last into the last one. Of several pairs, those that sum nothing are elementwise."""
    current, found = terms[0], []
    for place, term in enumerate(terms[1:-1], start=1):
        later = terms[-1].union(*terms[place + 1 : -1])
        if len(terms) <= 3 or (current & term) - later:
            found.append(_product(current, term, later, sizes))
        current = (current | term) & later
    return tuple(found)


def _product(one: frozenset[int], other: frozenset[int], kept: frozenset[int], sizes: Sequence[Size]) -> Product:
    def size(factors: frozenset[int]) -> Size:
        return numel(sizes[factor] for factor in sorted(factors))

    both = one & other
    return Product(batch=size(both & kept), rows=size(one - other), columns=size(other - one), inner=size(both - kept))


# -- products of recurrent layers. Their rules say that nothing but the batch may be cut, not what is multiplied -------------------


def layers(call: Call) -> Products:
    """Return a product of every step with every weight matrix; the list of parameters holds all layers and directions."""
    length, batch = _steps_and_rows(call)
    return tuple(
        Product(1, length * batch, gates, width) if place % 2 == 0 else Product(length, batch, gates, width)
        for place, (gates, width) in enumerate(_matrices(call))
    )


def weight_gradients(call: Call) -> Products:
    """Return the gradients of all weights, and of the states, which flow through all but the first layer's input weights."""
    length, batch = _steps_and_rows(call)
    first = 2 if call.arguments["bidirectional"] else 1
    states = tuple(
        Product(1 if place % 2 == 0 else length, length * batch if place % 2 == 0 else batch, width, gates)
        for place, (gates, width) in enumerate(_matrices(call))
        if place % 2 or place >= 2 * first
    )
    return (*(Product(1, gates, width, length * batch) for gates, width in _matrices(call)), *states)


def input_gradient(call: Call) -> Products:
    """Through the first layer's input weights, in each direction."""
    length, batch = _steps_and_rows(call)
    n_first = 2 if call.arguments["bidirectional"] else 1
    gates, width = _matrices(call)[0]
    return (Product(1, length * batch, width, gates),) * n_first


def cell(call: Call) -> Products:
    """Return the products of one step with both weight matrices."""
    rows = numel(call.shape("input")[:-1])
    return tuple(Product(1, rows, *call.shape(name)) for name in ("w_ih", "w_hh"))


def _steps_and_rows(call: Call) -> tuple[Size, Size]:
    """Return the steps of a recurrent layer, and its rows; ``nn.LSTM`` gives an input without a batch one row."""
    shape = call.shape("input")
    return (shape[1], shape[0]) if call.arguments.get("batch_first") else (shape[0], shape[1])


def _matrices(call: Call) -> list[tuple[Size, Size]]:
    """Return the shapes of the weights by layer and direction: input to hidden, hidden to hidden."""
    return [tensor.shape for tensor in call.arguments["params"] if len(tensor.shape) == 2]
