"""Worker processes that evaluate placements: forked from a process that has traced the models, so that nothing is traced twice.

    sweep ── fork ──> worker 0      placement ──> row
          ── fork ──> worker 1      placement ──> row

If a worker dies or exceeds the timeout, its placement fails and a new worker replaces it. Workers end when their parent process ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess

import torch

from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import Row, failed_row

Evaluate = Callable[[Placement], Row]
"""Returns the row of a placement; raises nothing."""

_HEARTBEAT = 0.5
"""Seconds after which an idle worker checks whether its parent still runs."""

_JOIN_TIMEOUT = 5.0
"""Seconds to wait for the end of a worker."""


def can_fork() -> bool:
    """Return whether this process may fork workers: the system supports it, and CUDA, which does not survive a fork, is not in use."""
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


class InProcess:
    """Evaluates placements in this process, one at a time, with the interface of ``WorkerProcesses``."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self._placement: Placement | None = None
        self._last: Placement | None = None

    @property
    def idle(self) -> Sequence[Placement | None]:
        """For each free worker, the last placement that it evaluated; None for none."""
        return [] if self._placement is not None else [self._last]

    @property
    def busy(self) -> int:
        """The number of placements that are submitted and not answered."""
        return int(self._placement is not None)

    def submit(self, placement: Placement, neighbour: Placement | None) -> None:
        """Give a placement to the free worker whose last placement was ``neighbour``, an element of ``idle``."""
        self._placement = self._last = placement

    def answers(self) -> Iterator[tuple[Placement, Row]]:
        """Wait for an answer; yield all placements that are answered, with their rows."""
        if self._placement is not None:
            row = self._evaluate(self._placement)
            placement, self._placement = self._placement, None
            yield placement, row

    def close(self) -> None:
        """End all workers."""
        self._placement = None


@dataclass(eq=False)
class _Worker:
    """A worker process and its current placement.

    Attributes:
        channel: sends it placements and receives its rows.
        placement: the placement that it evaluates; None if it is free.
        last: the placement that it evaluated before.
        since: start of the current evaluation, by the monotonic clock.
    """

    process: ForkProcess
    channel: Connection
    placement: Placement | None = None
    last: Placement | None = None
    since: float = 0.0


class WorkerProcesses:
    """Evaluates placements in forked processes.

    Args:
        evaluate: runs in the workers, which share the memory of this process at the time of the fork.
        key: returns the key of a placement, for the row of a placement whose worker died.
        n_workers: the number of processes.
        timeout: seconds that one placement may take; None: no limit.
    """

    def __init__(self, evaluate: Evaluate, key: Callable[[Placement], str], n_workers: int, timeout: float | None) -> None:
        self._evaluate = evaluate
        self._key = key
        self._timeout = timeout
        self._context: ForkContext = multiprocessing.get_context("fork")
        self._workers = [self._start() for _ in range(n_workers)]

    def _start(self) -> _Worker:
        """Fork a worker and connect it by a pipe."""
        channel, channel_of_worker = self._context.Pipe()
        process = self._context.Process(target=_run_worker, args=(channel_of_worker, self._evaluate, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Python warns if a process with threads forks. The threads of this process hold no locks that a worker needs.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
        channel_of_worker.close()
        return _Worker(process, channel)

    @property
    def idle(self) -> Sequence[Placement | None]:
        return [worker.last for worker in self._workers if worker.placement is None]

    @property
    def busy(self) -> int:
        return sum(worker.placement is not None for worker in self._workers)

    def submit(self, placement: Placement, neighbour: Placement | None) -> None:
        worker = next(worker for worker in self._workers if worker.placement is None and worker.last == neighbour)
        worker.placement, worker.since = placement, time.monotonic()
        with suppress(OSError):  # ``answers`` handles a worker that is dead
            worker.channel.send(placement)

    def answers(self) -> Iterator[tuple[Placement, Row]]:
        busy = [worker for worker in self._workers if worker.placement is not None]
        if not busy:
            return
        ready = wait([handle for worker in busy for handle in (worker.channel, worker.process.sentinel)], self._time_left(busy))
        for worker in busy:
            placement = worker.placement
            assert placement is not None
            seconds = time.monotonic() - worker.since
            row: Row | None = None
            if worker.channel in ready or worker.process.sentinel in ready:
                row = _receive_row(worker.channel)
                if row is None:
                    worker.process.join(_JOIN_TIMEOUT)
                    row = self._fail_and_restart(worker, placement, _exit_reason(worker.process.exitcode), seconds)
            elif self._timeout is not None and seconds >= self._timeout:
                row = self._fail_and_restart(worker, placement, f"it was not planned within {self._timeout:g} s", seconds)
            if row is not None:
                worker.last, worker.placement = placement, None
                yield placement, row

    def _time_left(self, busy: Sequence[_Worker]) -> float | None:
        """Return the seconds until the first of these workers exceeds the timeout; None if there is no timeout."""
        if self._timeout is None:
            return None
        return max(0.0, min(worker.since for worker in busy) + self._timeout - time.monotonic())

    def _fail_and_restart(self, worker: _Worker, placement: Placement, reason: str, seconds: float) -> Row:
        """Replace the process of a worker by a new one; return a failed row for the placement."""
        _kill(worker)
        fresh = self._start()
        worker.process, worker.channel = fresh.process, fresh.channel
        return failed_row(self._key(placement), placement, reason, seconds)

    def close(self) -> None:
        for worker in self._workers:
            _kill(worker)


def _receive_row(channel: Connection) -> Row | None:
    """Return the row that a worker sent; None if it ended without sending one."""
    try:
        answer = channel.recv() if channel.poll() else None
    except (EOFError, OSError):
        return None
    assert answer is None or isinstance(answer, Row)
    return answer


def _exit_reason(code: int | None) -> str:
    """Return why a worker ended, from its exit code; the negative of a signal's number if it was killed."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"the process that planned it was killed by {name}" + (": the machine may be out of memory" if name == "SIGKILL" else "")
    return f"the process that planned it ended with code {code}"


def _kill(worker: _Worker) -> None:
    worker.channel.close()
    worker.process.kill()
    worker.process.join(_JOIN_TIMEOUT)


def _run_worker(channel: Connection, evaluate: Evaluate, parent: int) -> None:
    """Run in a worker: receive placements and send their rows, silently and on one thread, until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # collections skip the objects of the sweep, which would take a tenth of a worker's time
    while os.getppid() == parent:
        if not channel.poll(_HEARTBEAT):
            continue
        try:
            channel.send(evaluate(channel.recv()))
        except (EOFError, OSError):
            return
