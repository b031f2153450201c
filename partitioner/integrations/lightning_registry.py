"""Register the strategy "partitioner" with Lightning when Lightning is imported, without importing it.

Lightning reads no entry points for strategies: a name must be in its registry before ``Trainer(strategy=...)``. It is registered at the
end of the import of ``lightning.pytorch.strategies``, ``lightning.fabric.strategies``, and of the same under their other names.
``import partitioner`` sees to it, and so does ``import torch`` where the package is installed, since torch loads the entry points of
the group ``torch.backends``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from partitioner.integrations.after_import import after_import

__all__ = ["declare_strategies"]

_NAME = "partitioner"

_REGISTRIES = {
    "lightning.pytorch.strategies": ("trainer", "StrategyRegistry"),
    "pytorch_lightning.strategies": ("trainer", "StrategyRegistry"),
    "lightning.fabric.strategies": ("fabric", "STRATEGY_REGISTRY"),
    "lightning_fabric.strategies": ("fabric", "STRATEGY_REGISTRY"),
}
"""Module of Lightning -> which strategies it has, and the name of their registry."""


def declare_strategies() -> None:
    """Register with what is imported of Lightning, and with the rest when it is."""
    after_import(_REGISTRIES, _register)


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
