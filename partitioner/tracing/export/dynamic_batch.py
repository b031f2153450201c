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

__all__ = ["Exported", "Fixed", "export_fixed", "export_open"]


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


@dataclass(frozen=True)
class Fixed:
    """Why a batch size cannot be left open.

    Attributes:
        reason: a clause.
        programs: exports for one batch size each that showed it.
    """

    reason: str
    programs: tuple[Exported, ...] = ()


def export_open(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> Exported | Fixed:
    """Export with the batch size open, if the model allows it.

    Raises:
        TraceError: the model cannot be traced, whatever its batch size.
    """
    if not layout.dimensions:
        return Fixed("no input is a tensor with dimensions")
    size = _unique_size(inputs, layout)
    result = _try_layout(model, inputs, training, layout, size)
    if isinstance(result, Exported) and result.batch is not None:
        return _checked(result)
    reason = why_fixed(result if isinstance(result, Exception) else None)
    programs = () if isinstance(result, Exception) else (result,)
    if len(layout.dimensions) > 1:
        sizes = (2 * layout.size, layout.size) if size == layout.size else (layout.size,)
        for other in sizes:
            result = _try_layout(model, inputs, training, layout, other, one_size=False)
            if isinstance(result, Exported):
                break
        if isinstance(result, Exception):
            raise trace_error(model, result) from result
        if result.batch is None:
            return Fixed(reason, (*programs, result))
        result = _try_layout(model, inputs, training, result.layout, _unique_size(inputs, result.layout))
        if isinstance(result, Exported) and result.batch is not None:
            return _checked(result)
    return Fixed(reason, programs)


def _checked(exported: Exported) -> Exported | Fixed:
    """Return the export with its limit; the assumption that it makes, if that does not hold for all smaller batches."""
    limit, assumption = sizes_that_hold(exported.program, exported.layout)
    if limit is None:
        return exported
    if limit >= exported.layout.size:
        note = f"a batch of more than {limit} rows is traced anew, since the model assumes that {assumption}"
        return replace(exported, limit=limit, notes=(*exported.notes, note))
    return Fixed(f"the model assumes that {assumption}")


def _try_layout(
    model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int, *, one_size: bool = True
) -> Exported | Exception:
    """Export with the sizes of a layout open; return an error that other sizes may avoid.

    Args:
        size: the batch size to trace with.
        one_size: whether all leaves have the same size: if one of them is constant, all are.

    Returns:
        The program, with the leaves that stayed open as its layout; without an open size, if none did.
    """
    resized = inputs.with_batch(size, layout)
    try:
        program, notes = export(model, resized, training, layout, one_size=one_size)
    except Exception as error:
        if not depends_on_sizes(error):
            raise trace_error(model, error) from error
        return error
    still_open = tuple(pair for pair in layout.dimensions if symbol_of(program, *pair) is not None)
    if not still_open:
        return Exported(program, resized, BatchLayout(size, layout.dimensions), None, notes)
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
