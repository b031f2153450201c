"""Phases: named steps from one state to the next, in the order of a literal tuple, each checked and timed.

    state ── phase 1 ──> state ── phase 2 ──> state ── ...        observers see every arrow: its name, what it gave, how long it took

What a phase makes depends on the state that it starts from and on a request. A phase names the parts of the request that it reads, so that
requests which agree in these share its result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["Observer", "Phase", "PhaseRunner", "observing_phases"]

State = TypeVar("State")
Request = TypeVar("Request")

Observer: TypeAlias = Callable[[str, Any, float], None]
"""Is told the name of a phase, the state after it, and the seconds that it took."""

_OBSERVER: ContextVar[Observer | None] = ContextVar("observer of phases", default=None)


@dataclass(frozen=True)
class Phase(Generic[State, Request]):
    """One step.

    Attributes:
        name: of the phase, in reports.
        apply: gives the state after the phase; the same object where there was nothing to do.
        reads: the fields of the request that decide the result; None: it is made anew for each request, as are those of later phases.
    """

    name: str
    apply: Callable[[State, Request], State]
    reads: tuple[str, ...] | None = ()


class PhaseRunner(Generic[State, Request]):
    """Runs phases on one state, and keeps what each made for the requests that it was asked.

    Args:
        phases: in their order.
        start: the state in front of the first.
        check: raises where the state after a phase (its name is given) is not valid.
    """

    def __init__(self, phases: Sequence[Phase[State, Request]], start: State, check: Callable[[State, str], None]) -> None:
        self._phases, self._start, self._check = tuple(phases), start, check
        self._known: dict[Hashable, State] = {}

    def after(self, name: str, request: Request) -> State:
        """Return the state after a phase, running what has not run for such a request."""
        state: State = self._start
        key: tuple[Hashable, ...] | None = ()
        for phase in self._phases:
            if key is None or phase.reads is None:
                key, state = None, self._run(phase, state, request)
            else:
                key = (*key, phase.name, *(getattr(request, field) for field in phase.reads))
                if key not in self._known:
                    self._known[key] = self._run(phase, state, request)
                state = self._known[key]
            if phase.name == name:
                return state
        raise KeyError(name)

    def _run(self, phase: Phase[State, Request], state: State, request: Request) -> State:
        start = time.perf_counter()
        found = phase.apply(state, request)
        took = time.perf_counter() - start
        if found is not state:
            self._check(found, phase.name)
        if (observer := _OBSERVER.get()) is not None:
            observer(phase.name, found, took)
        return found


@contextlib.contextmanager
def observing_phases(observer: Observer) -> Iterator[None]:
    """Let an observer see every phase that runs inside."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)
