"""Run the graphs of all ranks of a cut model node by node, side by side, each collective among their present values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import collectives
from passes.ir.mesh import Mesh
from passes.ir.microbatch import take_part
from passes.operators import draws

__all__ = ["run_in_lockstep"]

Values = list[Any]
"""One value for each rank."""


def run_in_lockstep(graphs: Sequence[fx.Graph], mesh: Mesh, given: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Run graphs that ``passes.localize`` wrote.

    Args:
        graphs: for each rank of the mesh its graph: the same calls in the same order, on parts of other sizes.
        mesh: whose dimensions the collectives name.
        given: for each rank a value for each placeholder.

    Returns:
        For each call of the whole model that gives one tensor, by name, the parts that the ranks computed.
    """
    ranks = range(len(graphs))
    environments: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    parts: dict[str, list[Tensor]] = {}
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        if nodes[0].op == "output":
            continue
        if nodes[0].op == "placeholder":
            values: Values = [given[rank][nodes[rank].name] for rank in ranks]
        else:
            arguments = [fx.map_arg(nodes[rank].args, environments[rank].__getitem__) for rank in ranks]
            keywords = [fx.map_arg(nodes[rank].kwargs, environments[rank].__getitem__) for rank in ranks]
            values = _call(nodes[0], mesh, arguments, keywords)
        for rank in ranks:
            environments[rank][nodes[rank]] = values[rank]
        name = nodes[0].meta.get("part_of")
        if name is not None and nodes[0].op == "call_function" and isinstance(values[0], Tensor):
            parts[name] = [value.detach() for value in values]
    return parts


def _call(node: fx.Node, mesh: Mesh, arguments: Sequence[tuple[Any, ...]], keywords: Sequence[Mapping[str, Any]]) -> Values:
    assert callable(node.target)
    if node.target in collectives.COLLECTIVES:
        carry_out = _COLLECTIVES[node.target]
        return [carry_out(rank, _Group(mesh, rank, arguments[rank]), arguments) for rank in range(mesh.size)]
    if draws(node):
        drawn = node.target(*arguments[0], **keywords[0])
        return [drawn for _ in arguments]
    return [node.target(*own, **named) for own, named in zip(arguments, keywords, strict=True)]


class _Group:
    """The ranks that one rank communicates with, and its place among them."""

    def __init__(self, mesh: Mesh, rank: int, arguments: Sequence[Any]) -> None:
        over = next(each for each in arguments if isinstance(each, str) and each in mesh.names)
        self.ranks = mesh.group(rank, (over,))
        self.place = self.ranks.index(rank)


def _reduced(_rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    values = [arguments[other][0] for other in group.ranks]
    return _fold(_OPERATIONS[arguments[group.ranks[0]][2]], values)


_OPERATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def _fold(operation: Callable[[Tensor, Tensor], Tensor], values: Sequence[Tensor]) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = operation(result, value)
    return result


def _gathered(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    return torch.cat([arguments[other][0] for other in group.ranks], arguments[rank][1])


def _part(value: Tensor, dim: int, sizes: Sequence[int], group: _Group) -> Tensor:
    return take_part(value, dim, sizes or len(group.ranks), group.place)


def _scattered(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    _, dim, _, _, sizes, _ = arguments[rank]
    return _part(_fold(torch.add, [arguments[other][0] for other in group.ranks]), dim, sizes, group)


def _taken(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    x, dim, _, _, sizes, _ = arguments[rank]
    return _part(x, dim, sizes, group)


def _exchanged(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    _, split_dim, concat_dim, _, _, sizes, *_ = arguments[rank]
    return torch.cat([_part(arguments[other][0], split_dim, sizes, group) for other in group.ranks], concat_dim)


def _kept_first(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    x: Tensor = arguments[rank][0]
    return x if group.place == 0 else torch.zeros_like(x)


def _indexed(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    index, _, _, size, sizes, _ = arguments[rank]
    result: Tensor = index - (sum(sizes[: group.place]) if sizes else group.place * size)
    return result


_COLLECTIVES: Mapping[Any, Callable[[int, _Group, Sequence[tuple[Any, ...]]], Tensor]] = {
    collectives.all_reduce: _reduced,
    collectives.vary: lambda rank, _group, arguments: arguments[rank][0],
    collectives.all_gather: _gathered,
    collectives.replicate: _gathered,
    collectives.take: _taken,
    collectives.reduce_scatter: _scattered,
    collectives.exchange: _exchanged,
    collectives.keep_first: _kept_first,
    collectives.local_index: _indexed,
}
