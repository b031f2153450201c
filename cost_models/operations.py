"""What one node costs: floating-point operations and bytes moved, as formulas in the batch symbol.

forward           reads its arguments, writes its results
backward input    reads the results' gradient and what was kept, writes the gradients of activations
backward weight   the same for the gradients of parameters
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from cost_models.contractions import Call, Size, TensorShape
from cost_models.operation_table import OPERATIONS, Operation
from passes.operators import packet, viewed_arguments, written_arguments
from passes.size_expression import size_of

__all__ = ["NO_WORK", "OperationCost", "Work", "operation_cost", "tensor_shapes"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """What a device has to do: floating-point operations, bytes of memory traffic, kernels."""

    flops: Size
    bytes: Size
    launches: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.launches + other.launches)


NO_WORK = Work(0, 0, 0)
"""Of a view, or of a gradient that nobody wants."""


@dataclass(frozen=True)
class OperationCost:
    """The price of one node.

    Attributes:
        dtype: what it computes in.
        forward: of the forward.
        backward_input: of the gradients of activations.
        backward_weight: of the gradients of parameters.
        saves: parameter names of the schema, or ``"result"`` or ``"results"``: the values that the backward keeps.
        keeps: bytes that the backward keeps besides.
        known: whether the operator is in the table; if not, it is priced by its bytes alone, and assumed to keep all it touches.
    """

    dtype: torch.dtype
    forward: Work
    backward_input: Work
    backward_weight: Work
    saves: tuple[str, ...]
    keeps: Size
    known: bool


def tensor_shapes(value: Any) -> tuple[TensorShape, ...]:
    """The tensors of a node's value as shapes, sizes as sympy expressions where they are symbolic."""
    if isinstance(value, torch.Tensor):
        return (TensorShape(tuple(size_of(size) for size in value.shape), value.dtype),)
    if isinstance(value, list | tuple):
        return tuple(shape for item in value for shape in tensor_shapes(item))
    return ()


def operation_cost(
    node: fx.Node,
    results: tuple[TensorShape, ...],
    arguments: Mapping[str, Any],
    gradients: Mapping[str, str],
    *,
    is_view: bool,
) -> OperationCost:
    """The price of a node.

    Args:
        node: a ``call_function``.
        results: its tensors.
        arguments: its arguments by name: tensors as shapes, nested as the schema nests them.
        gradients: argument -> ``"activation"`` or ``"weight"``, for those whose gradient the backward computes; empty: no backward.
        is_view: whether its results lie in the memory of its arguments.
    """
    dtype = results[0].dtype if results else torch.float32
    if node.target is operator.getitem or not results or not isinstance(node.target, OpOverload):
        return OperationCost(dtype, NO_WORK, NO_WORK, NO_WORK, (), 0, known=True)
    line = _line(node.target)
    known = line is not None or (not gradients and torch.Tag.pointwise in node.target.tags)
    is_view = is_view or (line is None and bool(viewed_arguments(node)) and not written_arguments(node))
    line = line or Operation(saves=(*gradients, "results"))
    call = Call(arguments, results)
    written = _bytes(results)
    read = sum((_bytes(tensors) for tensors in _tensors_of(arguments).values()), start=0)
    if is_view:
        backward = _view_backward(call, gradients, written)
        return OperationCost(dtype, NO_WORK, backward, NO_WORK, (), 0, known=True)
    if line.sparse_read:
        read = written
    forward = Work(line.flops(call) if line.flops else 0, read + written, line.launches)
    saves = _saves(line, gradients)
    return OperationCost(
        dtype=dtype,
        forward=forward,
        backward_input=_backward("activation", call, line, gradients, saves),
        backward_weight=_backward("weight", call, line, gradients, saves),
        saves=saves,
        keeps=line.keeps(call) if line.keeps and gradients else 0,
        known=known,
    )


def _line(target: OpOverload) -> Operation | None:
    """The line of the overload, of the operator, or of the functional twin of an in-place one."""
    line = OPERATIONS.get(target) or OPERATIONS.get(packet(target))
    name = target.overloadpacket.__name__
    if line is None and target.namespace == "aten" and name.endswith("_") and not name.endswith("__"):
        line = OPERATIONS.get(getattr(aten, name.removesuffix("_"), None))
    return line


def _saves(line: Operation, gradients: Mapping[str, str]) -> tuple[str, ...]:
    if not gradients:
        return ()
    conditions = [item.partition(":") for item in line.saves]
    return tuple(dict.fromkeys(name for name, _, needs in conditions if not needs or needs in gradients))


def _backward(kind: str, call: Call, line: Operation, gradients: Mapping[str, str], saves: tuple[str, ...]) -> Work:
    """The half of the backward that computes the gradients of one kind of arguments."""
    wanted = [name for name, gradient in gradients.items() if gradient == kind]
    if not wanted:
        return NO_WORK
    flops = sum((line.gradients[name](call) for name in wanted if name in line.gradients), start=0)
    tensors = _tensors_of(call.arguments)
    kept = sum((_bytes(call.results if name.startswith("result") else tensors.get(name, ())) for name in saves), start=0)
    made = sum((_bytes(tensors[name]) for name in wanted), start=0)
    return Work(flops, kept + _bytes(call.results) + made, len(wanted))


def _view_backward(call: Call, gradients: Mapping[str, str], written: Size) -> Work:
    """A view that shows each element once has a view for its backward; any other sums or fills."""
    if not gradients:
        return NO_WORK
    viewed = sum((_bytes(tensors) for name, tensors in _tensors_of(call.arguments).items() if name in gradients), start=0)
    return NO_WORK if viewed == written else Work(0, viewed + written, 1)


def _bytes(tensors: tuple[TensorShape, ...]) -> Size:
    return sum((tensor.bytes for tensor in tensors), start=0)


def _tensors_of(arguments: Mapping[str, Any]) -> dict[str, tuple[TensorShape, ...]]:
    return {name: tensors for name, value in arguments.items() if (tensors := tuple(_leaves(value)))}


def _leaves(value: Any) -> Iterator[TensorShape]:
    if isinstance(value, TensorShape):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
