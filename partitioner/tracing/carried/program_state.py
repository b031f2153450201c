"""Find the plain state of the program that the forward of a model may read, and the clocks and generators that it may ask.

    def forward(self, x):
        if time.time() - self.start > 60: ...      a clock; start of the model
        return x * SCALE / self.config.scale       SCALE of the module, scale of self.config

Nothing runs: the names in the code of ``forward``, and of what it can call, are looked up in globals, closures, classes and objects. Values
that the code does not read may be among those found. They are compared again at later calls, and a change decides nothing by itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import operator
import os
import random
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.restore import OF_EVERY_MODULE

_PLAIN = (bool, int, float, str, type(None))
_CALLED = (Tensor, nn.Module, types.BuiltinFunctionType)
_MOST = 64
"""Items of a container that are looked at."""

_LIBRARIES = tuple(
    str(path) for path in (Path(torch.__file__).parent, *(Path(__file__).parents[3] / name for name in ("partitioner", "passes")))
)
_STANDARD = sysconfig.get_path("stdlib")
CLOCKS: Mapping[str, Sequence[str]] = {
    "time": ("time", "perf_counter", "monotonic", "process_time", "thread_time", "localtime", "gmtime", "ctime", "strftime", "asctime"),
    "posix": ("urandom", "getrandom"),
    "nt": ("urandom",),
    "datetime": ("now", "utcnow", "today"),
}
"""Module of C functions that give another result each time -> their names, without ``_ns``."""
_SOURCES = frozenset({*CLOCKS, "uuid", "secrets", "os"})
_ASKS = frozenset(
    {
        *itertools.chain(*CLOCKS.values(), (f"{name}_ns" for name in CLOCKS["time"])),
        *("uuid1", "uuid4", "token_bytes", "token_hex", "token_urlsafe", "randbelow", "randbits", "SystemRandom"),
    }
)
"""Functions of these modules that ask a clock, or the system for random bytes."""


class Reading:
    """Plain values, and small containers and objects with such values, that code of the model may read from one place.

    What is changed inside a container is another reading's; here it is another container in its place.

    Args:
        owner: the place, for messages.
        holder: has them.
        names: of the values.
        set_on: the class whose attributes they are; None: they are set in ``holder``.
    """

    def __init__(self, owner: str, holder: Any, names: set[str], set_on: type | None = None) -> None:
        self.owner, self._holder, self._set_on = owner, holder, set_on
        self.values: dict[str, Any] = {name: holder[name] for name in sorted(names)}
        self._prepare()

    def _prepare(self) -> None:
        self._get = operator.itemgetter(*self.values) if self.values else len
        self._expected = self._get(self.values) if self.values else 0
        self._contents = {name: contents_of(value) for name, value in self.values.items() if not isinstance(value, _PLAIN)}

    def is_changed(self) -> bool:
        """Return whether one of the values may have changed; ``changed`` compares what containers hold."""
        try:
            return bool(self._get(self._holder) != self._expected)
        except (KeyError, IndexError):  # IndexError: of a list that is shorter now
            return True
        except (RuntimeError, ValueError, TypeError):  # a container holds tensors or arrays now
            return True

    def changed(self) -> dict[str, Any]:
        """Return the names whose values have changed -> their values, ``Ellipsis`` for one that was deleted."""
        found = {name: (self._holder[name] if name in self._holder else ...) for name in self.values}  # noqa: SIM401  not every holder has get()
        return {name: value for name, value in found.items() if self._is_other(name, value)}

    def _is_other(self, name: str, value: Any) -> bool:
        """Return whether a value is not the one that is expected; what cannot be compared is none."""
        if name not in self._contents or value is ...:
            return bool(value != self.values[name])
        contents = contents_of(value)
        return value is not self.values[name] and contents is not None and contents != self._contents[name]

    def take(self, values: Mapping[str, Any]) -> None:
        """Take values for those that are expected: copies of containers, since nothing else watches what is in these."""
        self.values.update({name: copy.copy(value) if name in self._contents else value for name, value in values.items()})
        self._prepare()

    def set(self, values: Mapping[str, Any]) -> None:
        """Give names these values."""
        for name, value in values.items():
            if self._set_on is not None:
                setattr(self._set_on, name, value)
            else:
                self._holder[name] = value


class _Environment(dict[str, Any]):
    """The variables of the environment; None for those that are not set."""

    def __getitem__(self, name: str) -> str | None:
        return os.environ.get(name)

    def __setitem__(self, name: str, value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


class ClosureCells(dict[str, Any]):
    """The variables of a closure that have values. Attributes: names."""

    def __init__(self, cells: Mapping[str, types.CellType]) -> None:
        super().__init__()
        self._cells = cells
        self.names = tuple(cells)

    @staticmethod
    def of(function: types.FunctionType) -> ClosureCells:
        """Return the variables of the closure of a function."""
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return ClosureCells({name: cell for name, cell in free if name != "__class__" and _has_content(cell)})

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._cells and _has_content(self._cells[name])


class ListItems(dict[str, Any]):
    """The items of a list, by their places: ``"[0]"``."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__({f"[{place}]": place for place in range(len(items))})
        self._items = items

    def __getitem__(self, name: str) -> Any:
        return self._items[self._place(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        self._items[self._place(name)] = value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name) and self._place(name) < len(self._items)

    def _place(self, name: str) -> int:
        return int(super().__getitem__(name))


class Items(dict[str, Any]):
    """All items of a list, a set or a dictionary of plain values, as one value."""

    NAME = "the content"

    def __init__(self, items: list[Any] | set[Any] | dict[Any, Any]) -> None:
        super().__init__({self.NAME: None})
        self._items = items

    def __getitem__(self, name: str) -> tuple[Any, ...] | frozenset[Any]:
        if isinstance(self._items, dict):
            return tuple(self._items.items())
        return tuple(self._items) if isinstance(self._items, list) else frozenset(self._items)

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self._items, list):
            self._items[:] = value
        else:
            self._items.clear()
            self._items.update(value)


class Reach:
    """Program state that a model's code may read.

    Attributes:
        readings: values by place.
        objects: what is no plain value.
        asks_clock: whether it may ask a clock, or the system for random bytes.
    """

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.objects: dict[int, object] = {}
        self.asks_clock = False
        self._places: dict[int, Reading] = {}
        self._lists: dict[int, ListItems] = {}
        self._items: dict[int, Items] = {}
        self._functions: set[int] = set()
        self._all_names: set[str] = set()
        self._names: dict[type, frozenset[str]] = {}

    def add_module(self, module: nn.Module, path: str) -> None:
        """Add what the forward of a module, and its hooks, may read."""
        kind, own = type(module), vars(module)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):  # noqa: SLF001
            self._follow(hook, path)
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001  forward of torch, whose p programs change in training
            self._add(path or "the model", own, {"p"})
        if is_library(_file_of(kind)):
            return
        if kind not in self._names:
            self._names[kind] = frozenset(self._names_of_class(kind))
        self._add_own(own, path, self._names[kind])

    def add_read_elsewhere(self, module: nn.Module, path: str) -> None:
        """Add the attributes of a module that functions read which are not its methods."""
        if not is_library(_file_of(type(module))):
            self._add_own(vars(module), path, frozenset(self._all_names))

    def _add_own(self, own: dict[str, Any], path: str, names: frozenset[str]) -> None:
        """Add the attributes of a module that have these names, and what they may read."""
        names -= OF_EVERY_MODULE
        # A text names a part that the model has chosen, as adapters do; later traces are made from those chosen when it was partitioned.
        self._add(path or "the model", own, {name for name in names if not _has_text(own.get(name))})
        for name in names & own.keys():
            self._reach(own[name], f"{path}.{name}" if path else name, names, of_module=True)

    def _names_of_class(self, kind: type[nn.Module]) -> set[str]:
        """Return the names in the code of the forward of a class, and of its methods that this may call."""
        found: set[str] = set()
        pending = ["forward"]
        while pending:
            function = getattr(kind, pending.pop(), None)
            for code in self._follow(function, kind.__qualname__):
                new = set(code.co_names) - found
                found |= new
                pending += [name for name in new if not is_library(_file_of(_function_of(getattr(kind, name, None))))]
        for base in kind.__mro__:
            if not is_library(_file_of(base)):
                self._add(base.__qualname__, vars(base), found, base)
        return found

    def _follow(self, function: Any, owner: str) -> list[types.CodeType]:
        """Add what a function may read, and return its code and that of functions in it; nothing if it was added before."""
        function = _function_of(function)
        if not isinstance(function, types.FunctionType) or id(function) in self._functions or is_library(_file_of(function)):
            return []
        self._functions.add(id(function))
        codes = [function.__code__]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        names = frozenset(name for code in codes for name in code.co_names)
        self._all_names |= names
        scope = function.__globals__
        self._add(f"the module {scope.get('__name__')}", scope, set(names))
        if names & {"environ", "getenv"}:
            texts = {each for code in codes for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
            self._add("os.environ", _ENVIRONMENT, texts)
        for name in names & scope.keys():
            self._reach(scope[name], name, names)
        cells = ClosureCells.of(function)
        self._add(function.__qualname__, cells, set(cells.names))
        for cell_name in cells.names:
            self._reach(cells[cell_name], cell_name, names)
        if "__wrapped__" in vars(function):
            codes += self._follow(vars(function)["__wrapped__"], owner)
        return codes

    def _reach(self, value: Any, owner: str, names: frozenset[str], *, of_module: bool = False) -> None:
        """Add the plain values of an object that have these names, and the state that its methods of these names may read.

        Args:
            of_module: whether the object is an attribute of a module.
        """
        if isinstance(value, (*_PLAIN, *_CALLED)):
            self.asks_clock |= isinstance(value, types.BuiltinFunctionType) and value.__name__ in _ASKS
            return
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._follow(value, owner)
            return
        self.objects[id(value)] = value
        if isinstance(value, types.ModuleType):
            self._reach_module(value, names)
        elif isinstance(value, type):
            if value.__module__ == "datetime":
                self.asks_clock |= not names.isdisjoint(_ASKS)
            elif not is_library(_file_of(value)):
                self._add(value.__qualname__, vars(value), set(names), value)
                self._follow_methods(value, names)
        elif isinstance(value, dict | list | tuple | set):
            self._reach_items(value, owner, of_module=of_module)
        elif isinstance(value, random.SystemRandom):
            self.asks_clock = True
        elif hasattr(value, "__dict__"):
            of_methods = names if is_library(_file_of(type(value))) else names | self._follow_methods(type(value), names)
            self._add(owner, vars(value), {*of_methods})

    def _reach_module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        if module.__name__ in _SOURCES:
            self.asks_clock |= not names.isdisjoint(_ASKS)
        elif not is_library(getattr(module, "__file__", None) or "<"):
            self._add(f"the module {module.__name__}", vars(module), set(names))
            for name in names & vars(module).keys():
                self._follow(vars(module)[name], name)

    def _reach_items(self, items: dict[Any, Any] | list[Any] | tuple[Any, ...] | set[Any], owner: str, *, of_module: bool) -> None:
        if len(items) <= _MOST:
            if isinstance(items, dict) and (not items or _has_text([*items])):
                self._add(owner, items, {key for key in items if isinstance(key, str)})
            elif isinstance(items, list | set | dict) and contents_of(items) is not None and not _has_text(items):
                self._add(owner, self._items.setdefault(id(items), Items(items)), {Items.NAME})
            elif isinstance(items, list):
                places = self._lists.setdefault(id(items), ListItems(items))
                # As in ``_add_own``: a module lists the adapters that it has chosen.
                self._add(owner, places, {place for place in places if not (of_module and isinstance(places[place], str))})
            for item in items.values() if isinstance(items, dict) else items:
                self._follow(item, owner)

    def _follow_methods(self, kind: type, names: frozenset[str]) -> frozenset[str]:
        """Follow the methods and properties of a class that have these names; return the names in their code."""
        found: set[str] = set()
        for name in names | {"__call__"}:
            for code in self._follow(getattr(kind, name, None), kind.__qualname__) if hasattr(kind, name) else ():
                found.update(code.co_names)
        return frozenset(found)

    def _add(self, owner: str, holder: Any, names: set[str], set_on: type | None = None) -> None:
        found = {name for name in names if name in holder and contents_of(holder[name]) is not None}
        place = id(holder if set_on is None else set_on)
        known = self._places.get(place)
        if known is not None:
            known.take({name: holder[name] for name in found if name not in known.values})
        elif found:
            self._places[place] = reading = Reading(owner, holder, found, set_on)
            self.readings.append(reading)


_ENVIRONMENT = _Environment()


@contextlib.contextmanager
def preserve_program(readings: Sequence[Reading]) -> Iterator[None]:
    """Restore on exit the values that were read, where they have changed."""
    try:
        yield
    finally:
        for reading in readings:
            if reading.is_changed():
                reading.set({name: reading.values[name] for name in reading.changed()})


def reach_of(model: nn.Module) -> Reach:
    """Return the state that the forward of a model may read."""
    reach = Reach()
    for path, module in model.named_modules():
        reach.add_module(module, path)
    for path, module in model.named_modules():
        reach.add_read_elsewhere(module, path)
    return reach


def _function_of(value: Any) -> Any:
    """Return the function of a method, a partial application or a property."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType | classmethod | staticmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        else:
            return value


def _has_content(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def contents_of(value: Any, *, is_item: bool = False) -> tuple[Any, ...] | None:
    """Return what is equal for equal plain values, small containers of these, and objects with such attributes; None for others.

    Args:
        is_item: whether it is in a container: objects are not looked into there.
    """
    if isinstance(value, _PLAIN):
        return None if isinstance(value, float) and math.isnan(value) else (type(value), value)
    if isinstance(value, dict):
        items: list[Any] = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        items = [*value]
    elif is_item or not is_record(value):
        return None
    else:
        return (type(value), frozenset(plain_attributes(value).items()))
    if len(items) > 2 * _MOST:
        return None
    found = [contents_of(each, is_item=True) for each in items]
    return None if None in found else (type(value), frozenset(found) if isinstance(value, set | frozenset) else tuple(found))


def plain_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain values."""
    return {name: each for name, each in vars(value).items() if isinstance(each, _PLAIN)}


def is_record(value: Any) -> bool:
    """Return whether a value is an object of a class outside of libraries, which keeps its attributes in a dictionary."""
    is_called = isinstance(value, (*_CALLED, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial))
    return not is_called and hasattr(value, "__dict__") and not is_library(_file_of(type(value)))


def _has_text(value: Any) -> bool:
    """Return whether a value is a text, or a container with texts."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set | frozenset) else (value,)
    return any(isinstance(each, str) for each in items)


def _file_of(value: Any) -> str:
    """Return the file of a function, or of the module that a class is in; ``<`` for others."""
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename
    module = sys.modules.get(value.__module__) if isinstance(value, type) else None
    if isinstance(value, type) and value.__module__ == "__main__":
        return ""
    return str(getattr(module, "__file__", None) or "<")


@functools.cache
def is_library(file: str) -> bool:
    """Return whether code belongs to Python, torch or this package, or is generated."""
    if file.startswith(("<", *_LIBRARIES)):
        return not file.startswith("<stdin") and not file.startswith("<ipython")
    return file.startswith(_STANDARD) and "site-packages" not in file
