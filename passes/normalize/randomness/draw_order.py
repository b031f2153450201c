"""Draw random numbers into row-major memory: kernels fill memory in its own order, so strides decide which element gets which number.

Before, for x with strides of a transpose:    After:

    y = dropout(x, p)                             rows = contiguous(permute(x, order))      what memory holds, in its order
                                                  y = permute(dropout(rows, p), inverse)

The strides of a value do not survive a partition: a rank that receives it, or holds a part of it, has row-major memory. A shape does.
Kernels of normal numbers fill row-major memory of 16 numbers and more by another algorithm than the rest, which is ``normal_in_turn``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY, tensors_of
from passes.graph.fake_tensors import call_like, memory_among
from passes.graph.schemas import bound_arguments, packet
from passes.normalize.randomness.kernel_order import kernel_values, of_numbers

aten = torch.ops.aten

FILLED = "filled"
"""Key of the tensor that a node filled in place before it was made functional: with the strides of that memory."""

_NORMAL = frozenset({aten.normal_functional, aten.randn_like})

_FILLING = _NORMAL | {
    aten.alpha_dropout, aten.bernoulli, aten.cauchy, aten.dropout, aten.exponential, aten.geometric, aten.log_normal, aten.rand_like,
    aten.randint_like, aten.random, aten.uniform,
}  # fmt: skip
"""Operators that draw a number for each element of their result, in the order of the memory that they fill."""


def draw_in_memory_order(graph: fx.Graph) -> list[fx.Node]:
    """Rewrite in place the draws whose results are not row-major; return those whose order may be another for a batch of one row.

    An expanded dimension has stride 0, and torch then compares only some pairs of strides to order memory. Which pairs depends on the
    stride of a dimension of size one, which is arbitrary.
    """
    ambiguous: list[fx.Node] = []
    values_of_kernels = kernel_values(graph) if draws(graph) else {}
    for node in list(graph.nodes):
        filled = node.meta.pop(FILLED, node.meta.get("val"))
        if not draws_in_memory_order(node):
            continue
        filled = values_of_kernels.get(node, filled)
        order = memory_order(filled)
        is_permuted = order != sorted(order)
        has_gaps = not is_permuted and not of_numbers(filled, "meta").is_contiguous()  # ``normal_`` fills such memory in sequence
        if is_permuted and any(_is_expanded(tensor) for source in node.all_input_nodes for tensor in tensors_of(source)):
            ambiguous.append(node)
        if is_permuted or (has_gaps and packet(node.target) in _NORMAL):
            _permute(graph, node, order)
    return ambiguous


def _is_expanded(value: Tensor) -> bool:
    """Return whether a dimension of several elements has stride 0."""
    of_two_rows = of_numbers(value, "meta")
    return any(size > 1 and not stride for size, stride in zip(of_two_rows.shape, of_two_rows.stride(), strict=True))


def draws(graph: fx.Graph) -> bool:
    """Return whether a graph has draws whose numbers follow the order of memory."""
    return any(node.target == normal_in_turn or draws_in_memory_order(node) for node in graph.nodes)


def draws_in_memory_order(node: fx.Node) -> bool:
    """Return whether a node draws a number for each element of its result, in the order of the memory that it fills."""
    return packet(node.target) in _FILLING


def laid_out_anew(graph: fx.Graph, begins: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the values whose strides may differ from the model's: nodes where ``begins`` holds, and values computed from them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        follows = begins(node) or not found.isdisjoint(node.all_input_nodes)
        if follows and packet(node.target) is not aten.contiguous:
            found.add(node)
    return found


def draw_in_rows(graph: fx.Graph, anew: Collection[str]) -> None:
    """Make the inputs of draws contiguous where their strides differ from the model's, for which the order of draws was chosen.

    Args:
        graph: rewritten in place.
        anew: names of the values that are laid out anew.
    """
    for node in list(graph.nodes):
        if not draws_in_memory_order(node):
            continue
        for source in node.all_input_nodes:
            if source.name in anew:
                with graph.inserting_before(node):
                    contiguous = call_like(graph, node, aten.contiguous.default, source)
                node.replace_input_with(source, contiguous)


def memory_order(value: Tensor) -> list[int]:
    """Return the dimensions of a value, outermost in memory first, in the memory that ``empty_like`` allocates for it."""
    like = torch.empty_like(of_numbers(value, "meta"))
    if like.is_contiguous():  # dimensions of size one have any stride
        return list(range(value.dim()))
    return sorted(range(value.dim()), key=like.stride().__getitem__, reverse=True)


def _permute(graph: fx.Graph, node: fx.Node, order: list[int]) -> None:
    """Draw into row-major memory, between permutations to ``order`` and back; normal numbers by ``normal_in_turn``."""
    value, inverse = node.meta["val"], sorted(range(len(order)), key=order.__getitem__)
    first, call = node.all_input_nodes[0], functools.partial(call_like, graph, node)

    def in_rows(source: fx.Node) -> fx.Node:
        spread = source if source.meta["val"].shape == value.shape else call(aten.expand_as.default, source, first)
        return call(aten.contiguous.default, call(aten.permute.default, spread, order))

    with graph.inserting_before(node):
        rows = {each: in_rows(each) for each in node.all_input_nodes}
        if packet(node.target) in _NORMAL:
            bound = bound_arguments(node)
            like = call(aten.detach.default, rows[first])
            drawn = call(normal_in_turn, like, bound.get("mean", 0.0), bound.get("std", 1.0), value.dtype, value.device)
        else:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), rows.__getitem__)
            keywords = {name: each for name, each in keywords.items() if name != "memory_format"}
            drawn = graph.create_node("call_function", node.target, arguments, keywords)
            drawn.meta = {**node.meta, "val": value.permute(order).contiguous()}
            drawn.meta[OWN_MEMORY] = memory_among(drawn, [node, *drawn.all_input_nodes])
        result = call(aten.permute.default, drawn, inverse)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


# -- normal numbers as an operator -------------------------------------------------------------------------------------------------

torch.library.define(
    "partitioner::normal_in_turn",
    "(Tensor self, float mean, float std, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pointwise),
)

normal_in_turn = torch.ops.partitioner.normal_in_turn.default
"""Row-major normal numbers, of the shape of a tensor, drawn one after the other: what ``normal_`` writes into other memory."""


def _draw(like: Tensor, mean: float, std: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    gaps = torch.empty((*like.shape, 2), dtype=dtype, device=device)  # its every second number is no row-major memory
    return gaps[..., 0].normal_(mean, std).contiguous()


def _shape(like: Tensor, mean: float, std: float, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG001  its own names
    return torch.empty(like.shape, dtype=dtype, device=device)


torch.library.impl("partitioner::normal_in_turn", "CompositeExplicitAutograd", _draw)
torch.library.register_fake("partitioner::normal_in_turn", _shape)
