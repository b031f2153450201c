"""Rules of operators that this package does not know: the user's own.

    register_rule(torch.ops.mine.gated_product, "batch* in, out in, out -> batch* out; linear input | weight")

``passes.rules.language`` explains the line, ``passes.rules.prove.prove_rule`` checks it by execution.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from passes.ir.errors import ConfigError
from passes.operators import packet, parameters_of, takes_lists_of_tensors, tensor_parameters
from passes.rules.language import Line, parse

__all__ = ["register_rule", "registered_rule"]

_registered: dict[Any, str] = {}


def register_rule(operator: Any, rule: str) -> None:
    """Say what loops an operator is. A rule of an overload goes before that of the operator, and both before those of this package.

    Args:
        operator: ``torch.ops.mine.gated_product``, or one overload of it; a registration of before is replaced.
        rule: a line of the rule language.

    Raises:
        ConfigError: the line cannot be read (its token is shown), or it does not fit the operator's schema.
    """
    line = parse(rule)
    if isinstance(operator, OpOverload):
        overloads = [operator]
    elif callable(getattr(operator, "overloads", None)):
        overloads = [getattr(operator, name) for name in operator.overloads()]
    else:
        raise ConfigError(
            f"{operator!r} is no operator", remedy="pass torch.ops.<namespace>.<name>; torch.library.custom_op defines operators"
        )
    for overload in overloads:
        _check(overload, line)
    _registered[operator] = rule


def registered_rule(target: Any) -> str | None:
    """What the user registered for an operation; None when nothing."""
    return _registered.get(target) or _registered.get(packet(target))


def _check(operator: OpOverload, line: Line) -> None:
    known = set(parameters_of(operator))
    named = {
        *(argument for argument in line.sizes.values() if isinstance(argument, str)),
        *(name for members in line.linear for name, _ in members),
        *([line.shape] if line.shape is not None else []),
    }
    if named - known:
        raise ConfigError(
            f"the rule of {operator} names {', '.join(sorted(named - known))}, which the operator does not take",
            remedy=f"its parameters are {', '.join(parameters_of(operator))}",
        )
    tensors = tensor_parameters(operator)
    if line.operands is not None and not takes_lists_of_tensors(operator) and len(line.operands) != len(tensors):
        raise ConfigError(
            f"the rule of {operator} has terms for {len(line.operands)} operands: {line.text!r}",
            remedy=f"the operator takes {len(tensors)} tensors: {', '.join(tensors) or 'none'}; write a term for each",
        )
