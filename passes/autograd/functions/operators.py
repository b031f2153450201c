"""Operators that stand for custom autograd functions.

    model          y = Swish.apply(x, 2.0)
    graph          swish = torch.ops.autograd_function.Swish(x)         2.0 belongs to the operator
    joint graph    mul, sigmoid, mul | mul, sub, mul, add, mul          what its forward calls, and its backward

A graph keeps the function as one call. Its operator is composite: wherever the graph runs, it applies the function, so that code that
differentiates the graph follows PyTorch into ``backward``.
"""

from __future__ import annotations

import contextlib
import inspect
import keyword
import re
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import Library

from passes.graph.aliasing import memory_key
from passes.graph.schemas import FUNCTION_NAMESPACE
from passes.ir.torch_private import DisableTorchFunction, OpOverload, TreeSpec, tree_flatten, tree_unflatten


class _Operand:
    """Stands for a tensor, or for a size that is no number, among the arguments of a function."""


_OPERAND = _Operand()


@dataclass(frozen=True)
class AppliedFunction:
    """A function with all its arguments but tensors and sizes.

    Attributes:
        function: what is applied.
        leaves: the arguments, flat, ``_OPERAND`` for each tensor and size.
        tree: their structure.
        device: of the tensors; it may decide what the function calls.
        autocast: the dtype that autocast casts to; None where it is off.
    """

    function: type[Function]
    leaves: tuple[Any, ...]
    tree: TreeSpec
    device: torch.device
    autocast: torch.dtype | None

    @property
    def key(self) -> Hashable:
        """Equal for functions that are applied alike."""
        return self.function, tuple(map(_form, self.leaves)), self.tree, self.device, self.autocast

    def apply(self, operands: Sequence[Any]) -> Any:
        """Apply the function to tensors and sizes."""
        remaining = iter(operands)
        arguments = tree_unflatten([next(remaining) if leaf is _OPERAND else leaf for leaf in self.leaves], self.tree)
        with DisableTorchFunction(), _applying(), _precision(self.device.type, self.autocast):
            return self.function.apply(*arguments)

    def names(self) -> list[str]:
        """Return a name for each operand: that of the parameter of ``forward``, numbered where it holds several."""
        names: list[str] = []
        parameters = _parameters(self.function)
        for index, part in enumerate(self.tree.children()):
            name = parameters[index] if index < len(parameters) else f"argument_{index}"
            names += [name] if part.is_leaf() else [f"{name}_{leaf}" for leaf in range(part.num_leaves)]
        return [name for name, leaf in zip(names, self.leaves, strict=True) if leaf is _OPERAND]


def applied_function(function: type[Function], args: Sequence[Any]) -> AppliedFunction:
    """Return a function with the arguments of a call, but without its tensors and symbolic sizes."""
    leaves, tree = tree_flatten(tuple(args))
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    is_cast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    autocast = torch.get_autocast_dtype(device.type) if is_cast else None
    return AppliedFunction(function, tuple(_OPERAND if _is_operand(leaf) else leaf for leaf in leaves), tree, device, autocast)


def operands_of(args: Sequence[Any]) -> list[Any]:
    """Return the tensors and symbolic sizes among the arguments of a call, in the order of the operator's parameters."""
    return [leaf for leaf in tree_flatten(tuple(args))[0] if _is_operand(leaf)]


def _is_operand(leaf: object) -> bool:
    return isinstance(leaf, Tensor | torch.SymInt)


def _form(leaf: Any) -> Hashable:
    """Return a key of a leaf: the value of a number or a name, the identity of any other object."""
    if isinstance(leaf, float | complex):
        return type(leaf), repr(leaf)
    if leaf is None or isinstance(leaf, bool | int | str | torch.dtype | torch.device):
        return type(leaf), leaf
    return type(leaf), id(leaf)


def _parameters(function: type[Function]) -> list[str]:
    """Return the names of the arguments of ``forward``, without the context and those that take any number."""
    parameters = inspect.signature(function.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    has_context = function.setup_context is Function.setup_context
    return [f"{name}_" if keyword.iskeyword(name) else name for name in names[has_context:]]


# -- applying it unchanged ----------------------------------------------------------------------------------------------------------


_DEPTH = threading.local()


def is_applying() -> bool:
    """Return whether this thread is inside one of these operators, which apply functions directly."""
    return getattr(_DEPTH, "value", 0) > 0


@contextlib.contextmanager
def _applying() -> Iterator[None]:
    _DEPTH.value = getattr(_DEPTH, "value", 0) + 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


@contextlib.contextmanager
def _precision(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Let autocast cast to a dtype, or not at all. Not by ``torch.autocast``, which a trace would record."""
    if not torch.amp.is_autocast_available(device_type):
        yield
        return
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, dtype is not None)
    torch.set_autocast_dtype(device_type, dtype or before[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


# -- operators ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionOperator:
    """The operator of an applied function.

    Attributes:
        overload: ``torch.ops.autograd_function.<name of the function>.default``; its parameters are the operands of ``applied``.
        applied: the function.
        tree: the structure of what ``apply`` returns.
        is_tensor: for each leaf of it, whether it is a tensor; the others are None.
    """

    overload: OpOverload
    applied: AppliedFunction
    tree: TreeSpec
    is_tensor: tuple[bool, ...]

    @property
    def name(self) -> str:
        """The function, as Python names it."""
        function = self.applied.function
        return f"{function.__module__}.{function.__qualname__}"

    def __call__(self, operands: Sequence[Any]) -> Any:
        """Call the operator; returns what ``apply`` would."""
        results = self.overload(*operands)
        remaining = iter(results if isinstance(results, tuple | list) else (results,))
        return tree_unflatten([next(remaining) if is_tensor else None for is_tensor in self.is_tensor], self.tree)


_LIBRARY = Library(FUNCTION_NAMESPACE, "FRAGMENT")
_operators: dict[Hashable, FunctionOperator] = {}
_of_overload: dict[OpOverload, FunctionOperator] = {}
_counts: Counter[str] = Counter()
"""Name of a function -> how many operators are named after it."""


def function_operator(applied: AppliedFunction, operands: Sequence[Any], results: Any) -> FunctionOperator:
    """Return the operator of a function; equal ones have one.

    Args:
        operands: what ``applied.apply`` is given: tensors, and sizes.
        results: what it returns: tensors, and None. They may be views of operands.
    """
    leaves, tree = tree_flatten(results)
    is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    memory = [memory_key(operand) if isinstance(operand, Tensor) else None for operand in operands]
    viewed = tuple(memory.index(key) if (key := memory_key(leaf)) in memory else None for leaf in leaves if isinstance(leaf, Tensor))
    is_size = tuple(not isinstance(operand, Tensor) for operand in operands)
    key = applied.key, is_size, tree, is_tensor, viewed
    if key not in _operators:
        overload = _define(applied, is_size, viewed)
        _operators[key] = _of_overload[overload] = FunctionOperator(overload, applied, tree, is_tensor)
    return _operators[key]


def operator_of(overload: OpOverload) -> FunctionOperator:
    """Return the operator of an overload of the namespace."""
    return _of_overload[overload]


def _define(applied: AppliedFunction, is_size: Sequence[bool], viewed: Sequence[int | None]) -> OpOverload:
    """Define ``Swish(Tensor x) -> Tensor``, or ``Swish_2``, where another operator has the name; ``Tensor(a0)`` is viewed by a result."""
    base = re.sub(r"\W", "_", applied.function.__name__)
    _counts[base] += 1
    name = base if _counts[base] == 1 else f"{base}_{_counts[base]}"
    kinds = ["SymInt" if size else _tensor(index if index in viewed else None) for index, size in enumerate(is_size)]
    parameters = ", ".join(f"{kind} {parameter}" for kind, parameter in zip(kinds, applied.names(), strict=True))
    returned = ", ".join(map(_tensor, viewed))
    _LIBRARY.define(f"{name}({parameters}) -> {returned if len(viewed) == 1 else f'({returned})'}")

    def kernel(*operands: Any) -> Tensor | tuple[Tensor, ...]:
        tensors = [leaf for leaf in tree_flatten(applied.apply(operands))[0] if isinstance(leaf, Tensor)]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    _LIBRARY.impl(name, kernel, "CompositeImplicitAutograd")
    overload: OpOverload = getattr(getattr(torch.ops, FUNCTION_NAMESPACE), name).default
    return overload


def _tensor(viewed: int | None) -> str:
    """Return the type of a tensor in a schema; those that share memory have the number of the operand."""
    return "Tensor" if viewed is None else f"Tensor(a{viewed})"
