"""What a loss function can reach besides its arguments: to recognise equal functions, and to leave their state as it was."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.restore import preserved

__all__ = ["loss_key", "undisturbed"]


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to itself for the same object alone, which it keeps alive so that no other gets its identity."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def loss_key(loss_fn: object, *, exact: bool = True) -> Hashable:
    """Return a key that is equal for functions of the same code over alike values: a lambda written inside a loop is traced once.

    Numbers and texts that a function reads from around it count by value, for they may switch parts of a loss on and off; tensors by
    their type; other objects by identity and by the numbers and texts among their attributes.

    Args:
        exact: whether finite floats count by value; else by their sign, for a factor that changes from step to step.
    """
    return _key(loss_fn, exact, set())


def _key(value: object, exact: bool, seen: set[int]) -> Hashable:
    if isinstance(value, float) and not exact and math.isfinite(value):
        return float, value > 0, value < 0
    if isinstance(value, bool | int | float | str | None):
        return type(value), value
    if isinstance(value, Tensor | types.ModuleType | type):
        return type(value) if isinstance(value, Tensor) else _Same(value)
    if id(value) in seen or _is_of_torch(value):
        return _Same(value)
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        return value.__code__, tuple((name, _key(each, exact, seen)) for name, each in _reads(value))
    if isinstance(value, types.MethodType):
        return _key(value.__func__, exact, seen), _key(value.__self__, exact, seen)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return functools.partial, tuple(value.keywords), tuple(_key(each, exact, seen) for each in parts)
    simple = [(name, each) for name, each in getattr(value, "__dict__", {}).items() if isinstance(each, bool | int | float | str | None)]
    return _Same(value), tuple((name, _key(each, exact, seen)) for name, each in simple)


def _is_of_torch(value: object) -> bool:
    return isinstance(value, types.FunctionType) and (value.__module__ or "").partition(".")[0] == "torch"


def _reads(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function reads that is no argument: cells of its closure, globals, and defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that has no value yet
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default {index}", value
    yield from (function.__kwdefaults__ or {}).items()


# -- calling it without a trace ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def undisturbed(loss_fn: Callable[..., Any] | None, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Call a loss inside, and restore what it changes: attributes, lists, dicts, tensors, closed-over names and random states.

    Yields:
        A function that says whether what the loss can reach differs from what it was when it was last asked.
    """
    functions, objects = _reached(loss_fn)
    cells = [cell for function in functions for cell in function.__closure__ or ()]
    contents = [_content(cell) for cell in cells]
    names = [(function, name) for function in functions for name in function.__code__.co_names if name in function.__globals__]
    values = [function.__globals__[name] for function, name in names]
    modules = [each for each in objects if isinstance(each, nn.Module)]
    tensors = [buffer for each in modules for buffer in each.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    states = [_state(functions, objects)]

    def is_changed() -> bool:
        states.append(_state(functions, objects))
        return states[-1] != states[-2]

    devices = [] if device.type == "cpu" else [device]
    with preserved(*objects), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield is_changed
        finally:
            for cell, content in zip(cells, contents, strict=True):
                if content is not _EMPTY and _content(cell) is not content:
                    cell.cell_contents = content
            for (function, name), value in zip(names, values, strict=True):
                if function.__globals__.get(name, _EMPTY) is not value:
                    function.__globals__[name] = value
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    if not torch.equal(tensor, copy):
                        tensor.copy_(copy)


_EMPTY = object()


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _reached(loss_fn: object) -> tuple[list[types.FunctionType], list[object]]:
    """The functions that a loss calls by name, and the objects that these read."""
    functions: list[types.FunctionType] = []
    objects: list[object] = []
    rest = [loss_fn]
    while rest:
        value = rest.pop()
        if any(value is each for each in (*functions, *objects)):
            continue
        if isinstance(value, types.FunctionType):
            if not _is_of_torch(value):
                functions.append(value)
                rest += [each for _, each in _reads(value)]
        elif isinstance(value, types.MethodType):
            rest += [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            rest += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, list | dict) or (hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | Tensor)):
            objects.append(value)
    return functions, objects


def _state(functions: list[types.FunctionType], objects: list[object]) -> Hashable:
    """What tells a changed state. A tensor that is written in place is still the same: a trace shows that."""
    read = [each for function in functions for _, each in _reads(function)]
    for value in objects:
        for module in value.modules() if isinstance(value, nn.Module) else [value]:
            read += list(getattr(module, "__dict__", {}).values()) if not isinstance(module, list | dict) else [module]
        if isinstance(value, nn.Module):
            read += [*value.parameters(), *value.buffers()]
    return tuple(_mark(value) for value in read)


def _mark(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, list | dict | set):
        return type(value), len(value)
    return (type(value), value) if isinstance(value, bool | int | float | str | None) else id(value)
