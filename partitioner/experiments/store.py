"""Rows in an SQLite file, each written when it is known and under its own key: whatever ends the process, nothing is lost or doubled.

result (key TEXT PRIMARY KEY, model TEXT, devices INTEGER, ..., plan TEXT)
"""

from __future__ import annotations

import dataclasses
import sqlite3
import types
import typing
from collections.abc import Collection, Iterable
from pathlib import Path

from partitioner.experiments.row import Row
from passes.ir.errors import ConfigError

__all__ = ["Store"]

_FORMAT = 1
_APPLICATION = 0x70617274
"""What SQLite keeps in the file's head so that nobody takes another program's file for a store."""

_SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL"}
_COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_PATIENCE = 60.0
"""Seconds that a write waits for another process that writes."""


class Store:
    """The rows of sweeps.

    Args:
        path: the file; made if it is not there. ``":memory:"`` keeps nothing.
        create: False refuses a file that is not there.

    Raises:
        ConfigError: the file is no store, or cannot be opened.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = str(path)
        if not create and not Path(path).is_file():
            raise ConfigError(f"there is no store {path}", remedy="partitioner sweep SWEEP.toml --store FILE writes one")
        try:
            self._connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
            self._open()
        except sqlite3.Error as error:
            raise ConfigError(
                f"{path} cannot be opened as a store: {error}", remedy="name a file that a sweep wrote, or one that is not there"
            ) from error

    def _open(self) -> None:
        # One transaction: a store is whole or is not there, however many processes open it.
        self._connection.execute("BEGIN IMMEDIATE")
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != _APPLICATION:
            self._connection.close()
            raise ConfigError(f"{self.path} is the database of another program", remedy="name another file for the store")
        if tables and version != _FORMAT:
            self._connection.close()
            raise ConfigError(f"the store {self.path} is of format {version}, this version reads {_FORMAT}", remedy="name another file")
        if not tables:
            self._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._connection.execute(f"PRAGMA user_version = {_FORMAT}")
            self._connection.execute(f"CREATE TABLE result ({_declarations()})")
        self._connection.execute("COMMIT")

    def add(self, row: Row) -> bool:
        """Keep a row for good; False if its key has one already."""
        values = [getattr(row, name) for name in _COLUMNS]
        marks = ", ".join("?" * len(values))
        added = self._connection.execute(f"INSERT OR IGNORE INTO result VALUES ({marks})", values)  # noqa: S608  names of our own
        return added.rowcount == 1

    def replace(self, row: Row) -> None:
        """Put a row in the place of the one with its key."""
        values = [getattr(row, name) for name in _COLUMNS[1:]]
        changes = ", ".join(f"{name} = ?" for name in _COLUMNS[1:])
        self._connection.execute(f"UPDATE result SET {changes} WHERE key = ?", [*values, row.key])  # noqa: S608  names of our own

    def rows(self, keys: Collection[str] | None = None) -> list[Row]:
        """The rows with these keys, or all, in the order in which they were kept."""
        found = self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM result ORDER BY rowid")  # noqa: S608  names of our own
        rows = (Row(*values) for values in found)
        wanted = None if keys is None else set(keys)
        return [row for row in rows if wanted is None or row.key in wanted]

    def keys(self) -> set[str]:
        """The keys of all rows."""
        return {key for (key,) in self._connection.execute("SELECT key FROM result")}

    def remove(self, keys: Iterable[str]) -> None:
        """Forget rows."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("DELETE FROM result WHERE key = ?", [(key,) for key in keys])
        self._connection.execute("COMMIT")

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
