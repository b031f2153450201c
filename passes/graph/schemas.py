"""What an operator's schema says about a call: its arguments by name, and which of them it views or writes.

The one file that reads PyTorch's operator schemas (``OpOverload._schema``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.torch_private import OpOverload

__all__ = [
    "MEAN",
    "NO_REDUCTION",
    "SUM",
    "argument_form",
    "bound_arguments",
    "call_with",
    "draws",
    "draws_random_numbers",
    "drops_nothing",
    "functional",
    "node_leaves",
    "out_parameters",
    "packet",
    "returns_argument",
    "tensor_parameters",
    "viewed_arguments",
    "views_its_arguments",
    "written_arguments",
]

aten = torch.ops.aten

NO_REDUCTION = 0
"""What the parameter ``reduction`` of a loss is in the schemas, for a loss of each element."""

MEAN = 1
"""The same for their mean."""

SUM = 2
"""The same for their sum."""


@dataclass(frozen=True)
class _Parameter:
    name: str
    default: Any
    aliased: bool
    written: bool
    takes_tensors: bool


@functools.cache
def _parameters(operator: OpOverload) -> tuple[_Parameter, ...]:
    return tuple(
        _Parameter(
            argument.name,
            argument.default_value if argument.has_default_value() else None,
            argument.alias_info is not None,
            argument.alias_info is not None and argument.alias_info.is_write,
            "Tensor" in str(argument.type),
        )
        for argument in operator._schema.arguments  # noqa: SLF001  no public way to alias annotations
    )


@functools.cache
def tensor_parameters(operator: OpOverload) -> tuple[str, ...]:
    """The parameters that take a tensor, perhaps none, or a list of tensors; in the order of the schema."""
    return tuple(parameter.name for parameter in _parameters(operator) if parameter.takes_tensors)


def parameters_of(operator: OpOverload) -> tuple[str, ...]:
    """The names of all parameters, in the order of the schema."""
    return tuple(parameter.name for parameter in _parameters(operator))


def takes_lists_of_tensors(operator: OpOverload) -> bool:
    """Whether a parameter takes a list of tensors."""
    return any("List" in str(each.type) and "Tensor" in str(each.type) for each in operator._schema.arguments)  # noqa: SLF001


def packet(target: Any) -> Any:
    """The operator that an overload belongs to (``aten.add`` of ``aten.add.Tensor``); any other target is itself."""
    return target.overloadpacket if isinstance(target, OpOverload) else target


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """Every parameter of the operator by name, with the value that this call gives it or its default."""
    assert isinstance(node.target, OpOverload)
    parameters = _parameters(node.target)
    bound = {parameter.name: parameter.default for parameter in parameters}
    bound.update(zip((parameter.name for parameter in parameters), node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def call_with(node: fx.Node, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments as a call writes them, from others of the same names: ``bound_arguments`` the other way."""
    names, n_positional = list(bound), len(node.args)
    return tuple(bound[name] for name in names[:n_positional]), {name: bound[name] for name in names[n_positional:] if name in node.kwargs}


def viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that the schema lets the result alias; all of them for a target that has no schema."""
    if not isinstance(node.target, OpOverload):
        return list(node.all_input_nodes)
    return _annotated(node, only_written=False)


def views_its_arguments(operator: OpOverload) -> bool:
    """Whether the schema lets the result alias an argument."""
    return any(parameter.aliased for parameter in _parameters(operator))


def returns_argument(operator: Any) -> bool:
    """Whether an operator returns the one tensor that it writes, and nothing else: ``add_`` and its like."""
    if not isinstance(operator, OpOverload):
        return False
    written = [parameter for parameter in _parameters(operator) if parameter.written]
    returned = operator._schema.returns  # noqa: SLF001  no public way to the schema
    return len(written) == 1 and len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that the schema says are written."""
    return _annotated(node, only_written=True) if isinstance(node.target, OpOverload) else []


def functional(operator: Any) -> OpOverload | None:
    """Return the operator that computes what another writes, ``aten.add.Tensor`` for ``aten.add_.Tensor`` and ``aten.add.out``.

    None when there is none.
    """
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    if outs := out_parameters(operator):
        return _without_outs(operator, outs)
    name, _, overload = operator.name().removeprefix("aten::").partition(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    if operator in _UNLIKE_NAMES:
        return _UNLIKE_NAMES[operator]
    return getattr(getattr(aten, name.removesuffix("_"), None), overload or "default", None)


@functools.cache
def out_parameters(operator: OpOverload) -> tuple[str, ...]:
    """The parameters that take memory for the result alone: ``out=`` and its like."""
    return tuple(each.name for each in operator._schema.arguments if each.is_out)  # noqa: SLF001  no public way to the schema


@functools.cache
def _without_outs(operator: OpOverload, outs: tuple[str, ...]) -> OpOverload | None:
    names = [name for name in parameters_of(operator) if name not in outs]
    overloads = (getattr(operator.overloadpacket, name) for name in operator.overloadpacket.overloads())
    return next((each for each in overloads if list(parameters_of(each)) == names and not _writes(each)), None)


def _writes(operator: OpOverload) -> bool:
    return any(parameter.written for parameter in _parameters(operator))


_UNLIKE_NAMES: Mapping[OpOverload, OpOverload | None] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.ldexp_.default: aten.ldexp.Tensor,
    aten.normal_.default: aten.normal_functional.default,
    aten.polygamma_.default: None,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.transpose_.default: aten.transpose.int,
}
"""In-place operators whose functional form has another name or none; by their own name they would find one with other arguments."""


def draws_random_numbers(target: Any) -> bool:
    """Whether the operator reads the random number generator (it may, with some arguments)."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def drops_nothing(dropout: fx.Node) -> bool:
    """Whether a call of dropout gives its argument: with probability zero, and in evaluation."""
    bound = bound_arguments(dropout)
    return bound["p"] == 0 or not bound["train"]


_DROPPED_SHARES = ("dropout_p", "dropout")
"""What attention and recurrent networks call the share of elements that they set to zero."""


def draws(node: fx.Node) -> bool:
    """Whether this call reads the random number generator: attention or an LSTM without dropout does not, though its operator may."""
    if not draws_random_numbers(node.target):
        return False
    given = bound_arguments(node)
    return given.get("train") is not False and not any(given.get(name, 1.0) == 0.0 for name in _DROPPED_SHARES)


def argument_form(argument: Any, form_of: Callable[[fx.Node], Hashable]) -> Hashable:
    """An argument of a call with forms in the place of nodes (numbers, say): equal for calls that do the same to values of equal forms.

    Equal numbers may be unlike arguments: types are told apart (1, 1.0 and True), and the digits of floats (0.0 and -0.0).
    """
    if isinstance(argument, fx.Node):
        return "node", form_of(argument)
    if isinstance(argument, tuple | list):
        return tuple(argument_form(part, form_of) for part in argument)
    if isinstance(argument, dict):
        return tuple((name, argument_form(part, form_of)) for name, part in argument.items())
    is_itself = isinstance(argument, Hashable) and not isinstance(argument, float | complex)
    return type(argument), argument if is_itself else repr(argument)


def node_leaves(argument: Any) -> list[fx.Node]:
    """The nodes in an argument, however nested."""
    if isinstance(argument, fx.Node):
        return [argument]
    if isinstance(argument, tuple | list):
        return [leaf for part in argument for leaf in node_leaves(part)]
    if isinstance(argument, dict):
        return [leaf for part in argument.values() for leaf in node_leaves(part)]
    return []


def _annotated(node: fx.Node, *, only_written: bool) -> list[fx.Node]:
    assert isinstance(node.target, OpOverload)
    names = [each.name for each in _parameters(node.target) if (each.written if only_written else each.aliased)]
    if not names:
        return []
    bound = bound_arguments(node)
    return [leaf for name in names for leaf in node_leaves(bound[name])]
