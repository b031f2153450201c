"""Run blocking calls so that a failure of another rank ends the waiting for them.

A store does not answer when the link to it is cut, and the creation of a process group waits for ranks that have died. Such calls cannot be
cancelled, so they run in a thread, which is abandoned when a failure becomes known.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias, TypeVar

from partitioner.runtime.process.failure import Failure, Store
from passes.ir.errors import CommunicationError

T = TypeVar("T")

_POLL_INTERVAL = 0.25
"""Seconds between two checks for a failure."""

_GRACE = 1.0
"""Seconds that a call may go on after a failure."""


_Task: TypeAlias = tuple[Callable[[], Any], Future[Any]]
"""A function to call, and the future of its result."""


class Interruptible:
    """Runs calls one after another, on a thread.

    Args:
        rank: of this process.
        first: returns the first failure of any rank that is known here.
        await_first: likewise, after a short wait for one.
    """

    def __init__(self, rank: int, first: Callable[[], Failure | None], await_first: Callable[[], Failure | None]) -> None:
        self._rank = rank
        self._first = first
        self._await_first = await_first
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def run(self, what: str, function: Callable[[], T], limit: float | None = None) -> T:
        """Call a function on the thread and return its result.

        Args:
            what: completes "rank 0 could not ..." in errors: ``"connect with ranks 0, 1"``.
            limit: seconds after which this rank stops waiting; None: the function has a limit of its own.

        Raises:
            CommunicationError: a rank has failed or left meanwhile, or the function raised RuntimeError, as stores and groups do.
        """
        result: Future[T] = Future()
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_run_tasks, args=(self._tasks,), name="partitioner wait", daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put((function, result))
        try:
            self._wait(result, what, limit)
        except BaseException:
            self._tasks.put(None)  # the thread ends when the call does, if ever
            self._tasks = None
            raise
        try:
            return result.result()
        except RuntimeError as error:
            failure = self._await_first()
            raise self._unable(what, failure.text if failure is not None else str(error).partition("\n")[0]) from error

    def _wait(self, result: Future[T], what: str, limit: float | None) -> None:
        """Wait for a call to end; raise CommunicationError if a rank fails meanwhile, or the limit is over."""
        waited = 0.0
        while not wait([result], _POLL_INTERVAL).done:
            waited += _POLL_INTERVAL
            failure = self._first()
            is_late = limit is not None and waited > limit
            if (failure is not None or is_late) and not wait([result], _GRACE).done:
                why = failure.text if failure is not None else f"nothing happened for {waited:.0f} s"
                raise self._unable(what, why)

    def _unable(self, what: str, why: str) -> CommunicationError:
        return CommunicationError(f"rank {self._rank} could not {what}: {why}", remedy="look at what the other ranks report")


def _run_tasks(tasks: queue.SimpleQueue[_Task | None]) -> None:
    """Run calls one after another, until a None."""
    while (task := tasks.get()) is not None:
        function, result = task
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            result.set_exception(error)
        del task, function, result  # release their objects before waiting for the next task


class InterruptibleStore:
    """A store whose requests are interruptible.

    Args:
        calls: runs the requests.
        limit: seconds within which the store must answer.
        holder: of the store, for errors: ``"rank 0"``.
    """

    def __init__(self, store: Store, calls: Interruptible, limit: float, holder: str) -> None:
        self._store = store
        self._what = f"reach the store of the processes, which {holder} holds"
        self._calls = calls
        self._limit = limit

    def set(self, key: str, value: str) -> None:
        self._calls.run(self._what, lambda: self._store.set(key, value), self._limit)

    def get(self, key: str) -> bytes:
        return self._calls.run(self._what, lambda: self._store.get(key), self._limit)

    def check(self, keys: list[str]) -> bool:
        return self._calls.run(self._what, lambda: self._store.check(keys), self._limit)


class ThreadStore:
    """A store for a daemon thread, whose requests can be ended.

    A daemon thread that comes back from a request while Python shuts down is ended inside of torch's C++ code, which aborts the process:
    "terminate called without an active exception".
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._requests = threading.Lock()

    def end(self) -> None:
        """Wait for the present request, and let the thread wait before the next one for ever; at the exit of the process."""
        self._requests.acquire(timeout=_GRACE)

    def set(self, key: str, value: str) -> None:
        with self._requests:
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with self._requests:
            return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._requests:
            return self._store.check(keys)
