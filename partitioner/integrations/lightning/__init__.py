"""Strategies of Lightning's Trainer, which partitions a ``LightningModule``, and of Fabric, which takes partitioned models.

    Trainer(strategy=PartitionStrategy(devices=4, mode="fsdp"))      the user's unchanged LightningModule
    Fabric(strategy=FabricPartitionStrategy())                       fabric.setup(pm, optimizer): a loop of its own
    Fabric(strategy=FabricDDPStrategy(), devices=2)                  Fabric's "ddp", which passes partitioned models through

A class has the base of the package that the script has imported: ``lightning``, or ``pytorch_lightning`` and ``lightning_fabric``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["FabricDDPStrategy", "FabricPartitionStrategy", "PartitionStrategy"]

if TYPE_CHECKING:
    from partitioner.integrations.lightning.fabric import FabricDDP as FabricDDPStrategy
    from partitioner.integrations.lightning.fabric import FabricPartition as FabricPartitionStrategy
    from partitioner.integrations.lightning.trainer import TrainerPartition as PartitionStrategy


def __getattr__(name: str) -> Any:
    """Return a strategy for the package that is in use; Lightning is imported when one is first needed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from partitioner.integrations.lightning.strategy_classes import strategy_class  # noqa: PLC0415  it imports Lightning

    return strategy_class(name)
