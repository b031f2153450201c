"""Bring an exported graph into the form that every later phase relies on: the steps, in their order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from passes.graph.aliasing import mutated_arguments, writes_statistics
from passes.graph.buffer_writes import verify_writes
from passes.graph.canonicalize import remove_noise
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.provenance import complete_provenance, place_of
from passes.ir.graph import Autocast
from passes.ir.phase import Phase, PhaseRunner
from passes.normalize.autocast.casts import write_casts
from passes.normalize.causal_masks import name_masks
from passes.normalize.functional.functionalize import functionalize
from passes.normalize.functional.returned_views import add_bases
from passes.normalize.inline.control_flow import inline_control_flow
from passes.normalize.inline.subgraphs import inline_subgraphs
from passes.normalize.inline.vmap import inline_vmap
from passes.normalize.randomness.draw_order import draw_in_memory_order
from passes.normalize.randomness.recurrent_dropout import call_layer_by_layer
from passes.normalize.rows.affine_grids import write_grids
from passes.normalize.rows.embedding_bags import write_bags
from passes.normalize.rows.row_orders import keep_rows_in_order
from passes.normalize.shared.equal_computations import share_equal_computations
from passes.normalize.shared.tied_parameters import tie_parameters
from passes.normalize.symbolic_batch import fix_sizes, number_paddings, pin_squeezes, read_sizes_from_batch
from passes.normalize.tidy import assign_by_mask, compute_outputs, name_nodes, place_getitems


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
        written: placeholders of the inputs that the graph wrote in place: its last results are their new values.
        arguments: index of a result -> placeholder of the written input that it is.
        n_bases: how many results, the last ones, are only there since others are views of them.
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
    written: tuple[str, ...] = ()
    arguments: Mapping[int, str] = field(default_factory=dict)
    n_bases: int = 0


@dataclass(frozen=True)
class Sizes:
    """Sizes for which a graph is normalized.

    Attributes:
        numbers: symbol of each open size, other than the batch -> the number that replaces it.
    """

    numbers: Mapping[sympy.Symbol, int]


def _rewriting(rewrite: Callable[[ExportedGraph], None]) -> Callable[[ExportedGraph, Sizes], ExportedGraph]:
    """Return a phase from a function that rewrites the graph in place and adds no notes."""

    def step(exported: ExportedGraph, _: Sizes) -> ExportedGraph:
        rewrite(exported)
        return replace(exported)

    return step


def _share(exported: ExportedGraph) -> None:
    share_equal_computations(exported.graph, exported.inputs, exported.without_gradient)


def _fix_sizes(exported: ExportedGraph, sizes: Sizes) -> ExportedGraph:
    """Return the state with a copy of the graph, so that the state can be fixed to other sizes later."""
    if not sizes.numbers or exported.batch is None or exported.symbol is None:
        return exported
    graph = fix_sizes(exported.graph, exported.batch, exported.symbol, sizes.numbers)
    batch = next(node for node in graph.nodes if node.name == exported.batch.name)
    return replace(exported, module=LazyGraphModule(exported.module, graph), graph=graph, batch=batch)


def _symbolic_batch(exported: ExportedGraph, _: Sizes) -> ExportedGraph:
    if exported.batch is None or exported.symbol is None:
        return exported
    read_sizes_from_batch(exported.graph, exported.batch, exported.symbol)
    number_paddings(exported.graph)
    return replace(exported, notes=(*exported.notes, *map(_note_of_squeeze, pin_squeezes(exported.graph))))


def _note_of_squeeze(node: fx.Node) -> str:
    return f"the model squeezes the result of {place_of(node)}, which has a batch; partitioned, a batch of one row keeps its dimension"


def _functionalize(exported: ExportedGraph, _: Sizes) -> ExportedGraph:
    output = exported.graph.output_node()
    (results,) = output.args
    assert isinstance(results, tuple | list)
    returned = {place: _written_placeholder(result) for place, result in enumerate(results) if isinstance(result, fx.Node)}
    written = functionalize(exported.graph, exported.inputs, exported.buffers, exported.without_gradient)
    (results,) = output.args  # as they are after all writes
    assert isinstance(results, tuple | list)
    output.args = ((*results, *written.values()),)
    arguments = {place: name for place, name in returned.items() if name in written}
    return replace(exported, written=tuple(written), arguments=arguments)


def _written_placeholder(node: fx.Node) -> str:
    """Return the name of the tensor that a node is: of an in-place operation, that which it writes."""
    while node.op == "call_function" and not writes_statistics(node) and (written := mutated_arguments(node)):
        node = written[0]
    return node.name


def _causal_masks(exported: ExportedGraph, _: Sizes) -> ExportedGraph:
    failed = name_masks(exported.graph, exported.batch)
    notes = (f"it is not known whether the mask of {place_of(mask)} is causal: {error}" for mask, error in failed.items())
    return replace(exported, notes=(*exported.notes, *notes))


def _draw_order(exported: ExportedGraph, _: Sizes) -> ExportedGraph:
    place_getitems(exported.graph)
    call_layer_by_layer(exported.graph)
    ambiguous = draw_in_memory_order(exported.graph)
    return exported if exported.batch is None else replace(exported, notes=(*exported.notes, *map(_note_of_draw, ambiguous)))


def _note_of_draw(node: fx.Node) -> str:
    return (
        f"{place_of(node)} draws random numbers for an expanded value that is not row-major; for a batch of one row they may differ "
        f"from the model's: call .contiguous() before it"
    )


def _tidy(exported: ExportedGraph, _: Sizes) -> ExportedGraph:
    assign_by_mask(exported.graph)
    compute_outputs(exported.graph)
    complete_provenance(exported.graph)
    graph = name_nodes(exported.graph)
    return replace(exported, graph=graph, n_bases=add_bases(graph, exported.inputs))


FUNCTIONAL = ("functionalize", "remove_noise", "embedding_bags", "affine_grids", "causal_masks", "row_orders", "draw_order", "tidy")
"""The steps after which no call writes memory, except the declared writes of buffers."""

NORMALIZE: tuple[Phase[ExportedGraph, Sizes], ...] = (
    Phase("tie_parameters", _rewriting(lambda exported: tie_parameters(exported.graph, exported.tied))),
    Phase("control_flow", _rewriting(lambda exported: inline_control_flow(exported.module))),
    Phase("inline_vmap", _rewriting(lambda exported: inline_vmap(exported.module, exported.autocast))),
    Phase("write_casts", _rewriting(lambda exported: write_casts(exported.module, exported.autocast))),
    Phase("inline", _rewriting(lambda exported: inline_subgraphs(exported.module, exported.without_gradient))),
    Phase("share", _rewriting(_share)),
    Phase("fix_sizes", _fix_sizes),
    Phase("symbolic_batch", _symbolic_batch),
    Phase("functionalize", _functionalize),
    Phase("remove_noise", _rewriting(lambda exported: remove_noise(exported.graph, exported.without_gradient))),
    Phase("embedding_bags", _rewriting(lambda exported: write_bags(exported.graph))),
    Phase("affine_grids", _rewriting(lambda exported: write_grids(exported.graph))),
    Phase("causal_masks", _causal_masks),
    Phase("row_orders", _rewriting(lambda exported: keep_rows_in_order(exported.graph))),
    Phase("draw_order", _draw_order),
    Phase("tidy", _tidy),
)
"""The order: one name for each tensor, operators of control flow inlined, ``vmap`` inlined, casts as calls, subgraphs inlined, equal casts
and tables shared, lengths numbers, sizes read from the batch, no writes, no no-ops, bags as lookups, affine grids as products, causal masks
by their name, rows in their own order, draws in the order of memory, names."""

_N_FOR_ALL_SIZES = [phase.name for phase in NORMALIZE].index("fix_sizes")
"""The steps before ``fix_sizes`` are the same for all sizes."""


class Normalizer:
    """Normalizes one exported graph for several sizes of its inputs: the steps that are the same for all sizes run once.

    Args:
        exported: the graph; it is rewritten. Without open sizes it can be normalized once.
    """

    def __init__(self, exported: ExportedGraph) -> None:
        self._common = PhaseRunner(NORMALIZE[:_N_FOR_ALL_SIZES], exported, _check)

    def normalize(self, numbers: Mapping[sympy.Symbol, int]) -> ExportedGraph:
        """Run the steps; return the graph in normal form for these sizes, with notes for the user."""
        sizes = Sizes(numbers)
        start = self._common.after(NORMALIZE[_N_FOR_ALL_SIZES - 1].name, sizes)
        return PhaseRunner(NORMALIZE[_N_FOR_ALL_SIZES:], start, _check).after(NORMALIZE[-1].name, sizes)


def _check(exported: ExportedGraph, phase: str) -> None:
    exported.graph.lint()
    if phase in FUNCTIONAL:
        verify_writes(exported.graph, phase)
