"""Refuse a forward that computes with what the call before it left in an attribute: a graph has the numbers of the call that was traced.

Attributes that are written and never read (weights of an attention to look at, sizes to remember) stay allowed. Buffers are no
attributes: what is written to them is part of the graph.
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
    """Every attribute that is a number, or a tensor."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float) or isinstance(value, Tensor)
    }


@contextlib.contextmanager
def attributes_behind(model: nn.Module) -> Iterator[dict[str, object]]:
    """While it lasts, the attributes as each call of the model has left them: ``torch.export`` puts them back behind it."""
    found: dict[str, object] = {}

    def look(*_: object) -> None:
        found.clear()
        found.update(attributes_of(model))

    handle = model.register_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def changed_numbers(before: Attributes, after: Attributes) -> dict[str, int | float]:
    """The numbers that a call has changed, as it left them."""
    number = (int, float)
    return {
        name: value
        for name, value in after.items()
        if isinstance(value, number) and isinstance(before.get(name), number) and before[name] != value
    }


def set_numbers(model: nn.Module, numbers: Mapping[str, int | float]) -> None:
    """Set attributes by their paths."""
    for path, value in numbers.items():
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, value)


def refuse_read_numbers(model: nn.Module, changed: Sequence[str], first: ExportedProgram, second: ExportedProgram) -> None:
    """Raise TraceError where a second trace, with the attributes as the first left them, gives another graph: the model reads them.

    Args:
        changed: the numbers that the first trace has changed.
    """
    if first.graph_module.code != second.graph_module.code:
        raise _error(model, changed)


def refuse_read_tensors(model: nn.Module, before: Attributes, assigned: Sequence[str], program: ExportedProgram) -> None:
    """Raise TraceError where a graph reads the tensors that were in attributes before forward assigned others.

    Args:
        assigned: the attributes that tracing has found to be assigned.
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
