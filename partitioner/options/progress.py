"""A line on the terminal that says which step of a long work is under way, or how much of it is done."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Progress", "ProgressBar"]


class _Line:
    """One line of the error stream.

    Args:
        title: in front of the line.
        total: how many pieces the work has.
        show: False shows nothing; None shows it on a terminal alone.
    """

    def __init__(self, title: str, total: int, show: bool | None) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._show = sys.stderr.isatty() if show is None else show

    def _write(self, line: str) -> None:
        if self._show:
            sys.stderr.write(f"\r\x1b[2K{line}")
            sys.stderr.flush()


class Progress(_Line):
    """Shows the step under way.

    partition  [#--]  2/3  planning
    """

    _name = ""

    @property
    def is_shown(self) -> bool:
        """Whether anybody can see it."""
        return self._show

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One step; the line goes when the last one ends."""
        self._name = name
        self.tell("")
        try:
            yield
        finally:
            self._done += 1
            self._write("")

    def tell(self, news: str) -> None:
        """Say how far the step is, in place of what was said before."""
        bar = "#" * self._done + "-" * (self._total - self._done)
        text = f"{self._title}  [{bar}]  {self._done + 1}/{self._total}  {self._name}{'  ' if news else ''}{news}"
        self._write(_fitting(text) if news else text)


class ProgressBar(_Line):
    """Shows how much of a long work is done, how much of it failed and how long the rest may take.

    sweep  [########------------]   81/200  3 failed  0:52 left  gpt data=4,tensor=2 on 8 x h100:8x8
    """

    def __init__(self, title: str, total: int, show: bool | None) -> None:
        super().__init__(title, total, show)
        self._counted = self._failed = 0
        self._started = time.monotonic()

    def advance(self, name: str, *, failed: bool = False, known: bool = False) -> None:
        """One piece is done.

        Args:
            name: what is said of it.
            failed: whether it came to nothing.
            known: whether it was done before: it then tells nothing of how long the others take.
        """
        self._done += 1
        self._counted += not known
        self._failed += failed
        parts = [self._bar()]
        parts += [f"{self._failed} failed"] if self._failed else []
        parts += [f"{_clock(self._left())} left"] if self._counted and self._done < self._total else []
        self._write(_fitting("  ".join([*parts, name])))

    def say(self, name: str) -> None:
        """What is under way, while nothing more is done."""
        self._write(_fitting(f"{self._bar()}  {name}"))

    def close(self) -> None:
        """The line goes."""
        self._write("")

    def _bar(self) -> str:
        full = round(_BAR_WIDTH * self._done / max(self._total, 1))
        bar = "#" * full + "-" * (_BAR_WIDTH - full)
        return f"{self._title}  [{bar}]  {self._done:>{len(str(self._total))}}/{self._total}"

    def _left(self) -> float:
        return (time.monotonic() - self._started) / self._counted * (self._total - self._done)


_BAR_WIDTH = 20


def _clock(seconds: float) -> str:
    """Minutes and seconds, ``1:05``; hours in front where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _fitting(line: str) -> str:
    """As much of a line as a terminal shows in one: a longer one would not go with the next."""
    return line[: shutil.get_terminal_size().columns - 1]
