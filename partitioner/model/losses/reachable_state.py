"""The state that a loss function can reach besides its arguments: recognise equal functions, and restore their state after a trial.

Nothing of this is for rare losses only. Without equal keys, a lambda would be proved in each step; a key that a changed switch does not
change would keep a proof that no longer holds. A trial that is not undone leaves a fake tensor as the scale of a GradScaler, and a loss
that counts its calls one ahead of the unpartitioned model's.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.model.losses.target_rows import RowsFirst
from partitioner.tracing.carried.program_state import ClosureCells
from partitioner.tracing.restore import preserve
from passes.graph.fake_tensors import plain_autograd


@dataclass(frozen=True, eq=False)
class _ById:
    """Compares an object by identity, and keeps it alive so that no other object gets its id."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def loss_key(loss_fn: object, *, exact: bool = True) -> Hashable:
    """Return a key that is equal for functions with the same code and captured values: a lambda written inside a loop is traced once.

    Captured numbers and strings are compared by value, since they may switch parts of a loss on and off, also in containers; tensors by
    their type and shape; other objects by identity, by the numbers and strings among their attributes, and by the attributes that code
    names.

    Args:
        exact: whether finite floats are compared by value; else by their sign, for a factor that changes from step to step.
    """
    return _key(loss_fn, exact, set(), frozenset())


_PLAIN = (bool, int, float, str, type(None))
_MOST_IN_KEYS = 64
"""Objects, and items of a container, that a key looks into: others are compared by identity, and longer containers by length, too."""


def _key(value: Any, exact: bool, seen: set[int], names: frozenset[str]) -> Hashable:
    """Return the key of a loss function, or of a value that it captures.

    Args:
        seen: ids of the objects on the way, against cycles.
        names: in the code that captures the value.
    """
    if isinstance(value, float) and not exact and math.isfinite(value):
        return float, value > 0, value < 0
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return type(value), tuple(value.shape)  # a number is a factor of the loss, where a value for each row is none
    if isinstance(value, types.ModuleType | type) or id(value) in seen or _is_of_torch(value):
        return _ById(value)
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        return value.__code__, tuple((name, _key(captured, exact, seen, _names(value))) for name, captured in _captured_values(value))
    if isinstance(value, types.MethodType):
        return _key(value.__func__, exact, seen, names), _key(value.__self__, exact, seen, _names(value))
    if isinstance(value, RowsFirst):
        return RowsFirst, value.dims, tuple(value.whole[::2]), _key(value.loss_fn, exact, seen, names)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return functools.partial, tuple(value.keywords), tuple(_key(part, exact, seen, names) for part in parts)
    return _ById(value) if len(seen) > _MOST_IN_KEYS else _object_key(value, exact, seen, names)


def _object_key(value: Any, exact: bool, seen: set[int], names: frozenset[str]) -> Hashable:
    """Return the key of a container, or of another object that is no function; see ``_key``."""
    if isinstance(value, list | tuple | dict | set):
        if len(value) > _MOST_IN_KEYS:
            return _ById(value), len(value)
        keys = tuple(value) if isinstance(value, dict) else len(value)
        return type(value), keys, tuple(_key(item, exact, seen, names) for item in _items(value))
    if isinstance(value, nn.Module):
        names = _names(type(value).forward) | {"_modules"}
    attributes = getattr(value, "__dict__", {}).items()
    read = [(name, attribute) for name, attribute in attributes if name in names or isinstance(attribute, _PLAIN)]
    return _ById(value), tuple((name, _key(attribute, exact, seen, names)) for name, attribute in read)


def _names(function: object) -> frozenset[str]:
    """Return the names in the code of a function; none if it is not written in Python."""
    return frozenset(getattr(getattr(function, "__code__", None), "co_names", ()))


def _is_of_torch(value: object) -> bool:
    return isinstance(value, types.FunctionType) and (value.__module__ or "").partition(".")[0] == "torch"


def _variables(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Yield the variables of its closure, and the globals, that a function reads: (the holder, a name, the value)."""
    cells = ClosureCells.of(function)
    for holder, names in ((cells, cells.names), (function.__globals__, function.__code__.co_names)):
        yield from ((holder, name, holder[name]) for name in names if name in holder)


def _captured_values(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function reads besides its arguments: variables of its closure, globals, and defaults."""
    for _, name, value in _variables(function):
        yield name, value
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default {index}", value
    yield from (function.__kwdefaults__ or {}).items()


@contextlib.contextmanager
def preserve_state(loss_fn: Callable[..., Any] | None, device: torch.device) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Restore, at the end, what calls of a loss change: attributes, lists, dicts, buffers, closure cells, globals and random states.

    Hooks on saved tensors and the detection of anomalies, which the user set for the step, are off while it is active.

    Yields:
        A function that returns the names of what has changed since its last call; none in the first.
    """
    functions, objects = _reachable(loss_fn)
    variables = [each for function in functions for each in _variables(function)]
    buffers = [buffer for value in objects if isinstance(value, nn.Module) for buffer in value.buffers()]
    copies = [buffer.detach().clone() for buffer in buffers]
    snapshots: list[dict[str, list[Hashable]]] = []

    def changed() -> tuple[str, ...]:
        now: dict[str, list[Hashable]] = {}
        for name, value in _held(functions, objects):
            now.setdefault(name, []).append(_fingerprint(value))
        snapshots.append(now)
        before = snapshots[-2:][0]
        return tuple(name for name in {**before, **now} if before.get(name) != now.get(name))

    devices = [] if device.type == "cpu" else [device]
    with preserve(*objects), plain_autograd(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield changed
        finally:
            for holder, name, value in variables:
                if name not in holder or holder[name] is not value:
                    holder[name] = value
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    if not torch.equal(buffer, copy):
                        buffer.copy_(copy)


def _reachable(loss_fn: object) -> tuple[list[types.FunctionType], list[object]]:
    """Return the functions that a loss calls by name, and the objects that these capture: modules, lists, dicts and others."""
    functions: list[types.FunctionType] = []
    objects: list[object] = []
    pending = [loss_fn]
    while pending:
        value = pending.pop()
        if any(value is known for known in (*functions, *objects)):
            continue
        if isinstance(value, types.FunctionType):
            if not _is_of_torch(value):
                functions.append(value)
                pending += [captured for _, captured in _captured_values(value)]
        elif isinstance(value, types.MethodType):
            pending += [value.__func__, value.__self__]
        elif isinstance(value, RowsFirst):
            pending += [value.loss_fn, value.whole]
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, list | dict) or (hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | Tensor)):
            objects.append(value)
    return functions, objects


def reads_tensors(loss_fn: object, tensors: Sequence[Tensor]) -> bool:
    """Return whether a loss function can reach each of these tensors, the objects themselves: it captures them, or a module has them."""
    values = [value for _, value in _held(*_reachable(loss_fn))]
    values += [item for value in values if isinstance(value, list | dict) for item in _items(value)]
    reached = {id(value) for value in values if isinstance(value, Tensor)}
    return all(id(tensor) in reached for tensor in tensors)


def _held(functions: Sequence[types.FunctionType], objects: Sequence[object]) -> list[tuple[str, object]]:
    """Return, by name, the values that functions capture, the lists and dicts among objects, and the attributes of all other objects."""
    values = [each for function in functions for each in _captured_values(function)]
    for holder in objects:
        if isinstance(holder, list | dict):
            if not any(holder is value for _, value in values):
                values.append((f"a {type(holder).__name__}", holder))
            continue
        if isinstance(holder, nn.Module):
            values += [*holder.named_parameters(type(holder).__name__), *holder.named_buffers(type(holder).__name__)]
        for owner in holder.modules() if isinstance(holder, nn.Module) else [holder]:
            values += [(f"{type(owner).__name__}.{name}", value) for name, value in getattr(owner, "__dict__", {}).items()]
    return values


def _items(container: Any) -> Iterable[object]:
    return container.values() if isinstance(container, dict) else container


_MOST = 10_000
"""Items of a container that are compared; of a longer one its length alone."""


def _fingerprint(value: object, around: frozenset[int] = frozenset()) -> Hashable:
    """Return a number or string by value, a container by its items, anything else by its id: writes into tensors show in a trace."""
    if isinstance(value, list | tuple | dict | set) and id(value) not in around:
        items = _items(value) if len(value) <= _MOST else ()
        return type(value), len(value), tuple(_fingerprint(item, around | {id(value)}) for item in items)
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)
