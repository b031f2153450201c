"""Find which inputs hold the batch, and trace with its size left open.

    all candidates open  --ok-->  open
            |
         violated:  ask which sizes the model leaves open, open only those  --ok-->  open
            |
         violated:  fixed, with the reason

A candidate is a tensor that has the batch size of the example as a size. The model is traced with a batch size that no other dimension
of the inputs has, so that a mask of (sequence, sequence) differs from one of (batch, sequence).
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
        program: the result of ``torch.export``.
        inputs: the inputs of the user; a program with an open batch may have been traced with another batch size.
        layout: the dimensions of the inputs that are the batch.
        batch: the symbol of the batch size; None when every size is fixed.
        notes: for the user, one sentence each.
    """

    program: ExportedProgram
    inputs: ModelInputs
    layout: BatchLayout
    batch: sympy.Symbol | None
    notes: tuple[str, ...]


def export_open(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Exported | str:
    """Export with the batch size open; return the reason, as a clause, when the model does not allow it.

    Raises:
        TraceError: the model cannot be traced, whatever its batch size.
    """
    if not layout.dimensions:
        return "no input is a tensor with dimensions"
    first_error: Exception | None = None
    for candidate in _layouts_to_try(model, inputs, training, layout):
        result = _try_layout(model, inputs, training, candidate)
        if isinstance(result, Exported):
            return result
        first_error = first_error or result
    return why_fixed(first_error)


def _try_layout(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Exported | Exception:
    """Export with one open size in all leaves of a layout; return the error if it needs assumptions that may not hold."""
    resized = inputs.with_batch(_unique_size(inputs, layout), layout)
    first_error: Exception | None = None
    for may_assume in (False, True):
        try:
            program, notes = export(model, resized, training, Dim("batch"), layout, may_assume=may_assume)
        except Exception as error:
            if not depends_on_sizes(error):
                raise trace_error(model, error) from error
            first_error = first_error or error
            continue
        batch = symbol_of(program, *layout.dimensions[0])
        if batch is not None and (not may_assume or assumptions_always_hold(program, layout)):
            return Exported(program, inputs, layout, batch, notes)
    return first_error or ValueError("the model makes it a constant")


def _layouts_to_try(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Iterator[BatchLayout]:
    """Yield the layouts to try, best first: all leaves, then those that stay open when ``torch.export`` chooses (``Dim.AUTO``)."""
    yield layout
    if len(layout.dimensions) < 2:
        return
    if layout.size == 1:  # Dim.AUTO never leaves a size of 1 open
        yield from layout.smaller_layouts()
        return
    try:
        program, _ = export(model, inputs, training, Dim.AUTO, layout)
    except Exception as error:
        raise trace_error(model, error) from error
    still_open = BatchLayout(layout.size, tuple(pair for pair in layout.dimensions if symbol_of(program, *pair) is not None))
    if still_open.dimensions and still_open != layout:
        yield still_open


def export_fixed(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int) -> Exported:
    """Export for one batch size, to which the inputs of the layout are resized; a smaller layout is tried if the model refuses that.

    Raises:
        TraceError: the model cannot be traced with that batch size.
    """
    first_error: Exception | None = None
    for candidate in (layout, *layout.smaller_layouts()):
        resized = inputs.with_batch(size, candidate)
        try:
            program, notes = export(model, resized, training)
        except Exception as error:  # noqa: BLE001  torch.export raises every kind
            first_error = first_error or error
            if size == layout.size or not depends_on_sizes(error):
                break
        else:
            return Exported(program, resized, BatchLayout(size, candidate.dimensions), None, notes)
    assert first_error is not None
    raise trace_error(model, first_error) from first_error


def _unique_size(inputs: ModelInputs, layout: BatchLayout) -> int:
    """Return the least multiple of the batch size, 2 or more, that is no other size of the inputs."""
    other_sizes: set[int] = set()
    batch_dims = dict(layout.dimensions)
    for index, leaf in enumerate(inputs.leaves):
        if isinstance(leaf, Tensor):
            other_sizes.update(size for dimension, size in enumerate(leaf.shape) if dimension != batch_dims.get(index))
    size = layout.size
    while size < 2 or size in other_sizes:
        size += max(layout.size, 1)
    return size
