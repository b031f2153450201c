"""Run the graphs of all ranks of a cut model side by side, with autograd through the collectives, and put the parts together.

run = run_cut(cut_axes(graph, axes, cut, "whole"), model, args, kwargs)
assert_equal_runs(run, run_model(model, args, kwargs))

Collectives and their gradients are carried out as ``passes.ir.comm.functional`` defines them, on lists with one tensor for each rank: no
program, no transport and none of our derivatives take part. Values that must be alike on several ranks are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from passes.ir.comm import functional as collectives
from passes.ir.comm.index_ranges import from_text, take_runs
from passes.ir.mesh import Mesh
from passes.spmd.decompose.normalization import normalize
from passes.spmd.local_shapes import Extents
from passes.spmd.shard_graph import CutModel
from passes.spmd.shards import Block, block_of
from tests.support.running.traced import SEED, Run, backward, own_values

TOLERANCE = 1e-12
"""How much replicas may differ: they are computed alike."""


def run_cut(cut: CutModel, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Run:
    """Call a model that was cut with results "whole": results, gradients and buffers as the unpartitioned model gives them."""
    graph, mesh = cut.graph, cut.cut.mesh
    model = copy.deepcopy(model)
    args, kwargs = own_values((args, dict(kwargs or {})), gradient=True)
    whole = _placeholder_values(cut, model, args, kwargs)
    blocks = [_blocks(cut, rank) for rank in range(mesh.size)]
    given: list[dict[str, Any]] = []
    for rank in range(mesh.size):
        parts: dict[str, Any] = {
            name: blocks[rank][name].take(value.detach()).clone().requires_grad_(value.requires_grad)
            for name, value in whole.items()
            if isinstance(value, Tensor)
        }
        parts["batch"] = graph.batch_size // cut.parts[rank].part.n_row_parts
        given.append(parts)
    torch.manual_seed(SEED)
    results = [each[: len(graph.leaves)] for each in _run([part.graph for part in cut.parts], mesh, given)]
    for each in results[1:]:
        _assert_alike(each, results[0])
    backward([leaf for each in results for leaf in each], [index for each in results for index in range(len(each))])

    def together(name: str) -> Tensor | None:
        grads = [parts[name].grad for parts in given]
        if all(grad is None for grad in grads):
            return None
        grads = [torch.zeros_like(parts[name]) if grad is None else grad for grad, parts in zip(grads, given, strict=True)]
        for index in cut.layouts.varying.get(name, ()):
            over = mesh.names[index]
            grads = [_sum([grads[other] for other in mesh.group(rank, (over,))]) for rank in range(mesh.size)]
        return _together(name, grads, blocks)

    return Run(
        tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in results[0]),
        {original: together(name) for name, original in graph.parameters.items()},
        tuple(
            together(leaf.placeholder)
            for leaf in graph.inputs
            if leaf.placeholder is not None and isinstance(whole[leaf.placeholder], Tensor) and whole[leaf.placeholder].requires_grad
        ),
        {original: _together(name, [parts[name] for parts in given], blocks) for name, original in graph.buffers.items()},
    )


def _placeholder_values(cut: CutModel, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return whole values: parameters, buffers, constants, inputs."""
    graph = cut.graph
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: dict[str, Any] = dict(graph.constants)
    values.update({placeholder: tensors[name] for placeholder, name in (*graph.parameters.items(), *graph.buffers.items())})
    given, tree = tree_flatten((args, kwargs))
    assert tree == graph.input_tree
    values.update({leaf.placeholder: value for leaf, value in zip(graph.inputs, given, strict=True) if leaf.placeholder is not None})
    return values


def _blocks(cut: CutModel, rank: int) -> dict[str, Block]:
    """Return each placeholder's block on a rank, for the batch size of the graph."""
    graph, mesh = cut.graph, cut.cut.mesh
    sizes = tuple(int(sympy.sympify(size).subs({graph.batch: graph.batch_size} if graph.batch else {})) for size in cut.axes.sizes)
    extents = Extents(sizes, mesh.dimensions, tuple(mesh.coordinate(rank).values()), None, 1, cut.axes.segments)
    return {
        node.name: block_of(cut.axes.of(node.name), cut.layouts.results[node.name][0], extents)
        for node in graph.graph.nodes
        if node.op == "placeholder" and node.name in cut.layouts.results
    }


def _together(name: str, parts: Sequence[Tensor], blocks: Sequence[Mapping[str, Block]]) -> Tensor:
    whole = parts[0].new_zeros(blocks[0][name].shape)
    for part, block in zip(parts, blocks, strict=True):
        block[name].put(whole, part.detach())
    for part, block in zip(parts, blocks, strict=True):
        torch.testing.assert_close(block[name].take(whole), part.detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=f"replicas of {name} differ")
    return whole


def _assert_alike(one: Sequence[Any], other: Sequence[Any]) -> None:
    for left, right in zip(one, other, strict=True):
        if isinstance(left, Tensor):
            torch.testing.assert_close(left, right, rtol=TOLERANCE, atol=TOLERANCE, msg="ranks return different results")
        else:
            assert left == right


def _run(graphs: Sequence[fx.Graph], mesh: Mesh, given: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Run all ranks collective by collective; return each rank's results. Between them, ranks of other sizes may differ in calls."""
    values: list[dict[fx.Node, Any]] = [{} for _ in graphs]
    runs = (_collectives(graph, own, placeholders) for graph, own, placeholders in zip(graphs, values, given, strict=True))
    for nodes in zip(*runs, strict=True):
        assert len({(node.op, node.target) for node in nodes}) == 1, "ranks run different collectives"
        op, target = nodes[0].op, nodes[0].target
        args = [fx.map_arg(node.args, own.__getitem__) for node, own in zip(nodes, values, strict=True)]
        if op == "output":
            return [each[0] for each in args]
        if target is normalize:
            results = _normalized(mesh, [dict(zip((each.name for each in target._schema.arguments), own, strict=True)) for own in args])
        else:
            results = _communicate(target, mesh, args)
        for own, node, result in zip(values, nodes, results, strict=True):
            own[node] = result
    raise AssertionError("the graph has no output")


def _collectives(graph: fx.Graph, values: dict[fx.Node, Any], given: Mapping[str, Any]) -> Iterator[fx.Node]:
    """Yield the collectives of one rank in order, and its output; run all other calls between them."""
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "output" or node.target in collectives.COLLECTIVES or node.target is normalize:
            yield node
        else:
            values[node] = _called(node.target, fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__))


def _called(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return target(*args, **kwargs)


# -- collectives: lists hold one entry for each rank of a group, in order ----------------------------------------------------------------


def _communicate(operator: Any, mesh: Mesh, args: Sequence[tuple[Any, ...]]) -> list[Any]:
    names = [argument.name for argument in operator._schema.arguments]
    over = args[0][names.index("over")]
    results: list[Any] = [None] * mesh.size
    for ranks in {mesh.group(rank, (over,)) for rank in range(mesh.size)}:
        tensors = [args[rank][0] for rank in ranks]
        rest = dict(zip(names[1:], args[ranks[0]][1:], strict=True))
        if operator in _DIFFERENTIATED:
            found: Sequence[Any] = _DIFFERENTIATED[operator](tensors, **rest)
        else:
            found = _Collective.apply(operator, rest, *tensors)  # type: ignore[no-untyped-call]
        for rank, result in zip(ranks, found, strict=True):
            results[rank] = result
    return results


def _normalized(mesh: Mesh, given: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Normalise by statistics of all parts, which autograd differentiates; given statistics must be equal."""
    results: list[Tensor] = [torch.empty(0)] * mesh.size
    for ranks in {mesh.group(rank, tuple(given[0]["over"])) for rank in range(mesh.size)}:
        parts = [given[rank]["x"].unflatten(1, (given[rank]["mean"].shape[-1], -1)) for rank in ranks]
        dims = [0] * (given[0]["mean"].dim() == 1) + list(range(2, parts[0].dim()))

        def average(parts: Sequence[Tensor], dims: Sequence[int] = dims) -> Tensor:
            sums = [each.sum(tuple(dims), keepdim=True) for each in parts]
            return _sum(sums) / int(given[0]["count"])

        mean = average(parts) if given[0]["centred"] else parts[0].new_zeros(())
        variance = average([(each - mean) ** 2 for each in parts])
        for rank, part in zip(ranks, parts, strict=True):
            own = given[rank]
            for name, value in (("mean", mean), ("variance", variance)):
                torch.testing.assert_close(own[name], value.expand_as(variance).reshape(own[name].shape).detach())
            result = ((part - mean) / torch.sqrt(variance + own["eps"])).reshape(own["x"].shape)
            sizes = [1, -1, *[1] * (result.dim() - 2)]
            result = result if own["weight"] is None else result * own["weight"].view(sizes)
            results[rank] = result if own["bias"] is None else result + own["bias"].view(sizes)
    return results


class _Collective(torch.autograd.Function):
    """One collective among a group; backward, its dual."""

    @staticmethod
    def forward(ctx: Any, operator: Any, rest: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operator, ctx.rest = operator, rest
        return tuple(each.clone() for each in _FORWARD[operator](tensors, **rest))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *_BACKWARD[ctx.operator](grads, **ctx.rest))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _split(x: Tensor, dim: int, count: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(torch.split(x, list(sizes) or [x.shape[dim] // count] * count, dim))


def _reduce(tensors: Sequence[Tensor], over: str, operation: str = "sum") -> list[Tensor]:
    stacked = torch.stack(list(tensors))
    return [stacked.sum(0) if operation == "sum" else stacked.amax(0) if operation == "max" else stacked.amin(0)] * len(tensors)


def _gather(tensors: Sequence[Tensor], dim: int, **_: Any) -> list[Tensor]:
    return [torch.cat(list(tensors), dim)] * len(tensors)


def _take(tensors: Sequence[Tensor], dim: int, count: int, sizes: Sequence[int], **_: Any) -> list[Tensor]:
    return [_split(x, dim, count, sizes)[place] for place, x in enumerate(tensors)]


def _scatter(tensors: Sequence[Tensor], **rest: Any) -> list[Tensor]:
    return _take([_sum(tensors)] * len(tensors), **rest)


def _exchange(tensors: Sequence[Tensor], split_dim: int, concat_dim: int, count: int, split_sizes: Sequence[int], **_: Any) -> list[Tensor]:
    pieces = [_split(x, split_dim, count, split_sizes) for x in tensors]
    return [torch.cat([each[place] for each in pieces], concat_dim) for place in range(len(tensors))]


def _exchange_back(tensors: Sequence[Tensor], **rest: Any) -> list[Tensor]:
    swapped = {"split_dim": rest["concat_dim"], "concat_dim": rest["split_dim"], "split_sizes": rest["concat_sizes"]}
    return _exchange(tensors, count=rest["count"], **swapped)


def _same(tensors: Sequence[Tensor], **_: Any) -> list[Tensor]:
    return list(tensors)


def _first(tensors: Sequence[Tensor], over: str) -> list[Tensor]:
    return [x if place == 0 else torch.zeros_like(x) for place, x in enumerate(tensors)]


def _local(tensors: Sequence[Tensor], size: int, sizes: Sequence[int], count: int, **_: Any) -> list[Tensor]:
    starts = list(sizes) or [size] * count
    return [index - sum(starts[:place]) for place, index in enumerate(tensors)]


def _taken(tensors: Sequence[Tensor], dim: int, wanted: str, fill: float, **_: Any) -> list[Tensor]:
    return [take_runs(x, dim, runs, fill) for x, runs in zip(tensors, from_text(wanted), strict=True)]


_FORWARD: Mapping[Any, Callable[..., list[Tensor]]] = {
    collectives.all_reduce: _reduce,
    collectives.vary: _same,
    collectives.all_gather: _gather,
    collectives.replicate: _gather,
    collectives.take: _take,
    collectives.reduce_scatter: _scatter,
    collectives.exchange: _exchange,
    collectives.keep_first: _first,
}
_BACKWARD: Mapping[Any, Callable[..., list[Tensor]]] = {
    collectives.all_reduce: _same,
    collectives.vary: _reduce,
    collectives.all_gather: _scatter,
    collectives.replicate: _take,
    collectives.take: _gather,
    collectives.reduce_scatter: _gather,
    collectives.exchange: _exchange_back,
    collectives.keep_first: _same,
}

_DIFFERENTIATED: Mapping[Any, Callable[..., list[Tensor]]] = {collectives.local_index: _local, collectives.take_runs: _taken}
"""Operators without communication, which autograd differentiates."""

CARRIED_OUT = frozenset((*_FORWARD, *_DIFFERENTIATED))
"""The collectives that graphs may hold."""
