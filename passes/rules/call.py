"""One call of an op, as rules and cost models see it: with sizes for tensors, and without a graph.

Calls are hashable, so that the loops and costs of equal layers are computed once.
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
from passes.ir.graph import VARIES
from passes.ir.tensor_spec import Size, TensorSpec
from passes.ir.torch_private import OpOverload

Shape: TypeAlias = tuple[Size, ...]
"""The sizes of one tensor."""


@dataclass(frozen=True)
class Operand(TensorSpec):
    """A tensor among the arguments.

    Attributes:
        index: among the tensor arguments, in the order of the operator's schema.
    """

    index: int


@dataclass(frozen=True)
class Call:
    """A call of an operator, with shape and dtype for each tensor.

    Attributes:
        operator: the overload that is called.
        values: (parameter, argument) in order; tensors are ``Operand``, symbolic numbers are expressions, lists are tuples.
        outputs: the tensors that it returns.
        varies: whether other sizes of the inputs change how many elements it takes of a dimension of a fixed size (``VARIES``).
    """

    operator: OpOverload
    values: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec, ...]
    varies: bool = False

    @classmethod
    def numbered(
        cls, operator: OpOverload, values: Iterable[tuple[str, Any]], outputs: tuple[TensorSpec, ...], *, varies: bool = False
    ) -> Call:
        """Return a call whose tensors become operands numbered in order; operands of another call are numbered anew."""
        indices = count()
        return cls(operator, tuple((name, _to_operands(value, indices)) for name, value in values), outputs, varies)

    @cached_property
    def _hash(self) -> int:
        return hash((self.operator, self.values, self.outputs, self.varies))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Parameter -> argument."""
        return dict(self.values)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """All tensors among the arguments."""
        return tuple(operand for _, value in self.values for operand in tensors_in(value))

    @cached_property
    def results(self) -> tuple[Shape, ...]:
        """Shapes of the outputs."""
        return tuple(output.shape for output in self.outputs)

    @cached_property
    def slots(self) -> tuple[Operand | None, ...]:
        """The operand of each parameter that takes a tensor, None if it is not passed; a list gives one for each of its tensors."""
        slots: list[Operand | None] = []
        for name in tensor_parameters(self.operator):
            value = self.arguments[name]
            if isinstance(value, tuple):
                slots += [item for item in value if isinstance(item, Operand)]
            else:
                slots.append(value if isinstance(value, Operand) else None)
        return tuple(slots)

    @property
    def result(self) -> TensorSpec:
        """The first output."""
        return self.outputs[0]

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor argument."""
        shape: Shape = self.arguments[name].shape
        return shape

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def operand(self, *names: str) -> Operand:
        """Return the tensor of the first of these parameters that the operator has."""
        value = next(self.arguments[name] for name in names if name in self.arguments)
        assert isinstance(value, Operand)
        return value

    def operand_indices(self, name: str) -> tuple[int, ...]:
        """Return the indices of a parameter's tensors."""
        return tuple(operand.index for operand in tensors_in(self.arguments.get(name)))


def tensors_in(value: Any) -> Iterator[Operand]:
    """Yield the tensors in an argument, also in nested lists."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def call_of(node: fx.Node) -> Call | None:
    """Return the call of a node; None if a result is no tensor, or an argument is computed and neither a tensor nor a number."""
    assert isinstance(node.target, OpOverload)
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else (value,)
    tensors = [result for result in results if result is not None]
    if not tensors or not all(isinstance(result, Tensor) for result in tensors):
        return None
    try:
        arguments = [(name, _describe(argument)) for name, argument in bound_arguments(node).items()]
    except _UnknownValueError:
        return None
    return Call.numbered(node.target, arguments, tuple(_spec(tensor) for tensor in tensors), varies=VARIES in node.meta)


class _UnknownValueError(Exception):
    """An argument is the result of a node, and neither a tensor nor a number."""


def _describe(value: Any) -> Any:
    """Replace nodes in an argument by their values in a ``Call``: a ``TensorSpec``, a number or an expression; and lists by tuples."""
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
        return tuple(_describe(item) for item in value)
    return value


def _to_operands(value: Any, indices: Iterator[int]) -> Any:
    """Replace each ``TensorSpec`` in an argument by an operand with the next index."""
    if isinstance(value, TensorSpec):
        return Operand(value.shape, value.dtype, next(indices))
    return tuple(_to_operands(item, indices) for item in value) if isinstance(value, tuple) else value


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(size if type(size) is int else size_of(size) for size in tensor.shape), tensor.dtype)
