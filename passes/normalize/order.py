"""Bring an exported graph into the form that every later phase relies on: the steps, in their order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import sympy
from torch import fx

from passes.graph.buffer_writes import verify_writes
from passes.graph.canonicalize import remove_noise
from passes.graph.provenance import complete_provenance, place_of
from passes.ir.graph import Autocast
from passes.ir.phase import Phase, PhaseRunner
from passes.normalize.autocast.casts import write_casts
from passes.normalize.autocast.operation_lists import traced_in
from passes.normalize.functionalize import functionalize
from passes.normalize.inline.subgraphs import inline_subgraphs
from passes.normalize.inline.vmap import inline_vmap
from passes.normalize.randomness.draw_order import draw_in_memory_order
from passes.normalize.randomness.recurrent_dropout import call_layer_by_layer
from passes.normalize.row_orders import keep_rows_in_order
from passes.normalize.symbolic_batch import number_paddings, pin_squeezes, read_sizes_from_batch
from passes.normalize.tidy import assign_by_mask, compute_outputs, name_nodes, place_getitems
from passes.normalize.tied_parameters import tie_parameters

__all__ = ["NORMALIZE", "ExportedGraph", "normalize"]


@dataclass(frozen=True)
class ExportedGraph:
    """A graph on its way to the normal form. Steps rewrite it in place, all but the last; what they find is kept beside it.

    Attributes:
        module: of the graph.
        graph: of the module; after the last step, the named copy of it.
        batch: the placeholder of the batch size; None when it is fixed.
        symbol: its symbol.
        tied: placeholder to remove -> placeholder of the same tensor.
        inputs: placeholders of the model's inputs.
        buffers: placeholders of its buffers.
        without_gradient: placeholders that never require a gradient.
        autocast: what it was traced in.
        notes: what the user should know.
    """

    module: fx.GraphModule
    graph: fx.Graph
    batch: fx.Node | None
    symbol: sympy.Symbol | None
    tied: Mapping[str, str]
    inputs: Collection[str]
    buffers: Collection[str]
    without_gradient: Collection[str]
    autocast: Autocast | None = None
    notes: tuple[str, ...] = ()


def _rewriting(rewrite: Callable[[ExportedGraph], None]) -> Callable[[ExportedGraph, None], ExportedGraph]:
    """Return a phase from a function that rewrites the graph in place and adds no notes."""

    def step(exported: ExportedGraph, _: None) -> ExportedGraph:
        rewrite(exported)
        return replace(exported)

    return step


def _inline_vmap(exported: ExportedGraph) -> None:
    with traced_in(exported.autocast):
        inline_vmap(exported.module)


def _symbolic_batch(exported: ExportedGraph, _: None) -> ExportedGraph:
    if exported.batch is None or exported.symbol is None:
        return exported
    read_sizes_from_batch(exported.graph, exported.batch, exported.symbol)
    number_paddings(exported.graph)
    return replace(exported, notes=(*exported.notes, *map(_note_of_squeeze, pin_squeezes(exported.graph))))


def _note_of_squeeze(node: fx.Node) -> str:
    return f"the model squeezes the result of {place_of(node)}, which has a batch; partitioned, a batch of one row keeps its dimension"


def _functionalize(exported: ExportedGraph, _: None) -> ExportedGraph:
    unwritten = functionalize(exported.graph, exported.inputs, exported.buffers, exported.without_gradient)
    return replace(exported, notes=(*map(_note_of_input, unwritten), *exported.notes))


def _note_of_input(name: str) -> str:
    return f"the model writes into its input {name}; partitioned, it leaves the caller's tensor as it is"


def _draw_order(exported: ExportedGraph, _: None) -> ExportedGraph:
    place_getitems(exported.graph)
    call_layer_by_layer(exported.graph)
    ambiguous = draw_in_memory_order(exported.graph)
    return exported if exported.batch is None else replace(exported, notes=(*exported.notes, *map(_note_of_draw, ambiguous)))


def _note_of_draw(node: fx.Node) -> str:
    return (
        f"{place_of(node)} draws random numbers for an expanded value that is not row-major; for a batch of one row they may be others "
        f"than the model's: call .contiguous() in front of it"
    )


def _tidy(exported: ExportedGraph, _: None) -> ExportedGraph:
    assign_by_mask(exported.graph)
    compute_outputs(exported.graph)
    complete_provenance(exported.graph)
    return replace(exported, graph=name_nodes(exported.graph))


FUNCTIONAL = ("functionalize", "remove_noise", "row_orders", "draw_order", "tidy")
"""The steps after which no call writes memory, except the declared writes of buffers."""

NORMALIZE: tuple[Phase[ExportedGraph, None], ...] = (
    Phase("tie_parameters", _rewriting(lambda exported: tie_parameters(exported.graph, exported.tied))),
    Phase("inline_vmap", _rewriting(_inline_vmap)),
    Phase("write_casts", _rewriting(lambda exported: write_casts(exported.module, exported.autocast))),
    Phase("inline", _rewriting(lambda exported: inline_subgraphs(exported.module, exported.without_gradient))),
    Phase("symbolic_batch", _symbolic_batch),
    Phase("functionalize", _functionalize),
    Phase("remove_noise", _rewriting(lambda exported: remove_noise(exported.graph, exported.without_gradient))),
    Phase("row_orders", _rewriting(lambda exported: keep_rows_in_order(exported.graph))),
    Phase("draw_order", _draw_order),
    Phase("tidy", _tidy),
)
"""The order: one name for each tensor, ``vmap`` inlined, casts as calls, subgraphs inlined, sizes read from the batch, no writes, no
no-ops, rows in their own order, draws in the order of memory, names."""


def normalize(exported: ExportedGraph) -> ExportedGraph:
    """Run the steps; returns the graph in normal form, with notes of what the user should know."""
    return PhaseRunner(NORMALIZE, exported, _check).after(NORMALIZE[-1].name, None)


def _check(exported: ExportedGraph, phase: str) -> None:
    exported.graph.lint()
    if phase in FUNCTIONAL:
        verify_writes(exported.graph, phase)
