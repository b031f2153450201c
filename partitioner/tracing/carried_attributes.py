"""Refuse a forward that reads a number or tensor that an earlier call left in an attribute: a graph has the values of the traced call.

Attributes that are only written (attention weights to inspect, sizes to remember) stay allowed. Buffers are no attributes here: writes to
them are part of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.export import ExportedProgram

from passes.ir.errors import Place, TraceError

__all__ = ["attributes_of", "changed_numbers", "refuse_read_numbers", "refuse_read_tensors"]

Attributes = Mapping[str, object]
"""Path of an attribute -> its value: numbers and tensors that are neither parameters nor buffers."""


def attributes_of(model: nn.Module) -> Attributes:
    """Return the attributes of all modules that are numbers or tensors."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float) or isinstance(value, Tensor)
    }


@contextlib.contextmanager
def record_attributes_after_calls(model: nn.Module) -> Iterator[dict[str, object]]:
    """While active, record the attributes after the last call of the model, before ``torch.export`` restores them; yield them."""
    attributes: dict[str, object] = {}

    def record(*_: object) -> None:
        attributes.clear()
        attributes.update(attributes_of(model))

    handle = model.register_forward_hook(record)
    try:
        yield attributes
    finally:
        handle.remove()


def changed_numbers(before: Attributes, after: Attributes) -> dict[str, int | float]:
    """Return attribute -> new value, of the numbers that differ after a call."""
    number = (int, float)
    numbers = {path: value for path, value in after.items() if isinstance(value, number) and isinstance(before.get(path), number)}
    return {path: value for path, value in numbers.items() if before[path] != value}


def set_numbers(model: nn.Module, numbers: Mapping[str, int | float]) -> None:
    """Set attributes by their paths."""
    for path, value in numbers.items():
        module_path, _, name = path.rpartition(".")
        setattr(model.get_submodule(module_path), name, value)


def refuse_read_numbers(model: nn.Module, changed: Sequence[str], first: ExportedProgram, second: ExportedProgram) -> None:
    """Raise TraceError where a second trace, which starts with the changed numbers, gives another graph: the model reads them.

    Args:
        changed: paths of the numbers that the first trace has changed.
    """
    if first.graph_module.code != second.graph_module.code:
        raise _error(model, changed)


def refuse_read_tensors(model: nn.Module, before: Attributes, assigned: Sequence[str], program: ExportedProgram) -> None:
    """Raise TraceError where a graph reads the tensors that were in attributes before forward assigned others.

    Args:
        before: the attributes before the trace.
        assigned: paths of the attributes that forward assigns.
    """
    constants = [value for value in program.constants.values() if isinstance(value, Tensor)]
    read = [name for name in assigned if any(before.get(name) is constant for constant in constants)]
    if read:
        raise _error(model, read)


def _error(model: nn.Module, names: Sequence[str]) -> TraceError:
    return TraceError(
        f"{type(model).__name__} changes {', '.join(names)} in its forward and computes with it in the next call, which a graph cannot",
        place=Place(module=names[0].rpartition(".")[0]),
        remedy='keep it in a buffer that forward writes: self.register_buffer("steps", torch.zeros(())), self.steps.add_(1)',
    )
