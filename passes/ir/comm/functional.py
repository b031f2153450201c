"""Collectives as operators of value semantics, for graphs that autograd differentiates: each carries its dual.

    operator          forward                         backward
    all_reduce        Partial    -> Replicate         identity
    vary              Replicate  -> Varying           all_reduce
    all_gather        Shard      -> Varying           reduce_scatter
    replicate         Shard      -> Replicate         take (the gradient is replicated, too)
    take              Replicate  -> Shard             replicate
    reduce_scatter    Partial    -> Shard             replicate
    exchange          Shard(a)   -> Shard(b)          exchange back
    halo_exchange    Shard      -> overlapping parts  halo_add
    take_runs        a rank's own elements, padded    put_runs

They stand in graphs while these are rewritten and differentiated; a program runs the started-and-waited-for functions of
``passes.ir.comm.primitives`` in their place. They name a mesh dimension, not ranks, so that ranks with parts of one shape share a graph.
Parts of an axis may be uneven: ``sizes`` are those of all parts along the mesh dimension and ``own`` is this rank's; both are empty and 0
when all parts are equal. ``vary`` costs nothing at run time: programs leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate, get_current_meta

__all__ = [
    "AGAIN",
    "COLLECTIVES",
    "GRADIENT",
    "all_gather",
    "all_reduce",
    "exchange",
    "halo_add",
    "halo_exchange",
    "keep_first",
    "local_index",
    "put_runs",
    "reduce_scatter",
    "replicate",
    "take",
    "take_runs",
    "vary",
]


GRADIENT = "gradient"
"""The key in ``meta["custom"]`` that tells a dual from the call that it is the dual of; what else stands there holds of both."""


AGAIN = "again"
"""The key in ``meta`` of what a backward computes or gathers once more instead of keeping it."""


def _never(*_: object) -> Any:
    raise RuntimeError("collectives of a graph run as communication of a program, never by themselves")


def _define(name: str, schema: str) -> Any:
    torch.library.define(f"partitioner::{name}", schema)
    torch.library.impl(f"partitioner::{name}", "CompositeExplicitAutograd", _never)
    return getattr(torch.ops.partitioner, name).default


_PART = "(Tensor x, int dim, str over, int count, SymInt[] sizes, SymInt own) -> Tensor"
_EXCHANGE = (
    "(Tensor x, int split_dim, int concat_dim, str over, int count, SymInt[] split_sizes, SymInt split_own, "
    "SymInt[] concat_sizes, SymInt concat_own) -> Tensor"
)

all_reduce = _define("all_reduce", "(Tensor x, str over, str operation) -> Tensor")
"""The sum (maximum, minimum) of all parts, on every rank."""

vary = _define("vary", "(Tensor x, str over) -> Tensor")
"""The same value, on its way into work that is cut."""

all_gather = _define("all_gather", _PART)
"""All parts together, for work that is cut otherwise."""

replicate = _define("replicate", _PART)
"""All parts together, for work that every rank does alike."""

take = _define("take", _PART)
"""This rank's part of a whole value."""

reduce_scatter = _define("reduce_scatter", _PART)
"""This rank's part of the sum of all parts."""

exchange = _define("exchange", _EXCHANGE)
"""The part of one axis for the part of another."""

keep_first = _define("keep_first", "(Tensor x, str over) -> Tensor")
"""The value on the first rank, zeros on all others: parts whose sum is the value."""

local_index = _define("local_index", "(Tensor index, str over, int count, SymInt size, SymInt[] sizes, SymInt own) -> Tensor")
"""Indices into an axis of which each rank has a part, counted from where this rank's part begins."""

_HALO = "(Tensor x, int dim, str over, int[] owned, str wanted, int own, int size, float fill) -> Tensor"

halo_exchange = _define("halo_exchange", _HALO)
"""The elements that a rank reads, whoever of the ranks along a mesh dimension has them (``passes.ir.comm.index_ranges``). ``owned``: how
many each has; ``wanted``: what each reads; ``own`` and ``size``: how many this rank has and reads; ``fill``: what padding holds."""

halo_add = _define("halo_add", _HALO)
"""Gradients of what each rank read, added where the elements lie."""

_RUNS = "(Tensor x, int dim, str over, str wanted, int own, int size, float fill) -> Tensor"

take_runs = _define("take_runs", _RUNS)
"""Elements that a rank has itself, in the order in which it reads them, with padding: ``halo_exchange`` where nobody reads another's."""

put_runs = _define("put_runs", _RUNS)
"""Gradients of what a rank read of its own elements, added."""

COLLECTIVES = (
    all_reduce, vary, all_gather, replicate, take, reduce_scatter, exchange, keep_first, local_index,
    halo_exchange, halo_add, take_runs, put_runs,
)  # fmt: skip
"""Every operator of this module."""


def _resized(x: Tensor, dim: int, size: Any) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _whole(x: Tensor, dim: int, _over: str, count: int, sizes: Sequence[Any], _own: Any) -> Tensor:
    return _resized(x, dim, sum(sizes) if sizes else x.shape[dim] * count)


def _part(x: Tensor, dim: int, _over: str, count: int, sizes: Sequence[Any], own: Any) -> Tensor:
    return _resized(x, dim, own if sizes else x.shape[dim] // count)


def _exchanged(x: Tensor, split_dim: int, concat_dim: int, over: str, count: int, *sizes: Any) -> Tensor:
    part = _part(x, split_dim, over, count, *sizes[:2])
    return _whole(part, concat_dim, over, count, *sizes[2:])


def _dense(x: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _alike(x: Tensor, *_rest: object) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


def _read(x: Tensor, dim: int, *rest: Any) -> Tensor:
    *_, size, _ = rest
    return _resized(x, dim, size)


def _own(x: Tensor, dim: int, *rest: Any) -> Tensor:
    *_, own, _, _ = rest
    return _resized(x, dim, own)


_SHAPES: Mapping[Any, Callable[..., Tensor]] = {
    all_reduce: _dense,
    vary: _alike,
    keep_first: _alike,
    all_gather: _whole,
    replicate: _whole,
    take: _part,
    reduce_scatter: _part,
    exchange: _exchanged,
    halo_exchange: _read,
    halo_add: _own,
    take_runs: _read,
    put_runs: _own,
}


def _identity(grad: Tensor, *_rest: object) -> Tensor:
    return grad


def _exchange_back(grad: Tensor, split_dim: int, concat_dim: int, over: str, count: int, *sizes: Any) -> Tensor:
    back: Tensor = exchange(grad, concat_dim, split_dim, over, count, *sizes[2:], *sizes[:2])
    return back


_DUALS: Mapping[Any, Callable[..., Tensor]] = {
    all_reduce: _identity,
    vary: lambda grad, over: all_reduce(grad, over, "sum"),
    keep_first: _identity,
    all_gather: reduce_scatter,
    replicate: take,
    take: replicate,
    reduce_scatter: replicate,
    exchange: _exchange_back,
    halo_exchange: halo_add,
    halo_add: halo_exchange,
    take_runs: put_runs,
    put_runs: take_runs,
}


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001  the names that torch calls it by
    _, *ctx.rest = inputs
    ctx.about = get_current_meta().get("custom", {})


def _register(operator: Any, dual: Callable[..., Tensor]) -> None:
    def gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with annotate({**ctx.about, GRADIENT: True}):
            return (dual(grad, *ctx.rest), *(None for _ in ctx.rest))

    torch.library.register_fake(operator.name(), _SHAPES[operator])
    torch.library.register_autograd(operator.name(), gradient, setup_context=_remember)


for _operator, _dual in _DUALS.items():
    _register(_operator, _dual)

torch.library.register_fake(local_index.name(), _alike)
