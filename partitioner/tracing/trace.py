"""From a module to a ``ModelGraph``: export, normalize, follow the batch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
from torch import nn

from partitioner.tracing.assemble import Assembly, assemble
from partitioner.tracing.errors import refuse_unplaceable
from partitioner.tracing.export.dynamic_batch import Exported, export_fixed, export_open, wrong_dimension
from partitioner.tracing.export.export import TRACING
from partitioner.tracing.inputs.batch_dims import BatchDims, input_dims
from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs, flatten_inputs
from partitioner.tracing.inputs.ties import refuse_overlaps
from partitioner.tracing.outputs import add_outputs
from passes.analysis.batch_sizes import FittedSizes, OpenSizes, pair_nodes
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import TraceError
from passes.ir.graph import Attribute, Autocast, ModelGraph


@dataclasses.dataclass(frozen=True)
class Source:
    """Subject of a trace: a model in a mode, and the inputs of one call.

    Attributes:
        model: never changed.
        inputs: of the call.
        training: the mode.
        is_found: whether the inputs were found with the model, not passed.
    """

    model: nn.Module
    inputs: ModelInputs
    training: bool
    is_found: bool


@dataclasses.dataclass(frozen=True)
class Opened:
    """A trace whose sizes are open, and the graph made of it for the sizes of the inputs.

    Attributes:
        graph: for these sizes.
        exported: the trace.
        assembly: gives the graph for other sizes than the batch.
    """

    graph: ModelGraph
    exported: Exported
    assembly: Assembly


def trace(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool | None = None,
    batch_size: int | None = None,
    autocast: Autocast | None = None,
    *,
    with_gradients: bool = True,
    batch_dims: BatchDims | None = None,
) -> ModelGraph:
    """Trace a model into one graph. The model is not changed, and tracing computes nothing.

    Args:
        example_inputs: positional inputs of one call, with the whole batch; only their sizes and types matter.
        example_kwargs: its keyword inputs. When both are None, inputs are found as ``find_example_inputs`` says.
        training: trace as ``model.train(training)`` would compute; None keeps the mode of every module.
        batch_size: trace for this batch size alone, even where the model allows any.
        autocast: the mixed precision to trace in; what the caller is in does not matter.
        with_gradients: trace with gradients on, as in training; off as under ``torch.no_grad()``. That of the caller does not matter.
        batch_dims: the batch dimension of inputs by name, as ``partition`` takes them.

    Raises:
        TraceError: the model cannot be made one graph.
        ConfigError: the inputs do not fit, or there are none and none can be found.
    """
    source = source_of(model, example_inputs, example_kwargs, training, autocast, with_gradients=with_gradients, batch_dims=batch_dims)
    return trace_source(source, batch_size)[0]


def source_of(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None,
    example_kwargs: Mapping[str, Any] | None,
    training: bool | None,
    autocast: Autocast | None,
    *,
    with_gradients: bool = True,
    batch_dims: BatchDims | None = None,
) -> Source:
    """Check a model and the inputs of a call before they are traced; see ``trace``."""
    refuse_unplaceable(model)
    refuse_overlaps(model)
    is_found = example_inputs is None and example_kwargs is None
    if is_found:
        example_inputs, example_kwargs = find_example_inputs(model)
    inputs = flatten_inputs(model, example_inputs or (), example_kwargs or {}).on_device_of(model)
    named = input_dims(batch_dims or {}, inputs.names, inputs.leaves, inspect.signature(model.forward).parameters)
    return Source(
        model,
        dataclasses.replace(inputs, autocast=autocast, with_gradients=with_gradients, batch_dims=named),
        model.training if training is None else training,
        is_found,
    )


@gc_paused()
def trace_source(source: Source, batch_size: int | None = None, *, open_sizes: Collection[str] = ()) -> tuple[ModelGraph, Opened | None]:
    """Trace a model; see ``trace``.

    Args:
        open_sizes: kinds of sizes besides the batch that are left open, as far as the model allows it (``ModelInputs.other_sizes``).

    Returns:
        The graph, and the trace that it was made of if its batch is open.
    """
    model, inputs, training = source.model, source.inputs, source.training
    with TRACING:
        if batch_size is not None:
            return _trace_fixed(model, inputs, training, inputs.batch_layout(0), batch_size), None
        graph, opened = _trace_open(source, open_sizes)
    return (_add_batch_note(graph) if source.is_found else graph), opened


def _add_batch_note(graph: ModelGraph) -> ModelGraph:
    """Add a note that the batch size of the plan comes from inputs found with the model."""
    rows = f"{graph.batch_size} row{'' if graph.batch_size == 1 else 's'}"
    note = f"no example inputs were passed: the plan is for a batch of {rows}, found with the model; pass example_inputs= to plan for yours"
    return dataclasses.replace(graph, notes=(note, *graph.notes))


def _trace_open(source: Source, open_sizes: Collection[str]) -> tuple[ModelGraph, Opened | None]:
    """Trace with an open batch size if possible, else with that of the inputs. Layers with ``batch_first=False`` have it in dimension 1."""
    model, layout = source.model, source.inputs.batch_layout(0)
    batch_first = open_trace(source, layout, source.inputs.sizes_of(layout, open_sizes))
    if isinstance(batch_first, Opened) and _has_splittable_outputs(batch_first.graph):
        return batch_first.graph, batch_first
    if any(getattr(module, "batch_first", None) is False for module in model.modules()):
        second = source.inputs.batch_layout(1)
        batch_second = open_trace(source, second, source.inputs.sizes_of(second, open_sizes))
        if isinstance(batch_second, Opened) and _has_splittable_outputs(batch_second.graph):
            return batch_second.graph, batch_second
    if isinstance(batch_first, Opened):
        return batch_first.graph, batch_first
    fixed = _trace_fixed(model, source.inputs, source.training, layout, layout.size)
    note = f"the batch is fixed at {layout.size}, and the model is traced again for another size: {batch_first}"
    return dataclasses.replace(fixed, notes=(note, *fixed.notes)), None


def open_trace(source: Source, layout: BatchLayout, others: Sequence[tuple[int, int]] = ()) -> Opened | str:
    """Trace with an open batch size; return the reason, as a clause, if that is impossible.

    Args:
        layout: where the inputs hold the batch.
        others: dimensions of other sizes, pairs (leaf, dimension), that are left open as far as the model allows it.
    """
    exported = export_open(source.model, source.inputs, source.training, layout, others)
    if isinstance(exported, str):
        return exported
    assembly = Assembly(source.model, exported, source.training)
    try:
        graph = assembly.at(exported.sizes)
    except TraceError as error:
        if not exported.sizes:
            raise
        opened = open_trace(source, layout)
        note = f"sizes besides the batch are fixed, and the model is traced again for others: {error.problem}"
        if isinstance(opened, Opened):
            return dataclasses.replace(opened, graph=dataclasses.replace(opened.graph, notes=(*opened.graph.notes, note)))
        return opened
    assert graph.batch is not None
    return Opened(add_outputs(graph, OpenSizes(graph.batch)), exported, assembly)


def _has_splittable_outputs(graph: ModelGraph) -> bool:
    """Return whether every result but attributes of modules can be put together from microbatches."""
    return all(output.combine != "mixed" or isinstance(output.destination, Attribute) for output in graph.outputs)


def _trace_fixed(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int) -> ModelGraph:
    """Trace for one batch size; numbers that differ in a trace for twice the size, or half of it, depend on the batch."""
    exported = export_fixed(model, inputs, training, layout, size)
    graph, found, traces = assemble(model, exported, training), None, 0
    for other in (2 * size, *([size // 2] if size % 2 == 0 else [])):
        try:
            twin = assemble(model, export_fixed(model, inputs, training, exported.layout, other), training)
        except TraceError:
            continue
        traces += 1
        sizes = _fitted_sizes(graph, twin)
        if sizes is not None and sizes.digest is not None:
            return dataclasses.replace(add_outputs(graph, sizes), digest=sizes.digest)
        found = sizes if found is None else found
    named = [pair for pair in layout.dimensions if pair[0] in layout.named]
    if named and not traces:
        raise wrong_dimension(inputs, *named[0])
    return add_outputs(graph, found)


def _fitted_sizes(graph: ModelGraph, twin: ModelGraph) -> FittedSizes | None:
    """Return the sizes of two traces as expressions in the batch; None if they differ in more than numbers."""
    pairs = pair_nodes(graph.graph, twin.graph)
    if pairs is None:
        return None
    return FittedSizes(pairs, (graph.batch_size, twin.batch_size), sympy.Symbol("batch", positive=True, integer=True))
