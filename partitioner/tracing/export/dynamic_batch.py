"""Find which inputs hold the batch, and trace with its size left open.

    all candidates open  --ok-->  open
            |
         violated:  ask which sizes the model leaves open, open only those  --ok-->  open
            |
         violated:  fixed, with the reason

A candidate is a tensor that has the batch size of the example as a size. The size that is traced is no other size of the inputs, so
that a mask of (sequence, sequence) is told from one of (batch, sequence).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from partitioner.tracing.errors import depends_on_sizes, trace_error, why_fixed
from partitioner.tracing.export.export import export
from partitioner.tracing.export.guards import assumptions_always_hold, symbol_of
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs

__all__ = ["Exported", "export_fixed", "export_open"]


@dataclass(frozen=True)
class Exported:
    """A model exported with or without an open batch size.

    Attributes:
        program: what ``torch.export`` gave.
        inputs: the inputs of the user; a program with an open batch may have been traced with another batch size.
        layout: where they hold the batch.
        batch: the symbol of the batch size; None when every size is fixed.
        notes: what the user should know, one sentence each.
    """

    program: ExportedProgram
    inputs: ModelInputs
    layout: BatchLayout
    batch: sympy.Symbol | None
    notes: tuple[str, ...]


def export_open(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Exported | str:
    """Export with the batch size open; the reason when the model does not allow it.

    Raises:
        TraceError: the model cannot be traced, whatever its batch size.
    """
    if not layout.dimensions:
        return "no input is a tensor with dimensions"
    reason: Exception | None = None
    for choice in _choices(model, inputs, training, layout):
        found = _try(model, inputs, training, choice)
        if isinstance(found, Exported):
            return found
        reason = reason or found
    return why_fixed(reason)


def _try(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Exported | Exception:
    """Export with one open size in all leaves of a layout, and nothing assumed about it."""
    resized = inputs.with_batch(_unmistakable_size(inputs, layout), layout)
    reason: Exception | None = None
    for may_assume in (False, True):
        try:
            program, notes = export(model, resized, training, Dim("batch"), layout, may_assume=may_assume)
        except Exception as error:
            if not depends_on_sizes(error):
                raise trace_error(model, error) from error
            reason = reason or error
            continue
        batch = symbol_of(program, *layout.dimensions[0])
        if batch is not None and (not may_assume or assumptions_always_hold(program, layout)):
            return Exported(program, inputs, layout, batch, notes)
    return reason or ValueError("the model makes it a constant")


def _choices(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Iterator[BatchLayout]:
    """Layouts to try, best first; later ones are made only when earlier ones fail."""
    yield layout
    if len(layout.dimensions) < 2:
        return
    if layout.size == 1:  # a size of 1 is never left open, so that asking would not help
        yield from layout.smaller()
        return
    try:
        program, _ = export(model, inputs, training, Dim.AUTO, layout)
    except Exception as error:
        raise trace_error(model, error) from error
    left = BatchLayout(layout.size, tuple(pair for pair in layout.dimensions if symbol_of(program, *pair) is not None))
    if left.dimensions and left != layout:
        yield left


def export_fixed(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int) -> Exported:
    """Export for one batch size: the inputs that hold the batch are resized to it.

    Raises:
        TraceError: the model cannot be traced with that batch size.
    """
    failure: Exception | None = None
    for choice in (layout, *layout.smaller()):
        resized = inputs.with_batch(size, choice)
        try:
            program, notes = export(model, resized, training)
        except Exception as error:  # noqa: BLE001  torch.export raises every kind
            failure = failure or error
            if size == layout.size or not depends_on_sizes(error):
                break
        else:
            return Exported(program, resized, BatchLayout(size, choice.dimensions), None, notes)
    assert failure is not None
    raise trace_error(model, failure) from failure


def _unmistakable_size(inputs: ModelInputs, layout: BatchLayout) -> int:
    """The least multiple of the batch size, 2 or more, that no other size of the inputs equals."""
    others: set[int] = set()
    dimensions = dict(layout.dimensions)
    for index, leaf in enumerate(inputs.leaves):
        if isinstance(leaf, Tensor):
            others.update(size for dimension, size in enumerate(leaf.shape) if dimension != dimensions.get(index))
    size = layout.size
    while size < 2 or size in others:
        size += max(layout.size, 1)
    return size
