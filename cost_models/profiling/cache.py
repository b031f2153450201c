"""Measured times in SQLite, so that each distinct operation is timed once on a machine."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from passes.ir.arguments.conform import conform
from passes.ir.errors import ConfigError
from passes.rules.call import Call

_TABLE = """
CREATE TABLE IF NOT EXISTS operation_times (
    machine TEXT NOT NULL, call TEXT NOT NULL, seconds REAL, measured_at REAL NOT NULL, PRIMARY KEY (machine, call)
)
"""


class MeasurementStore:
    """A file of times; ``":memory:"`` keeps them for this process alone.

    Args:
        path: the file; made where there is none.
        machine: whose times these are: device, number of threads, version of torch.

    Raises:
        ConfigError: the file is no store of times, or cannot be opened.
    """

    def __init__(self, path: str | Path, machine: str) -> None:
        self._path, self._machine = path, machine
        try:
            self._connection = sqlite3.connect(path, timeout=30)
            self._connection.execute(_TABLE)
            found = self._connection.execute("SELECT call, seconds FROM operation_times WHERE machine = ?", (machine,)).fetchall()
        except (sqlite3.Error, ValueError) as error:  # ValueError: a path with a null byte
            problem = f"{path} cannot be opened as a store of measured times: {error}"
            raise ConfigError(problem, remedy="name a file that MeasuredCosts wrote, or one that is not there") from error
        self._known: dict[str, float | None] = {
            call: conform(seconds, float | None, f"{path}: the time of {call}") for call, seconds in found
        }

    def __contains__(self, call: Call) -> bool:
        return key_of(call) in self._known

    def __getitem__(self, call: Call) -> float | None:
        """Return seconds; None for a call that could not be timed. Raise KeyError for a call that was not tried."""
        return self._known[key_of(call)]

    def __setitem__(self, call: Call, seconds: float | None) -> None:
        key = key_of(call)
        self._known[key] = seconds
        try:
            with self._connection:
                row = (self._machine, key, seconds, time.time())
                self._connection.execute("INSERT OR REPLACE INTO operation_times VALUES (?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise ConfigError(
                f"a measured time cannot be written to {self._path}: {error}", remedy="name a file on a disk with room, of your own"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def key_of(call: Call) -> str:
    """Format a call as text: ``aten.mm.default(self=float32[64, 128], mat2=float32[128, 32])``."""
    return f"{call.operator}({', '.join(f'{name}={_text(value)}' for name, value in call.values)})"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and isinstance(dtype, torch.dtype):
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return repr(value)
