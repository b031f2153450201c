"""Bring an exported graph into the form that every later step relies on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sympy
from torch import fx

from passes.batch_size import read_sizes_from_batch
from passes.buffer_writes import verify_writes
from passes.compute_outputs import compute_outputs
from passes.draw_order import draw_in_memory_order
from passes.explicit_casts import write_casts
from passes.functionalize import functionalize
from passes.inline_subgraphs import inline_subgraphs
from passes.inline_vmap import inline_vmap
from passes.ir.autocast import Autocast
from passes.name_nodes import name_nodes
from passes.number_paddings import number_paddings
from passes.pin_squeezes import pin_squeezes
from passes.place_getitems import place_getitems
from passes.provenance import complete_provenance, place_of
from passes.remove_noise import remove_noise
from passes.tie_parameters import tie_parameters

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
