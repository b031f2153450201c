"""Record when a running program computes and communicates, under the names that the simulator gives its slices.

    recorder.begin("0F1")                       an action begins, the one before it ends
    recorder.start("send_h_mb1_to_rank1")
    ...                                         the call that starts it
    recorder.started()
    recorder.wait("receive_h_mb2")              the action pauses: a rank that waits computes nothing
    ...                                         in one process, other ranks run
    recorder.take("receive_h_mb2")
    ...                                         the call that blocks, or takes what has come
    recorder.arrived("receive_h_mb2")           the action goes on

``pm.record()`` keeps the times of the host. On a CPU that is when things are computed; a GPU computes later. A profiler of torch
that is active gets the same as ranges; without both, programs are run that call no recorder.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

from torch.profiler import record_function

from cost_models.simulator.events import Slice
from passes.ir.torch_private import is_profiling


class ProgramRecorder(Protocol):
    """Calls of a generated program."""

    def begin(self, section: str) -> None:
        """Begin an action, which ends the one before."""

    def end(self) -> None:
        """End the action, or let it pause."""

    def resume(self) -> None:
        """Let the action go on."""

    def start(self, name: str) -> None:
        """Note that a transfer is about to be started."""

    def started(self) -> None:
        """Note that it is started."""

    def wait(self, name: str) -> None:
        """Note that the rank waits for a transfer: the action pauses."""

    def take(self, name: str) -> None:
        """Note that the rank is about to take it, which may block."""

    def arrived(self, name: str) -> None:
        """Note the end of the wait: the action goes on."""


class Recorder:
    """Records the slices of one rank; the generated program calls its methods.

    Attributes:
        computed: one slice for each part of an action between waits.
        communicated: one slice for each transfer, from its start to the end of the wait for it; a send, which is not waited for, has no
            duration.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.computed: list[Slice] = []
        self.communicated: list[Slice] = []
        self._section = ""
        self._section_start: float | None = None
        self._started: defaultdict[str, deque[float]] = defaultdict(deque)  # a name may be under way in several runs at once

    def begin(self, section: str) -> None:
        """Begin an action, which ends the one before."""
        self.end()
        self._section, self._section_start = section, time.time()

    def end(self) -> None:
        """End the action."""
        if self._section_start is not None:
            self.computed.append(Slice(self.rank, self._section, self._section, self._section_start, time.time(), "compute"))
        self._section_start = None

    def resume(self) -> None:
        """Let the action go on."""
        self._section_start = time.time()

    def start(self, name: str) -> None:
        """Note the start of a transfer."""
        self._started[name].append(time.time())

    def started(self) -> None:
        """Do nothing: a transfer begins with the call that starts it."""

    def wait(self, name: str) -> None:
        """Note that the rank waits for a transfer: the action pauses."""
        self.end()
        if not self._started[name]:
            self._started[name].append(time.time())

    def take(self, name: str) -> None:
        """Do nothing: it is waited for already."""

    def arrived(self, name: str) -> None:
        """Note the end of the wait: the action goes on."""
        now = time.time()
        self.communicated.append(Slice(self.rank, name, "", self._started[name].popleft(), now, "transfer"))
        self._section_start = now

    def finish(self) -> None:
        """Note the end of the program: transfers that were never waited for get slices without duration."""
        under_way = [(name, start) for name, starts in self._started.items() for start in starts]
        self.communicated += [Slice(self.rank, name, "", start, start, "transfer") for name, start in under_way]
        self._started.clear()


class ProfilerRecorder:
    """Marks actions, and calls that start or take a transfer, as ranges in the trace of a profiler of torch."""

    def __init__(self) -> None:
        self._section = ""
        self._ranges: list[record_function] = []

    def begin(self, section: str) -> None:
        """Begin an action, which ends the one before."""
        self.end()
        self._section = section
        self.resume()

    def end(self) -> None:
        """End all ranges that are open: a call that fails leaves its own."""
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def resume(self) -> None:
        """Let the action go on."""
        if self._section:
            self._enter(self._section)

    def start(self, name: str) -> None:
        """Begin the range of the call that starts a transfer."""
        self._enter(name)

    def started(self) -> None:
        """End that range."""
        self._ranges.pop().__exit__(None, None, None)

    def wait(self, name: str) -> None:
        """Let the action pause."""
        self.end()

    def take(self, name: str) -> None:
        """Begin the range of the call that takes a transfer, and blocks if it has not come."""
        self._enter(f"wait for {name}")

    def arrived(self, name: str) -> None:
        """End that range, and let the action go on."""
        self.end()
        self.resume()

    def _enter(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self._ranges.append(entered)


class _Several:
    """Calls several recorders in sequence."""

    def __init__(self, recorders: Sequence[ProgramRecorder]) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(recorder, name) for recorder in self._recorders]

        def call(*arguments: Any) -> None:
            for method in methods:
                method(*arguments)

        return call


def in_profiler_ranges(run: Generator[Any, None, Any], title: str, recorder: ProgramRecorder) -> Generator[Any, None, Any]:
    """Run a program in ranges of this title, each from one wait for another rank to the next."""
    while True:
        with record_function(title):
            try:
                pending = next(run)
            except StopIteration as end:
                return end.value
            except BaseException:
                recorder.end()  # ranges end in the reverse of their order
                raise
        yield pending


_RECORDERS: contextvars.ContextVar[dict[int, Recorder] | None] = contextvars.ContextVar("recorders", default=None)


def active_recorders(rank: int) -> tuple[ProgramRecorder | None, bool]:
    """Return the recorder of a rank's program, and whether a profiler is active; None outside of ``recording`` and of a profiler."""
    profiling, recorders = is_profiling(), _RECORDERS.get()
    recorder = None if recorders is None else recorders.setdefault(rank, Recorder(rank))
    if not profiling:
        return recorder, False
    return ProfilerRecorder() if recorder is None else _Several([recorder, ProfilerRecorder()]), True


@contextlib.contextmanager
def recording() -> Iterator[dict[int, Recorder]]:
    """Record programs that are started inside; yields rank of this process -> its recorder."""
    recorders: dict[int, Recorder] = {}
    token = _RECORDERS.set(recorders)
    try:
        yield recorders
    finally:
        _RECORDERS.reset(token)
        for recorder in recorders.values():
            recorder.finish()
