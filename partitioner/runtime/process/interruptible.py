"""Calls that block without a way to end them, waited for so that a failure elsewhere ends the waiting.

A store does not answer when the link to it is cut, and a process group that is being made waits for ranks that have died. Such calls run in
a thread of their own; when a failure becomes known, the thread is left to itself.
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

__all__ = ["Interruptible", "InterruptibleStore"]

T = TypeVar("T")

_LOOK = 0.25
"""Seconds between two looks at whether there is a failure."""

_GRACE = 1.0
"""Seconds that a call may go on once there is one."""


_Task: TypeAlias = tuple[Callable[[], Any], Future[Any]]
"""A call, and what comes of it."""


class Interruptible:
    """Runs calls one after another, on a thread.

    Args:
        rank: who this is.
        first: the first failure of any rank that is known here.
        await_first: likewise, waiting a moment for it.
    """

    def __init__(self, rank: int, first: Callable[[], Failure | None], await_first: Callable[[], Failure | None]) -> None:
        self._rank = rank
        self._first = first
        self._await_first = await_first
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def run(self, what: str, function: Callable[[], T], limit: float | None = None) -> T:
        """A function's value.

        Args:
            what: says what this rank could not do: ``"connect with ranks 0, 1"``.
            limit: seconds after which this rank waits no longer; None: the function has a limit of its own.

        Raises:
            CommunicationError: a rank has failed or left meanwhile, or the function raised RuntimeError, as stores and groups do.
        """
        result: Future[T] = Future()
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks,), name="partitioner wait", daemon=True).start()
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
        """Wait for a call to end, unless a rank fails meanwhile."""
        waited = 0.0
        while not wait([result], _LOOK).done:
            waited += _LOOK
            failure = self._first()
            late = limit is not None and waited > limit
            if (failure is not None or late) and not wait([result], _GRACE).done:
                why = failure.text if failure is not None else f"nothing happened for {waited:.0f} s"
                raise self._unable(what, why)

    def _unable(self, what: str, why: str) -> CommunicationError:
        return CommunicationError(f"rank {self._rank} could not {what}: {why}", remedy="look at what the other ranks report")


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        function, result = task
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            result.set_exception(error)
        del task, function, result  # what they hold must not live until the next one


class InterruptibleStore:
    """A store whose answers are waited for so.

    Args:
        store: what is asked.
        calls: run the questions.
        limit: seconds within which it must answer.
        holder: who has it: ``"rank 0"``.
    """

    def __init__(self, store: Store, calls: Interruptible, limit: float, holder: str) -> None:
        self._store = store
        self._what = f"reach the store of the processes, which {holder} holds"
        self._calls = calls
        self._limit = limit

    def set(self, key: str, value: str) -> None:
        """Write; a store whose earlier question has no answer yet takes nothing."""
        self._calls.run(self._what, lambda: self._store.set(key, value), self._limit)

    def get(self, key: str) -> bytes:
        """Read what is there."""
        return self._calls.run(self._what, lambda: self._store.get(key), self._limit)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._calls.run(self._what, lambda: self._store.check(keys), self._limit)
