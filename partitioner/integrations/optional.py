"""Import the part of an integration that needs its framework, when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

from passes.ir.errors import ConfigError

__all__ = ["import_optional"]


def import_optional(module: str) -> Any:
    """Import a module; raise ConfigError, with the extra to install, if it or what it imports is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        extra = "lightning" if "lightning" in library else library
        raise ConfigError(f"{library} is not installed", remedy=f'pip install "torch-partitioner[{extra}]"') from error
