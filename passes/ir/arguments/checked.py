"""Check the arguments of public calls, and the fields of public dataclasses.

@checked_arguments({"n_microbatches": at_least(1), "memory_limit": read_by(parse_bytes)})
def partition(model: nn.Module, ..., n_microbatches: int | None = None, memory_limit: int | str | None = None): ...

The annotation determines the types that are accepted, a rule the values. Both are checked before the function runs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from passes.ir.arguments.conform import conform, hints_of
from passes.ir.arguments.describe import described
from passes.ir.errors import ConfigError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_EMPTY: Mapping[str, Any] = MappingProxyType({})

Rule = Callable[[str, Any], object]
"""Raises ConfigError if the value of an argument is invalid; called with the argument's name and value, but not for None."""


def checked_arguments(
    values: Mapping[str, Rule] = _EMPTY, examples: Mapping[str, str] = _EMPTY
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check each argument of a call against its annotation, then against its rule.

    Numbers of other libraries (``numpy.int64``) reach the function as Python's. A call that does not fit the signature, such as an
    unknown keyword, raises a ConfigError too.

    Args:
        values: parameter -> rule; may also name parameters that the function does not have.
        examples: parameter -> a valid value as source text, for the remedy of a wrong type.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = bind(f"{_name(function, signature, args)}()", signature, args, kwargs)
            try:
                _check(function, signature, bound, values, examples)
            except ConfigError as error:
                problem = f"{_name(function, signature, args)}(): {error.problem}"
                raise ConfigError(problem, place=error.place, remedy=error.remedy) from error
            return function(*bound.args, **bound.kwargs)

        return checked

    return decorate


def check_fields(instance: Any, values: Mapping[str, Rule] = _EMPTY, examples: Mapping[str, str] = _EMPTY) -> None:
    """Check and convert the fields of a dataclass as ``checked_arguments`` does arguments; call it in ``__post_init__``."""
    kind: Any = type(instance)
    hints = hints_of(kind)
    for field in dataclasses.fields(kind):
        value = getattr(instance, field.name)
        try:
            checked = conform(value, hints[field.name], field.name, example=examples.get(field.name, ""))
            if checked is not None and field.name in values:
                values[field.name](field.name, checked)
        except ConfigError as error:
            raise ConfigError(f"{kind.__name__}: {error.problem}", place=error.place, remedy=error.remedy) from error
        if checked is not value:
            object.__setattr__(instance, field.name, checked)


def _name(function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...]) -> str:
    """Return the name of a function for errors: that of a method has the class of its object, since a base class may be internal."""
    is_method = bool(args) and next(iter(signature.parameters), None) == "self"
    return f"{type(args[0]).__name__}.{function.__name__}" if is_method else function.__qualname__


def checked_names(kind: type[T]) -> type[T]:
    """Let the constructor of a dataclass raise ConfigError for unknown, missing and surplus arguments, as ``checked_arguments`` does."""
    of_kind: Any = kind
    initialize, signature = of_kind.__init__, inspect.signature(of_kind.__init__)

    @functools.wraps(initialize)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        try:
            initialize(self, *args, **kwargs)
        except TypeError:
            bind(f"{kind.__name__}()", signature, (self, *args), kwargs)  # afterwards: valid calls, of which there are many, take no time
            raise

    of_kind.__init__ = checked
    return kind


def bind(call: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Bind arguments to a signature; a misfit raises ConfigError, which suggests a parameter with a similar name.

    Args:
        call: names the call in the error.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [parameter for parameter in signature.parameters if parameter != "self"]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        unknown = None if takes_any else next((keyword for keyword in kwargs if keyword not in known), None)
        meant = did_you_mean(unknown, known, str) if unknown is not None else ""
        problem = error if unknown is None else f"got an unexpected keyword argument {unknown!r}"  # before those that are missing
        raise ConfigError(f"{call}: {problem}", remedy=f"{meant}its arguments are {', '.join(known) or 'none'}") from error


def _check(
    function: Callable[..., Any],
    signature: inspect.Signature,
    bound: inspect.BoundArguments,
    values: Mapping[str, Rule],
    examples: Mapping[str, str],
) -> None:
    """Check bound arguments against annotations and rules, and replace them with converted values."""
    hints = hints_of(function)
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if name == "self" or name not in hints:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # arguments of a model are compared with its example inputs
        checked = conform(value, hints[name], name, example=examples.get(name, ""))
        if checked is not None and name in values:
            values[name](name, checked)
        bound.arguments[name] = checked


def one_of(choices: Collection[str]) -> Rule:
    """Return a rule: the value is one of these strings."""

    def rule(name: str, value: Any) -> None:
        if value not in choices:
            meant = did_you_mean(value, choices)
            listed = ", ".join(f'"{choice}"' for choice in choices)
            raise ConfigError(f"there is no {name}={value!r}", remedy=f"{meant}choose one of {listed}")

    return rule


def at_least(least: float) -> Rule:
    """Return a rule: the value is ``least`` or more."""

    def rule(name: str, value: Any) -> None:
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, not {described(value)}", remedy=f"pass {name}={least} or more")

    return rule


def positive(name: str, value: Any) -> None:
    """Raise ConfigError unless the value is greater than 0: a rule."""
    if value <= 0:
        raise ConfigError(f"{name} must be more than 0, not {described(value)}", remedy="pass a number above 0")


def each_of(rule: Rule) -> Rule:
    """Return a rule: ``rule`` holds for the value, or for each item of a sequence or mapping that is not None."""

    def rule_for_items(name: str, value: Any) -> None:
        items: Iterable[tuple[Any, Any]] = ((None, value),)
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            items = enumerate(value)
        for key, item in items:
            if item is not None:
                rule(name if key is None else f"{name}[{key!r}]", item)

    return rule_for_items


def read_by(reader: Callable[[Any], object]) -> Rule:
    """Return a rule: ``reader(value)`` raises no ConfigError."""

    def rule(name: str, value: Any) -> None:
        try:
            reader(value)
        except ConfigError as error:
            problem = error.problem if name in error.problem else f"{name}: {error.problem}"
            raise ConfigError(problem, place=error.place, remedy=error.remedy) from error

    return rule
