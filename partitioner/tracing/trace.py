"""From a module to a ``ModelGraph``: export, normalize, follow the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy
from torch import nn

from partitioner.tracing.assemble import assemble
from partitioner.tracing.errors import refuse_unplaceable
from partitioner.tracing.export.dynamic_batch import export_fixed, export_open
from partitioner.tracing.export.export import TRACING
from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs, flatten_inputs
from partitioner.tracing.inputs.ties import refuse_overlaps
from partitioner.tracing.outputs import add_outputs
from passes.analysis.batch_sizes import FittedSizes, OpenSizes, pair_nodes
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import TraceError
from passes.ir.graph import Autocast, ModelGraph

__all__ = ["trace"]


@gc_paused()
def trace(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool | None = None,
    batch_size: int | None = None,
    autocast: Autocast | None = None,
) -> ModelGraph:
    """Trace a model into one graph. The model is not changed, and tracing computes nothing.

    Args:
        example_inputs: positional inputs of one call, with the whole batch; only their sizes and types matter.
        example_kwargs: its keyword inputs. When both are None, inputs are found as ``find_example_inputs`` says.
        training: trace as ``model.train(training)`` would compute; None keeps the mode of every module.
        batch_size: trace for this batch size alone, even where the model allows any.
        autocast: the mixed precision to trace in; what the caller is in does not matter.

    Raises:
        TraceError: the model cannot be made one graph.
        ConfigError: the inputs do not fit, or there are none and none can be found.
    """
    refuse_unplaceable(model)
    refuse_overlaps(model)
    is_found = example_inputs is None and example_kwargs is None
    if is_found:
        example_inputs, example_kwargs = find_example_inputs(model)
    inputs = flatten_inputs(model, example_inputs or (), example_kwargs or {}).on_device_of(model)
    inputs = dataclasses.replace(inputs, autocast=autocast)
    training = model.training if training is None else training
    with TRACING:
        if batch_size is not None:
            return _trace_fixed(model, inputs, training, inputs.batch_layout(0), batch_size)
        graph = _trace_open(model, inputs, training)
    return _add_batch_note(graph) if is_found else graph


def _add_batch_note(graph: ModelGraph) -> ModelGraph:
    """Add a note that the batch size of the plan comes from inputs found with the model."""
    rows = f"{graph.batch_size} row{'' if graph.batch_size == 1 else 's'}"
    note = f"no example inputs were passed: the plan is for a batch of {rows}, found with the model; pass example_inputs= to plan for yours"
    return dataclasses.replace(graph, notes=(note, *graph.notes))


def _trace_open(model: nn.Module, inputs: ModelInputs, training: bool) -> ModelGraph:
    """Trace with an open batch size if possible, else with that of the inputs. Layers with ``batch_first=False`` have it in dimension 1."""
    layout = inputs.batch_layout(0)
    batch_first = _try_open(model, inputs, training, layout)
    if isinstance(batch_first, ModelGraph) and _has_splittable_outputs(batch_first):
        return batch_first
    if any(getattr(module, "batch_first", None) is False for module in model.modules()):
        batch_second = _try_open(model, inputs, training, inputs.batch_layout(1))
        if isinstance(batch_second, ModelGraph) and _has_splittable_outputs(batch_second):
            return batch_second
    if isinstance(batch_first, ModelGraph):
        return batch_first
    fixed = _trace_fixed(model, inputs, training, layout, layout.size)
    note = f"the batch is fixed at {layout.size}, and the model is traced again for another size: {batch_first}"
    return dataclasses.replace(fixed, notes=(note, *fixed.notes))


def _try_open(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout) -> ModelGraph | str:
    """Trace with an open batch size; return the reason, as a clause, if that is impossible."""
    exported = export_open(model, inputs, training, layout)
    if isinstance(exported, str):
        return exported
    graph = assemble(model, exported, training)
    assert graph.batch is not None
    return add_outputs(graph, OpenSizes(graph.batch))


def _has_splittable_outputs(graph: ModelGraph) -> bool:
    """Return whether every output can be put together from microbatches."""
    return all(output.combine != "mixed" for output in graph.outputs)


def _trace_fixed(model: nn.Module, inputs: ModelInputs, training: bool, layout: BatchLayout, size: int) -> ModelGraph:
    """Trace for one batch size; numbers that differ in a trace for twice the size, or half of it, depend on the batch."""
    exported = export_fixed(model, inputs, training, layout, size)
    graph, found = assemble(model, exported, training), None
    for other in (2 * size, *([size // 2] if size % 2 == 0 else [])):
        try:
            twin = assemble(model, export_fixed(model, inputs, training, exported.layout, other), training)
        except TraceError:
            continue
        sizes = _fitted_sizes(graph, twin)
        if sizes is not None and sizes.digest is not None:
            return dataclasses.replace(add_outputs(graph, sizes), digest=sizes.digest)
        found = sizes if found is None else found
    return add_outputs(graph, found)


def _fitted_sizes(graph: ModelGraph, twin: ModelGraph) -> FittedSizes | None:
    """Return the sizes of two traces as expressions in the batch; None if they differ in more than numbers."""
    pairs = pair_nodes(graph.graph, twin.graph)
    if pairs is None:
        return None
    return FittedSizes(pairs, (graph.batch_size, twin.batch_size), sympy.Symbol("batch", positive=True, integer=True))
