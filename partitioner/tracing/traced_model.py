"""A traced model: its graph for the sizes of the example, and for every other size that a call may have.

    trace, with open lengths ──> graph for length 128, which is planned
                            └──> graph for length 7, when a call has it: no new trace, and the names of the planned graph

Only the batch stays open in a graph. For a length that the trace does not serve (the model makes it a constant, or the length is one) the
model is traced again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from partitioner.tracing.export.dynamic_batch import takes_twice
from partitioner.tracing.inputs.batch_dims import BatchDims
from partitioner.tracing.inputs.flatten import BatchLayout
from partitioner.tracing.outputs import add_outputs
from partitioner.tracing.sizes.names_of_sizes import named_like
from partitioner.tracing.sizes.table_lookups import lookup_beyond_table
from partitioner.tracing.sizes.taken_tables import takes_of_weights
from partitioner.tracing.trace import Opened, Source, open_trace, source_of, trace_source
from passes.analysis.batch_sizes import OpenSizes
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import ConfigError, TraceError
from passes.ir.graph import Autocast, ModelGraph

__all__ = ["TracedModel", "trace_model"]

_OPEN_AT_FIRST = ("length",)
"""Kinds of sizes that the first trace leaves open. Each takes time to trace: images of another size get a second trace.

A model that takes a part of its weights by numbers gets it at once: these may be heights (``table[:, :height, :width]``)."""


def trace_model(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool | None = None,
    autocast: Autocast | None = None,
    *,
    with_gradients: bool = True,
    batch_dims: BatchDims | None = None,
) -> TracedModel:
    """Trace a model with all sizes open that it may take in any number; the arguments are those of ``trace``."""
    source = source_of(model, example_inputs, example_kwargs, training, autocast, with_gradients=with_gradients, batch_dims=batch_dims)
    return TracedModel(source, *trace_source(source, open_sizes=_OPEN_AT_FIRST))


class TracedModel:
    """The graphs of a model, one for each choice of the sizes of its inputs besides the batch.

    Args:
        source: what was traced.
        graph: for the sizes of the inputs.
        opened: the trace of the graph, if its batch is open.
    """

    def __init__(self, source: Source, graph: ModelGraph, opened: Opened | None) -> None:
        self._source = source
        self._opened, self._is_all_open = opened, False
        layout = source.inputs.batch_layout(0) if opened is None else opened.exported.layout
        self._taken = _sizes_taken(source, layout, {} if opened is None else opened.exported.open_sizes)
        if opened is not None and takes_of_weights(opened.exported.program):
            graph = self._all_open(opened, graph)
        symbols = {} if self._opened is None else self._opened.exported.open_sizes
        self._names = _unique_names(self._taken, symbols)
        self.graph = self._with_names(graph)

    def at(self, sizes: Mapping[str, int]) -> ModelGraph:
        """Return the graph for other sizes, with the names of the first graph.

        Args:
            sizes: name of a size, as in ``ModelGraph.open_sizes`` -> size.

        Raises:
            ConfigError: the model does not take these sizes, or computes with other operations for them.
        """
        if sizes == self.graph.open_sizes:
            return self.graph
        graph, assumption = self._from_trace(sizes)
        if graph is None:
            graph = self._traced_again(sizes, assumption)
        lookup = lookup_beyond_table(graph, self._source.model)
        if lookup is not None:
            raise ConfigError(
                f"the model does not take {_words(sizes)}: it looks up row {lookup.row} of a table that has {lookup.rows}",
                place=lookup.place,
                remedy=f"pass inputs that need at most {lookup.rows} rows of it, or build the model with a larger table",
            )
        renamed = named_like(graph, self.graph)
        if renamed is None or not _has_constants_of(graph, self.graph):
            raise ConfigError(
                f"the model computes with other operations for {_words(sizes)} than for {_words(self.graph.open_sizes)}, which was planned",
                remedy="partition it again with example inputs of these sizes",
            )
        return self._with_names(renamed)

    @gc_paused()
    def _from_trace(self, sizes: Mapping[str, int]) -> tuple[ModelGraph | None, str]:
        """Return the graph for sizes that the open trace serves; else None and the assumption of the trace that does not hold."""
        if self._opened is None:
            return None, ""
        exported, planned = self._opened.exported, self.graph.open_sizes
        fixed = [name for pair, name in self._names.items() if pair not in exported.open_sizes and sizes[name] != planned[name]]
        if fixed and not self._is_all_open:
            self._open_all(exported.layout)
            return self._from_trace(sizes)
        numbers = {symbol: sizes[self._names[pair]] for pair, symbol in exported.open_sizes.items()}
        differ = any(sizes[self._names[pair]] != numbers[symbol] for pair, symbol in exported.open_sizes.items())
        if fixed or differ or min(numbers.values(), default=2) < 2 or exported.assumed is None:
            return None, ""
        names = {symbol: self._names[pair] for pair, symbol in exported.open_sizes.items()}
        if failing := exported.assumed.failing(names, numbers):
            return None, failing
        limit, failing = exported.assumed.largest_batch(numbers)
        if limit is not None and limit < max(exported.layout.size, 2):
            return None, failing
        graph = self._opened.assembly.at(numbers)
        assert graph.batch is not None
        return add_outputs(dataclasses.replace(graph, batch_limit=limit), OpenSizes(graph.batch)), ""

    def _all_open(self, opened: Opened, graph: ModelGraph) -> ModelGraph:
        """Trace with all sizes open, if possible, to mark slices of tables by a size (``VARIES``); return the example's graph."""
        if set(self._taken.values()) <= set(_OPEN_AT_FIRST):
            return graph
        self._open_all(opened.exported.layout)
        assert self._opened is not None
        return graph if self._opened is opened else dataclasses.replace(self._opened.graph, notes=graph.notes)

    def _open_all(self, layout: BatchLayout) -> None:
        """Trace once more with all sizes open; keep the first trace if the model does not allow that."""
        self._is_all_open = True
        opened = open_trace(self._source, layout, tuple(self._taken))
        if isinstance(opened, Opened):
            self._opened = opened

    def _traced_again(self, sizes: Mapping[str, int], assumption: str) -> ModelGraph:
        """Trace the model for these sizes alone.

        Raises:
            ConfigError: the model does not take them.
        """
        try:
            return trace_source(self.source_for(sizes))[0]
        except TraceError as error:
            reason = f"it assumes that {assumption}" if assumption else error.problem
            raise ConfigError(
                f"the model does not take {_words(sizes)}: {reason}", remedy="pass sizes for which the model itself can be called"
            ) from error

    def source_for(self, sizes: Mapping[str, int]) -> Source:
        """Return the source of a trace for these sizes."""
        inputs = self._source.inputs.with_sizes({pair: sizes[name] for pair, name in self._names.items()})
        return dataclasses.replace(self._source, inputs=inputs, is_found=False)

    def _with_names(self, graph: ModelGraph) -> ModelGraph:
        """Return a graph whose inputs say which of their sizes are open."""
        named = tuple(
            dataclasses.replace(leaf, open_sizes=tuple((dim, name) for (each, dim), name in self._names.items() if each == index))
            for index, leaf in enumerate(graph.inputs)
        )
        return dataclasses.replace(graph, inputs=named, for_sizes=self if any(leaf.open_sizes for leaf in named) else None)

    def call_of(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return args and kwargs of these sizes, to trace the model with."""
        inputs = self.source_for(sizes).inputs
        return inputs.args, inputs.kwargs


def _sizes_taken(source: Source, layout: BatchLayout, symbols: Mapping[tuple[int, int], object]) -> dict[tuple[int, int], str]:
    """Return the sizes that calls may change, pairs (leaf, dimension) -> kind.

    The last dimension of (batch, samples) and (batch, channels, samples) is left out where traces of twice the size, also in all others of
    this size, show that the model takes one number of features; so is the dimension of channels beside samples.
    """
    kinds, leaves = source.inputs.other_sizes(layout), source.inputs.leaves

    def is_taken(*pairs: tuple[int, int]) -> bool:
        return takes_twice(source.model, source.inputs, source.training, pairs)

    samples: set[tuple[int, int]] = set()
    for pair in (pair for pair, kind in kinds.items() if kind == "samples"):
        alike = [(leaf, dim) for leaf, dim in kinds if leaves[leaf].shape[dim] == leaves[pair[0]].shape[pair[1]]]
        if pair not in samples and is_taken(*alike):
            samples.update(each for each in alike if kinds[each] == "samples")
        elif pair not in samples and len(alike) > 1 and is_taken(pair):
            samples.add(pair)
    beside = {(leaf, 1) for leaf, dimension in samples if dimension == 2}
    channels = {pair for pair in beside if pair in kinds and pair not in symbols and not is_taken(pair)}
    return {pair: kind for pair, kind in kinds.items() if pair not in channels and (kind != "samples" or pair in samples)}


def _has_constants_of(graph: ModelGraph, other: ModelGraph) -> bool:
    """Return whether a graph computes with the constants of another one, whose values ranks hold."""
    pairs = [(value, other.constants.get(name)) for name, value in graph.constants.items()]
    return all(value is held or (held is not None and not value.is_meta and torch.equal(value, held)) for value, held in pairs)


def _unique_names(kinds: Mapping[tuple[int, int], str], symbols: Mapping[tuple[int, int], object]) -> dict[tuple[int, int], str]:
    """Return a name for each size: one for all dimensions of one symbol; ``length``, ``length_2``, ... for several of a kind."""
    unique: dict[tuple[int, int], str] = {}
    by_symbol: dict[object, str] = {}
    for pair, kind in kinds.items():
        name = "length" if kind == "samples" else kind
        key = symbols.get(pair, pair)
        if key not in by_symbol:
            taken = sum(other.partition("_")[0] == name for other in by_symbol.values())
            by_symbol[key] = f"{name}_{taken + 1}" if taken else name
        unique[pair] = by_symbol[key]
    return unique


def _words(sizes: Mapping[str, int]) -> str:
    """Return sizes as text: ``length 7, width 64``."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
