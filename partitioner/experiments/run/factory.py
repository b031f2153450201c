"""A model from a file: ``net.py:factory`` names a function that makes it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from passes.ir.errors import ConfigError, PartitionError, Place

__all__ = ["Made", "call_factory", "checked"]

_HOW = "name a file and a function in it: net.py:factory"
_MODULE = "factory_file"
"""What the file is called as a module: its own name may be that of a module that somebody imports."""


class Made(NamedTuple):
    """What a factory returns.

    Attributes:
        model: the module.
        args: positional inputs of one call; None where they are to be found in the model.
        kwargs: keyword inputs.
    """

    model: nn.Module
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]


def call_factory(text: str) -> Made:
    """Call what ``FILE.py:FACTORY`` names. The file may import what lies beside it, as a script may.

    Raises:
        ConfigError: there is no such file or function, it fails, or it returns something else than a model with its inputs.
    """
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{text!r} names no factory", remedy=_HOW)
    module = _load(path)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == _MODULE]
        raise ConfigError(f"{path} has no {name!r}", remedy=f"its functions are {', '.join(functions)}" if functions else _HOW)
    factory = getattr(module, name)
    if not callable(factory):
        raise ConfigError(f"{name!r} in {path} is no function, but {_kind(factory)}", remedy=_HOW)
    try:
        made = factory()
    except PartitionError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends its process has not made a model
        raise _failed(f"{name}()", path, error) from error
    return checked(name, made)


def _load(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}", remedy=_HOW)
    specification = importlib.util.spec_from_file_location(_MODULE, path)
    if specification is None or specification.loader is None:
        raise ConfigError(f"{path} is no Python file", remedy=_HOW)
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        specification.loader.exec_module(module)
    except PartitionError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends its process has not made a model
        raise _failed(path, path, error) from error
    return module


def _failed(what: str, path: str, error: BaseException) -> ConfigError:
    """The error of the user's own code, with the last of its lines that was running."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(path).resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return ConfigError(
        f"{what} failed: {type(error).__name__}: {error}",
        place=None if line is None else Place(source=f"{path}:{line}"),
        remedy="--debug shows the whole traceback",
    )


def checked(name: str, made: object) -> Made:
    """What a factory returned, if it is what one has to return.

    Raises:
        ConfigError: it is no ``(model, args)`` and no ``(model, args, kwargs)``.
    """
    values = made if isinstance(made, tuple) else ()
    kinds = (nn.Module, tuple, Mapping)[: max(len(values), 2)]
    if len(values) == len(kinds) and all(map(isinstance, values, kinds)):
        return Made(values[0], values[1], values[2] if len(values) == 3 else {})
    returned = f"({', '.join(type(value).__name__ for value in values)})" if isinstance(made, tuple) else _kind(made)
    raise ConfigError(
        f"{name}() returned {returned}",
        remedy="return (model, args) or (model, args, kwargs): a module, a tuple and a dict, as in return model, (x,)",
    )


def _kind(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"
