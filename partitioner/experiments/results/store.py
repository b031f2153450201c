"""Rows in an SQLite file, each committed under a unique key as soon as it is known, so that an interrupted sweep loses and repeats none.

result (key TEXT PRIMARY KEY, model TEXT, devices INTEGER, ..., plan TEXT)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sqlite3
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from partitioner.experiments.results.row import NUMBERS, Row
from passes.ir.checked_arguments import conform
from passes.ir.errors import ConfigError

__all__ = ["Store"]

_FORMAT = 1
_APPLICATION = 0x70617274
"""SQLite's application id in the file header, by which databases of other programs are refused."""

_SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL"}
_COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_OF_PLANS = ("step_time", "bubble_fraction", "peak_memory", "communication")
"""Columns that are set in the row of every planned placement."""
_PATIENCE = 10.0
"""Seconds that a write waits for another process that writes."""


class Store:
    """The rows of sweeps.

    Args:
        path: the file, created if missing. ``":memory:"`` writes no file.
        create: False refuses a missing file.

    Raises:
        ConfigError: the file is no store, or cannot be opened.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = str(path)
        if not create and not os.path.isfile(self.path):  # noqa: PTH113  Path.is_file() raises for invalid names
            raise ConfigError(f"there is no store {self.path}", remedy="partitioner sweep SWEEP.toml --store FILE writes one")
        with self._told("opened as a store", "name a file that a sweep wrote, or one that is not there"):
            self._connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._connection.close()  # an open transaction would lock the file
            raise

    @contextlib.contextmanager
    def _told(self, done: str, remedy: str = "name another file for the store") -> Iterator[None]:
        """Turn errors of SQLite into a ConfigError."""
        try:
            yield
        except (sqlite3.Error, ValueError) as error:  # ValueError: invalid file names
            raise ConfigError(f"{self.path} cannot be {done}: {error}", remedy=remedy) from error

    def _open(self) -> None:
        # One transaction, so that several processes may create the store at once.
        with self._told("opened as a store", "name a file that a sweep wrote, or one that is not there"):
            self._connection.execute("BEGIN IMMEDIATE")
            (application,) = self._connection.execute("PRAGMA application_id").fetchone()
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            found = [name for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            columns = tuple(name for _, name, *_ in self._connection.execute("PRAGMA table_info(result)"))
            if not found:
                self._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                self._connection.execute(f"PRAGMA user_version = {_FORMAT}")
                self._connection.execute(f"CREATE TABLE result ({_declarations()})")
            self._connection.execute("COMMIT")
        if found and application != _APPLICATION:
            raise ConfigError(f"{self.path} is the database of another program", remedy="name another file for the store")
        if found and (version != _FORMAT or columns != _COLUMNS):
            format_ = f"of format {version}, this version reads {_FORMAT}" if version != _FORMAT else "without the table of this version"
            raise ConfigError(f"the store {self.path} is {format_}", remedy="name another file")

    def add(self, row: Row) -> bool:
        """Insert and commit a row; False if its key has one already."""
        values = [getattr(row, name) for name in _COLUMNS]
        marks = ", ".join("?" * len(values))
        with self._told("written"):
            added = self._connection.execute(f"INSERT OR IGNORE INTO result VALUES ({marks})", values)  # noqa: S608  names of our own
        return added.rowcount == 1

    def replace(self, row: Row) -> None:
        """Overwrite the row with the same key."""
        values = [getattr(row, name) for name in _COLUMNS[1:]]
        changes = ", ".join(f"{name} = ?" for name in _COLUMNS[1:])
        with self._told("written"):
            self._connection.execute(f"UPDATE result SET {changes} WHERE key = ?", [*values, row.key])  # noqa: S608  names of our own

    def rows(self, keys: Collection[str] | None = None) -> list[Row]:
        """Return the rows with these keys, or all, in the order of insertion."""
        with self._told("read"):
            found = self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM result ORDER BY rowid").fetchall()  # noqa: S608  names of our own
        wanted = None if keys is None else set(keys)
        return [self._row(values) for values in found if wanted is None or values[0] in wanted]

    def _row(self, values: Sequence[Any]) -> Row:
        """A row, whose columns hold what another program may have written."""
        where = f"row {values[0]!r} of the store {self.path}"
        row: Row = conform(dict(zip(_COLUMNS, values, strict=True)), Row, where, plain=True)
        for name in NUMBERS:
            number = getattr(row, name)
            missing = number is None and name in _OF_PLANS and row.ok
            if missing or (number is not None and not 0 <= number < math.inf):
                raise ConfigError(f"{where}: there is no {name} {number}", remedy="name another file for the store")
        return row

    def remove(self, keys: Iterable[str]) -> None:
        """Forget rows."""
        with self._told("written"), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("DELETE FROM result WHERE key = ?", [(key,) for key in keys])

    def close(self) -> None:
        """Give the file back."""
        self._connection.close()


def _declarations() -> str:
    hints = typing.get_type_hints(Row)
    return ", ".join(f"{name} {_declared(hints[name])}{' PRIMARY KEY' if name == 'key' else ''}" for name in _COLUMNS)


def _declared(hint: object) -> str:
    if isinstance(hint, types.UnionType):
        (kind,) = (each for each in typing.get_args(hint) if each is not type(None))
        return _SQL_TYPES[kind]
    assert isinstance(hint, type)
    return f"{_SQL_TYPES[hint]} NOT NULL"
