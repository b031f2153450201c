"""Numbers and lists that note when code decides by them: compares a number, or asks how long a list is.

steps = watched(3, note)
steps + 1           4, watched as well
steps + 1 < 10      True, and note() is called
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COMPUTE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPUTE_ALONE = ("neg", "pos", "abs")
_DECIDE = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "index", "int", "float", "hash", "round")


def watched(value: Any, note: Callable[[], object]) -> Any:
    """Return a number that calls ``note`` where it is compared, converted or an index, or a list that does where its length is asked."""
    if type(value) is list:
        result: Any = _List(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        result = _Int(value) if isinstance(value, int) else _Float(value)
    else:
        return value
    result.note = note
    return result


def is_watched_list(value: object) -> bool:
    """Return whether ``watched`` returned it for a list."""
    return isinstance(value, _List)


class _List(list[Any]):
    note: Callable[[], object]

    def __len__(self) -> int:
        self.note()
        return super().__len__()


class _Int(int):
    note: Callable[[], object]


class _Float(float):
    note: Callable[[], object]


def _plain(value: Any) -> Any:
    """Return a number without its notes."""
    if isinstance(value, _Int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _Float) else value


def _computes(name: str, kind: type) -> Callable[..., Any]:
    original = getattr(kind, name)

    def method(self: Any, *others: Any) -> Any:
        result = original(_plain(self), *map(_plain, others))
        return result if result is NotImplemented else watched(result, self.note)

    return method


def _decides(name: str, kind: type) -> Callable[..., Any]:
    original = getattr(kind, name)

    def method(self: Any, *others: Any) -> Any:
        self.note()
        return original(_plain(self), *map(_plain, others))

    return method


for _class, _kind in ((_Int, int), (_Float, float)):
    for _name in (*_COMPUTE, *(f"r{name}" for name in _COMPUTE), *_COMPUTE_ALONE):
        setattr(_class, f"__{_name}__", _computes(f"__{_name}__", _kind))
    for _name in _DECIDE:
        if hasattr(_kind, f"__{_name}__"):
            setattr(_class, f"__{_name}__", _decides(f"__{_name}__", _kind))
