"""Answer several requests at once: while later ranks compute a token of one, this rank computes one of the next.

    rank 0   a0 b0 a1 b1 a2 b2          a, b: requests; 0, 1, 2: tokens
    rank 1      a0 b0 a1 b1 a2 b2

A request runs on a thread, since the loop that answers it is that of transformers, which cannot be left otherwise. One thread goes on at a
time: until its request waits, or is answered. Which is next depends on the requests alone, so it is the same on every rank.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch

__all__ = ["Meanwhile", "Request", "answers"]

T = TypeVar("T")

Meanwhile: TypeAlias = Callable[[], None]
"""Called by a request while it waits; returns when it is its turn again."""

Request: TypeAlias = Callable[[Meanwhile], T]
"""Answers a request."""


def answers(requests: Sequence[Request[T]], most: int) -> list[T]:
    """Return the answers of requests, in their order.

    Args:
        most: how many are in flight; with one, requests run one after another on this thread.

    Raises:
        BaseException: what a request raises; those that wait are left when their waits are over.
    """
    if most == 1:
        return [request(lambda: None) for request in requests]
    turns = [_Turns(request) for request in requests]
    waiting, in_flight = deque(turns), deque[_Turns[T]]()
    try:
        while waiting or in_flight:
            each = waiting.popleft() if waiting and len(in_flight) < most else in_flight.popleft()
            if not each.go_on():
                in_flight.append(each)
    except Exception:
        for each in in_flight:
            each.leave()
        raise
    return [each.answer for each in turns]


class _LeftError(BaseException):
    """Ends the thread of a request that is not wanted any more."""


class _Turns(Generic[T]):
    """A request, answered turn by turn."""

    def __init__(self, request: Request[T]) -> None:
        self._request = request
        self._its_turn, self._turn_over = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._is_left = False
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @property
    def answer(self) -> T:
        return self._answers[0]

    def go_on(self) -> bool:
        """Let the request go on until it waits, or is answered; return whether it is answered, or raise its error."""
        if self._thread is None:
            target = contextvars.copy_context().run
            self._thread = threading.Thread(target=target, args=(self._run,), name="partitioner request", daemon=True)
            self._thread.start()
        self._take_turn()
        if self._error is not None:
            raise self._error
        return bool(self._answers)

    def leave(self) -> None:
        """End the request where it waits: it still takes what it waits for."""
        self._is_left = True
        self._take_turn()

    def _take_turn(self) -> None:
        self._its_turn.release()
        self._turn_over.acquire()

    def _wait(self) -> None:
        self._turn_over.release()
        self._its_turn.acquire()
        if self._is_left:
            raise _LeftError

    def _run(self) -> None:
        self._its_turn.acquire()
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a thread has a current device of its own
        try:
            self._answers.append(self._request(self._wait))
        except BaseException as error:  # noqa: BLE001  raised where the requests are waited for
            self._error = error
        self._turn_over.release()
