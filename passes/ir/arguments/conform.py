"""Check values against annotations, and convert them: numbers of other libraries become Python's.

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
import math
import numbers
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from passes.ir.arguments.describe import SEQUENCES, described, expected, is_protocol, is_union, options_of, protocol_methods, shortened
from passes.ir.errors import ConfigError

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
    if is_union(annotation):
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
    if origin in SEQUENCES and arguments:
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
    if origin in SEQUENCES:
        return isinstance(value, origin) and not isinstance(value, _TEXT)
    if origin is collections.abc.Callable:
        return callable(value)
    if is_protocol(origin):
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in protocol_methods(origin))
    if plain and dataclasses.is_dataclass(origin):
        return isinstance(value, Mapping)
    return isinstance(value, origin)


def _conform_to_union(value: Any, annotation: Any, path: str, plain: bool, example: str) -> Any:
    """Check a value against each option of a union whose type fits; the error is that of the last one."""
    matching = [option for option in options_of(annotation) if _type_fits(value, option, plain)]
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
        raise ConfigError(f"{path} must have {len(arguments)} entries, not {len(value)}: {shortened(value)}", remedy="pass as many")
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
        checked_key = conform(key, arguments[0], f"the key {shortened(key)} of {path}", plain=plain)
        checked[checked_key] = conform(item, arguments[1], f"{path}[{shortened(key)}]", plain=plain)
    unchanged = len(checked) == len(value) and all(checked.get(key, _ABSENT) is item for key, item in value.items())
    return value if unchanged else checked


def _conform_table(value: Mapping[str, Any], kind: type, path: str) -> Any:
    """Make a dataclass from a table with an entry for each field; fields with defaults may be missing."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise ConfigError(f"{path or 'it'} has an unknown entry {shortened(unknown[0])}", remedy=f"its entries are {', '.join(fields)}")
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
    for option in options_of(annotation):
        origin, arguments = typing.get_origin(option) or option, typing.get_args(option)
        if isinstance(value, type) and (is_protocol(origin) or (isinstance(origin, type) and issubclass(value, origin))):
            return f"pass an object of the class: {path}={value.__name__}(...)"
        if origin is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return f"pass an int: {path}={int(value)}"
        if origin in (int, float) and isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 20:
            return f"pass a number: {path}={int(value)}"
        is_container = (origin in SEQUENCES or origin is tuple) and bool(arguments) and arguments[0] is not Any
        if is_container and value is not None and any(_type_fits(value, item, plain) for item in options_of(arguments[0])):
            item = shortened(value) if isinstance(value, str | int) else "..."
            return f"pass a tuple: {path}=({item},)" if origin is tuple else f"pass a list: {path}=[{item}]"
    return None
