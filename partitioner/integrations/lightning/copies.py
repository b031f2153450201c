"""Copies of a partitioned module: the teacher of a student, averages that a script keeps by hand, or those of a callback of Lightning.

    for teacher, student in zip(self.teacher.parameters(), self.student.parameters()):
        teacher.lerp_(student, 0.1)

Where a process has a part of the student, the loop is right if it has the same part of the teacher: both run by one plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.errors import ConfigError


def is_copy(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules have one class, and parameters of the same names and shapes."""
    return one is not other and _parameters(one) == _parameters(other) and type(one) is type(other) and bool(_parameters(one))


def uncalled_copies(root: nn.Module, partitioned: nn.Module, called: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return path and module of each copy of a partitioned module that is not in, and has not in it, a module that is called."""
    inside = {module for each in called for module in each.modules()}
    found = [(path, module) for path, module in root.named_modules() if module not in inside and is_copy(module, partitioned)]
    return [(path, module) for path, module in found if not any(each in inside for each in module.modules())]


def refuse_copies_inside(model: PartitionedModel, path: str) -> None:
    """Raise ConfigError if a module that ``forward`` calls has a copy beside it in the same partitioned model, which it does not call.

    Parameters that no program reads are whole, on the first process alone.

    Args:
        path: of the model in the LightningModule.
    """
    original = model.traced.original
    for name, module in original.named_modules():
        for copied, other in _beside(original, name):
            if is_copy(module, other) and _is_read(model, name) and not _is_read(model, copied):
                prefix = f"{path}." if path else ""
                raise ConfigError(
                    f"{prefix}{copied} is built like {prefix}{name}, and forward does not call it: the processes have parts of "
                    f"{prefix}{name} alone, so averages of the two, parameter by parameter, would combine other layers",
                    remedy=f"call self.{name}(...) in the step, not forward; or keep averages by a callback: EMAWeightAveraging(decay=0.9)",
                )


def _parameters(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, parameter.shape) for name, parameter in module.named_parameters()]


def _beside(root: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the other children of the parent of a module."""
    parent, _, own = path.rpartition(".")
    for name, module in root.get_submodule(parent).named_children() if path else ():
        if name != own:
            yield f"{parent}.{name}" if parent else name, module


def _is_read(model: PartitionedModel, path: str) -> bool:
    """Return whether programs read a parameter of a module."""
    graph = model.traced.graph
    read = {node.name for node in graph.module.graph.find_nodes(op="placeholder") if node.users}
    return any(placeholder in read and name.startswith(f"{path}.") for placeholder, name in graph.parameters.items())


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
