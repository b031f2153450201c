"""Record when a running program computes and communicates, under the names that the simulator gives its slices.

    recorder.begin("0F1")                       an action begins, the one before it ends
    recorder.start("send_h_mb1_to_rank1")
    recorder.wait("receive_h_mb2")              the action pauses: a rank that waits computes nothing
    recorder.arrived("receive_h_mb2")           and goes on

Times are those of the host. On a CPU that is when things are computed; a GPU computes behind its host.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

from cost_models.simulator.events import Slice

__all__ = ["Recorder", "active_recorder", "recording"]


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
        self._started: dict[str, float] = {}

    def begin(self, section: str) -> None:
        """Begin an action, which ends the one before."""
        self.end()
        self._section, self._section_start = section, time.time()

    def end(self) -> None:
        """End the action."""
        if self._section_start is not None:
            self.computed.append(Slice(self.rank, self._section, self._section, self._section_start, time.time(), "compute"))
        self._section_start = None

    def start(self, name: str) -> None:
        """Note the start of a transfer."""
        self._started[name] = time.time()

    def wait(self, name: str) -> None:
        """Note that the rank waits for a transfer: the action pauses."""
        self.end()
        self._started.setdefault(name, time.time())

    def arrived(self, name: str) -> None:
        """Note the end of the wait: the action goes on."""
        now = time.time()
        self.communicated.append(Slice(self.rank, name, "", self._started.pop(name), now, "transfer"))
        self._section_start = now

    def finish(self) -> None:
        """Note the end of the program: transfers that were never waited for get slices without duration."""
        self.communicated += [Slice(self.rank, name, "", start, start, "transfer") for name, start in self._started.items()]
        self._started = {}


_RECORDERS: contextvars.ContextVar[dict[int, Recorder] | None] = contextvars.ContextVar("recorders", default=None)


def active_recorder(rank: int) -> Recorder | None:
    """Return the recorder of a rank; None outside ``recording``."""
    recorders = _RECORDERS.get()
    return None if recorders is None else recorders.setdefault(rank, Recorder(rank))


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
