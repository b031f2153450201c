"""Floating-point operations of the operations that multiply and sum: a multiplication and an addition count as two.

All else (pointwise, normalisation, pooling) moves bytes and counts no FLOPs, as in ``torch.utils.flop_counter`` and in the literature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["Call", "Formula", "Size", "TensorShape", "numel"]

Size: TypeAlias = Any
"""A number that may depend on the batch symbol: an int or a sympy expression."""


@dataclass(frozen=True)
class TensorShape:
    """What an operation's cost depends on in one tensor."""

    shape: tuple[Size, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> Size:
        return numel(self.shape)

    @property
    def bytes(self) -> Size:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One call of an operator: its arguments by name, tensors as shapes, and its results."""

    arguments: Mapping[str, Any]
    results: tuple[TensorShape, ...]

    def shape(self, name: str) -> tuple[Size, ...]:
        """The shape of a tensor argument."""
        shape: tuple[Size, ...] = self.arguments[name].shape
        return shape

    @property
    def result(self) -> TensorShape:
        return self.results[0]


Formula = Callable[[Call], Size]
"""A number that follows from a call: FLOPs, bytes."""


def numel(shape: Iterable[Size]) -> Size:
    """Product of the sizes."""
    return math.prod(shape)


def matrix_product(first: str) -> Formula:
    """Each result element is a dot product over the last dimension of the first factor."""

    def flops(call: Call) -> Size:
        return 2 * call.result.numel * call.shape(first)[-1]

    return flops


def convolution(call: Call) -> Size:
    """Each result element is a dot product with one filter (weight: out, in / groups, kernel...); the input's side when transposed."""
    transposed = bool(call.arguments.get("transposed", False))
    return transposed_convolution(call) if transposed else 2 * call.result.numel * numel(call.shape("weight")[1:])


def transposed_convolution(call: Call) -> Size:
    """Each input element is multiplied with one filter (weight: in, out / groups, kernel...)."""
    return 2 * numel(call.shape("input")) * numel(call.shape("weight")[1:])


def attention(call: Call) -> Size:
    """Scores and weighted sum: (heads, queries, keys) x (width of keys + width of values)."""
    *batch, queries, width = call.shape("query")
    keys, value_width = call.shape("key")[-2], call.shape("value")[-1]
    return 2 * numel(batch) * queries * keys * (width + value_width)


def attention_gradients(call: Call) -> Size:
    """The scores again, and the gradients of scores, queries, keys and values: five products for the forward's two."""
    return attention(call) * 5 // 2


def recurrent(call: Call) -> Size:
    """Every step multiplies with every weight matrix; the list of parameters holds all layers and directions."""
    return 2 * numel(call.shape("input")[:-1]) * sum(numel(shape) for shape in _matrices(call))


def recurrent_weight_gradients(call: Call) -> Size:
    """The gradients of all weights, and those of the states, which flow through all but the first layer's input weights."""
    return 2 * recurrent(call) - recurrent_input_gradient(call)


def recurrent_input_gradient(call: Call) -> Size:
    """The first layer's input weights, in each direction."""
    n_first = 2 if call.arguments["bidirectional"] else 1
    return 2 * numel(call.shape("input")[:-1]) * numel(_matrices(call)[0]) * n_first


def _matrices(call: Call) -> list[tuple[Size, ...]]:
    """Shapes of the weights, layer by layer, direction by direction: input to hidden, hidden to hidden."""
    return [tensor.shape for tensor in call.arguments["params"] if len(tensor.shape) == 2]


def recurrent_cell(call: Call) -> Size:
    """One step with both weight matrices."""
    rows = numel(call.shape("input")[:-1])
    return 2 * rows * (numel(call.shape("w_ih")) + numel(call.shape("w_hh")))


def tensor_dot(call: Call) -> Size:
    """Each result element is a sum over the contracted dimensions."""
    shape = call.shape("self")
    return 2 * call.result.numel * numel(shape[dim] for dim in call.arguments["dims_self"])


def bilinear(call: Call) -> Size:
    """Result element (row, out): input1 x weight[out] x input2."""
    return 2 * numel(call.shape("input1")[:-1]) * numel(call.shape("weight"))


def einsum(call: Call) -> Size:
    """Operands are contracted from left to right, each label summed as soon as neither the result nor a later operand has it."""
    equation: str = call.arguments["equation"]
    operands: Sequence[TensorShape] = call.arguments["tensors"]
    left, _, output = equation.replace(" ", "").partition("->")
    terms = [_labels(term, len(operand.shape)) for term, operand in zip(left.split(","), operands, strict=True)]
    sizes: dict[str, Size] = {}
    for term, operand in zip(terms, operands, strict=True):
        for label, size in zip(term, operand.shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
    seen = [label for term in terms for label in term]
    kept = set(_labels(output, len(call.result.shape))) if "->" in equation else {label for label in seen if seen.count(label) == 1}
    total: Size = 0
    current = set(terms[0])
    for position, term in enumerate(terms[1:], start=1):
        later = kept.union(*terms[position + 1 :])
        joined = current | set(term)
        if any(label in current and label in term and label not in later for label in joined):
            total = total + 2 * numel(sizes[label] for label in sorted(joined))
        current = joined & later
    return total


def einsum_gradients(call: Call) -> Size:
    """As much as the forward for each operand; one operand is not contracted with anything."""
    return len(call.arguments["tensors"]) * einsum(call)


def _labels(term: str, n_dims: int) -> list[str]:
    """One label a dimension; an ellipsis becomes numbers counted from the right."""
    before, dots, after = term.partition("...")
    hidden = n_dims - len(before) - len(after) if dots else 0
    return [*before, *(str(number) for number in reversed(range(hidden))), *after]
