"""Mark what crosses from stage to stage, where these are of unlike width: it lies whole on the ranks of both.

Before (stage 1 begins with ``linear_1``):          After:

    relu = aten.relu(linear)                            relu = aten.relu(linear)
    linear_1 = aten.linear(relu, ...)                   relu_crossing = aten.alias(relu)
                                                        linear_1 = aten.linear(relu_crossing, ...)

However many ranks share a stage, and whatever they cut, its neighbours know the value by one name and in one size. What every stage
computes for itself (``passes.analysis.replicable``) is computed whole, too, so that no stage sends what another one does not. What a stage
makes of a value for its own calls, a part or a sum, stays in it: the next one begins with the value (``passes.spmd.reshard``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from passes.analysis.replicable import replicable_nodes
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.ir.graph import ModelGraph
from passes.stages.split import stage_of_nodes

__all__ = ["is_whole", "mark_boundaries", "stage_within"]

_WHOLE = "whole_on_each_rank"
"""What says of a node that it is not cut over the ranks that share a stage."""

_STAGE = "stage_between_borders"
"""What says of a node which stage computes it, where these are of unlike width."""


def is_whole(node: fx.Node) -> bool:
    """Whether a value is whole on every rank that shares its stage."""
    return _WHOLE in node.meta


def stage_within(node: fx.Node) -> int | None:
    """The stage that computes a node, where stages are of unlike width; None for what is no stage's own."""
    stage = node.meta.get(_STAGE)
    return stage if isinstance(stage, int) else None


def mark_boundaries(graph: ModelGraph, first_nodes: Sequence[str]) -> ModelGraph:
    """The graph with an alias, at the end of its stage, of each value that a later stage reads or the model returns from an earlier one.

    Args:
        first_nodes: for each stage, the name of its first node, in graph order.
    """
    stages, replicable, last = stage_of_nodes(graph, first_nodes), replicable_nodes(graph), len(first_nodes) - 1
    target, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    within: dict[fx.Node, fx.Node] = {}
    stage = 0
    for node in graph.graph.nodes:
        here = stages.get(node.name, stage)
        if here > stage or node.op == "output":
            _add_borders(target, [each for each in within if _crosses(each, stages, stage, last)], copies)
            within.clear()
            stage = here
        copies[node] = target.node_copy(node, copies.__getitem__)
        if node.name in replicable:
            copies[node].meta[_WHOLE] = True
        elif node.name in stages:
            copies[node].meta[_STAGE] = stage
        if isinstance(node.meta.get("val"), Tensor) and node.name in stages:
            within[node] = copies[node]
    target.lint()
    names = {node.name: copy.name for node, copy in copies.items()}
    outputs = tuple(dataclasses.replace(each, node=None if each.node is None else names[each.node]) for each in graph.outputs)
    return dataclasses.replace(graph, module=LazyGraphModule({}, target, class_name="Model"), outputs=outputs)


def _crosses(node: fx.Node, stages: dict[str, int], stage: int, last: int) -> bool:
    """Whether a later stage reads a value, directly or through what every stage computes for itself, or is the one that returns it."""
    return any(
        stage < last if user.op == "output" else stages[user.name] > stage if user.name in stages else _crosses(user, stages, stage, last)
        for user in node.users
    )


def _add_borders(target: fx.Graph, crossing: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Behind the end of a stage: whoever comes later reads the alias."""
    for node in crossing:
        alias = target.create_node("call_function", torch.ops.aten.alias.default, (copies[node],), name=f"{node.name}_crossing")
        alias.meta = {**copies[node].meta, _WHOLE: True}
        copies[node] = alias
