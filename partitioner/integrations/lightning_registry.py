"""Register the strategy "partitioner" with Lightning when Lightning is imported, without importing it.

Lightning reads no entry points for strategies: a name must be in its registry before ``Trainer(strategy=...)``. A finder in front of
Python's own ones registers it at the end of the import of ``lightning.pytorch.strategies``, ``lightning.fabric.strategies``, and of the
same under their other names. ``import partitioner`` installs it, and so does ``import torch`` where the package is installed, since
torch loads the entry points of the group ``torch.backends``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["declare_strategies"]

_NAME = "partitioner"

_REGISTRIES = {
    "lightning.pytorch.strategies": ("trainer", "StrategyRegistry"),
    "pytorch_lightning.strategies": ("trainer", "StrategyRegistry"),
    "lightning.fabric.strategies": ("fabric", "STRATEGY_REGISTRY"),
    "lightning_fabric.strategies": ("fabric", "STRATEGY_REGISTRY"),
}
"""Module of Lightning -> which strategies it has, and the name of their registry."""


class _Finder:
    """Finds the modules that have a registry, and lets their import end with a registration."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that Python's finders give, for a module that has a registry; None for any other."""
        if name not in _REGISTRIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _registering(loader.exec_module)
        return spec


def declare_strategies() -> None:
    """Register with what is imported of Lightning, and with the rest when it is."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])


def _registering(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return a function that runs a module, then registers."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _register(module)

    return exec_module


def _register(module: ModuleType) -> None:
    """Register the strategies with the registry of a module of Lightning.

    Fabric's "ddp", its choice for several processes, becomes one that passes partitioned models through.
    """
    part, registry_name = _REGISTRIES[module.__name__]
    registry: Any = getattr(module, registry_name, None)
    if registry is None or _NAME in registry:
        return
    package = module.__name__.rpartition(".")[0]
    registry.register(_NAME, _maker(part, package), description="Partitions the model over devices")
    if part == "fabric":
        registry.register("ddp", _maker("ddp", package), description=registry["ddp"]["description"], override=True, start_method="popen")


def _maker(part: str, package: str) -> Callable[..., Any]:
    """Return a function that makes a strategy; it imports what it needs when it is called."""

    def make(**options: Any) -> Any:
        classes = importlib.import_module("partitioner.integrations.lightning.strategy_classes")
        return classes.strategy_class(part, package)(**options)

    return make
