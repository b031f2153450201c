"""Load a model from a Python file: ``net.py:factory`` names a function that returns it with its inputs."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from passes.ir.errors import ConfigError, PartitionError, Place

__all__ = ["FactoryResult", "call_factory", "check_factory_result"]

_HOW = "name a file and a function in it: net.py:factory"
_MODULE = "factory_file"
"""The name of the file as a module: its own name may be that of another module."""


class FactoryResult(NamedTuple):
    """A model with its example inputs.

    Attributes:
        model: the module.
        args: positional inputs of one call; None: to be inferred from the model.
        kwargs: keyword inputs.
    """

    model: nn.Module
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]


def call_factory(text: str) -> FactoryResult:
    """Import a file and call the function that ``FILE.py:FACTORY`` names. Like a script, the file may import modules of its folder.

    Raises:
        ConfigError: there is no such file or function, it fails, or it does not return a model with its inputs.
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
    with _errors_of_file(f"{name}()", path):
        made = factory()
    return check_factory_result(name, made)


def _load(path: str) -> ModuleType:
    """Import a file as the module ``_MODULE``; its folder is added to ``sys.path``."""
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}", remedy=_HOW)
    specification = importlib.util.spec_from_file_location(_MODULE, path)
    if specification is None or specification.loader is None:
        raise ConfigError(f"{path} is no Python file", remedy=_HOW)
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    with _errors_of_file(path, path):
        specification.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _errors_of_file(what: str, path: str) -> Iterator[None]:
    """Wrap errors of the user's file, with the line of the file that raised it or called what raised it."""
    try:
        yield
    except PartitionError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends its process has not made a model
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(path).resolve()]
        line = frames[-1].lineno if frames else None
        if isinstance(error, SyntaxError):
            line = error.lineno
        raise ConfigError(
            f"{what} failed: {type(error).__name__}: {error}",
            place=None if line is None else Place(source=f"{path}:{line}"),
            remedy="--debug shows the whole traceback",
        ) from error


def check_factory_result(name: str, made: object) -> FactoryResult:
    """Check that the factory ``name`` returned ``(model, args)`` or ``(model, args, kwargs)``.

    Raises:
        ConfigError: it returned something else.
    """
    values = made if isinstance(made, tuple) else ()
    types = (nn.Module, tuple, Mapping)[: max(len(values), 2)]
    if len(values) == len(types) and all(map(isinstance, values, types)):
        return FactoryResult(values[0], values[1], values[2] if len(values) == 3 else {})
    returned = f"({', '.join(type(value).__name__ for value in values)})" if isinstance(made, tuple) else _kind(made)
    raise ConfigError(
        f"{name}() returned {returned}",
        remedy="return (model, args) or (model, args, kwargs): a module, a tuple and a dict, as in return model, (x,)",
    )


def _kind(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"
