"""Facts of a call from its operator's schema: arguments by name, and those that it views or writes.

The one file that reads PyTorch's operator schemas (``OpOverload._schema``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir.torch_private import OpOverload

aten = torch.ops.aten

FUNCTION_NAMESPACE = "autograd_function"
"""The namespace of operators that stand for custom autograd functions (``passes.autograd.functions.operators``)."""

NO_REDUCTION = 0
"""The argument ``reduction`` of a loss function that returns one loss for each element."""

MEAN = 1
"""The argument ``reduction`` for their mean."""

SUM = 2
"""The argument ``reduction`` for their sum."""


@dataclass(frozen=True)
class _Parameter:
    """A parameter; ``aliased``: a result may share its memory, ``written``: the operator writes it, by the schema."""

    name: str
    default: Any
    aliased: bool
    written: bool
    takes_tensors: bool


@functools.cache
def _parameters(operator: OpOverload) -> tuple[_Parameter, ...]:
    """Return the parameters of an operator's schema, in order.

    Results may alias each parameter with an annotation, but for one that is written and that no result names: running statistics.
    """
    returned = [set(each.alias_info.before_set) for each in operator._schema.returns if each.alias_info is not None]  # noqa: SLF001

    def is_aliased(argument: Any) -> bool:
        if argument.alias_info is None or not (argument.alias_info.is_write and operator._schema.returns):  # noqa: SLF001
            return argument.alias_info is not None
        return any(names & argument.alias_info.before_set for names in returned)

    return tuple(
        _Parameter(
            argument.name,
            argument.default_value if argument.has_default_value() else None,
            is_aliased(argument),
            argument.alias_info is not None and argument.alias_info.is_write,
            "Tensor" in str(argument.type),
        )
        for argument in operator._schema.arguments  # noqa: SLF001  no public way to alias annotations
    )


@functools.cache
def tensor_parameters(operator: OpOverload) -> tuple[str, ...]:
    """Return the names of parameters that take a tensor, an optional tensor or a list of tensors, in the order of the schema."""
    return tuple(parameter.name for parameter in _parameters(operator) if parameter.takes_tensors)


def parameters_of(operator: OpOverload) -> tuple[str, ...]:
    """Return the names of all parameters, in the order of the schema."""
    return tuple(parameter.name for parameter in _parameters(operator))


def takes_lists_of_tensors(operator: OpOverload) -> bool:
    """Return whether a parameter takes a list of tensors."""
    return any("List" in str(each.type) and "Tensor" in str(each.type) for each in operator._schema.arguments)  # noqa: SLF001


def packet(target: Any) -> Any:
    """Return the operator of an overload (``aten.add`` for ``aten.add.Tensor``); any other target itself."""
    return target.overloadpacket if isinstance(target, OpOverload) else target


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """Return parameter -> the argument of this call, or the default; in the order of the schema."""
    assert isinstance(node.target, OpOverload)
    parameters = _parameters(node.target)
    bound = {parameter.name: parameter.default for parameter in parameters}
    bound.update(zip((parameter.name for parameter in parameters), node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def call_with(node: fx.Node, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return new arguments (by parameter, as ``bound_arguments`` gives them) as positional and keyword arguments like those of a call."""
    names, n_positional = list(bound), len(node.args)
    keywords = {name: bound[name] for name in names[n_positional:] if name in node.kwargs}
    return tuple(bound[name] for name in names[:n_positional]), keywords


def viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that the result may alias by the schema; all input nodes for a target without a schema."""
    if not isinstance(node.target, OpOverload):
        return list(node.all_input_nodes)
    return _aliased_nodes(node, only_written=False)


def views_its_arguments(operator: OpOverload) -> bool:
    """Return whether the result may alias an argument, by the schema."""
    return any(parameter.aliased for parameter in _parameters(operator))


def is_cast_or_view(node: fx.Node) -> bool:
    """Return whether a call casts a value to another type or views it, and writes nothing."""
    if node.target is aten._to_copy.default:  # noqa: SLF001  the operator's own name
        return True
    return isinstance(node.target, OpOverload) and views_its_arguments(node.target) and not written_arguments(node)


def returns_argument(operator: Any) -> bool:
    """Return whether an operator returns the one tensor that it writes, and nothing else, like ``add_``."""
    if not isinstance(operator, OpOverload):
        return False
    written = [parameter for parameter in _parameters(operator) if parameter.written]
    returned = operator._schema.returns  # noqa: SLF001  no public way to the schema
    return len(written) == 1 and len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a call writes, by the schema."""
    return _aliased_nodes(node, only_written=True) if isinstance(node.target, OpOverload) else []


def written_values(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that it writes, by the schema."""
    parameters = _parameters(operator)
    bound = {**dict(zip(parameters_of(operator), args, strict=False)), **kwargs}
    return [bound[each.name] for each in parameters if each.written and each.name in bound]


def functional(operator: Any) -> OpOverload | None:
    """Return the functional form of an operator: ``aten.add.Tensor`` for ``aten.add_.Tensor`` and ``aten.add.out``.

    None if the operator does not write, or has no functional form.
    """
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    if outs := out_parameters(operator):
        return _without_outs(operator, outs)
    name, _, overload = operator.name().removeprefix("aten::").partition(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    if operator in _IRREGULAR_FUNCTIONAL_FORMS:
        return _IRREGULAR_FUNCTIONAL_FORMS[operator]
    return getattr(getattr(aten, name.removesuffix("_"), None), overload or "default", None)


@functools.cache
def out_parameters(operator: OpOverload) -> tuple[str, ...]:
    """Return the names of parameters that take memory for the result: ``out=`` and the like."""
    return tuple(each.name for each in operator._schema.arguments if each.is_out)  # noqa: SLF001  no public way to the schema


@functools.cache
def _without_outs(operator: OpOverload, outs: tuple[str, ...]) -> OpOverload | None:
    """Return the overload of the same operator that has all parameters except ``outs``, and writes nothing."""
    names = [name for name in parameters_of(operator) if name not in outs]
    overloads = (getattr(operator.overloadpacket, name) for name in operator.overloadpacket.overloads())
    return next((each for each in overloads if list(parameters_of(each)) == names and not _writes(each)), None)


def _writes(operator: OpOverload) -> bool:
    return any(parameter.written for parameter in _parameters(operator))


_IRREGULAR_FUNCTIONAL_FORMS: Mapping[OpOverload, OpOverload | None] = {
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
"""In-place operator -> its functional form, where the name without ``_`` is an overload with other parameters; None: it has none."""


def is_autograd_function(target: Any) -> bool:
    """Return whether an operator stands for a custom autograd function."""
    return isinstance(target, OpOverload) and target.namespace == FUNCTION_NAMESPACE


def draws_random_numbers(target: Any) -> bool:
    """Return whether an operator reads the random number generator, at least with some arguments."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def drops_nothing(dropout: fx.Node) -> bool:
    """Return whether a call of dropout returns its input: with probability zero, or in evaluation."""
    bound = bound_arguments(dropout)
    return bound["p"] == 0 or not bound["train"]


_DROPOUT_PROBABILITIES = ("dropout_p", "dropout")
"""The parameters of attention and of recurrent networks for their dropout probability."""


def draws(node: fx.Node) -> bool:
    """Return whether a call reads the random number generator: attention or an LSTM with zero dropout does not, though its operator may."""
    if not draws_random_numbers(node.target):
        return False
    bound = bound_arguments(node)
    return bound.get("train") is not False and not any(bound.get(name, 1.0) == 0.0 for name in _DROPOUT_PROBABILITIES)


_UNINITIALIZED = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided})
"""Their results are uninitialized memory, which differs from run to run."""


def is_deterministic(target: Any) -> bool:
    """Return whether equal arguments give equal results: PyTorch's own ops without random numbers, and arithmetic on sizes."""
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math") or getattr(target, "__name__", "").startswith("sym_")
    if target.namespace not in ("aten", "prims") or target.overloadpacket in _UNINITIALIZED:
        return False
    return not draws_random_numbers(target)


def node_leaves(argument: Any) -> list[fx.Node]:
    """Return the nodes in a nested argument, in order."""
    if isinstance(argument, fx.Node):
        return [argument]
    if isinstance(argument, tuple | list):
        return [leaf for part in argument for leaf in node_leaves(part)]
    if isinstance(argument, dict):
        return [leaf for part in argument.values() for leaf in node_leaves(part)]
    return []


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensors among a call's arguments, in the order of the operator's schema, lists flattened."""
    leaves = [leaf for value in bound_arguments(node).values() for leaf in node_leaves(value)]
    return [leaf for leaf in leaves if isinstance(leaf.meta.get("val"), Tensor)]


def _aliased_nodes(node: fx.Node, *, only_written: bool) -> list[fx.Node]:
    """Return the nodes passed to parameters with an alias annotation, or only to those that are annotated as written."""
    assert isinstance(node.target, OpOverload)
    names = [each.name for each in _parameters(node.target) if (each.written if only_written else each.aliased)]
    if not names:
        return []
    bound = bound_arguments(node)
    return [leaf for name in names for leaf in node_leaves(bound[name])]
