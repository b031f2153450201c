"""Check the arguments of public calls, and the fields of public dataclasses, against their annotations.

@checked_arguments({"n_microbatches": at_least(1), "memory_limit": read_by(parse_bytes)})
def partition(model: nn.Module, ..., n_microbatches: int | None = None, memory_limit: int | str | None = None): ...

The annotation says which types there are, a rule which values. Both are checked before the function runs.

conform(2.0, int | None, "devices")          ConfigError: devices must be an int or None, not 2.0 (float); remedy: pass devices=2
conform([["data", 2]], tuple[tuple[str, int], ...], "mesh", plain=True) == (("data", 2),)

Annotations are read as follows.

int         an integer of any type (numpy's too) of 64 bits, which is made an ``int``; a bool is none
float       a real number of any type; nan is none, infinity is one
bool        a bool, or numpy's
Sequence    a list, a tuple, a ``torch.Size``; text is none
Mapping     any mapping
Protocol    an object, not a class, that has the methods
a class     an instance of it

With ``plain=True`` values come from a file (JSON, TOML): lists stand for tuples, and tables for dataclasses, whose fields are all checked.
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
from collections.abc import Callable, Collection, Mapping, Sequence
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
_NOWHERE = object()
_MOST = 2**63
"""Sizes, counts and seeds beyond it fit no tensor and no C function."""


def conform(value: Any, annotation: Any, path: str, *, plain: bool = False, example: str = "") -> Any:
    """The value as its annotation has it: numbers of other libraries become Python's, and plain values become dataclasses.

    Args:
        value: anything.
        annotation: a resolved annotation: no text.
        path: what the value is called in errors: ``"devices[1]"``; empty: a file, whose entries are called by their names.
        plain: whether the value was read from a file; see the module.
        example: how to write one, for the remedy.

    Raises:
        ConfigError: the value, or a part of it, is of another type; names the part.
    """
    if _is_union(annotation):
        return _of_union(value, annotation, path, plain, example)
    if not _is_kind(value, annotation, plain):
        raise _mismatch(value, annotation, path, plain, example)
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (int, float, bool):
        return _number(value, origin, path)
    if origin is tuple and plain:
        value = tuple(value)
    if origin is tuple and arguments:
        return _of_tuple(value, arguments, path, plain)
    if origin in _SEQUENCES and arguments:
        return _items(value, arguments[0], path, plain)
    if origin is collections.abc.Mapping and arguments:
        return _of_mapping(value, arguments, path, plain)
    if plain and dataclasses.is_dataclass(origin) and isinstance(origin, type):
        return _of_table(value, origin, path)
    return value


@functools.cache
def hints_of(of: Any) -> Mapping[str, Any]:
    """The resolved annotations of a function's parameters, or of a dataclass's fields."""
    return types.MappingProxyType(typing.get_type_hints(of))


def expected(annotation: Any) -> str:
    """What an annotation admits, in words.

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
            return f"a tuple ({', '.join(map(_short, items))})"
        return f"a {kind} of {_short(items[0])}" if items and items[0] is not Any else f"a {kind}"
    if origin is collections.abc.Mapping:
        return f"a mapping of {_short(arguments[0])} to {_short(arguments[1])}" if arguments else "a mapping"
    if origin is collections.abc.Callable:
        return "a function"
    if _is_protocol(origin):
        return f"a {origin.__name__} (an object with {' and '.join(_members(origin))})"
    if annotation in (None, type(None)):
        return "None"
    name = _short(origin)
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def described(value: object) -> str:
    """A value as an error shows it: short, with its type.

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
    """Numbers and text as they are, shortened; of any other object its type, whose own text may be long or fail."""

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


# -- what an annotation is -------------------------------------------------------------------------------------------------------------


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in _UNIONS


def _options(annotation: Any) -> list[Any]:
    """The options of a union, those of unions in it too, None last; any other annotation is its only option."""
    if not _is_union(annotation):
        return [annotation]
    found = [each for option in typing.get_args(annotation) for each in _options(option)]
    return sorted(found, key=lambda option: option is type(None))


def _short(annotation: Any) -> str:
    """An annotation as an element of another."""
    if _is_union(annotation):
        return " or ".join(map(_short, _options(annotation)))
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
    """The public methods that a protocol asks for."""
    return [name for name, member in vars(protocol).items() if callable(member) and not name.startswith("_")]


def _is_kind(value: Any, annotation: Any, plain: bool) -> bool:
    """Whether a value is, from outside, what an annotation asks for; its parts are looked at later."""
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


def _of_union(value: Any, annotation: Any, path: str, plain: bool, example: str) -> Any:
    fitting = [option for option in _options(annotation) if _is_kind(value, option, plain)]
    if not fitting:
        raise _mismatch(value, annotation, path, plain, example)
    for option in fitting[:-1]:
        try:
            return conform(value, option, path, plain=plain)
        except ConfigError:
            continue
    return conform(value, fitting[-1], path, plain=plain)


def _number(value: Any, kind: type, path: str) -> Any:
    if isinstance(value, numbers.Integral) and not -_MOST <= int(value) < _MOST:
        raise ConfigError(f"{path} does not fit 64 bits", remedy=f"pass a number below 2**63 as {path}")
    if kind is float and math.isnan(value):
        raise ConfigError(f"{path} is not a number: nan", remedy=f"pass a number as {path}")
    if kind is float:
        return value if isinstance(value, int | float) else float(value)
    return value if type(value) is kind else kind(value)


def _of_tuple(value: tuple[Any, ...], arguments: tuple[Any, ...], path: str, plain: bool) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return typing.cast("tuple[Any, ...]", _items(value, arguments[0], path, plain))
    if len(value) != len(arguments):
        raise ConfigError(f"{path} must have {len(arguments)} entries, not {len(value)}: {_repr(value)}", remedy="pass as many")
    pairs = enumerate(zip(value, arguments, strict=True))
    return tuple(conform(item, kind, f"{path}[{index}]", plain=plain) for index, (item, kind) in pairs)


def _items(value: Any, kind: Any, path: str, plain: bool) -> Any:
    """The same sequence where its items need no change, which the caller may compare by identity; else a tuple or a list of others."""
    if kind is Any or not isinstance(value, Collection):  # a one-time iterable is not read here
        return value
    if kind not in (int, float) and isinstance(kind, type) and all(type(item) is kind for item in value):
        return value
    if kind is int and all(type(item) is int and -_MOST <= item < _MOST for item in value):
        return value
    items = [conform(item, kind, f"{path}[{index}]", plain=plain) for index, item in enumerate(value)]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return tuple(items) if isinstance(value, tuple) else items


def _of_mapping(value: Mapping[Any, Any], arguments: tuple[Any, ...], path: str, plain: bool) -> Mapping[Any, Any]:
    found: dict[Any, Any] = {}
    for key, item in value.items():
        name = conform(key, arguments[0], f"the key {_repr(key)} of {path}", plain=plain)
        found[name] = conform(item, arguments[1], f"{path}[{_repr(key)}]", plain=plain)
    same = len(found) == len(value) and all(found.get(key, _NOWHERE) is item for key, item in value.items())
    return value if same else found


def _of_table(value: Mapping[str, Any], kind: type, path: str) -> Any:
    """A dataclass from a table that has each of its fields; fields with defaults may be missing."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise ConfigError(f"{path or 'it'} has an unknown entry {_repr(unknown[0])}", remedy=f"its entries are {', '.join(fields)}")
    missing = [name for name, field in fields.items() if name not in value and _is_required(field)]
    if missing:
        raise ConfigError(f"{path or 'it'} lacks {', '.join(missing)}", remedy=f"its entries are {', '.join(fields)}")
    hints = hints_of(kind)
    start = f"{path}." if path else ""
    return kind(**{name: conform(item, hints[name], f"{start}{name}", plain=True) for name, item in value.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# -- errors ----------------------------------------------------------------------------------------------------------------------------


def _mismatch(value: Any, annotation: Any, path: str, plain: bool, example: str) -> ConfigError:
    what = expected(annotation)
    remedy = _hint(value, annotation, path, plain) or (f"pass {path}={example}" if example else f"pass {what}")
    return ConfigError(f"{path} must be {what}, not {described(value)}", remedy=remedy)


def _hint(value: Any, annotation: Any, path: str, plain: bool) -> str | None:
    """What the caller may have meant."""
    for option in _options(annotation):
        origin, arguments = typing.get_origin(option) or option, typing.get_args(option)
        if isinstance(value, type) and (_is_protocol(origin) or (isinstance(origin, type) and issubclass(value, origin))):
            return f"pass an object of the class: {path}={value.__name__}(...)"
        if origin is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return f"pass an int: {path}={int(value)}"
        if origin in (int, float) and isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 20:
            return f"pass a number: {path}={int(value)}"
        if (origin in _SEQUENCES or origin is tuple) and arguments and value is not None and _is_item(value, arguments[0], plain):
            written = _repr(value) if isinstance(value, str | int) else "..."
            return f"pass a {'tuple' if origin is tuple else 'list'}: {path}={f'({written},)' if origin is tuple else f'[{written}]'}"
    return None


def _is_item(value: Any, annotation: Any, plain: bool) -> bool:
    return annotation is not Any and any(_is_kind(value, option, plain) for option in _options(annotation))


# -- arguments of calls, fields of dataclasses -------------------------------------------------------------------------------------


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
