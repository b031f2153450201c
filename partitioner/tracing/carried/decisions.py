"""Refuse a forward whose computation follows from values that are neither tensors nor arguments; keep those that must not change.

    random.random() < 0.1     draws are set to the least and the largest, and others: another computation? then it is refused by name
    time.time()               the model runs again, later
    STEP                      compared at later calls; a change is refused if the model computes something else with it

Runs on the meta device are compared by their calls. Where they differ, traces decide, since a call may be one that nothing reads.
An error names the line: profiling finds the first clock that is asked, tracing line by line the draw of a generator.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from partitioner.tracing.carried.generators import Generator
from partitioner.tracing.carried.program_state import CLOCKS, Reach, Reading, is_library
from partitioner.tracing.carried.same_computation import same_computation
from partitioner.tracing.restore import preserve
from passes.ir.errors import Place, TraceError

_RUNS = 16
"""How often a model runs again that asked a clock."""


@dataclass(frozen=True)
class Run:
    """How a model is run.

    Attributes:
        model: is as it was after each run.
        calls: returns all calls of one run on the meta device; None: they cannot be compared.
        export: traces it with fixed sizes.
    """

    model: nn.Module
    calls: Callable[[], Hashable | None]
    export: Callable[[], ExportedProgram]

    def log(self) -> Hashable | None:
        """Return all calls of one run."""
        with preserve(self.model):
            return self.calls()


@contextlib.contextmanager
def drawn_from(generators: Sequence[Generator]) -> Iterator[list[Generator]]:
    """Yield a list that has, at the end, the generators that were drawn from meanwhile; they get back their states."""
    drawn: list[Generator] = []
    before = [each.get() for each in generators]
    try:
        yield drawn
    finally:
        for each, state in zip(generators, before, strict=True):
            if each.get() != state:
                drawn.append(each)
                each.set(state)


def refuse_decisions(run: Run, reach: Reach, drawn: Sequence[Generator], changed: Sequence[tuple[Reading, dict[str, Any]]]) -> None:
    """Raise TraceError where a model computes otherwise for other random numbers, times, or state that it has changed itself.

    Args:
        drawn: the generators that the traced call has drawn from.
        changed: the state that it has changed -> the values that it left.
    """
    for generator in drawn:
        _refuse_draws(run, generator)
    if reach.asks_clock:
        with _observed_calls(run.model) as asked:
            log = run.log()
        if asked and any(log is None or run.log() != log for _ in range(_RUNS)) and not _is_steady(run):
            clock, place = next(iter(asked.items()))
            raise _error(run.model, f"lets {clock} decide what it computes", place)
    for reading, left in changed:
        before = {name: reading.values[name] for name in left}
        if _differs(run, functools.partial(reading.set, before), functools.partial(reading.set, left)):
            raise _error(
                run.model, f"changes {next(iter(left))} of {reading.owner}, and computes with it in the next call", Place(module="")
            )


def _refuse_draws(run: Run, generator: Generator) -> None:
    """Raise TraceError where other draws of a generator give another computation."""
    before = generator.get()
    set_first = functools.partial(generator.set, before)
    try:
        for state in generator.others:
            if _differs(run, set_first, functools.partial(generator.set, state)):
                set_first()
                place = _line_that_changes(run.model, generator.get, run.log)
                raise _error(run.model, f"lets {generator.name} decide what it computes", place)
    finally:
        set_first()


def _differs(run: Run, first: Callable[[], object], second: Callable[[], object]) -> bool:
    """Return whether a model computes something else in a second state of the program than in a first one."""
    logs = []
    for set_state in (first, second):
        set_state()
        logs.append(run.log())
    if logs[0] is not None and logs[0] == logs[1]:
        return False
    programs = []
    for set_state in (first, second):
        set_state()
        programs.append(run.export())
    return not same_computation(programs[0], programs[1], ())


def _is_steady(run: Run) -> bool:
    """Return whether a model computes the same at several times."""
    first = run.export()
    return all(same_computation(first, run.export(), ()) for _ in range(_RUNS))


def _error(model: nn.Module, problem: str, place: Place) -> TraceError:
    return TraceError(
        f"{type(model).__name__} {problem}: a graph computes in every call as in the one that was traced",
        place=place,
        remedy="decide with a tensor in the graph, torch.where(torch.rand(()) < p, a, b); or decide outside of the model, and pass the "
        "decision as an argument",
    )


@contextlib.contextmanager
def _observed_calls(model: nn.Module) -> Iterator[dict[str, Place]]:
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


def _line_that_changes(model: nn.Module, state: Callable[[], Any], run: Callable[[], object]) -> Place:
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
