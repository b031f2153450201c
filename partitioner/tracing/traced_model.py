"""A traced model: its graph for the sizes of the example, and for every other size that a call may have.

    trace, with open lengths ──> graph for length 128, which is planned
                            └──> graph for length 7, when a call has it: no new trace, and the names of the planned graph

Only the batch stays open in a graph. For a length that the trace does not serve (the model makes it a constant, or the length is one) the
model is traced again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from partitioner.tracing.inputs.batch_dims import BatchDims
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs
from partitioner.tracing.outputs import add_outputs
from partitioner.tracing.sizes.names_of_sizes import named_like
from partitioner.tracing.sizes.table_lookups import lookup_beyond_table, takes_of_weights
from partitioner.tracing.trace import Opened, Source, open_trace, source_of, trace_source
from passes.analysis.batch_sizes import OpenSizes
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import ConfigError, TraceError
from passes.ir.graph import Autocast, Input, ModelGraph
from passes.ir.program import at_batch

_OPEN_AT_FIRST = ("length", "samples")
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
        self._source, self._opened = source, opened
        layout = source.inputs.batch_layout(0) if opened is None else opened.exported.layout
        self._tried = set(source.inputs.sizes_of(layout, _OPEN_AT_FIRST))
        if opened is not None and takes_of_weights(opened.exported.program):
            graph = self._all_open(opened, graph)
        expressions = {} if self._opened is None else self._opened.exported.open_sizes
        known = _known_sizes(source.inputs, layout, expressions)
        self._taken = {pair: kind for pair, kind in known.items() if not _has_batch(graph, *pair)}
        self._names = {**_names_of_fixed(graph, layout), **_unique_names(self._taken, expressions)}
        self.graph = self._with_names(graph)

    def at(self, sizes: Mapping[str, int], rows: int) -> ModelGraph:
        """Return the graph for other sizes, with the names of the first graph.

        Args:
            sizes: name of a size, as in ``ModelGraph.open_sizes`` -> size.
            rows: of the call, for the error.

        Raises:
            ConfigError: the model does not take these sizes, or computes with other operations for them.
        """
        if sizes == self.graph.open_sizes:
            return self.graph
        graph, assumption = self._from_trace(sizes)
        if graph is None:
            graph = self._traced_again(sizes, rows, assumption)
        lookup = lookup_beyond_table(graph, self._source.model)
        if lookup is not None:
            raise ConfigError(
                f"{self._not_taken(sizes, rows)}: it looks up row {lookup.row} of a table that has {lookup.rows}",
                place=lookup.place,
                remedy=f"pass inputs that need at most {lookup.rows} rows of it, or build the model with a larger table",
            )
        renamed = named_like(graph, self.graph)
        if renamed is None or not _has_constants_of(graph, self.graph):
            given, planned = (self._words(each, self._unlike(sizes)) for each in (sizes, self.graph.open_sizes))
            raise ConfigError(
                f"the model computes with other operations for {given} than for {planned}, which was planned",
                remedy="partition it again with example inputs of these sizes",
            )
        return self._with_names(renamed)

    @gc_paused()
    def _from_trace(self, sizes: Mapping[str, int]) -> tuple[ModelGraph | None, str]:
        """Return the graph for sizes that the open trace serves; else None and the assumption of the trace that does not hold."""
        if self._opened is None:
            return None, ""
        exported, planned = self._opened.exported, self.graph.open_sizes
        fixed = {pair for pair, name in self._names.items() if pair not in exported.open_sizes and sizes[name] != planned[name]}
        if not fixed <= self._tried:
            self._open(fixed)
            return self._from_trace(sizes)
        by_pair = exported.open_sizes.items()
        numbers = {size: sizes[self._names[pair]] for pair, size in by_pair if isinstance(size, sympy.Symbol)}
        differ = any(sizes[self._names[pair]] != size.subs(numbers) for pair, size in by_pair)
        if fixed or differ or min(numbers.values(), default=2) < 2 or exported.assumed is None:
            return None, ""
        names = {size: self._names[pair] for pair, size in by_pair if isinstance(size, sympy.Symbol)}
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
        self._open(())
        assert self._opened is not None
        return graph if self._opened is opened else dataclasses.replace(self._opened.graph, notes=graph.notes)

    def _open(self, wanted: Collection[tuple[int, int]]) -> None:
        """Trace once more with further sizes open; keep the first trace if the model does not allow that.

        Args:
            wanted: dimensions to open, pairs (leaf, dimension), besides those of ``ModelInputs.other_sizes``.
        """
        assert self._opened is not None
        exported = self._opened.exported
        kinds = self._source.inputs.other_sizes(exported.layout)
        others = {pair: None for pair in (*kinds, *wanted) if pair in exported.open_sizes or pair not in self._tried}
        if self._tried.issuperset(others):
            return
        self._tried.update(others)
        opened = open_trace(self._source, exported.layout, tuple(others))
        if isinstance(opened, Opened) and opened.exported.open_sizes.keys() > exported.open_sizes.keys():
            self._opened = opened

    def _traced_again(self, sizes: Mapping[str, int], rows: int, assumption: str) -> ModelGraph:
        """Trace the model for these sizes alone.

        Raises:
            ConfigError: the model does not take them.
        """
        try:
            return trace_source(self.source_for(sizes))[0]
        except TraceError as error:
            reason = f"it assumes that {assumption}" if assumption else error.problem
            raise ConfigError(
                f"{self._not_taken(sizes, rows)}: {reason}",
                place=error.place,
                remedy="pass sizes for which the model itself can be called",
            ) from error

    def source_for(self, sizes: Mapping[str, int]) -> Source:
        """Return the source of a trace for these sizes."""
        inputs = self._source.inputs.with_sizes({pair: sizes[name] for pair, name in self._names.items()})
        return dataclasses.replace(self._source, inputs=inputs, is_found=False)

    def _with_names(self, graph: ModelGraph) -> ModelGraph:
        """Return a graph whose inputs say which of their sizes are open."""
        named = tuple(
            dataclasses.replace(
                leaf,
                open_sizes=tuple((dim, name) for (each, dim), name in self._names.items() if each == index),
                unproven=frozenset(dim for each, dim in self._names if each == index and (each, dim) not in self._taken),
            )
            for index, leaf in enumerate(graph.inputs)
        )
        return dataclasses.replace(graph, inputs=named, for_sizes=self if any(leaf.open_sizes for leaf in named) else None)

    def _words(self, sizes: Mapping[str, int], unlike: Sequence[Input]) -> str:
        """Return the sizes of a call as text: ``length 7, width 64``, or for inputs ``mel of shape (batch, 80, 7)``."""
        shapes = [f"{leaf.name} of shape {_at_sizes(leaf, sizes).shape_text}" for leaf in unlike]
        return ", ".join(shapes or [f"{name} {sizes[name]}" for name in self.graph.proven_sizes])

    def _not_taken(self, sizes: Mapping[str, int], rows: int) -> str:
        """Return the beginning of an error: the model does not take the sizes of a call."""
        unlike = self._unlike(sizes)
        if not unlike:
            return f"the model does not take {self._words(sizes, ())}"
        pairs = [(leaf, _at_sizes(leaf, sizes, rows)) for leaf in unlike]
        shapes = (f"{leaf.name} has shape {given.shape_text}; the model was traced with {leaf.shape_text}" for leaf, given in pairs)
        return f"{'; '.join(shapes)}, and does not take {'that' if len(unlike) == 1 else 'those'}"

    def _unlike(self, sizes: Mapping[str, int]) -> tuple[Input, ...]:
        """Return the inputs of which a call has another size than planned in a dimension that the model may take in one size alone."""

        def is_unlike(leaf: Input) -> bool:
            return any(dim in leaf.unproven and sizes[name] != leaf.shape[dim] for dim, name in leaf.open_sizes)

        return tuple(filter(is_unlike, self.graph.inputs))

    def call_of(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return args and kwargs of these sizes, to trace the model with."""
        inputs = self.source_for(sizes).inputs
        return inputs.args, inputs.kwargs


def _known_sizes(inputs: ModelInputs, layout: BatchLayout, expressions: Mapping[tuple[int, int], object]) -> dict[tuple[int, int], str]:
    """Return the sizes that a model is known to take in other numbers, pairs (leaf, dimension) -> kind.

    Those of vectors and sequences of vectors may be numbers of features, unless the trace has left them open.
    """
    kinds = inputs.other_sizes(layout).items()
    vectors = {
        index
        for index, leaf in enumerate(inputs.leaves)
        if isinstance(leaf, Tensor) and leaf.ndim < 4 and (leaf.is_floating_point() or leaf.is_complex())
    }
    return {pair: kind for pair, kind in kinds if pair in expressions or pair[0] not in vectors}


def _has_batch(graph: ModelGraph, leaf: int, dimension: int) -> bool:
    """Return whether a size of an input follows from the batch, such as that of offsets with one more at the end."""
    size = graph.inputs[leaf].shape[dimension]
    return isinstance(size, sympy.Expr) and graph.batch in size.free_symbols


def _at_sizes(leaf: Input, sizes: Mapping[str, int], rows: int | None = None) -> Input:
    """Return an input with the sizes of a call, and its rows; None: they stay open."""
    given = {dim: sizes[name] for dim, name in leaf.open_sizes}
    shape = (given.get(dim, size if rows is None else at_batch(size, rows)) for dim, size in enumerate(leaf.shape))
    return dataclasses.replace(leaf, shape=tuple(shape), open_sizes=())


def _names_of_fixed(graph: ModelGraph, layout: BatchLayout) -> dict[tuple[int, int], str]:
    """Return a name for each size of the inputs that is a number in a graph and not of the batch: ``mel.shape[2]``."""
    return {
        (index, dim): f"{leaf.name}.shape[{dim}]"
        for index, leaf in enumerate(graph.inputs)
        for dim, size in enumerate(leaf.shape)
        if isinstance(size, int) and size > 1 and dim != leaf.batch_dim and (index, dim) not in layout.dimensions
    }


def _has_constants_of(graph: ModelGraph, other: ModelGraph) -> bool:
    """Return whether a graph computes with the constants of another one, whose values ranks hold."""
    pairs = [(value, other.constants.get(name)) for name, value in graph.constants.items()]
    return all(value is held or (held is not None and not value.is_meta and torch.equal(value, held)) for value, held in pairs)


def _unique_names(kinds: Mapping[tuple[int, int], str], expressions: Mapping[tuple[int, int], object]) -> dict[tuple[int, int], str]:
    """Return a name for each size: one for all dimensions of one size; ``length``, ``length_2``, ... for several of a kind."""
    unique: dict[tuple[int, int], str] = {}
    by_size: dict[object, str] = {}
    for pair, kind in kinds.items():
        name = "length" if kind == "samples" else kind
        key = expressions.get(pair, pair)
        if key not in by_size:
            taken = sum(other.partition("_")[0] == name for other in by_size.values())
            by_size[key] = f"{name}_{taken + 1}" if taken else name
        unique[pair] = by_size[key]
    return unique
