"""A progress line on the terminal: the current step, or how much is done."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Line:
    """A line of the error stream that is overwritten.

    Args:
        title: at the beginning of the line.
        total: number of pieces of work.
        show: whether to write the line; None: only on a terminal.
    """

    def __init__(self, title: str, total: int, show: bool | None) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._show = sys.stderr.isatty() if show is None else show

    def _write(self, line: str) -> None:
        """Return to the start of the line, clear it and write another."""
        if self._show:
            sys.stderr.write(f"\r\x1b[2K{line}")
            sys.stderr.flush()


class Progress(_Line):
    """Shows the current step.

    partition  [#--]  2/3  planning
    """

    _name = ""

    @property
    def is_shown(self) -> bool:
        """Whether the line is written."""
        return self._show

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show a step inside; clear the line at the end."""
        self._name = name
        self.tell("")
        try:
            yield
        finally:
            self._done += 1
            self._write("")

    def reach(self, done: int, name: str) -> None:
        """Show a step after so many that are done; clear the line if there is no name."""
        self._done, self._name = done, name
        if name:
            self.tell("")
        else:
            self._write("")

    def tell(self, news: str) -> None:
        """Rewrite the line, with news of the current step after its name."""
        bar = "#" * self._done + "-" * (self._total - self._done)
        text = f"{self._title}  [{bar}]  {self._done + 1}/{self._total}  {self._name}{'  ' if news else ''}{news}"
        self._write(_fitting(text) if news else text)


class ProgressBar(_Line):
    """Shows how many pieces are done, how many failed and how long the rest may take.

    sweep  [########------------]   81/200  3 failed  0:52 left  gpt data=4,tensor=2 on 8 x h100:8x8
    """

    def __init__(self, title: str, total: int, show: bool | None) -> None:
        super().__init__(title, total, show)
        self._timed = self._failed = 0
        self._started = time.monotonic()

    def advance(self, name: str, *, failed: bool = False, known: bool = False) -> None:
        """Count one piece as done.

        Args:
            name: shown at the end of the line.
            failed: whether it failed.
            known: whether its result was stored before: it then does not count in the estimate of the time left.
        """
        self._done += 1
        self._timed += not known
        self._failed += failed
        parts = [self._bar()]
        parts += [f"{self._failed} failed"] if self._failed else []
        parts += [f"{_clock(self._seconds_left())} left"] if self._timed and self._done < self._total else []
        self._write(_fitting("  ".join([*parts, name])))

    def say(self, name: str) -> None:
        """Show the name of the piece that is being worked on."""
        self._write(_fitting(f"{self._bar()}  {name}"))

    def close(self) -> None:
        """Clear the line."""
        self._write("")

    def _bar(self) -> str:
        full = round(_BAR_WIDTH * self._done / max(self._total, 1))
        bar = "#" * full + "-" * (_BAR_WIDTH - full)
        return f"{self._title}  [{bar}]  {self._done:>{len(str(self._total))}}/{self._total}"

    def _seconds_left(self) -> float:
        return (time.monotonic() - self._started) / self._timed * (self._total - self._done)


_BAR_WIDTH = 20


def _clock(seconds: float) -> str:
    """Format a duration: ``"1:05"``, or ``"2:01:05"`` with hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _fitting(line: str) -> str:
    """Cut a line to the width of the terminal: only the last row of a wrapped line could be overwritten."""
    return line[: shutil.get_terminal_size().columns - 1]
