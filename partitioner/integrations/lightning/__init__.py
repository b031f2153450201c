"""Lightning: a strategy of its Trainer that partitions a ``LightningModule``, and one of Fabric for partitioned models.

    Trainer(strategy=PartitionStrategy(devices=4, mode="fsdp"))      the user's LightningModule, as it is written
    Trainer(strategy="partitioner", devices=4)                       the same, planned with mode="auto"
    Fabric(strategy="partitioner"), fabric.setup(pm, optimizer)      a partitioned model in a loop of its own

A class has the base of the package that the script has imported: ``lightning``, or ``pytorch_lightning`` and ``lightning_fabric``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partitioner.integrations.shadowed_packages import check_shadowed_packages

__all__ = ["FabricPartitionStrategy", "PartitionStrategy"]

if TYPE_CHECKING:
    from partitioner.integrations.lightning.fabric import FabricPartition as FabricPartitionStrategy
    from partitioner.integrations.lightning.trainer import TrainerPartition as PartitionStrategy


def __getattr__(name: str) -> Any:
    """Return a strategy for the package that is in use; Lightning is imported when one is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_shadowed_packages()
    from partitioner.integrations.lightning.strategy_classes import strategy_class  # noqa: PLC0415  it imports Lightning

    return strategy_class("trainer" if name == "PartitionStrategy" else "fabric")
