"""How long the collectives of one rank's graph take in a step: forward, their duals in the backward, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cost_models.group_communication import Collective, collective_time
from cost_models.hardware import Cluster
from passes.ir import collectives
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.size_expression import bytes_of

__all__ = ["collective_seconds"]

_KINDS: Mapping[Any, tuple[Collective | None, Collective | None]] = {
    collectives.all_reduce: ("all_reduce", None),
    collectives.vary: (None, "all_reduce"),
    collectives.all_gather: ("all_gather", "reduce_scatter"),
    collectives.replicate: ("all_gather", None),
    collectives.take: (None, "all_gather"),
    collectives.reduce_scatter: ("reduce_scatter", "all_gather"),
    collectives.exchange: ("all_to_all", "all_to_all"),
}
"""Operator -> what it does forward and backward."""


def collective_seconds(graph: ModelGraph, mesh: Mesh, cluster: Cluster, n_microbatches: int) -> float:
    """Seconds of communication between the ranks of a stage in one step, if nothing hides it.

    Args:
        graph: what rank 0 computes, with its collectives.
        mesh: of all ranks.
        n_microbatches: microbatches of a step; gradients are summed once.
    """
    groups = {name: tuple(dict.fromkeys(mesh.group(rank, (name,)) for rank in range(mesh.size))) for name in mesh.cutting.names}

    def seconds_of(kind: Collective | None, size: float, over: str) -> float:
        return 0.0 if kind is None else collective_time(kind, size, groups[over][0], cluster, at_once=groups[over])

    seconds = 0.0
    for node in graph.computing_nodes():
        if node.target not in _KINDS:
            continue
        over = next(argument for argument in node.args if isinstance(argument, str) and argument in groups)
        size = _whole_bytes(graph, node) / n_microbatches
        forward, backward = _KINDS[node.target]
        seconds += seconds_of(forward, size, over) * n_microbatches
        if _needs_gradient(node):
            seconds += seconds_of(backward, size, over) * n_microbatches
    nodes = {node.name: node for node in graph.graph.nodes}
    for name, dimensions in graph.part.reduced.items():
        for dimension in dimensions if graph.training else ():
            seconds += seconds_of("all_reduce", bytes_of(nodes[name].meta["val"], graph.batch, graph.batch_size), dimension)
    return seconds


def _whole_bytes(graph: ModelGraph, node: Any) -> float:
    """The larger of what goes in and comes out is whole; of an exchange, both are what one rank holds."""
    sizes = [value for value in (node.args[0].meta["val"], node.meta["val"]) if isinstance(value, Tensor)]
    return float(max(bytes_of(value, graph.batch, graph.batch_size) for value in sizes))


def _needs_gradient(node: Any) -> bool:
    return bool(node.meta["val"].is_floating_point())
