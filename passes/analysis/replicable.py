"""Replicable nodes: every stage may compute them itself instead of receiving them (position ids, masks, rotary tables).

In a transformer:

    batch ---- arange ---- unsqueeze ----+
                                         +---- le ---- ...      replicable: nothing here is learned, drawn or written
    input_ids ---- ne --- slice ---------+
    input_ids + wte ---- embedding ---- ...                     not replicable: depends on a parameter
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import fx

from passes.graph.aliasing import aliasing
from passes.graph.dependencies import is_differentiable
from passes.graph.schemas import is_deterministic, packet
from passes.ir.graph import ModelGraph

aten = torch.ops.aten

_CUTS_GRADIENT = frozenset(
    {
        aten.detach,
        aten.full_like,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones_like,
        aten.sym_numel,
        aten.sym_size,
        aten.zeros_like,
    }
)
"""They pass no gradient on: ``detach``, and those that read the sizes of their argument alone."""


def replicable_nodes(graph: ModelGraph) -> frozenset[str]:
    """Return the names of nodes that have the same value on every rank, and pass no gradient on.

    Such a node is deterministic, and its arguments are replicable nodes, the batch size, constants, buffers that no node writes, or inputs
    of the model without a gradient. A floating-point input may require one, so only results that cut the gradient (``x != 0``,
    ``zeros_like(x)``) may be computed from it. Memory that is written in place is not replicable: its value depends on the time of reading.
    """
    memory = aliasing(graph.graph)
    without_gradient = graph.buffers.keys() | graph.constants.keys()
    replicable: set[str] = set()
    available: set[str] = set()
    for node in graph.graph.nodes:
        if memory.written(node):
            continue
        if node.op == "placeholder":
            if node.name not in graph.parameters:
                available.add(node.name)
        elif node.op == "call_function" and _is_replicable(node, available, without_gradient):
            available.add(node.name)
            replicable.add(node.name)
    return frozenset(replicable)


def read_by_replicable(graph: ModelGraph) -> frozenset[str]:
    """Return the buffers and constants that replicable nodes read.

    Which stages compute such nodes depends on the sharding of the batch, since nodes with collectives belong to one stage. A rank that
    stores all of these buffers and constants can run the programs of every such sharding.
    """
    replicable, stored = replicable_nodes(graph), graph.buffers.keys() | graph.constants.keys()
    operands = (node.all_input_nodes for node in graph.graph.nodes if node.name in replicable)
    return frozenset(operand.name for sources in operands for operand in sources if operand.name in stored)


def _is_replicable(node: fx.Node, available: AbstractSet[str], without_gradient: AbstractSet[str]) -> bool:
    """Return whether a node is deterministic, reads only ``available`` nodes, and would pass no gradient to a floating-point input."""
    if not is_deterministic(node.target) or any(argument.name not in available for argument in node.all_input_nodes):
        return False
    cuts_gradient = packet(node.target) in _CUTS_GRADIENT or not is_differentiable(node)
    return cuts_gradient or not any(
        argument.op == "placeholder" and argument.name not in without_gradient and is_differentiable(argument)
        for argument in node.all_input_nodes
    )
