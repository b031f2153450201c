"""One call of an operation as a rule sees it: sizes and numbers, and no graph.

Calls compare and hash, so that the loops of equal layers are found once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from passes.graph.schemas import bound_arguments, tensor_parameters
from passes.graph.symbolic_sizes import size_of
from passes.ir.torch_private import OpOverload
from passes.rules.loops import Size

__all__ = ["Call", "Operand", "Shape", "call_of"]

Shape: TypeAlias = tuple[Size, ...]
"""The sizes of one tensor."""


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments.

    Attributes:
        index: its number among the tensors, in the order of the operator's schema.
        shape: its sizes.
        dtype: its type.
    """

    index: int
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """An operator with sizes for tensors.

    Attributes:
        operator: what is called.
        values: of the operator's parameters, in order; tensors are ``Operand``, symbolic numbers expressions, lists tuples.
        results: shapes of the results.
        dtypes: types of the results.
    """

    operator: OpOverload
    values: tuple[tuple[str, Any], ...]
    results: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Parameter -> value."""
        return dict(self.values)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """All tensors among the arguments."""
        return tuple(
            each for _, value in self.values for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Operand)
        )

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

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def operand(self, *names: str) -> Operand:
        """The tensor of the first of these parameters that the operator has."""
        value = next(self.arguments[name] for name in names if name in self.arguments)
        assert isinstance(value, Operand)
        return value


def call_of(node: fx.Node) -> Call | None:
    """What a node calls; None when a value in front of it is no tensor and no number of known meaning."""
    assert isinstance(node.target, OpOverload)
    found = node.meta.get("val")
    results = found if isinstance(found, list | tuple) else (found,)
    tensors = [result for result in results if result is not None]
    if not tensors or not all(isinstance(result, Tensor) for result in tensors):
        return None
    counter = iter(range(1_000_000))
    try:
        values = tuple((name, _value(value, counter)) for name, value in bound_arguments(node).items())
    except _UnknownValueError:
        return None
    return Call(node.target, values, tuple(_shape(each) for each in tensors), tuple(each.dtype for each in tensors))


class _UnknownValueError(Exception):
    """An argument that rules have no word for."""


def _value(value: Any, counter: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
        if isinstance(value, Tensor):
            return Operand(next(counter), _shape(value), value.dtype)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            expression = value.node.expr
            return int(expression) if expression.is_Integer else expression
        if not isinstance(value, int | float | bool):
            raise _UnknownValueError
        return value
    if isinstance(value, list | tuple):
        return tuple(_value(each, counter) for each in value)
    return value


def _shape(tensor: Tensor) -> Shape:
    return tuple(size if type(size) is int else size_of(size) for size in tensor.shape)
