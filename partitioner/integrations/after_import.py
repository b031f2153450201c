"""Call a function at the end of the import of a module of another library, without importing it.

A finder in front of Python's own ones lets the import of the module end with the call.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

__all__ = ["after_import"]

_Function = Callable[[ModuleType], None]

_functions: dict[str, list[_Function]] = {}
"""Name of a module -> what to call with it."""


class _Finder:
    """Finds the modules for which there are functions."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that Python's finders give, for a module that is waited for; None for any other."""
        if name not in _functions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _calling(loader.exec_module)
        return spec


def after_import(names: Iterable[str], function: _Function) -> None:
    """Call a function with each of the modules: now if it is imported, else when it is; once, however often this is asked."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in names:
        functions = _functions.setdefault(name, [])
        if function not in functions:
            functions.append(function)
            if name in sys.modules:
                function(sys.modules[name])


def _calling(execute: _Function) -> _Function:
    """Return a function that runs a module, then calls what waits for it."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for function in _functions[module.__name__]:
            function(module)

    return exec_module
