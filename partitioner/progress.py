"""A line on the terminal that says which step of a long work is under way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Progress"]


class Progress:
    """Shows the step under way on one line of the error stream.

        partition  [#--]  2/3  planning

    Args:
        title: in front of the line.
        total: how many steps there are.
        show: False shows nothing; None shows it on a terminal alone.
    """

    def __init__(self, title: str, total: int, show: bool | None) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._show = sys.stderr.isatty() if show is None else show

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One step; the line goes when the last one ends."""
        self._write(f"{self._title}  [{'#' * self._done}{'-' * (self._total - self._done)}]  {self._done + 1}/{self._total}  {name}")
        try:
            yield
        finally:
            self._done += 1
            self._write("")

    def _write(self, line: str) -> None:
        if self._show:
            sys.stderr.write(f"\r\x1b[2K{line}")
            sys.stderr.flush()
