"""Replicate the values between stages with submeshes of different shape: they are whole on the ranks of both.

Before (stage 1 begins with ``linear_1``):          After:

    relu = aten.relu(linear)                            relu = aten.relu(linear)
    linear_1 = aten.linear(relu, ...)                   relu_crossing = aten.alias(relu)
                                                        linear_1 = aten.linear(relu_crossing, ...)

So a value has one name and one size for all stages, whatever their submeshes shard. Replicable nodes (``passes.analysis.replicable``),
which every stage computes for itself, are replicated too. Reshards of a value that one stage makes are not visible to the next, which
starts from the value itself (``passes.spmd.reshard``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from passes.analysis.replicable import replicable_nodes
from passes.graph.lazy_graph_module import rewritten
from passes.ir.graph import ModelGraph
from passes.stages.split import is_read_later, stage_of_nodes

_WHOLE = "whole_on_each_rank"
"""Key of ``node.meta``: the value is replicated over the submesh of its stage."""

_STAGE = "stage_between_borders"
"""Key of ``node.meta``: the stage that computes the node."""


def is_whole(node: fx.Node) -> bool:
    """Return whether a value is marked as replicated over the submesh of its stage."""
    return _WHOLE in node.meta


def stage_within(node: fx.Node) -> int | None:
    """Return the stage that computes a node of a marked graph; None for placeholders and replicable nodes."""
    stage = node.meta.get(_STAGE)
    return stage if isinstance(stage, int) else None


def mark_boundaries(graph: ModelGraph, first_nodes: Sequence[str]) -> ModelGraph:
    """Return the graph with a replicated alias, at the end of its stage, of each value that a later stage reads.

    The last stage returns all results of the model, so it reads those of earlier stages.

    Args:
        first_nodes: for each stage, the name of its first node, in graph order.
    """
    stages, replicable, last = stage_of_nodes(graph, first_nodes), replicable_nodes(graph), len(first_nodes) - 1
    target, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    stage, tensors_of_stage = 0, list[fx.Node]()
    for node in graph.graph.nodes:
        stage_of_node = stages.get(node.name, stage)
        if stage_of_node > stage or node.op == "output":
            _add_aliases(target, [value for value in tensors_of_stage if is_read_later(value, stages, stage, output=last)], copies)
            tensors_of_stage.clear()
            stage = stage_of_node
        copies[node] = target.node_copy(node, copies.__getitem__)
        if node.name in replicable:
            copies[node].meta[_WHOLE] = True
        elif node.name in stages:
            copies[node].meta[_STAGE] = stage
        if isinstance(node.meta.get("val"), Tensor) and node.name in stages:
            tensors_of_stage.append(node)
    return rewritten(graph, target, {node.name: copy.name for node, copy in copies.items()})


def _add_aliases(target: fx.Graph, crossing: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Append an alias of each value that crosses to a later stage, and replace the value by it in ``copies``: later nodes read it."""
    for node in crossing:
        alias = target.create_node("call_function", torch.ops.aten.alias.default, (copies[node],), name=f"{node.name}_crossing")
        alias.meta = {**copies[node].meta, _WHOLE: True}
        copies[node] = alias
