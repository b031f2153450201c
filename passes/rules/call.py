"""One call of an operator as rules and cost models see it: sizes and numbers, and no graph.

Calls compare and hash, so that the loops of equal layers are found once, and equal layers are priced once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from passes.graph.schemas import bound_arguments, tensor_parameters
from passes.graph.symbolic_sizes import size_of
from passes.ir.tensor_spec import Size, TensorSpec
from passes.ir.torch_private import OpOverload

__all__ = ["Call", "Operand", "Shape", "call_of", "tensors_in"]

Shape: TypeAlias = tuple[Size, ...]
"""The sizes of one tensor."""


@dataclass(frozen=True)
class Operand(TensorSpec):
    """A tensor among the arguments.

    Attributes:
        index: its number among the tensors, in the order of the operator's schema.
    """

    index: int


@dataclass(frozen=True)
class Call:
    """An operator with sizes for tensors.

    Attributes:
        operator: what is called.
        values: of the operator's parameters, in order; tensors are ``Operand``, symbolic numbers expressions, lists tuples.
        outputs: the tensors that it gives.
    """

    operator: OpOverload
    values: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def numbered(cls, operator: OpOverload, values: Iterable[tuple[str, Any]], outputs: tuple[TensorSpec, ...]) -> Call:
        """Of values whose tensors are no operands yet, or operands of another call."""
        counter = count()
        return cls(operator, tuple((name, _numbered(value, counter)) for name, value in values), outputs)

    @cached_property
    def _hash(self) -> int:
        return hash((self.operator, self.values, self.outputs))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Parameter -> value."""
        return dict(self.values)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """All tensors among the arguments."""
        return tuple(each for _, value in self.values for each in tensors_in(value))

    @cached_property
    def results(self) -> tuple[Shape, ...]:
        """Shapes of the outputs."""
        return tuple(output.shape for output in self.outputs)

    @cached_property
    def slots(self) -> tuple[Operand | None, ...]:
        """A place for each parameter that takes a tensor, empty where the call gives none; a list has a place for each of its tensors."""
        found: list[Operand | None] = []
        for name in tensor_parameters(self.operator):
            value = self.arguments[name]
            if isinstance(value, tuple):
                found += [each for each in value if isinstance(each, Operand)]
            else:
                found.append(value if isinstance(value, Operand) else None)
        return tuple(found)

    @property
    def result(self) -> TensorSpec:
        """The first output."""
        return self.outputs[0]

    def shape(self, name: str) -> Shape:
        """The shape of a tensor argument."""
        shape: Shape = self.arguments[name].shape
        return shape

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def operand(self, *names: str) -> Operand:
        """The tensor of the first of these parameters that the operator has."""
        value = next(self.arguments[name] for name in names if name in self.arguments)
        assert isinstance(value, Operand)
        return value

    def operand_indices(self, name: str) -> tuple[int, ...]:
        """The indices of a parameter's tensors."""
        return tuple(each.index for each in tensors_in(self.arguments.get(name)))


def tensors_in(value: Any) -> Iterator[Operand]:
    """The tensors of an argument."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def call_of(node: fx.Node) -> Call | None:
    """What a node calls; None when a value in front of it is no tensor and no number of known meaning."""
    assert isinstance(node.target, OpOverload)
    found = node.meta.get("val")
    results = found if isinstance(found, list | tuple) else (found,)
    tensors = [result for result in results if result is not None]
    if not tensors or not all(isinstance(result, Tensor) for result in tensors):
        return None
    try:
        values = [(name, _value(value)) for name, value in bound_arguments(node).items()]
    except _UnknownValueError:
        return None
    return Call.numbered(node.target, values, tuple(_spec(each) for each in tensors))


class _UnknownValueError(Exception):
    """An argument that rules have no word for."""


def _value(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
        if isinstance(value, Tensor):
            return _spec(value)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            expression = value.node.expr
            return int(expression) if expression.is_Integer else expression
        if not isinstance(value, int | float | bool):
            raise _UnknownValueError
        return value
    if isinstance(value, list | tuple):
        return tuple(_value(each) for each in value)
    return value


def _numbered(value: Any, counter: Iterator[int]) -> Any:
    if isinstance(value, TensorSpec):
        return Operand(value.shape, value.dtype, next(counter))
    return tuple(_numbered(each, counter) for each in value) if isinstance(value, tuple) else value


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(size if type(size) is int else size_of(size) for size in tensor.shape), tensor.dtype)
