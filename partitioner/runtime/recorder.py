"""When a running program did what: told by the program itself, under the names that the simulator gives its slices.

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
    """Takes down the slices of one rank.

    Attributes:
        computed: of computing, one for each piece of an action without a wait.
        communicated: from the start of each transfer to when it was waited for; what is sent ends where it starts.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.computed: list[Slice] = []
        self.communicated: list[Slice] = []
        self._section = ""
        self._since: float | None = None
        self._started: dict[str, float] = {}

    def begin(self, section: str) -> None:
        """An action, or what else the program calls it, begins."""
        self.end()
        self._section, self._since = section, time.time()

    def end(self) -> None:
        """The action ends."""
        if self._since is not None:
            self.computed.append(Slice(self.rank, self._section, self._section, self._since, time.time(), "compute"))
        self._since = None

    def start(self, name: str) -> None:
        """A transfer starts."""
        self._started[name] = time.time()

    def wait(self, name: str) -> None:
        """The rank waits for a transfer, and until then does nothing else."""
        self.end()
        self._started.setdefault(name, time.time())

    def arrived(self, name: str) -> None:
        """The transfer is over, the action goes on."""
        now = time.time()
        self.communicated.append(Slice(self.rank, name, "", self._started.pop(name), now, "transfer"))
        self._since = now

    def finish(self) -> None:
        """The program is over."""
        self.communicated += [Slice(self.rank, name, "", since, since, "transfer") for name, since in self._started.items()]
        self._started = {}


_RECORDERS: contextvars.ContextVar[dict[int, Recorder] | None] = contextvars.ContextVar("recorders", default=None)


def active_recorder(rank: int) -> Recorder | None:
    """Who takes down what a rank does; None: nobody."""
    recorders = _RECORDERS.get()
    return None if recorders is None else recorders.setdefault(rank, Recorder(rank))


@contextlib.contextmanager
def recording() -> Iterator[dict[int, Recorder]]:
    """Programs that are started inside are recorded: rank of this process -> its recorder."""
    recorders: dict[int, Recorder] = {}
    token = _RECORDERS.set(recorders)
    try:
        yield recorders
    finally:
        _RECORDERS.reset(token)
        for recorder in recorders.values():
            recorder.finish()
