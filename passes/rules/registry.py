"""Look up the rule of an op, and bind it to a call; let users register rules for their own ops.

    register_rule(torch.ops.mine.gated_product, "batch* in, out in, out -> batch* out; linear input | weight")

``passes.rules.language`` explains the line, ``passes.rules.validate.prove_rule`` checks it by execution.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from passes.graph.schemas import functional, packet, parameters_of, takes_lists_of_tensors, tensor_parameters
from passes.ir.errors import ConfigError
from passes.ir.torch_private import OpOverload
from passes.rules.bind import MisfitError, bind
from passes.rules.call import Call, call_of
from passes.rules.language import Line, parse
from passes.rules.loops import Loops
from passes.rules.tables import ALONG, CONTRACTIONS, CREATION, ELEMENTWISE, INDEXING, LAYERS, LOSSES, MATRICES, RESHAPES, SHAPES, SPACE

Rule: TypeAlias = "str | Callable[[Call], str | Loops | None]"
"""A line of the language, or a function that returns the line (or the loops) of a call."""


def _rules_of_tables() -> Iterator[tuple[Any, Rule]]:
    """Yield (op, rule) of all tables; later tables override earlier ones."""
    tables: tuple[Mapping[Any, list[Any]], ...] = (
        ELEMENTWISE, CREATION, CONTRACTIONS, LAYERS, SPACE, LOSSES, RESHAPES, SHAPES, INDEXING, ALONG, MATRICES,
    )  # fmt: skip
    for rule, operators in itertools.chain.from_iterable(table.items() for table in tables):
        for operator in operators:
            yield operator, rule


RULES: Mapping[Any, Rule] = dict(_rules_of_tables())
"""Op (``aten.add``) or overload (``aten.max.dim``) -> its rule."""


def rule_of(target: Any) -> Rule | None:
    """Return the rule of an overload, or of its op; None if there is none.

    Rules that the user registered come first, then those derived from what an operator calls. An in-place op has the rule of its functional
    form. Ops that PyTorch tags as pointwise are elementwise.
    """
    if not isinstance(target, OpOverload):
        return None
    return registered_rule(target) or _derived.get(target) or _builtin_rule(target)


@functools.cache
def _builtin_rule(target: OpOverload) -> Rule | None:
    target = functional(target) or target
    rule = RULES.get(target) or RULES.get(packet(target))
    return "..." if rule is None and torch.Tag.pointwise in target.tags else rule


def loops_of(node: fx.Node) -> Loops | None:
    """Return the loops of a call; None if its op has no rule, or the call does not match it.

    Args:
        node: a call of an operator whose operands have ``meta["val"]``.

    Raises:
        ConfigError: a rule that the user registered does not fit the call.
    """
    if node.op != "call_function" or rule_of(node.target) is None:
        return None
    call = call_of(node)
    return None if call is None else loops_of_call(call)


def loops_of_call(call: Call) -> Loops | None:
    """Return the loops of a call of which only sizes and numbers are known; as ``loops_of``."""
    rule = rule_of(call.operator)
    if rule is None:
        return None
    try:
        return _cached_loops(call, rule)
    except TypeError:  # an argument that is not hashable
        return _apply_rule(call, rule)


def _apply_rule(call: Call, rule: Rule) -> Loops | None:
    try:
        line_or_loops = rule(call) if callable(rule) else rule
        return bind(parse(line_or_loops), call) if isinstance(line_or_loops, str) else line_or_loops
    except MisfitError as error:
        if rule == registered_rule(call.operator):
            raise ConfigError(
                f"the rule registered for {call.operator} does not fit a call: {error}",
                remedy=f"the rule is {rule!r}; operands have the shapes {[operand.shape for operand in call.operands]}",
            ) from error
        return None


_cached_loops = functools.lru_cache(maxsize=8192)(_apply_rule)


_derived: dict[OpOverload, Callable[[Call], Loops | None]] = {}


def derive_rule_by(operator: OpOverload, rule: Callable[[Call], Loops | None]) -> None:
    """Register the rule of one operator: a function of a call that returns its loops, or None if the call is computed whole."""
    _derived[operator] = rule


# -- rules that users register -----------------------------------------------------------------------------------------------------


_registered: dict[Any, str] = {}


def register_rule(operator: Any, rule: str) -> None:
    """Register the sharding rule of an op. A rule of an overload overrides that of its op, and both override built-in rules.

    Args:
        operator: ``torch.ops.mine.gated_product``, or one overload of it; an earlier registration is replaced.
        rule: a line of the rule language.

    Raises:
        ConfigError: the line cannot be parsed (its token is shown), or it does not fit the operator's schema.
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
        _check_schema(overload, line)
    _registered[operator] = rule


def registered_rule(target: Any) -> str | None:
    """Return the rule that the user registered for an overload or its op; None if there is none."""
    return _registered.get(target) or _registered.get(packet(target))


def _check_schema(operator: OpOverload, line: Line) -> None:
    """Raise if a line names parameters that an overload does not have, or has another number of operands."""
    parameters = set(parameters_of(operator))
    named = {
        *(argument for argument in line.sizes.values() if isinstance(argument, str)),
        *(name for members in line.linear for name, _ in members),
        *([line.shape] if line.shape is not None else []),
    }
    if named - parameters:
        raise ConfigError(
            f"the rule of {operator} names {', '.join(sorted(named - parameters))}, which the operator does not take",
            remedy=f"its parameters are {', '.join(parameters_of(operator))}",
        )
    tensors = tensor_parameters(operator)
    if line.operands is not None and not takes_lists_of_tensors(operator) and len(line.operands) != len(tensors):
        raise ConfigError(
            f"the rule of {operator} has terms for {len(line.operands)} operands: {line.text!r}",
            remedy=f"the operator takes {len(tensors)} tensors: {', '.join(tensors) or 'none'}; write a term for each",
        )
