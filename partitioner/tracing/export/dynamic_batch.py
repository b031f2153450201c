"""Find which inputs hold the batch, and trace with its size left open.

    all candidates open, with one size   --open-->   for which sizes does the trace hold?   --all, or all up to a limit-->   open
            |                                                  |
         constant:  each with a size of its own;            others:  fixed, with the reason
                    those that stay open are traced
                    again, with one size, if the
                    model takes no other size in the rest

A candidate is a tensor that has the batch size of the example as a size. The size that is traced is no other size of the inputs, so
that a mask of (sequence, sequence) is distinguished from one of (batch, sequence).

Other sizes (lengths) are traced open together with the batch, each with the size of the example, if the caller asks for it. A model that
cannot be traced so is traced with the batch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
from torch import Tensor, nn

from partitioner.tracing.errors import depends_on_sizes, trace_error, why_fixed
from partitioner.tracing.export.export import Export, export
from partitioner.tracing.export.guards import Assumptions, assumptions_of, expression_of, symbol_of
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs
from passes.ir.errors import ConfigError
from passes.ir.torch_private import TreeSpec


@dataclass(frozen=True, kw_only=True)
class Exported(Export):
    """A model exported with or without an open batch size.

    Attributes:
        inputs: the inputs of the user; a program with a fixed batch size has inputs of that size.
        layout: where they hold the batch.
        batch: the symbol of the batch size; None when every size is fixed.
        limit: the largest batch that a program with an open size is the model for; None: any.
        open_sizes: the other open sizes: (leaf, dimension) -> its symbol, or an expression in those of others (``4 * frames``).
        sizes: each of these symbols -> its size in the inputs.
        assumed: what the program assumes of open sizes; None without any.
    """

    inputs: ModelInputs
    layout: BatchLayout
    batch: sympy.Symbol | None = None
    limit: int | None = None
    open_sizes: Mapping[tuple[int, int], sympy.Expr] = field(default_factory=dict)
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    assumed: Assumptions | None = None

    @property
    def output_tree(self) -> TreeSpec:
        """The structure of the result of the model."""
        tree: TreeSpec = self.program.call_spec.out_spec
        return tree if not self.left.is_pair else tree.children()[0]


def export_open(
    model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, others: Sequence[tuple[int, int]] = ()
) -> Exported | str:
    """Export with the batch size open; return the reason, as a clause, when the model does not allow it.

    Args:
        others: further dimensions, pairs (leaf, dimension), that are left open if the model allows it.

    Raises:
        TraceError: the model cannot be traced, whatever its batch size.
    """
    only_batch: tuple[str, ...] = ()
    if not layout.dimensions:
        return "no input is a tensor with dimensions"
    if others:
        result = _try_layout(model, inputs, training, layout, _unique_size(inputs, layout), others=others, may_fail=True)
        if isinstance(result, Exported):
            return _checked(result)
        only_batch = (f"sizes besides the batch are fixed, and the model is traced again for others: {why_fixed(result)}",)
    result = _try_layout(model, inputs, training, layout, _unique_size(inputs, layout))
    if isinstance(result, Exported):
        return _checked(replace(result, notes=(*result.notes, *only_batch)))
    reason = why_fixed(result)
    if len(layout.dimensions) == 1:
        return reason
    result = _try_layout(model, inputs, training, layout, max(layout.size, 2), one_size=False)  # a size of 1 is never left open
    if isinstance(result, Exported):
        if _takes_another_size(model, inputs, training, layout):
            return reason
        _refuse_constant(inputs, layout, result.layout)
        result = _try_layout(model, inputs, training, result.layout, _unique_size(inputs, result.layout))
        return _checked(result) if isinstance(result, Exported) else reason
    if isinstance(result, Exception) and layout.size > 1:
        raise trace_error(model, result) from result
    return reason


def _takes_another_size(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> bool:
    """Return whether a trace with fixed sizes holds another batch size: operations fix open sizes that the model itself does not."""
    return isinstance(_at_size(model, inputs, training, layout, 2 * max(_unique_size(inputs, layout), 2)), Exported)


def _refuse_constant(inputs: ModelInputs, layout: BatchLayout, opened: BatchLayout) -> None:
    """Raise ConfigError where the model takes one size alone in a dimension that the caller names as the batch, and more in another one."""
    for index, dimension in layout.dimensions:
        if index in layout.named and (index, dimension) not in opened.dimensions:
            raise wrong_dimension(inputs, index, dimension)


def wrong_dimension(inputs: ModelInputs, index: int, dimension: int) -> ConfigError:
    """Return the error for a named batch dimension in which the model takes one size alone."""
    name = inputs.names[index]
    return ConfigError(
        f"batch_dims says that dimension {dimension} of {name} is the batch, and the model takes no other size than "
        f"{inputs.leaves[index].shape[dimension]} there",
        remedy=f"name the dimension that holds the samples, or leave {name} out of batch_dims",
    )


def _checked(exported: Exported) -> Exported | str:
    """Return the export with its limit; the reason to fix the batch, if what it assumes does not hold for all smaller batches."""
    assert exported.assumed is not None
    limit, assumption = exported.assumed.largest_batch(exported.sizes)
    if limit is None:
        return exported
    if limit >= exported.layout.size:
        note = f"a batch of more than {limit} rows is traced anew, since the model assumes that {assumption}"
        return replace(exported, limit=limit, notes=(*exported.notes, note))
    return f"the model assumes that {assumption}"


def _try_layout(
    model: nn.Module,
    inputs: ModelInputs,
    training: bool,
    layout: BatchLayout,
    size: int,
    *,
    one_size: bool = True,
    others: Sequence[tuple[int, int]] = (),
    may_fail: bool = False,
) -> Exported | Exception | None:
    """Export with the sizes of a layout open; return an error that other sizes may avoid, and None if all sizes are constants.

    Args:
        size: the batch size to trace with.
        one_size: whether all leaves have the same size: if one of them is constant, all are.
        others: further dimensions to leave open.
        may_fail: return every error.

    Returns:
        The program, with the leaves that stayed open as its layout.
    """
    try:
        found = export(model, inputs.with_batch(size, layout), training, layout, one_size=one_size, others=others)
    except Exception as error:
        if not may_fail and not depends_on_sizes(error):
            raise trace_error(model, error) from error
        return error
    program = found.program
    still_open = tuple(pair for pair in layout.dimensions if symbol_of(program, *pair) is not None)
    if not still_open:
        return None
    open_layout, batch = replace(layout, dimensions=still_open), symbol_of(program, *still_open[0])
    found_sizes = {(leaf, dim): expression_of(program, leaf, dim) for leaf, dim in others}
    symbols = {size: inputs.leaves[leaf].shape[dim] for (leaf, dim), size in found_sizes.items() if isinstance(size, sympy.Symbol)}
    sizes = {symbol: size for symbol, size in symbols.items() if symbol != batch}
    open_sizes = {pair: size for pair, size in found_sizes.items() if isinstance(size, sympy.Expr) and size.free_symbols <= sizes.keys()}
    assumed = assumptions_of(program, open_layout, differs_for_one=bool(found.lines_about_one_row))
    return Exported(**vars(found), inputs=inputs, layout=open_layout, batch=batch, open_sizes=open_sizes, sizes=sizes, assumed=assumed)


def export_fixed(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int) -> Exported:
    """Export for one batch size, to which the inputs of the layout are resized; a smaller layout is tried if the model refuses that.

    Raises:
        TraceError: the model cannot be traced with that batch size.
    """
    first_error: Exception | None = None
    for candidate in (layout, *layout.smaller_layouts()):
        result = _at_size(model, inputs, training, candidate, size)
        if isinstance(result, Exported):
            return result
        first_error = first_error or result
        if size == layout.size or not depends_on_sizes(result):
            break
    assert first_error is not None
    raise trace_error(model, first_error, inputs.other_batch()) from first_error


def _at_size(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int) -> Exported | Exception:
    """Export for one batch size, to which the inputs of the layout are resized; return the error if the model refuses it."""
    resized = inputs.with_batch(size, layout)
    try:
        found = export(model, resized, training)
    except Exception as error:  # noqa: BLE001  torch.export raises every kind
        return error
    return Exported(**vars(found), inputs=resized, layout=replace(layout, size=size))


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
