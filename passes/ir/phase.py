"""Phases: named steps from one state to the next, in the order of a literal tuple, each checked and timed.

    state ── phase 1 ──> state ── phase 2 ──> state ── ...        an observer gets the name, result and time of each phase

The result of a phase depends on the state before it and on a request. A phase names the fields of the request that it reads, so that
requests with equal fields share its result. The caller's autocast is off meanwhile: casts are operations of the graph.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from passes.ir.graph import without_autocast

State = TypeVar("State")
Request = TypeVar("Request")

Observer: TypeAlias = Callable[[str, Any, float], None]
"""Called with the name of a phase, the state after it, and the seconds that it took."""

_OBSERVER: ContextVar[Observer | None] = ContextVar("observer of phases", default=None)


@dataclass(frozen=True)
class Phase(Generic[State, Request]):
    """One step.

    Attributes:
        name: of the phase, in reports.
        apply: returns the state after the phase; the same object if nothing changed.
        reads: the fields of the request that the result depends on; None: this phase and all later ones are never cached.
    """

    name: str
    apply: Callable[[State, Request], State]
    reads: tuple[str, ...] | None = ()


class PhaseRunner(Generic[State, Request]):
    """Runs phases on one state, and caches the result of each phase for each request.

    Args:
        phases: in their order.
        start: the state before the first phase.
        check: called with the state after a phase and the phase's name; raises if the state is invalid.
        tell: called with the number of a phase before it runs, and its name; with the number of all phases and no name when the last of
            those asked for has run. None: nothing is called.
    """

    def __init__(
        self,
        phases: Sequence[Phase[State, Request]],
        start: State,
        check: Callable[[State, str], None],
        tell: Callable[[int, str], None] | None = None,
    ) -> None:
        self._phases, self._start, self._check, self._tell = tuple(phases), start, check, tell
        self._cache: dict[Hashable, State] = {}
        self._has_told = False

    def after(self, name: str, request: Request) -> State:
        """Return the state after a phase; run only phases whose result is not cached."""
        try:
            return self._after(name, request)
        finally:
            if self._tell is not None and self._has_told:
                self._tell(len(self._phases), "")
            self._has_told = False

    def _after(self, name: str, request: Request) -> State:
        state: State = self._start
        key: tuple[Hashable, ...] | None = ()  # phases so far, with the fields that they read; None: do not cache
        for phase in self._phases:
            if key is None or phase.reads is None:
                key, state = None, self._run(phase, state, request)
            else:
                key = (*key, phase.name, *(getattr(request, field) for field in phase.reads))
                if key not in self._cache:
                    self._cache[key] = self._run(phase, state, request)
                state = self._cache[key]
            if phase.name == name:
                return state
        raise KeyError(name)

    def _run(self, phase: Phase[State, Request], state: State, request: Request) -> State:
        """Apply a phase without the caller's autocast, check the new state, and report it to the observer."""
        if self._tell is not None:
            self._tell(self._phases.index(phase), phase.name)
            self._has_told = True
        start = time.perf_counter()
        with without_autocast():  # it would cast again where phases run operations, also those that the model keeps out of autocast
            result = phase.apply(state, request)
            seconds = time.perf_counter() - start
            if result is not state:
                self._check(result, phase.name)
        observer = _OBSERVER.get()
        if observer is not None:
            observer(phase.name, result, seconds)
        return result


@contextlib.contextmanager
def observing_phases(observer: Observer) -> Iterator[None]:
    """Call an observer after every phase that runs inside of the context."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)
