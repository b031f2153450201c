"""Annotations and values in words, for errors: ``an int or None``, ``2.0 (float)``."""

from __future__ import annotations

import collections.abc
import numbers
import reprlib
import types
import typing
from pathlib import Path
from typing import Any

_UNIONS = (typing.Union, types.UnionType)
SEQUENCES = (collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable, list)
"""Annotations that accept a list or a tuple, and no text."""


def expected(annotation: Any) -> str:
    """Describe the values that an annotation accepts.

    >>> expected(int | None), expected(Sequence[str]), expected(Mapping[str, int])
    ('an int or None', 'a sequence of str', 'a mapping of str to int')
    """
    if is_union(annotation):
        words = list(dict.fromkeys(map(expected, options_of(annotation))))
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple or origin in SEQUENCES:
        kind = "tuple" if origin is tuple else "sequence"
        items = [argument for argument in arguments if argument is not Ellipsis]
        if origin is tuple and items and Ellipsis not in arguments:
            return f"a tuple ({', '.join(map(_short_name, items))})"
        return f"a {kind} of {_short_name(items[0])}" if items and items[0] is not Any else f"a {kind}"
    if origin is collections.abc.Mapping:
        return f"a mapping of {_short_name(arguments[0])} to {_short_name(arguments[1])}" if arguments else "a mapping"
    if origin is collections.abc.Callable:
        return "a function"
    if is_protocol(origin):
        return f"a {origin.__name__} (an object with {' and '.join(protocol_methods(origin))})"
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
        return f"{shortened(value)} ({kind})"
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


def shortened(value: object) -> str:
    """Return the ``repr`` of a value, shortened."""
    try:
        return _Short().repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "..."


def is_union(annotation: Any) -> bool:
    """Return whether an annotation has several options."""
    return typing.get_origin(annotation) in _UNIONS


def options_of(annotation: Any) -> list[Any]:
    """Return the options of a union and of unions in it, None last; any other annotation is its only option."""
    if not is_union(annotation):
        return [annotation]
    options = [option for argument in typing.get_args(annotation) for option in options_of(argument)]
    return sorted(options, key=lambda option: option is type(None))


def _short_name(annotation: Any) -> str:
    """Name an annotation inside of another: ``str``, ``torch.Tensor``, ``int or None``."""
    if is_union(annotation):
        return " or ".join(map(_short_name, options_of(annotation)))
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


def is_protocol(annotation: Any) -> bool:
    """Return whether an annotation is a protocol of these packages."""
    return bool(getattr(annotation, "_is_protocol", False)) and annotation.__module__ not in ("typing", "collections.abc", "contextlib")


def protocol_methods(protocol: type) -> list[str]:
    """Return the names of the public methods of a protocol."""
    return [name for name, member in vars(protocol).items() if callable(member) and not name.startswith("_")]
