"""Make the classes of strategies: Lightning exists under two names, and a strategy must derive from the base of the one in use.

lightning.pytorch.strategies.ParallelStrategy        pytorch_lightning.strategies.ParallelStrategy
lightning.fabric.strategies.ParallelStrategy         lightning_fabric.strategies.ParallelStrategy
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Literal

from partitioner.integrations.lightning.fabric import FabricPartition, PassThrough
from partitioner.integrations.lightning.trainer import TrainerPartition
from passes.ir.errors import ConfigError

__all__ = ["strategy_class"]

Part = Literal["trainer", "fabric", "ddp"]

PACKAGES: dict[str, tuple[str, str]] = {
    "trainer": ("lightning.pytorch", "pytorch_lightning"),
    "fabric": ("lightning.fabric", "lightning_fabric"),
    "ddp": ("lightning.fabric", "lightning_fabric"),
}

_MADE: dict[Part, tuple[str, type, str]] = {
    "trainer": ("PartitionStrategy", TrainerPartition, "ParallelStrategy"),
    "fabric": ("FabricPartitionStrategy", FabricPartition, "ParallelStrategy"),
    "ddp": ("PassThroughStrategy", PassThrough, "DDPStrategy"),
}
"""Part of Lightning -> name of the strategy, the class that has its methods, and its base in Lightning."""


def strategy_class(part: Part, package: str | None = None) -> Any:
    """Return the class of a strategy.

    Args:
        package: of Lightning; None: the one that the script has imported, ``lightning`` if it has imported none or both.

    Raises:
        ConfigError: Lightning is not installed.
    """
    new, old = PACKAGES[part]
    if package is None:
        package = old if old in sys.modules and new not in sys.modules else new
    return _made(part, package)


@functools.cache
def _made(part: Part, package: str) -> Any:
    try:
        strategies: Any = importlib.import_module(f"{package}.strategies")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{package} is not installed", remedy='pip install "partitioner[lightning]"') from error
    name, methods, base = _MADE[part]
    attributes = {"__module__": "partitioner.integrations.lightning", "__doc__": methods.__doc__, "package": package}
    return type(name, (methods, getattr(strategies, base)), attributes)
