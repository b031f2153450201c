"""Run the sharded graphs of all ranks in one process: each up to its next collective, then the collective on all ranks' operands."""

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


def run_in_lockstep(graphs: Sequence[fx.Graph], mesh: Mesh, given: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Run graphs that ``passes.spmd.localize`` wrote.

    Args:
        graphs: one for each rank of the mesh: the same collectives in the same order, on shards of possibly different sizes.
        mesh: the mesh whose dimensions the collectives name.
        given: for each rank, the values of its placeholders.

    Returns:
        Node of the whole model that yields one tensor, by name -> its shards in rank order.
    """
    runs = [_RankRun(graph, values) for graph, values in zip(graphs, given, strict=True)]
    while all([run.run_to_collective() for run in runs]):  # noqa: C419  no short cut: every rank has to run
        nodes = [run.waiting for run in runs]
        arguments = [run.arguments(node) for run, node in zip(runs, nodes, strict=True)]
        for run, value in zip(runs, _collective_results(nodes[0], mesh, arguments), strict=True):
            run.store(run.waiting, value)
    return {name: [run.shards[name] for run in runs] for name in runs[0].shards}


class _RankRun:
    """The execution of one rank's graph, paused at the collective ``waiting``; ``shards`` are its results so far."""

    waiting: fx.Node

    def __init__(self, graph: fx.Graph, given: Mapping[str, Any]) -> None:
        self.shards: dict[str, Tensor] = {}
        self._remaining = iter(graph.nodes)
        self._given = given
        self._values: dict[fx.Node, Any] = {}

    def run_to_collective(self) -> bool:
        """Run up to the next collective or random draw and set ``waiting`` to it; return False at the end of the graph."""
        for node in self._remaining:
            if node.op == "placeholder":
                self._values[node] = self._given[node.name]
            elif node.op != "output":
                if node.target in collectives.COLLECTIVES or draws(node):
                    self.waiting = node
                    return True
                assert callable(node.target)
                self.store(node, node.target(*self.arguments(node), **fx.map_arg(node.kwargs, self._values.__getitem__)))
        return False

    def arguments(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the positional arguments of a call, nodes replaced by their values."""
        given: tuple[Any, ...] = fx.map_arg(node.args, self._values.__getitem__)
        return given

    def store(self, node: fx.Node, value: Any) -> None:
        """Give a call its result."""
        self._values[node] = value
        name = node.meta.get("part_of")
        if name is not None and isinstance(value, Tensor):
            self.shards[name] = value.detach()


AllArguments = Sequence[tuple[Any, ...]]
"""For each rank of the mesh, the positional arguments of its call of one collective of ``passes.ir.comm.functional``."""


def _collective_results(node: fx.Node, mesh: Mesh, arguments: AllArguments) -> list[Any]:
    """Return each rank's result of a collective, or of a random draw, which is the same on all ranks."""
    if node.target in collectives.COLLECTIVES:
        result_of = _COLLECTIVES[node.target]
        return [result_of(rank, _Group(mesh, rank, arguments[rank]), arguments) for rank in range(mesh.size)]
    assert callable(node.target)
    drawn = node.target(*arguments[0], **node.kwargs)
    return [drawn for _ in arguments]


class _Group:
    """The ranks that take part in one rank's collective, and the rank's place among them."""

    def __init__(self, mesh: Mesh, rank: int, arguments: Sequence[Any]) -> None:
        over = next(argument for argument in arguments if isinstance(argument, str) and argument in mesh.names)
        self.ranks = mesh.group(rank, (over,))
        self.place = self.ranks.index(rank)


# One function for each collective: its result on ``rank``. Signatures of the calls: see ``passes.ir.comm.functional``.


def _all_reduce(_rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    return reduce_pieces([arguments[member][0] for member in group.ranks], arguments[group.ranks[0]][2])


def _all_gather(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    return torch.cat([arguments[member][0] for member in group.ranks], arguments[rank][1])


def _shard(value: Tensor, dim: int, sizes: Sequence[int], group: _Group) -> Tensor:
    """Return the rank's part of a tensor along ``dim``: of the given sizes in group order, or equal ones if ``sizes`` is empty."""
    return take_part(value, dim, sizes or len(group.ranks), group.place)


def _reduce_scatter(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    _, dim, _, _, sizes, _ = arguments[rank]
    return _shard(reduce_pieces([arguments[member][0] for member in group.ranks], "sum"), dim, sizes, group)


def _take(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    x, dim, _, _, sizes, _ = arguments[rank]
    return _shard(x, dim, sizes, group)


def _all_to_all(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    _, split_dim, concat_dim, _, _, sizes, *_ = arguments[rank]
    return torch.cat([_shard(arguments[member][0], split_dim, sizes, group) for member in group.ranks], concat_dim)


def _exchange_rows(_rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    pieces = []
    for member in group.ranks:
        x, sent, received, *_, back = arguments[member]
        pieces.append(x.split((received if back else sent).tolist())[group.place])
    return torch.cat(pieces)


def _keep_first(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    x: Tensor = arguments[rank][0]
    return x if group.place == 0 else torch.zeros_like(x)


def _local_index(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    """Subtract the position at which the rank's shard begins from indices into the whole dimension."""
    index, _, _, size, sizes, _ = arguments[rank]
    result: Tensor = index - (sum(sizes[: group.place]) if sizes else group.place * size)
    return result


def _halo_of(member: int, group: _Group, arguments: AllArguments) -> Halo:
    _, dim, _, owned, wanted, *_ = arguments[member]
    return Halo(dim, group.ranks.index(member), tuple(owned), wanted)


def _halo_exchange(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    fill = arguments[rank][-1]
    exchanges = [_halo_of(member, group, arguments).fetch(arguments[member][0], fill) for member in group.ranks]
    return exchanges[group.place].result([exchange.pieces[group.place] for exchange in exchanges])


def _take_runs(rank: int, group: _Group, arguments: AllArguments) -> Tensor:
    x, dim, _, wanted, _, _, fill = arguments[rank]
    return take_runs(x, dim, from_text(wanted)[group.place], fill)


_COLLECTIVES: Mapping[Any, Callable[[int, _Group, AllArguments], Tensor]] = {
    collectives.all_reduce: _all_reduce,
    collectives.vary: lambda rank, _group, arguments: arguments[rank][0],
    collectives.all_gather: _all_gather,
    collectives.replicate: _all_gather,
    collectives.take: _take,
    collectives.reduce_scatter: _reduce_scatter,
    collectives.exchange: _all_to_all,
    collectives.exchange_rows: _exchange_rows,
    collectives.keep_first: _keep_first,
    collectives.local_index: _local_index,
    collectives.halo_exchange: _halo_exchange,
    collectives.take_runs: _take_runs,
}
