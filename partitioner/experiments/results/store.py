"""The rows of sweeps in an SQLite file, each committed as soon as it is known, so that an interrupted sweep can be resumed.

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

from partitioner.experiments.results.row import NUMBERS, RATES, Row
from passes.ir.arguments.conform import conform
from passes.ir.errors import ConfigError

_FORMAT = 2
_APPLICATION = 0x70617274
"""SQLite's application id in the file header; files with another id are rejected."""

_SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL"}
_COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_REQUIRED = ("step_time", "bubble_fraction", "peak_memory", "communication")
"""Columns that every row with the status "ok" has."""
_TIMEOUT = 10.0
"""Seconds that a write waits for the lock of another process."""


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
        with self._config_errors("opened as a store", "name a file that a sweep wrote, or one that is not there"):
            self._connection = sqlite3.connect(self.path, timeout=_TIMEOUT, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._connection.close()  # an open transaction would lock the file
            raise

    @contextlib.contextmanager
    def _config_errors(self, done: str, remedy: str = "name another file for the store") -> Iterator[None]:
        """Turn errors of SQLite into a ConfigError."""
        try:
            yield
        except (sqlite3.Error, ValueError) as error:  # ValueError: invalid file names
            raise ConfigError(f"{self.path} cannot be {done}: {error}", remedy=remedy) from error

    def _open(self) -> None:
        """Create the table in a new file; reject a file of another program or version. One transaction, for concurrent processes."""
        with self._config_errors("opened as a store", "name a file that a sweep wrote, or one that is not there"):
            self._connection.execute("BEGIN IMMEDIATE")
            (application,) = self._connection.execute("PRAGMA application_id").fetchone()
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            has_tables = bool(self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall())
            columns = tuple(name for _, name, *_ in self._connection.execute("PRAGMA table_info(result)"))
            if not has_tables:
                self._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                self._connection.execute(f"PRAGMA user_version = {_FORMAT}")
                self._connection.execute(f"CREATE TABLE result ({_declarations()})")
            self._connection.execute("COMMIT")
        if has_tables and application != _APPLICATION:
            raise ConfigError(f"{self.path} is the database of another program", remedy="name another file for the store")
        if has_tables and (version != _FORMAT or columns != _COLUMNS):
            format_ = f"of format {version}, this version reads {_FORMAT}" if version != _FORMAT else "without the table of this version"
            raise ConfigError(f"the store {self.path} is {format_}", remedy="name another file")

    def add(self, row: Row) -> bool:
        """Insert and commit a row; return False if there is one with the same key already."""
        values = [getattr(row, name) for name in _COLUMNS]
        marks = ", ".join("?" * len(values))
        with self._config_errors("written"):
            added = self._connection.execute(f"INSERT OR IGNORE INTO result VALUES ({marks})", values)  # noqa: S608  names of our own
        return added.rowcount == 1

    def replace(self, row: Row) -> None:
        """Overwrite the row with the same key."""
        values = [getattr(row, name) for name in _COLUMNS[1:]]
        changes = ", ".join(f"{name} = ?" for name in _COLUMNS[1:])
        with self._config_errors("written"):
            self._connection.execute(f"UPDATE result SET {changes} WHERE key = ?", [*values, row.key])  # noqa: S608  names of our own

    def rows(self, keys: Collection[str] | None = None) -> list[Row]:
        """Return the rows with these keys, or all, in the order of insertion."""
        with self._config_errors("read"):
            found = self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM result ORDER BY rowid").fetchall()  # noqa: S608  names of our own
        wanted = None if keys is None else set(keys)
        return [self._row(values) for values in found if wanted is None or values[0] in wanted]

    def _row(self, values: Sequence[Any]) -> Row:
        """Return the values of a row of the file as a ``Row``; raise ConfigError if another program wrote invalid ones."""
        where = f"row {values[0]!r} of the store {self.path}"
        row: Row = conform(dict(zip(_COLUMNS, values, strict=True)), Row, where, plain=True)
        for name in (*NUMBERS, *RATES):
            number = getattr(row, name)
            missing = number is None and name in _REQUIRED and row.ok
            if missing or (number is not None and not 0 <= number < math.inf):
                raise ConfigError(f"{where}: there is no {name} {number}", remedy="name another file for the store")
        return row

    def remove(self, keys: Iterable[str]) -> None:
        """Delete the rows with these keys."""
        with self._config_errors("written"), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("DELETE FROM result WHERE key = ?", [(key,) for key in keys])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _declarations() -> str:
    """Return the SQL declarations of the columns, from the type hints of ``Row``."""
    hints = typing.get_type_hints(Row)
    return ", ".join(f"{name} {_sql_type(hints[name])}{' PRIMARY KEY' if name == 'key' else ''}" for name in _COLUMNS)


def _sql_type(hint: object) -> str:
    """Return ``"REAL"`` for ``float | None``, ``"REAL NOT NULL"`` for ``float``."""
    if isinstance(hint, types.UnionType):
        (kind,) = (option for option in typing.get_args(hint) if option is not type(None))
        return _SQL_TYPES[kind]
    assert isinstance(hint, type)
    return f"{_SQL_TYPES[hint]} NOT NULL"
