"""Modules beside a partitioned one that are built like it: the teacher of a student, or averages that a script keeps by hand.

    for teacher, student in zip(self.teacher.parameters(), self.student.parameters()):
        teacher.lerp_(student, 0.1)

Where a process has a part of the student, the loop is right if it has the same part of the teacher: both run by one plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.errors import ConfigError

__all__ = ["is_copy", "refuse_copies_inside", "uncalled_copies"]


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
