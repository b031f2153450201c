"""Collectives as functional operators that autograd differentiates: the backward of each is its dual.

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

Graphs have them while they are rewritten and differentiated; a program has the asynchronous functions of
``passes.ir.comm.primitives`` in their place. They name a mesh dimension, not ranks, so that ranks with parts of one shape share a graph.
Parts of an axis may be uneven: ``sizes`` are those of all parts along the mesh dimension and ``own`` is this rank's; both are empty and 0
when all parts are equal. ``vary`` costs nothing at run time: programs leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.traceback import annotate, get_current_meta

GRADIENT = "gradient"
"""The key in ``meta["custom"]`` that marks the dual of a call; all other entries are copied from the call."""

AGAIN = "again"
"""The key in ``meta`` of nodes of a backward that recompute or gather again a value of the forward."""

FOR_ALL = "for_all"
"""The key in ``meta`` of what is computed once a step, for all microbatches: gathers of parameters, and sums of their gradients."""


def _cannot_run(*_: object) -> Any:
    raise RuntimeError("collectives of a graph run as communication of a program, never by themselves")


def _define(name: str, schema: str) -> Any:
    """Define ``torch.ops.partitioner.<name>``, which graphs may contain but which must not run."""
    torch.library.define(f"partitioner::{name}", schema)
    torch.library.impl(f"partitioner::{name}", "CompositeExplicitAutograd", _cannot_run)
    return getattr(torch.ops.partitioner, name).default


_PART = "(Tensor x, int dim, str over, int count, SymInt[] sizes, SymInt own) -> Tensor"
_EXCHANGE = (
    "(Tensor x, int split_dim, int concat_dim, str over, int count, SymInt[] split_sizes, SymInt split_own, "
    "SymInt[] concat_sizes, SymInt concat_own) -> Tensor"
)

all_reduce = _define("all_reduce", "(Tensor x, str over, str operation) -> Tensor")
"""The sum (maximum, minimum) of all parts, on every rank."""

vary = _define("vary", "(Tensor x, str over) -> Tensor")
"""The same value, as an operand of sharded compute."""

all_gather = _define("all_gather", _PART)
"""All parts concatenated, as an operand of compute that is sharded over another axis."""

replicate = _define("replicate", _PART)
"""All parts concatenated, as an operand of replicated compute."""

take = _define("take", _PART)
"""This rank's part of a whole value."""

reduce_scatter = _define("reduce_scatter", _PART)
"""This rank's part of the sum of all parts."""

exchange = _define("exchange", _EXCHANGE)
"""This rank's part of another axis: an all_to_all."""

_ROWS = "(Tensor x, Tensor sent, Tensor received, Tensor own, Tensor theirs, str over, bool back) -> Tensor"

exchange_rows = _define("exchange_rows", _ROWS)
"""The rows that this rank receives (``passes.ir.comm.expert_rows``): an all_to_all of as many rows as ``sent`` and ``received`` say; with
``back`` those that it gave away. ``own``, ``theirs``: tensors with as many rows as it has, and as it receives."""

keep_first = _define("keep_first", "(Tensor x, str over) -> Tensor")
"""The value on the first rank, zeros on all others: parts whose sum is the value."""

local_index = _define("local_index", "(Tensor index, str over, int count, SymInt size, SymInt[] sizes, SymInt own) -> Tensor")
"""Indices into a sharded axis, counted from the start of this rank's part."""

_HALO = "(Tensor x, int dim, str over, int[] owned, str wanted, int own, int size, float fill) -> Tensor"

halo_exchange = _define("halo_exchange", _HALO)
"""The elements that a rank reads, its own and those of other ranks along a mesh dimension (``passes.ir.comm.index_ranges``). ``owned``:
number of elements of each rank; ``wanted``: the runs that each reads; ``own``, ``size``: how many this rank has and reads."""

halo_add = _define("halo_add", _HALO)
"""Gradients of the elements that each rank read, added on their owners."""

_RUNS = "(Tensor x, int dim, str over, str wanted, int own, int size, float fill) -> Tensor"

take_runs = _define("take_runs", _RUNS)
"""A rank's own elements in the order in which it reads them, with padding: a ``halo_exchange`` without communication."""

put_runs = _define("put_runs", _RUNS)
"""Gradients of the copies that ``take_runs`` made of each element, added."""

COLLECTIVES = (
    all_reduce, vary, all_gather, replicate, take, reduce_scatter, exchange, exchange_rows, keep_first, local_index,
    halo_exchange, halo_add, take_runs, put_runs,
)  # fmt: skip
"""Every operator of this module."""


def makes_memory(call: fx.Node) -> bool:
    """Return whether the result of a call that is no view is in memory that nothing else uses.

    That of a collective may be in use by other ranks; of operators that users define, this is not known.
    """
    return call.target not in COLLECTIVES and getattr(call.target, "namespace", "") in ("aten", "partitioner")


def _resized(x: Tensor, dim: int, size: Any) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _fake_whole(x: Tensor, dim: int, _over: str, count: int, sizes: Sequence[Any], _own: Any) -> Tensor:
    return _resized(x, dim, sum(sizes) if sizes else x.shape[dim] * count)


def _fake_part(x: Tensor, dim: int, _over: str, count: int, sizes: Sequence[Any], own: Any) -> Tensor:
    return _resized(x, dim, own if sizes else x.shape[dim] // count)


def _fake_exchange(x: Tensor, split_dim: int, concat_dim: int, over: str, count: int, *sizes: Any) -> Tensor:
    part = _fake_part(x, split_dim, over, count, *sizes[:2])
    return _fake_whole(part, concat_dim, over, count, *sizes[2:])


def _fake_contiguous(x: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_like(x: Tensor, *_rest: object) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


def _fake_read(x: Tensor, dim: int, *rest: Any) -> Tensor:
    *_, size, _fill = rest
    return _resized(x, dim, size)


def _fake_own(x: Tensor, dim: int, *rest: Any) -> Tensor:
    *_, own, _size, _fill = rest
    return _resized(x, dim, own)


def _identity(grad: Tensor, *_rest: object) -> Tensor:
    return grad


def _exchange_back(grad: Tensor, split_dim: int, concat_dim: int, over: str, count: int, *sizes: Any) -> Tensor:
    result: Tensor = exchange(grad, concat_dim, split_dim, over, count, *sizes[2:], *sizes[:2])
    return result


def _fake_rows(x: Tensor, _sent: Tensor, _received: Tensor, own: Tensor, theirs: Tensor, _over: str, back: bool) -> Tensor:
    return _resized(x, 0, (own if back else theirs).shape[0])


def _rows_back(grad: Tensor, *rest: Any) -> Tensor:
    *counts, over, back = rest
    result: Tensor = exchange_rows(grad, *counts, over, not back)
    return result


_FAKES_AND_DUALS: Mapping[Any, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    all_reduce: (_fake_contiguous, _identity),
    vary: (_fake_like, lambda grad, over: all_reduce(grad, over, "sum")),
    keep_first: (_fake_like, _identity),
    all_gather: (_fake_whole, reduce_scatter),
    replicate: (_fake_whole, take),
    take: (_fake_part, replicate),
    reduce_scatter: (_fake_part, replicate),
    exchange: (_fake_exchange, _exchange_back),
    exchange_rows: (_fake_rows, _rows_back),
    halo_exchange: (_fake_read, halo_add),
    halo_add: (_fake_own, halo_exchange),
    take_runs: (_fake_read, put_runs),
    put_runs: (_fake_own, take_runs),
}
"""Collective -> a function that returns an empty result of the right shape, for tracing; and its dual, for the backward."""


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001  the names that torch calls it by
    _, *ctx.options = inputs
    ctx.annotations = get_current_meta().get("custom", {})


def _register(operator: Any, fake: Callable[..., Tensor], dual: Callable[..., Tensor]) -> None:
    """Register the fake of an operator, and its backward: the dual with the options of the forward call."""

    def gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with annotate({**ctx.annotations, GRADIENT: True}):
            return (dual(grad, *ctx.options), *(None for _ in ctx.options))

    torch.library.register_fake(operator.name(), fake)
    torch.library.register_autograd(operator.name(), gradient, setup_context=_save_for_backward)


for _operator, (_fake, _dual) in _FAKES_AND_DUALS.items():
    _register(_operator, _fake, _dual)

torch.library.register_fake(local_index.name(), _fake_like)
