"""Write through a view: from the new value of a view, compute the new value of its base.

    view = aten.select(base, 1, 0)                     new_base = aten.select_scatter(base, new_view, 1, 0)
    view = aten.transpose(base, 0, 1)                  new_base = aten.transpose(new_view, 0, 1)
    view = aten.unfold(base, 0, 3, 3)                  new_base = index_put(base, places of the view's elements, new_view)

Operators with a functional inverse are in a table. Any other view is inverted by element indices: the same view of an arange over the
base's elements gives the index of each element, for index_put.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from passes.graph.provenance import place_of
from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import TraceError

aten = torch.ops.aten

Emit: TypeAlias = Callable[..., fx.Node]
"""Writes a call: operator, then its arguments."""

View: TypeAlias = tuple[fx.Node, int | None]
"""The call that takes a view, and which item of its result the view is; None when the result is the view."""


def inverse(view: View, source: fx.Node, base: fx.Node, value: fx.Node, emit: Emit, take_view: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Return the new value of the base of a view, after a write to the view.

    Args:
        view: the view that was written to.
        source: the argument of its call that is the base.
        base: the value of the base before the write.
        value: the new value of the view.
        emit: writes a call.
        take_view: takes the same view of another tensor.

    Raises:
        TraceError: elements of the view share memory, or it is a strided view of a base that is not dense.
    """
    call, item = view
    _refuse_overlaps(view)
    kind = packet(call.target)
    if item is None and (kind in _SAME_ELEMENTS or _is_whole(call, source)):
        return value if _has_shape_of(value, base) else emit(aten.reshape_as.default, value, base)
    if item is None and kind in _UNARY:
        return emit(_UNARY[kind], value)
    if item is None and kind in _INVERSES and call.args and call.args[0] is source:
        return _INVERSES[kind](call, base, value, emit)
    if item is not None and kind is aten.unbind:
        return _emit_scatter(emit, aten.select_scatter.default, base, value, bound_arguments(call)["dim"], item)
    if item is not None and kind in _SPLITS and (interval := _interval(call, item)) is not None:
        return _emit_scatter(emit, aten.slice_scatter.default, base, value, bound_arguments(call)["dim"], *interval)
    if kind is aten.as_strided and not (_is_dense(source) and _is_dense(base)):
        raise TraceError(
            "the model writes by strides (as_strided) into a tensor that is itself a view, or has another memory order here",
            place=place_of(call),
            remedy="write it with slices, reshape and transpose",
        )
    return _by_elements(base, value, emit, take_view)


def _is_dense(node: fx.Node) -> bool:
    fake: Tensor = node.meta["val"]
    return fake.is_contiguous() and fake.storage_offset() == 0


def _refuse_overlaps(view: View) -> None:
    call, item = view
    fake = call.meta["val"] if item is None else call.meta["val"][item]
    expanded = any(stride == 0 and size_of(size) != 1 for size, stride in zip(fake.shape, fake.stride(), strict=True))
    bound = bound_arguments(call) if packet(call.target) is aten.unfold else {}
    if expanded or (bound and bound["step"] < bound["size"]):
        raise TraceError(
            f"the model writes into a view whose elements share memory ({call.target})",
            place=place_of(call),
            remedy="write into a copy (.clone()) of the view",
        )


def _has_shape_of(value: fx.Node, base: fx.Node) -> bool:
    shapes = [[size_of(size) for size in node.meta["val"].shape] for node in (value, base)]
    return shapes[0] == shapes[1]


def _is_whole(call: fx.Node, source: fx.Node) -> bool:
    """Return whether a slice takes the whole of its argument."""
    return packet(call.target) in _INTERVALS and bound_arguments(call).get("step", 1) == 1 and _has_shape_of(call, source)


def _by_elements(base: fx.Node, value: fx.Node, emit: Emit, take_view: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Return the base with the elements of the view replaced. A cumsum of ones numbers the elements: it takes its shape from the base."""
    counts = emit(aten.ones_like.default, base, dtype=torch.int64, memory_format=torch.contiguous_format)
    numbers = emit(aten.sub.Tensor, emit(aten.cumsum.default, emit(aten.reshape.default, counts, [-1]), 0), 1)
    places = take_view(emit(aten.reshape_as.default, numbers, base))
    flat = [emit(aten.reshape.default, node, [-1]) for node in (base, places, value)]
    return emit(aten.reshape_as.default, emit(aten.index_put.default, flat[0], [flat[1]], flat[2]), base)


def _interval(call: fx.Node, item: int) -> tuple[int, int] | None:
    """Return the start and end of an item of a split; None if they depend on the batch."""
    dimension = bound_arguments(call)["dim"]
    sizes = [size_of(part.shape[dimension]) for part in call.meta["val"][: item + 1]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return sum(sizes[:item]), sum(sizes)


# -- one operator each -----------------------------------------------------------------------------------------------------------------


def _emit_scatter(emit: Emit, function: Any, base: fx.Node, value: fx.Node, *arguments: Any) -> fx.Node:
    """Write a view into its base: complex numbers as pairs of real ones, since the operators have no autograd for complex tensors."""
    fake: Tensor = base.meta["val"]
    if not fake.is_complex():
        return emit(function, base, value, *arguments)
    is_diagonal = function is aten.diagonal_scatter.default  # (offset, dim1, dim2); the others begin with their dimension
    dims = (1, 2) if is_diagonal else (0,)
    of_pairs = [each % fake.dim() if place in dims else each for place, each in enumerate(arguments)]
    value = value if value.meta["val"].is_complex() else emit(aten.to.dtype, value, fake.dtype)
    base_pairs, pairs = (emit(aten.view_as_real.default, emit(aten.resolve_conj.default, each)) for each in (base, value))
    if is_diagonal:  # a diagonal is the last dimension of its view, also of pairs
        pairs = emit(aten.transpose.int, pairs, -1, -2)
    return emit(aten.view_as_complex.default, emit(function, base_pairs, pairs, *of_pairs))


_Inverse: TypeAlias = Callable[[fx.Node, fx.Node, fx.Node, Emit], fx.Node]
"""(call, base, value, emit) -> the new base."""


def _scatter(function: Any, *names: str) -> _Inverse:
    """Return the inverse by an operator that writes the view into the base, with the named arguments of the view's call."""

    def write(call: fx.Node, base: fx.Node, value: fx.Node, emit: Emit) -> fx.Node:
        bound = bound_arguments(call)
        return _emit_scatter(emit, function, base, value, *(bound[name] for name in names))

    return write


def _inverse_of_narrow(call: fx.Node, base: fx.Node, value: fx.Node, emit: Emit) -> fx.Node:
    bound = bound_arguments(call)
    start, length = bound["start"], bound["length"]
    if isinstance(start, int) and start < 0:
        return _emit_scatter(
            emit, aten.slice_scatter.default, base, value, bound["dim"], start, None if start + length == 0 else start + length
        )
    if isinstance(start, int) and isinstance(length, int):
        end: Any = start + length
    elif start == 0:
        end = length
    else:
        end = emit(operator.add, start, length)
    return _emit_scatter(emit, aten.slice_scatter.default, base, value, bound["dim"], start, end)


def _permutation(order_of: Callable[[Mapping[str, Any], int], Sequence[int]]) -> _Inverse:
    """Return the inverse of an operator that reorders dimensions: dimension ``order[i]`` of the base is dimension ``i`` of the view."""

    def write(call: fx.Node, _: fx.Node, value: fx.Node, emit: Emit) -> fx.Node:
        rank = value.meta["val"].dim()
        order = [dimension % rank for dimension in order_of(bound_arguments(call), rank)] if rank else []
        return emit(aten.permute.default, value, [order.index(place) for place in range(rank)])

    return write


def _swap_dimensions(first: str | int, second: str | int) -> _Inverse:
    def order(bound: Mapping[str, Any], rank: int) -> list[int]:
        result = list(range(rank))
        if rank > 1:
            one, other = (bound[which] if isinstance(which, str) else which for which in (first, second))
            result[one], result[other] = result[other], result[one]
        return result

    return _permutation(order)


def _inverse_of_movedim(call: fx.Node, _: fx.Node, value: fx.Node, emit: Emit) -> fx.Node:
    bound = bound_arguments(call)
    return emit(call.target, value, bound["destination"], bound["source"])


def _part_of_complex(place: int) -> _Inverse:
    """Return the inverse of ``real`` (0) or ``imag`` (1): one half of the base, viewed as pairs of real numbers.

    The real part of a real tensor is the tensor.
    """

    def write(_: fx.Node, base: fx.Node, value: fx.Node, emit: Emit) -> fx.Node:
        if not base.meta["val"].is_complex():
            return value
        pairs = emit(aten.select_scatter.default, emit(aten.view_as_real.default, base), value, -1, place)
        return emit(aten.view_as_complex.default, pairs)

    return write


def _inverse_of_view(call: fx.Node, base: fx.Node, value: fx.Node, emit: Emit) -> fx.Node:
    if call.target is aten.view.dtype:
        fake: Tensor = base.meta["val"]
        return emit(aten.view.dtype, value, fake.dtype)
    return value if _has_shape_of(value, base) else emit(aten.reshape_as.default, value, base)


_SAME_ELEMENTS = frozenset(
    {
        aten.alias, aten.alpha_dropout, aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.broadcast_to, aten.contiguous, aten.detach,
        aten.dropout, aten.expand, aten.expand_as, aten.feature_alpha_dropout, aten.feature_dropout, aten.flatten, aten.lift_fresh,
        aten.pin_memory, aten.ravel, aten.reshape, aten.reshape_as, aten.resolve_conj, aten.resolve_neg, aten.squeeze, aten.to,
        aten.type_as, aten.unflatten, aten.unsqueeze, aten.view_as, aten._unsafe_view,  # noqa: SLF001
    }
)  # fmt: skip
"""Operators whose result, where it is a view, has the elements of its first argument in their order."""

_SPLITS = frozenset(
    {aten.chunk, aten.split, aten.split_with_sizes, aten.tensor_split, aten.unsafe_chunk, aten.unsafe_split, aten.unsafe_split_with_sizes}
)

_UNARY: Mapping[Any, Any] = {
    aten._conj: aten.conj.default,  # noqa: SLF001
    aten._neg_view: aten.neg.default,  # noqa: SLF001
    aten.adjoint: aten.adjoint.default,
    aten.conj: aten.conj.default,
    aten.mH: aten.adjoint.default,
    aten.matrix_H: aten.adjoint.default,
    aten.view_as_complex: aten.view_as_real.default,
    aten.view_as_real: aten.view_as_complex.default,
}
"""Operator -> the operator that computes its argument from its result."""

_INTERVALS = frozenset({aten.narrow, aten.slice})
"""Operators whose result equals their argument if it has the argument's shape."""

_INVERSES: Mapping[Any, _Inverse] = {
    aten.diagonal: _scatter(aten.diagonal_scatter.default, "offset", "dim1", "dim2"),
    aten.imag: _part_of_complex(1),
    aten.mT: _swap_dimensions(-2, -1),
    aten.moveaxis: _inverse_of_movedim,
    aten.movedim: _inverse_of_movedim,
    aten.narrow: _inverse_of_narrow,
    aten.numpy_T: _permutation(lambda _, rank: range(rank)[::-1]),
    aten.permute: _permutation(lambda bound, _: bound["dims"]),
    aten.real: _part_of_complex(0),
    aten.select: _scatter(aten.select_scatter.default, "dim", "index"),
    aten.slice: _scatter(aten.slice_scatter.default, "dim", "start", "end", "step"),
    aten.swapaxes: _swap_dimensions("axis0", "axis1"),
    aten.swapdims: _swap_dimensions("dim0", "dim1"),
    aten.t: _swap_dimensions(0, 1),
    aten.transpose: _swap_dimensions("dim0", "dim1"),
    aten.view: _inverse_of_view,
}
"""Operator -> the inverse that carries a write to its result over to its first argument."""
