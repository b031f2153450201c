"""Read and write text files that a user names; errors are ConfigErrors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from passes.ir.errors import ConfigError


def read_text(path: str | Path, what: str, remedy: str) -> str:
    """Return the text of a file.

    Args:
        path: of the file.
        what: it is, for the error: ``"the plan file"``.
        remedy: where one comes from.

    Raises:
        ConfigError: there is no such file, or it is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, a path with a null byte
        raise ConfigError(f"{what} {path} cannot be read: {_reason(error, 'it is no text')}", remedy=remedy) from error


def read_toml(path: str | Path, what: str, remedy: str) -> dict[str, Any]:
    """Return the table of a TOML file; raise ConfigError as ``read_text`` does, and where the text is no TOML."""
    text = read_text(path, what, remedy)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is nested too deep, or has a number of too many digits"
        raise ConfigError(f"{what} {path} cannot be read: {reason}", remedy=remedy) from error


def write_text(path: str | Path, text: str, what: str) -> None:
    """Write a text file.

    Args:
        path: of the file.
        text: all that it holds.
        what: it is, for the error: ``"the report"``.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = f"{what} cannot be written to {path}: {_reason(error, 'it is no name of a file')}"
        raise ConfigError(problem, remedy="name a file in a folder that is there") from error


def _reason(error: Exception, otherwise: str) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else otherwise
