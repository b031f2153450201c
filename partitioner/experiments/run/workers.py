"""Worker processes that evaluate placements: forked from a process that has traced the models, so that nothing is traced twice.

    sweep ── fork ──> worker 0      placement ──> row
          ── fork ──> worker 1      placement ──> row

A worker that dies, or takes too long, is one failed row and a new worker. Workers end with the process that forked them, however it ends.
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

__all__ = ["Evaluate", "InProcess", "WorkerProcesses", "can_fork"]

Evaluate = Callable[[Placement], Row]
"""Gives the row of a placement; raises nothing."""

_HEARTBEAT = 0.5
"""Seconds after which an idle worker looks whether the sweep is still there."""

_FAREWELL = 5.0
"""Seconds that a worker gets to end by itself."""


def can_fork() -> bool:
    """Whether this process may have forked workers: the system knows them, and no accelerator is in use, which would not survive it."""
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


class InProcess:
    """Evaluates in this process, one placement at a time; ``WorkerProcesses`` does the same for several.

    Args:
        evaluate: gives a row.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self._placement: Placement | None = None
        self._last: Placement | None = None

    @property
    def idle(self) -> Sequence[Placement | None]:
        """For each free worker, what it evaluated last."""
        return [] if self._placement is not None else [self._last]

    @property
    def busy(self) -> int:
        """How many placements are under way."""
        return int(self._placement is not None)

    def submit(self, placement: Placement, neighbour: Placement | None) -> None:
        """Give a placement to the free worker that evaluated the neighbour last."""
        self._placement = self._last = placement

    def answers(self) -> Iterator[tuple[Placement, Row]]:
        """Wait until something is known; give all that is."""
        if self._placement is not None:
            row = self._evaluate(self._placement)
            placement, self._placement = self._placement, None
            yield placement, row

    def close(self) -> None:
        """End all workers."""
        self._placement = None


@dataclass(eq=False)
class _Worker:
    """A process and what it is at.

    Attributes:
        process: it.
        channel: placements to it, rows from it.
        placement: what it evaluates; None when it is free.
        last: what it evaluated before.
        since: when it began, by the monotonic clock.
    """

    process: ForkProcess
    channel: Connection
    placement: Placement | None = None
    last: Placement | None = None
    since: float = 0.0


class WorkerProcesses:
    """Evaluates in forked processes.

    Args:
        evaluate: gives a row; it runs in the workers, which see everything that this process has made so far.
        key: of a placement, for the row of one whose worker died.
        n_workers: how many processes.
        timeout: seconds that one placement may take; None: as long as it likes.
    """

    def __init__(self, evaluate: Evaluate, key: Callable[[Placement], str], n_workers: int, timeout: float | None) -> None:
        self._evaluate = evaluate
        self._key = key
        self._timeout = timeout
        self._context: ForkContext = multiprocessing.get_context("fork")
        self._workers = [self._start() for _ in range(n_workers)]

    def _start(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._evaluate, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Python warns of any thread; those of this process hold no lock that a worker needs, which computes on one thread of its own.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
        there.close()
        return _Worker(process, here)

    @property
    def idle(self) -> Sequence[Placement | None]:
        return [worker.last for worker in self._workers if worker.placement is None]

    @property
    def busy(self) -> int:
        return sum(worker.placement is not None for worker in self._workers)

    def submit(self, placement: Placement, neighbour: Placement | None) -> None:
        worker = next(each for each in self._workers if each.placement is None and each.last == neighbour)
        worker.placement, worker.since = placement, time.monotonic()
        # One that is dead already is found by ``answers``.
        with suppress(OSError):
            worker.channel.send(placement)

    def answers(self) -> Iterator[tuple[Placement, Row]]:
        busy = [worker for worker in self._workers if worker.placement is not None]
        if not busy:
            return
        ready = wait([each for worker in busy for each in (worker.channel, worker.process.sentinel)], self._patience(busy))
        for worker in busy:
            placement = worker.placement
            assert placement is not None
            seconds = time.monotonic() - worker.since
            row: Row | None = None
            if worker.channel in ready or worker.process.sentinel in ready:
                row = _received(worker.channel)
                if row is None:
                    worker.process.join(_FAREWELL)
                    row = self._replaced(worker, _ending(worker.process.exitcode), seconds)
            elif self._timeout is not None and seconds >= self._timeout:
                row = self._replaced(worker, f"it was not planned within {self._timeout:g} s", seconds)
            if row is not None:
                worker.last, worker.placement = placement, None
                yield placement, row

    def _patience(self, busy: Sequence[_Worker]) -> float | None:
        """Seconds until the first of them has taken too long."""
        if self._timeout is None:
            return None
        return max(0.0, min(worker.since for worker in busy) + self._timeout - time.monotonic())

    def _replaced(self, worker: _Worker, reason: str, seconds: float) -> Row:
        """The row of what a worker did not finish; a new worker takes its place."""
        placement = worker.placement
        assert placement is not None
        _end(worker)
        fresh = self._start()
        worker.process, worker.channel = fresh.process, fresh.channel
        return failed_row(self._key(placement), placement, reason, seconds)

    def close(self) -> None:
        for worker in self._workers:
            _end(worker)


def _received(channel: Connection) -> Row | None:
    """A worker's answer; None if it ended without one."""
    try:
        answer = channel.recv() if channel.poll() else None
    except (EOFError, OSError):
        return None
    assert answer is None or isinstance(answer, Row)
    return answer


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"the process that planned it was killed by {name}" + (": the machine may be out of memory" if name == "SIGKILL" else "")
    return f"the process that planned it ended with code {code}"


def _end(worker: _Worker) -> None:
    worker.channel.close()
    worker.process.kill()
    worker.process.join(_FAREWELL)


def _serve(channel: Connection, evaluate: Evaluate, parent: int) -> None:
    """What a worker does: a row for each placement, as long as its parent is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # what the sweep has made stays; looking through it for garbage again and again takes a tenth of a worker's time
    while os.getppid() == parent:
        if not channel.poll(_HEARTBEAT):
            continue
        try:
            channel.send(evaluate(channel.recv()))
        except (EOFError, OSError):
            return
