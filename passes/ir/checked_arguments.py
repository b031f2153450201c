"""Check the arguments of public calls, and the fields of public dataclasses, against their annotations.

@checked_arguments({"n_microbatches": at_least(1), "memory_limit": read_by(parse_bytes)})
def partition(model: nn.Module, ..., n_microbatches: int | None = None, memory_limit: int | str | None = None): ...

The annotation determines the types that are accepted, a rule the values. Both are checked before the function runs.

conform(2.0, int | None, "devices")          ConfigError: devices must be an int or None, not 2.0 (float); remedy: pass devices=2
conform([["data", 2]], tuple[tuple[str, int], ...], "mesh", plain=True) == (("data", 2),)

Annotations are read as follows.

int         an integer of any type (numpy's too) of 64 bits, converted to ``int``; no bool
float       a real number of any type, or infinity; no nan
bool        a bool, or numpy's
Sequence    a list, a tuple, a ``torch.Size``; no text
Mapping     any mapping
Protocol    an object, not a class, that has the methods
a class     an instance of it

With ``plain=True`` values come from a file (JSON, TOML): lists become tuples, and tables become dataclasses, whose fields are all checked.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from passes.ir.errors import ConfigError

__all__ = [
    "Rule",
    "at_least",
    "check_fields",
    "checked_arguments",
    "conform",
    "described",
    "each_of",
    "expected",
    "hints_of",
    "more_than",
    "one_of",
    "read_by",
]

_UNIONS = (typing.Union, types.UnionType)
_SEQUENCES = (collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable, list)
_TEXT = (str, bytes, bytearray)
_ABSENT = object()
_INT64_END = 2**63
"""Integers must be below: larger sizes, counts and seeds fit no tensor and no C function."""


def conform(value: Any, annotation: Any, path: str, *, plain: bool = False, example: str = "") -> Any:
    """Check a value against an annotation and return it; numbers of other libraries become Python's, tables become dataclasses.

    Args:
        value: anything.
        annotation: a resolved annotation, not a string.
        path: name of the value in errors: ``"devices[1]"``; empty: a file, whose entries are named without a prefix.
        plain: whether the value was read from a file; see the module.
        example: a valid value as source text, for the remedy.

    Raises:
        ConfigError: the value, or a part of it, is of another type; names the part.
    """
    if _is_union(annotation):
        return _conform_to_union(value, annotation, path, plain, example)
    if not _type_fits(value, annotation, plain):
        raise _mismatch(value, annotation, path, plain, example)
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (int, float, bool):
        return _conform_number(value, origin, path)
    if origin is tuple and plain:
        value = tuple(value)
    if origin is tuple and arguments:
        return _conform_tuple(value, arguments, path, plain)
    if origin in _SEQUENCES and arguments:
        return _conform_items(value, arguments[0], path, plain)
    if origin is collections.abc.Mapping and arguments:
        return _conform_mapping(value, arguments, path, plain)
    if plain and dataclasses.is_dataclass(origin) and isinstance(origin, type):
        return _conform_table(value, origin, path)
    return value


@functools.cache
def hints_of(of: Any) -> Mapping[str, Any]:
    """Return the resolved annotations of a function's parameters, or of a dataclass's fields."""
    return types.MappingProxyType(typing.get_type_hints(of))


def expected(annotation: Any) -> str:
    """Describe the values that an annotation accepts.

    >>> expected(int | None), expected(Sequence[str]), expected(Mapping[str, int])
    ('an int or None', 'a sequence of str', 'a mapping of str to int')
    """
    if _is_union(annotation):
        options = list(dict.fromkeys(expected(option) for option in _options(annotation)))
        return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple or origin in _SEQUENCES:
        kind = "tuple" if origin is tuple else "sequence"
        items = [argument for argument in arguments if argument is not Ellipsis]
        if origin is tuple and items and Ellipsis not in arguments:
            return f"a tuple ({', '.join(map(_short_name, items))})"
        return f"a {kind} of {_short_name(items[0])}" if items and items[0] is not Any else f"a {kind}"
    if origin is collections.abc.Mapping:
        return f"a mapping of {_short_name(arguments[0])} to {_short_name(arguments[1])}" if arguments else "a mapping"
    if origin is collections.abc.Callable:
        return "a function"
    if _is_protocol(origin):
        return f"a {origin.__name__} (an object with {' and '.join(_members(origin))})"
    if annotation in (None, type(None)):
        return "None"
    name = _short_name(origin)
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def described(value: object) -> str:
    """Describe a value for an error: short, with its type.

    >>> described(2.0), described("2"), described(None)
    ('2.0 (float)', "'2' (str)", 'None')
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, Path):
        return f"{str(value)!r} ({kind})"
    if type(value) in (int, float, complex, str, bytes, list, tuple, dict, set, frozenset) or isinstance(value, numbers.Number):
        return f"{_repr(value)} ({kind})"
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}{of_shape}"


class _Short(reprlib.Repr):
    """Shortens numbers and text, and shows other objects as their type, because their ``__repr__`` may be long or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, numbers.Number | Path) or x is None:
            return repr(x)
        return x.__name__ if isinstance(x, type) else f"<{type(x).__name__}>"


def _repr(value: object) -> str:
    try:
        return _Short().repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "..."


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in _UNIONS


def _options(annotation: Any) -> list[Any]:
    """Return the options of a union and of unions in it, None last; any other annotation is its only option."""
    if not _is_union(annotation):
        return [annotation]
    options = [option for argument in typing.get_args(annotation) for option in _options(argument)]
    return sorted(options, key=lambda option: option is type(None))


def _short_name(annotation: Any) -> str:
    """Name an annotation inside of another: ``str``, ``torch.Tensor``, ``int or None``."""
    if _is_union(annotation):
        return " or ".join(map(_short_name, _options(annotation)))
    if annotation in (None, type(None)):
        return "None"
    if annotation is Any:
        return "anything"
    if typing.get_origin(annotation) is not None:
        return expected(annotation)
    if not isinstance(annotation, type):
        return str(annotation)
    folder = {"torch": "torch.", "torch.nn.modules.module": "torch.nn."}.get(annotation.__module__, "")
    return f"{folder}{annotation.__name__}"


def _is_protocol(annotation: Any) -> bool:
    return bool(getattr(annotation, "_is_protocol", False)) and annotation.__module__ not in ("typing", "collections.abc", "contextlib")


def _members(protocol: type) -> list[str]:
    """Return the names of the public methods of a protocol."""
    return [name for name, member in vars(protocol).items() if callable(member) and not name.startswith("_")]


def _type_fits(value: Any, annotation: Any, plain: bool) -> bool:
    """Return whether the type of a value fits an annotation; the items of a container are checked later."""
    origin = typing.get_origin(annotation) or annotation
    if origin in (Any, object) or isinstance(origin, typing.TypeVar | typing.ParamSpec):
        return True
    if origin in (None, type(None)):
        return value is None
    if origin is typing.Literal:
        return any(type(value) is type(option) and value == option for option in typing.get_args(annotation))
    if origin is bool:
        return isinstance(value, bool | np.bool_)
    if origin in (int, float):
        kind = numbers.Integral if origin is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool | np.bool_)
    if origin is tuple:
        return isinstance(value, (tuple, list) if plain else tuple)
    if origin in _SEQUENCES:
        return isinstance(value, origin) and not isinstance(value, _TEXT)
    if origin is collections.abc.Callable:
        return callable(value)
    if _is_protocol(origin):
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _members(origin))
    if plain and dataclasses.is_dataclass(origin):
        return isinstance(value, Mapping)
    return isinstance(value, origin)


# -- values and their parts ------------------------------------------------------------------------------------------------------------


def _conform_to_union(value: Any, annotation: Any, path: str, plain: bool, example: str) -> Any:
    """Check a value against each option of a union whose type fits; the error is that of the last one."""
    matching = [option for option in _options(annotation) if _type_fits(value, option, plain)]
    if not matching:
        raise _mismatch(value, annotation, path, plain, example)
    for option in matching[:-1]:
        try:
            return conform(value, option, path, plain=plain)
        except ConfigError:
            continue
    return conform(value, matching[-1], path, plain=plain)


def _conform_number(value: Any, kind: type, path: str) -> Any:
    """Convert a number to ``kind`` (int, float or bool); raises ConfigError for nan and for integers that exceed 64 bits."""
    if isinstance(value, numbers.Integral) and not -_INT64_END <= int(value) < _INT64_END:
        raise ConfigError(f"{path} does not fit 64 bits", remedy=f"pass a number below 2**63 as {path}")
    if kind is float and math.isnan(value):
        raise ConfigError(f"{path} is not a number: nan", remedy=f"pass a number as {path}")
    if kind is float:
        return value if isinstance(value, int | float) else float(value)
    return value if type(value) is kind else kind(value)


def _conform_tuple(value: tuple[Any, ...], arguments: tuple[Any, ...], path: str, plain: bool) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return typing.cast("tuple[Any, ...]", _conform_items(value, arguments[0], path, plain))
    if len(value) != len(arguments):
        raise ConfigError(f"{path} must have {len(arguments)} entries, not {len(value)}: {_repr(value)}", remedy="pass as many")
    return tuple(conform(item, arguments[index], f"{path}[{index}]", plain=plain) for index, item in enumerate(value))


def _conform_items(value: Any, kind: Any, path: str, plain: bool) -> Any:
    """Check the items of a sequence; return the same object if no item changes (callers compare by identity), else a tuple or list."""
    if kind is Any or not isinstance(value, Collection):  # a one-time iterable is not read here
        return value
    if kind not in (int, float) and isinstance(kind, type) and all(type(item) is kind for item in value):
        return value
    if kind is int and all(type(item) is int and -_INT64_END <= item < _INT64_END for item in value):
        return value
    items = [conform(item, kind, f"{path}[{index}]", plain=plain) for index, item in enumerate(value)]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return tuple(items) if isinstance(value, tuple) else items


def _conform_mapping(value: Mapping[Any, Any], arguments: tuple[Any, ...], path: str, plain: bool) -> Mapping[Any, Any]:
    """Check the keys and items of a mapping; return the same object if none changes."""
    checked: dict[Any, Any] = {}
    for key, item in value.items():
        checked_key = conform(key, arguments[0], f"the key {_repr(key)} of {path}", plain=plain)
        checked[checked_key] = conform(item, arguments[1], f"{path}[{_repr(key)}]", plain=plain)
    unchanged = len(checked) == len(value) and all(checked.get(key, _ABSENT) is item for key, item in value.items())
    return value if unchanged else checked


def _conform_table(value: Mapping[str, Any], kind: type, path: str) -> Any:
    """Make a dataclass from a table with an entry for each field; fields with defaults may be missing."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise ConfigError(f"{path or 'it'} has an unknown entry {_repr(unknown[0])}", remedy=f"its entries are {', '.join(fields)}")
    missing = [name for name, field in fields.items() if name not in value and _is_required(field)]
    if missing:
        raise ConfigError(f"{path or 'it'} lacks {', '.join(missing)}", remedy=f"its entries are {', '.join(fields)}")
    hints = hints_of(kind)
    prefix = f"{path}." if path else ""
    return kind(**{name: conform(item, hints[name], f"{prefix}{name}", plain=True) for name, item in value.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _mismatch(value: Any, annotation: Any, path: str, plain: bool, example: str) -> ConfigError:
    accepted = expected(annotation)
    remedy = _guess_remedy(value, annotation, path, plain) or (f"pass {path}={example}" if example else f"pass {accepted}")
    return ConfigError(f"{path} must be {accepted}, not {described(value)}", remedy=remedy)


def _guess_remedy(value: Any, annotation: Any, path: str, plain: bool) -> str | None:
    """Return a remedy that guesses the value that was meant: ``"2"`` for an int, an item in place of a sequence; None: no guess."""
    for option in _options(annotation):
        origin, arguments = typing.get_origin(option) or option, typing.get_args(option)
        if isinstance(value, type) and (_is_protocol(origin) or (isinstance(origin, type) and issubclass(value, origin))):
            return f"pass an object of the class: {path}={value.__name__}(...)"
        if origin is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return f"pass an int: {path}={int(value)}"
        if origin in (int, float) and isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 20:
            return f"pass a number: {path}={int(value)}"
        is_container = (origin in _SEQUENCES or origin is tuple) and bool(arguments) and arguments[0] is not Any
        if is_container and value is not None and any(_type_fits(value, item, plain) for item in _options(arguments[0])):
            item = _repr(value) if isinstance(value, str | int) else "..."
            return f"pass a tuple: {path}=({item},)" if origin is tuple else f"pass a list: {path}=[{item}]"
    return None


# -- arguments of calls, fields of dataclasses -------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

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
            bound = _bind(function.__qualname__, signature, args, kwargs)
            try:
                _check(function, signature, bound, values, examples)
            except ConfigError as error:
                raise ConfigError(f"{function.__qualname__}(): {error.problem}", place=error.place, remedy=error.remedy) from error
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


def _bind(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Bind arguments to a signature; a misfit raises ConfigError, which suggests a parameter with a similar name."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [parameter for parameter in signature.parameters if parameter != "self"]
        unknown = next((keyword for keyword in kwargs if keyword not in known), None)
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
            near = get_close_matches(value, choices, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(f'"{choice}"' for choice in choices)
            raise ConfigError(f"there is no {name}={value!r}", remedy=f"{meant}choose one of {listed}")

    return rule


def at_least(least: float) -> Rule:
    """Return a rule: the value is ``least`` or more."""

    def rule(name: str, value: Any) -> None:
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, not {described(value)}", remedy=f"pass {name}={least} or more")

    return rule


def more_than(least: float) -> Rule:
    """Return a rule: the value is greater than ``least``."""

    def rule(name: str, value: Any) -> None:
        if value <= least:
            raise ConfigError(f"{name} must be more than {least}, not {described(value)}", remedy=f"pass a number above {least}")

    return rule


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
