"""Find which inputs hold the batch, and trace with its size left open.

    all candidates open, with one size   --open-->   for which sizes does the trace hold?   --all, or all up to a limit-->   open
            |                                                  |
         constant:  each with a size of its own;            others:  fixed, with the reason
                    those that stay open are traced
                    again, with one size

A candidate is a tensor that has the batch size of the example as a size. The size that is traced is no other size of the inputs, so
that a mask of (sequence, sequence) is told from one of (batch, sequence).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.tracing.errors import depends_on_sizes, trace_error, why_fixed
from partitioner.tracing.export.export import export
from partitioner.tracing.export.guards import sizes_that_hold, symbol_of
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs

__all__ = ["Exported", "export_fixed", "export_open"]


@dataclass(frozen=True)
class Exported:
    """A model exported with or without an open batch size.

    Attributes:
        program: the result of ``torch.export``.
        inputs: the inputs of the user; a program with a fixed batch size has inputs of that size.
        layout: where they hold the batch.
        batch: the symbol of the batch size; None when every size is fixed.
        notes: for the user, one sentence each.
        limit: the largest batch that a program with an open size is the model for; None: any.
    """

    program: ExportedProgram
    inputs: ModelInputs
    layout: BatchLayout
    batch: sympy.Symbol | None
    notes: tuple[str, ...]
    limit: int | None = None


def export_open(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Exported | str:
    """Export with the batch size open; return the reason, as a clause, when the model does not allow it.

    Raises:
        TraceError: the model cannot be traced, whatever its batch size.
    """
    if not layout.dimensions:
        return "no input is a tensor with dimensions"
    result = _try_layout(model, inputs, training, layout, _unique_size(inputs, layout))
    if isinstance(result, Exported):
        return _checked(result)
    reason = why_fixed(result)
    if len(layout.dimensions) == 1:
        return reason
    result = _try_layout(model, inputs, training, layout, max(layout.size, 2), one_size=False)  # a size of 1 is never left open
    if isinstance(result, Exported):
        result = _try_layout(model, inputs, training, result.layout, _unique_size(inputs, result.layout))
        return _checked(result) if isinstance(result, Exported) else reason
    if isinstance(result, Exception) and layout.size > 1:
        raise trace_error(model, result) from result
    return reason


def _checked(exported: Exported) -> Exported | str:
    """Return the export with its limit; the reason to fix the batch, if what it assumes does not hold for all smaller batches."""
    limit, assumption = sizes_that_hold(exported.program, exported.layout)
    if limit is None:
        return exported
    if limit >= exported.layout.size:
        note = f"a batch of more than {limit} rows is traced anew, since the model assumes that {assumption}"
        return replace(exported, limit=limit, notes=(*exported.notes, note))
    return f"the model assumes that {assumption}"


def _try_layout(
    model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int, *, one_size: bool = True
) -> Exported | Exception | None:
    """Export with the sizes of a layout open; return an error that other sizes may avoid, and None if all sizes are constants.

    Args:
        size: the batch size to trace with.
        one_size: whether all leaves have the same size: if one of them is constant, all are.

    Returns:
        The program, with the leaves that stayed open as its layout.
    """
    try:
        program, notes = export(model, inputs.with_batch(size, layout), training, layout, one_size=one_size)
    except Exception as error:
        if not depends_on_sizes(error):
            raise trace_error(model, error) from error
        return error
    still_open = tuple(pair for pair in layout.dimensions if symbol_of(program, *pair) is not None)
    if not still_open:
        return None
    return Exported(program, inputs, BatchLayout(layout.size, still_open), symbol_of(program, *still_open[0]), notes)


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
