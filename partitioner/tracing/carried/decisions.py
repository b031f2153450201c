"""Refuse a forward whose computation follows from values that are neither tensors nor arguments; keep those that must not change.

    random.random() < 0.1     draws are set to the least and the largest, and others: another computation? then it is refused by name
    time.time()               the model runs again, later
    STEP                      compared at later calls; a change is refused if the model computes something else with it

Runs on the meta device are compared by their calls. Where they differ, traces decide, since a call may be one that nothing reads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from partitioner.tracing.carried.generators import Generator
from partitioner.tracing.carried.observed_run import line_that_changes, observed_calls
from partitioner.tracing.carried.program_state import Reach, Reading
from partitioner.tracing.carried.same_computation import same_computation
from partitioner.tracing.restore import preserve
from passes.ir.errors import Place, TraceError

__all__ = ["Run", "drawn_from", "refuse_decisions"]

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
        with observed_calls(run.model) as asked:
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
                place = line_that_changes(run.model, generator.get, run.log)
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
