"""Observe which clocks a run of a model asks, where it draws from generators of Python, and which line changes a state."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from partitioner.tracing.carried.program_state import CLOCKS, is_library
from passes.ir.errors import Place

__all__ = ["line_that_changes", "observed_calls"]


@contextlib.contextmanager
def observed_calls(model: nn.Module) -> Iterator[dict[str, Place]]:
    """While active, note the clocks that this thread asks, and where; nothing where another profiler is active."""
    asked: dict[str, Place] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def observe(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (clock := _clock(function)) is not None and clock not in asked:
            asked[clock] = _innermost_place(frame, names)

    if sys.getprofile() is not None:
        yield asked
        return
    sys.setprofile(observe)
    try:
        yield asked
    finally:
        sys.setprofile(None)


def _clock(function: Any) -> str | None:
    """Return the text of a C function that gives another result each time; None for others."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if isinstance(owner, types.ModuleType) and name.removesuffix("_ns") in CLOCKS.get(owner.__name__, ()):
        return f"{'os' if owner.__name__ in ('posix', 'nt') else owner.__name__}.{name}()"
    if isinstance(owner, type) and owner.__module__ == "datetime" and name in CLOCKS["datetime"]:
        return f"datetime.{owner.__name__}.{name}()"
    return None


def line_that_changes(model: nn.Module, state: Callable[[], Any], run: Callable[[], object]) -> Place:
    """Return the line of the model in which a state changes, by a run that is traced line by line."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[Place] = []
    first = state()

    def trace(frame: types.FrameType, _event: str, _: object) -> Any:
        place: list[Place] = []

        def each_line(frame: types.FrameType, _event: str, _: object) -> Any:
            if place and not found and state() != first:
                found.extend(place)
            place[:] = [_innermost_place(frame, names)]
            return None if found else each_line

        return None if is_library(frame.f_code.co_filename) else each_line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return found[0] if found else Place(module="")


def _innermost_place(frame: types.FrameType | None, names: Mapping[int, str]) -> Place:
    """Return the innermost line of code that is not of a library, and the module that it belongs to.

    Args:
        names: id of a module of the model -> its path.
    """
    source: str | None = None
    while frame is not None:
        code = frame.f_code
        if source is None and not is_library(code.co_filename):
            source = f"{code.co_filename}:{frame.f_lineno}"
        first = frame.f_locals.get(code.co_varnames[0]) if source is not None and code.co_argcount else None
        if id(first) in names:
            return Place(module=names[id(first)], source=source)
        frame = frame.f_back
    return Place(source=source)
