"""Run the graphs of all ranks of a cut model node by node, side by side, each collective among their present values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.runtime.collectives.exchange import reduce_pieces
from partitioner.runtime.collectives.halo import Halo
from passes.graph.schemas import draws
from passes.ir.comm import functional as collectives
from passes.ir.comm.index_ranges import from_text, take_runs
from passes.ir.comm.microbatch import take_part
from passes.ir.mesh import Mesh

__all__ = ["run_in_lockstep"]

Values = list[Any]
"""One value for each rank."""


def run_in_lockstep(graphs: Sequence[fx.Graph], mesh: Mesh, given: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Run graphs that ``passes.spmd.localize`` wrote.

    Args:
        graphs: for each rank of the mesh its graph: the same calls in the same order, on parts of other sizes.
        mesh: whose dimensions the collectives name.
        given: for each rank a value for each placeholder.

    Returns:
        For each call of the whole model that gives one tensor, by name, the parts that the ranks computed.
    """
    runs = [_Run(graph, values) for graph, values in zip(graphs, given, strict=True)]
    while all([run.to_meeting() for run in runs]):  # noqa: C419  every rank runs, whatever the first says
        nodes = [run.waiting for run in runs]
        arguments = [run.arguments(node) for run, node in zip(runs, nodes, strict=True)]
        for run, value in zip(runs, _meet(nodes[0], mesh, arguments), strict=True):
            run.go_on(value)
    return {name: [run.parts[name] for run in runs] for name in runs[0].parts}


class _Run:
    """One rank's graph, as far as it has run."""

    waiting: fx.Node

    def __init__(self, graph: fx.Graph, given: Mapping[str, Any]) -> None:
        self.parts: dict[str, Tensor] = {}
        self._left = iter(graph.nodes)
        self._given = given
        self._values: dict[fx.Node, Any] = {}

    def to_meeting(self) -> bool:
        """Run up to the next call in which all ranks take part; False at the end. Ranks may differ in how they count sizes."""
        for node in self._left:
            if node.op == "placeholder":
                self._values[node] = self._given[node.name]
            elif node.op != "output":
                if node.target in collectives.COLLECTIVES or draws(node):
                    self.waiting = node
                    return True
                assert callable(node.target)
                self._keep(node, node.target(*self.arguments(node), **fx.map_arg(node.kwargs, self._values.__getitem__)))
        return False

    def arguments(self, node: fx.Node) -> tuple[Any, ...]:
        """What a call is given."""
        given: tuple[Any, ...] = fx.map_arg(node.args, self._values.__getitem__)
        return given

    def go_on(self, value: Any) -> None:
        """Take what the call gave that was waited for."""
        self._keep(self.waiting, value)

    def _keep(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value
        name = node.meta.get("part_of")
        if name is not None and isinstance(value, Tensor):
            self.parts[name] = value.detach()


def _meet(node: fx.Node, mesh: Mesh, arguments: Sequence[tuple[Any, ...]]) -> Values:
    """What each rank gets of a collective, or of random numbers that all draw alike."""
    if node.target in collectives.COLLECTIVES:
        carry_out = _COLLECTIVES[node.target]
        return [carry_out(rank, _Group(mesh, rank, arguments[rank]), arguments) for rank in range(mesh.size)]
    assert callable(node.target)
    drawn = node.target(*arguments[0], **node.kwargs)
    return [drawn for _ in arguments]


class _Group:
    """The ranks that one rank communicates with, and its place among them."""

    def __init__(self, mesh: Mesh, rank: int, arguments: Sequence[Any]) -> None:
        over = next(each for each in arguments if isinstance(each, str) and each in mesh.names)
        self.mesh = mesh
        self.ranks = mesh.group(rank, (over,))
        self.place = self.ranks.index(rank)


def _reduced(_rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    return reduce_pieces([arguments[other][0] for other in group.ranks], arguments[group.ranks[0]][2])


def _gathered(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    return torch.cat([arguments[other][0] for other in group.ranks], arguments[rank][1])


def _part(value: Tensor, dim: int, sizes: Sequence[int], group: _Group) -> Tensor:
    return take_part(value, dim, sizes or len(group.ranks), group.place)


def _scattered(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    _, dim, _, _, sizes, _ = arguments[rank]
    return _part(reduce_pieces([arguments[other][0] for other in group.ranks], "sum"), dim, sizes, group)


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


def _halo_of(group: _Group, arguments: Sequence[Any]) -> Halo:
    _, dim, _, owned, wanted, *_ = arguments
    return Halo(dim, group.place, tuple(owned), wanted)


def _read(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    fill = arguments[rank][-1]
    given = [
        _halo_of(_Group(group.mesh, other, arguments[other]), arguments[other]).fetch(arguments[other][0], fill) for other in group.ranks
    ]
    return given[group.place].result([exchange.pieces[group.place] for exchange in given])


def _own_runs(rank: int, group: _Group, arguments: Sequence[tuple[Any, ...]]) -> Tensor:
    x, dim, _, wanted, _, _, fill = arguments[rank]
    return take_runs(x, dim, from_text(wanted)[group.place], fill)


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
    collectives.halo_exchange: _read,
    collectives.take_runs: _own_runs,
}
