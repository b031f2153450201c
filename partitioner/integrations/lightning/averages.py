"""Lightning's StochasticWeightAveraging on partitioned models: its averages are sharded as the parameters of this process are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.errors import ConfigError

__all__ = ["copy_average", "refuse_reset_statistics"]


def copy_average(callback: Any, trainer: Any, device: torch.device) -> None:
    """Give the callback a copy of the partitioned LightningModule, with the averages of a checkpoint if it has loaded one.

    All ranks must call it.

    Raises:
        ConfigError: the averages would be on another device than the parts.
    """
    wanted = callback._device  # noqa: SLF001  Lightning has no public way to it
    if wanted is not None and torch.device(wanted).type != device.type:
        raise ConfigError(
            f"StochasticWeightAveraging(device={str(wanted)!r}) would move averages of a partitioned model from {device}",
            remedy="StochasticWeightAveraging(..., device=None)",
        )
    averages = callback._average_model.state_dict()  # noqa: SLF001
    callback.setup(trainer, trainer.lightning_module, "fit")
    callback._average_model.load_state_dict(averages)  # noqa: SLF001


def refuse_reset_statistics(model: PartitionedModel) -> None:
    """Raise ConfigError for batch normalization, whose statistics and momentum the callback replaces after the last epoch."""
    kind = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
    name = next((name for name, module in model.traced.original.named_modules() if isinstance(module, kind)), None)
    if name is not None:
        raise ConfigError(
            f"StochasticWeightAveraging would replace the running statistics and the momentum of {name} after the last epoch, and programs "
            "go on with those that were traced",
            remedy="lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging, which average the statistics, too",
        )
