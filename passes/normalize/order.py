"""Bring an exported graph into the form that every later step relies on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sympy
from torch import fx

from passes.graph.buffer_writes import verify_writes
from passes.graph.canonicalize import remove_noise
from passes.graph.provenance import complete_provenance, place_of
from passes.ir.graph import Autocast
from passes.normalize.autocast_casts import write_casts
from passes.normalize.draw_order import draw_in_memory_order
from passes.normalize.functionalize import functionalize
from passes.normalize.inline_subgraphs import inline_subgraphs
from passes.normalize.inline_vmap import inline_vmap
from passes.normalize.symbolic_batch import number_paddings, pin_squeezes, read_sizes_from_batch
from passes.normalize.tidy import compute_outputs, name_nodes, place_getitems
from passes.normalize.tied_parameters import tie_parameters

__all__ = ["normalize"]


def normalize(
    module: fx.GraphModule,
    batch: fx.Node | None,
    symbol: sympy.Symbol | None,
    tied: Mapping[str, str],
    inputs: Collection[str],
    buffers: Collection[str],
    without_gradient: Collection[str],
    autocast: Autocast | None = None,
) -> tuple[fx.Graph, tuple[str, ...]]:
    """The graph of a module, rewritten, and what the user should know.

    Args:
        batch: the placeholder of the batch size; None when it is fixed.
        symbol: its symbol.
        tied: placeholder to remove -> placeholder of the same tensor.
        inputs: placeholders of the model's inputs.
        buffers: placeholders of its buffers.
        without_gradient: placeholders that never require a gradient.
        autocast: what it was traced in.
    """
    graph = module.graph
    pinned: tuple[fx.Node, ...] = ()
    tie_parameters(graph, tied)
    write_casts(module, autocast)
    inline_vmap(module)
    inline_subgraphs(module, without_gradient)
    if batch is not None and symbol is not None:
        read_sizes_from_batch(graph, batch, symbol)
        number_paddings(graph)
        pinned = pin_squeezes(graph)
    unwritten = functionalize(graph, inputs, buffers, without_gradient)
    remove_noise(graph, without_gradient)
    place_getitems(graph)
    draw_in_memory_order(graph)
    compute_outputs(graph)
    complete_provenance(graph)
    named = name_nodes(graph)
    named.lint()
    verify_writes(named, "normalization")
    return named, (*(_unwritten(name) for name in unwritten), *(_pinned(node) for node in pinned))


def _unwritten(name: str) -> str:
    return f"the model writes into its input {name}; partitioned, it leaves the caller's tensor as it is"


def _pinned(node: fx.Node) -> str:
    return f"the model squeezes the result of {place_of(node)}, which has a batch; partitioned, a batch of one row keeps its dimension"
