"""Check the arguments of public calls, and the fields of public dataclasses, against their annotations.

@checked_arguments({"n_microbatches": at_least(1), "memory_limit": read_by(parse_bytes)})
def partition(model: nn.Module, ..., n_microbatches: int | None = None, memory_limit: int | str | None = None): ...

The annotation says which types there are, a rule which values. Both are checked before the function runs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from passes.ir.errors import ConfigError
from passes.ir.value_checks import conform, described, hints_of

__all__ = ["Rule", "at_least", "check_fields", "checked_arguments", "each_of", "more_than", "one_of", "read_by"]

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING: Mapping[str, Any] = MappingProxyType({})

Rule = Callable[[str, Any], object]
"""Raises ConfigError unless the value of an argument is one that there is; called with its name, and never with None."""


def checked_arguments(
    values: Mapping[str, Rule] = _NOTHING, examples: Mapping[str, str] = _NOTHING
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check each argument of a call against its annotation, then against its rule.

    Numbers of other libraries (``numpy.int64``) reach the function as Python's. A call that the signature does not admit, an unknown
    keyword for one, is a ConfigError too.

    Args:
        values: parameter -> rule; one table may serve functions that have some of the parameters each.
        examples: parameter -> how to write one, for the remedy of a wrong type.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = _bind(function.__qualname__, signature, args, kwargs)
            try:
                _check(function, signature, bound, values, examples)
            except ConfigError as error:
                raise ConfigError(f"{function.__qualname__}(): {error.problem}", place=error.place, remedy=error.remedy) from error
            return function(*bound.args, **bound.kwargs)

        return checked

    return decorate


def check_fields(instance: Any, values: Mapping[str, Rule] = _NOTHING, examples: Mapping[str, str] = _NOTHING) -> None:
    """Check the fields of a dataclass, as ``checked_arguments`` checks arguments; for its ``__post_init__``."""
    kind: Any = type(instance)
    hints = hints_of(kind)
    for field in dataclasses.fields(kind):
        value = getattr(instance, field.name)
        try:
            found = conform(value, hints[field.name], field.name, example=examples.get(field.name, ""))
            if found is not None and field.name in values:
                values[field.name](field.name, found)
        except ConfigError as error:
            raise ConfigError(f"{kind.__name__}: {error.problem}", place=error.place, remedy=error.remedy) from error
        if found is not value:
            object.__setattr__(instance, field.name, found)


def _bind(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [parameter for parameter in signature.parameters if parameter != "self"]
        unknown = next((given for given in kwargs if given not in known), None)
        near = get_close_matches(unknown, known, n=1) if unknown is not None else []
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{name}(): {error}", remedy=f"{meant}its arguments are {', '.join(known) or 'none'}") from error


def _check(
    function: Callable[..., Any],
    signature: inspect.Signature,
    bound: inspect.BoundArguments,
    values: Mapping[str, Rule],
    examples: Mapping[str, str],
) -> None:
    hints = hints_of(function)
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if name == "self" or name not in hints:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # what a model takes is compared with its example
        found = conform(value, hints[name], name, example=examples.get(name, ""))
        if found is not None and name in values:
            values[name](name, found)
        bound.arguments[name] = found


def one_of(choices: Collection[str]) -> Rule:
    """A rule: one of these texts."""

    def rule(name: str, value: Any) -> None:
        if value not in choices:
            near = get_close_matches(value, choices, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(f'"{choice}"' for choice in choices)
            raise ConfigError(f"there is no {name}={value!r}", remedy=f"{meant}choose one of {listed}")

    return rule


def at_least(least: float) -> Rule:
    """A rule: a number that is no less."""

    def rule(name: str, value: Any) -> None:
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, not {described(value)}", remedy=f"pass {name}={least} or more")

    return rule


def more_than(least: float) -> Rule:
    """A rule: a number that is greater."""

    def rule(name: str, value: Any) -> None:
        if value <= least:
            raise ConfigError(f"{name} must be more than {least}, not {described(value)}", remedy=f"pass a number above {least}")

    return rule


def each_of(rule: Rule) -> Rule:
    """A rule: for a value, or for each of a sequence of values; None among them is left to the function."""

    def each(name: str, value: Any) -> None:
        listed = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        for index, item in enumerate(listed):
            if item is not None:
                rule(name if listed is not value else f"{name}[{index}]", item)

    return each


def read_by(reader: Callable[[Any], object]) -> Rule:
    """A rule: what this function reads without a ConfigError."""

    def rule(name: str, value: Any) -> None:
        try:
            reader(value)
        except ConfigError as error:
            named = error.problem if name in error.problem else f"{name}: {error.problem}"
            raise ConfigError(named, place=error.place, remedy=error.remedy) from error

    return rule
