"""One call of an operator as a value, without a graph: it compares and hashes, so that equal layers are priced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import sympy
import torch

from passes.ir.tensor_spec import Size, TensorSpec
from passes.ir.torch_private import OpOverload
from passes.rules import call as rules
from passes.rules.loops import Loops
from passes.rules.registry import loops_of_call

__all__ = ["Call", "tensors_in"]


@dataclass(frozen=True)
class Call:
    """An operator with its arguments; tensors are given by their shapes.

    Attributes:
        operator: the operator.
        values: (parameter, argument) pairs in order; tensors as shapes, lists as tuples.
        results: shapes of its results.
    """

    operator: OpOverload
    values: tuple[tuple[str, Any], ...]
    results: tuple[TensorSpec, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.operator, self.values, self.results))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Parameter -> value."""
        return dict(self.values)

    def shape(self, name: str) -> tuple[Size, ...]:
        """The shape of a tensor argument."""
        shape: tuple[Size, ...] = self.arguments[name].shape
        return shape

    @property
    def result(self) -> TensorSpec:
        """The first result."""
        return self.results[0]

    @cached_property
    def loops(self) -> Loops | None:
        """Return the loops of the call by the operator's rule; None if there is no rule, or it does not fit."""
        counter = iter(range(1_000_000))
        values = tuple((name, _for_rules(value, counter)) for name, value in self.values)
        shapes, dtypes = tuple(each.shape for each in self.results), tuple(each.known_dtype for each in self.results)
        return loops_of_call(rules.Call(self.operator, values, shapes, dtypes))

    def operand_indices(self, name: str) -> tuple[int, ...]:
        """Return the indices of a parameter's tensors among the operands of the loops."""
        before = 0
        for parameter, value in self.values:
            count = len(tuple(tensors_in(value)))
            if parameter == name:
                return tuple(range(before, before + count))
            before += count
        return ()

    def filled(self, tensor: Callable[[str, TensorSpec], Any], device: torch.device) -> dict[str, Any]:
        """Return parameter -> argument with tensors and devices replaced, to run the call.

        Args:
            tensor: makes a tensor from the parameter's name and the shape.
        """
        return {name: _filled(value, partial(tensor, name), device) for name, value in self.values}

    def at(self, values: Any) -> Call:
        """Return the call with symbolic sizes evaluated as ``values[size]``."""
        return replace(
            self,
            values=tuple((name, _at(value, values)) for name, value in self.values),
            results=tuple(_at(result, values) for result in self.results),
        )


def tensors_in(value: Any) -> Iterator[TensorSpec]:
    """Yield the tensors of an argument."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def _filled(value: Any, tensor: Callable[[TensorSpec], Any], device: torch.device) -> Any:
    if isinstance(value, tuple):
        return [_filled(item, tensor, device) for item in value]
    if isinstance(value, torch.device):
        return device
    return tensor(value) if isinstance(value, TensorSpec) else value


def _for_rules(value: Any, counter: Iterator[int]) -> Any:
    if isinstance(value, TensorSpec):
        return rules.Operand(next(counter), value.shape, value.known_dtype)
    return tuple(_for_rules(each, counter) for each in value) if isinstance(value, tuple) else value


def _at(value: Any, values: Any) -> Any:
    if isinstance(value, TensorSpec):
        return TensorSpec(tuple(int(values[size]) for size in value.shape), value.dtype)
    if isinstance(value, tuple):
        return tuple(_at(each, values) for each in value)
    return int(values[value]) if isinstance(value, sympy.Basic) else value
