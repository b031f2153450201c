"""Make the classes of strategies: Lightning exists under two names, and a strategy must derive from the base of the one in use.

lightning.pytorch.strategies.ParallelStrategy        pytorch_lightning.strategies.ParallelStrategy
lightning.fabric.strategies.ParallelStrategy         lightning_fabric.strategies.ParallelStrategy
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from partitioner.integrations.interface import import_optional
from partitioner.integrations.lightning.fabric import FabricDDP, FabricPartition
from partitioner.integrations.lightning.trainer import TrainerPartition

_TRAINER = ("lightning.pytorch", "pytorch_lightning")
_FABRIC = ("lightning.fabric", "lightning_fabric")

_MADE: dict[str, tuple[type, tuple[str, str], str]] = {
    "PartitionStrategy": (TrainerPartition, _TRAINER, "ParallelStrategy"),
    "FabricPartitionStrategy": (FabricPartition, _FABRIC, "ParallelStrategy"),
    "FabricDDPStrategy": (FabricDDP, _FABRIC, "DDPStrategy"),
}
"""Name of a strategy -> the class that has its methods, the packages of Lightning that have a base for it, and that base."""


def strategy_class(name: str) -> Any:
    """Return the class of a strategy, for the package that the script has imported: ``lightning`` if it has imported none or both.

    Raises:
        ConfigError: Lightning is not installed.
    """
    new, old = _MADE[name][1]
    return _made(name, old if old in sys.modules and new not in sys.modules else new)


@functools.cache
def _made(name: str, package: str) -> Any:
    methods, _, base = _MADE[name]
    strategies = import_optional(f"{package}.strategies")
    attributes = {"__module__": "partitioner.integrations.lightning", "__doc__": methods.__doc__, "package": package}
    return type(name, (methods, getattr(strategies, base)), attributes)
