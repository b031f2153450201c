"""How long the collectives of one rank's graph take in a step: forward, their duals in the backward, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cost_models import communication
from cost_models.hardware import Cluster, Link
from cost_models.sizes import Size
from passes.ir import collectives
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.size_expression import bytes_of

__all__ = ["collective_seconds"]

Formula = Callable[[Size, int, Link], Size]


def _nothing(_size: Size, _n_ranks: int, _link: Link) -> Size:
    return 0


_FORMULAS: Mapping[Any, tuple[Formula, Formula]] = {
    collectives.all_reduce: (communication.all_reduce, _nothing),
    collectives.vary: (_nothing, communication.all_reduce),
    collectives.all_gather: (communication.all_gather, communication.reduce_scatter),
    collectives.replicate: (communication.all_gather, _nothing),
    collectives.take: (_nothing, communication.all_gather),
    collectives.reduce_scatter: (communication.reduce_scatter, communication.all_gather),
    collectives.exchange: (communication.all_to_all, communication.all_to_all),
}
"""Operator -> how long it takes forward and backward, by the bytes of the whole value."""


def collective_seconds(graph: ModelGraph, mesh: Mesh, cluster: Cluster, n_microbatches: int) -> float:
    """Seconds of communication between the ranks of a stage in one step, if nothing hides it.

    Args:
        graph: what rank 0 computes, with its collectives.
        mesh: of all ranks.
        n_microbatches: microbatches of a step; gradients are summed once.
    """
    links = {name: _slowest(mesh, name, cluster) for name in mesh.cutting.names}
    seconds = 0.0
    for node in graph.computing_nodes():
        if node.target not in _FORMULAS:
            continue
        over = next(argument for argument in node.args if isinstance(argument, str) and argument in links)
        size = _whole_bytes(graph, node, mesh.length(over))
        parts = 1 if _needs_gradient(node) else 0
        forward, backward = _FORMULAS[node.target]
        link = links[over]
        each = forward(size / n_microbatches, mesh.length(over), link) + parts * backward(size / n_microbatches, mesh.length(over), link)
        seconds += float(each) * n_microbatches
    nodes = {node.name: node for node in graph.graph.nodes}
    for name, dimensions in graph.part.reduced.items():
        for dimension in dimensions if graph.training else ():
            size = bytes_of(nodes[name].meta["val"], graph.batch, graph.batch_size)
            seconds += float(communication.all_reduce(size, mesh.length(dimension), links[dimension]))
    return seconds


def _whole_bytes(graph: ModelGraph, node: Any, count: int) -> float:
    """The larger of what goes in and comes out is whole; of an exchange, neither is."""
    sizes = [value for value in (node.args[0].meta["val"], node.meta["val"]) if isinstance(value, Tensor)]
    largest = max(bytes_of(value, graph.batch, graph.batch_size) for value in sizes)
    return float(largest * (count if node.target is collectives.exchange else 1))


def _needs_gradient(node: Any) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _slowest(mesh: Mesh, name: str, cluster: Cluster) -> Link:
    """The slowest link between neighbours along a mesh dimension."""
    group = mesh.group(0, (name,))
    links = [cluster.link(one, other) for one, other in zip(group, (*group[1:], group[0]), strict=True) if one != other]
    return min(links, key=lambda link: link.bandwidth)
