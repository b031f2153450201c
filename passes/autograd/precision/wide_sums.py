"""Sum the gradients of parameters over ranks in the type of the parameters: the cast comes before the sum.

    before                                                   after

    part = reduce_scatter(gradient)       bfloat16           wide = _to_copy(gradient, float32)
    sum = _to_copy(part, float32)                            sum = reduce_scatter(wide)                float32

A parameter that is cast where it is stored (``passes.spmd.commute.parameter_casts``) is gathered in the smaller type, so autograd sums its
gradient in that type, and casts the sum. A cast to a wider type commutes with a sum of parts but for rounding, and rounds less before it.

With ``reduce_dtype``, sums are in that type, and are cast back: ``reduce_scatter(_to_copy(gradient, bfloat16))``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from passes.autograd.trace_joint import Joint
from passes.graph.fake_tensors import FakeTensorCache, fake_mode
from passes.graph.schemas import views_its_arguments
from passes.ir.comm.functional import all_reduce, reduce_scatter, take
from passes.ir.torch_private import OpOverload

aten = torch.ops.aten

_CAST = aten._to_copy.default  # noqa: SLF001  what a conversion comes down to


_PUT_TOGETHER = frozenset({aten.add.Tensor, aten.select_backward.default, aten.slice_backward.default, take})
"""Operations on gradients of a value's readers, besides views: sums of several, and gradients of parts."""


def with_wide_sums(joint: Joint, reduce_dtype: torch.dtype | None = None) -> Joint:
    """Return the joint graph, changed in place, with sums of gradients of parameters in the parameters' type, or in a given one."""
    names = [name for name in joint.stage.parameters if name in joint.gradients]
    moved: dict[fx.Node, fx.Node] = {}
    with fake_mode(joint.graph):
        for cast in [each for name in names for each in _casts_of(joint.gradients[name])]:
            if cast not in moved and (path := _path_to_sum(cast)):
                moved[cast] = _cast_before(path, cast)
    for cast in moved:
        joint.graph.erase_node(cast)
    gradients = {name: moved.get(node, node) for name, node in joint.gradients.items()}
    if reduce_dtype is not None:
        with fake_mode(joint.graph):
            for node in dict.fromkeys(each for name in names for each in _ancestors(gradients[name]) if _is_sum(each)):
                result = _sum_in(node, reduce_dtype)
                gradients = {name: result if gradient is node else gradient for name, gradient in gradients.items()}
    return dataclasses.replace(joint, gradients=gradients)


def _sum_in(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Cast the operand of a sum over ranks, and the result back; return the node that gives the result."""
    own, (source,) = node.meta["val"].dtype, node.all_input_nodes
    if own == dtype:
        return node
    operand = source.all_input_nodes[0] if source.target is _CAST else source
    with node.graph.inserting_before(node):
        node.replace_input_with(source, operand if operand.meta["val"].dtype == dtype else _cast_to(source, dtype, node))
    FakeTensorCache().describe(node)
    with _inserting_before_readers(node):
        result = _cast_to(node, own, node)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    if not source.users:
        node.graph.erase_node(source)
    return result


def _inserting_before_readers(node: fx.Node) -> AbstractContextManager[Any]:
    """Insert nodes before the first reader of a node, else at the end of the graph: small sums can then share one message."""
    following = node
    while following not in node.users and following.op != "root":
        following = following.next
    return node.graph.inserting_before(following)


def _cast_to(value: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Insert a cast that belongs to another node."""
    cast = value.graph.create_node("call_function", _CAST, (value,), {"dtype": dtype}, name=f"{value.name}_{dtype}".replace("torch.", ""))
    cast.meta = dict(like.meta)
    FakeTensorCache().describe(cast)
    return cast


def _casts_of(gradient: fx.Node) -> Iterator[fx.Node]:
    """Yield the casts whose results a gradient is put together from, but those that other casts read."""
    return (node for node in _ancestors(gradient, through_casts=False) if node.target is _CAST)


def _ancestors(gradient: fx.Node, *, through_casts: bool = True) -> Iterator[fx.Node]:
    """Yield the nodes that a gradient is put together from: by additions, views and parts of views, sums over ranks, and casts."""
    pending = [gradient]
    while pending:
        node = pending.pop()
        yield node
        if (node.target is _CAST and through_casts) or node.target in _PUT_TOGETHER or _is_view(node) or _is_sum(node):
            pending += node.all_input_nodes


def _path_to_sum(cast: fx.Node) -> list[fx.Node]:
    """Return the sums over ranks, and views between them, from a cast to a wider type to the first of them; empty if there is none."""
    path: list[fx.Node] = []
    node = cast.all_input_nodes[0]
    if node.meta["val"].dtype.itemsize >= cast.meta["val"].dtype.itemsize:
        return path
    while len(node.users) == 1 and (_is_sum(node) or _is_view(node)):
        path.append(node)
        node = node.all_input_nodes[0]
    while path and not _is_sum(path[-1]):
        path.pop()
    return path


def _cast_before(path: list[fx.Node], cast: fx.Node) -> fx.Node:
    """Move a cast before the last node of a path, the first that is computed; return the node that gives what the cast gave."""
    fakes, first = FakeTensorCache(), path[-1]
    (source,) = first.all_input_nodes
    with first.graph.inserting_before(first):
        wide = first.graph.create_node("call_function", cast.target, (source, *cast.args[1:]), cast.kwargs, name=f"{cast.name}_wide")
    wide.meta = dict(cast.meta)
    first.replace_input_with(source, wide)
    for node in (wide, *reversed(path)):
        fakes.describe(node)
    cast.replace_all_uses_with(path[0])
    return path[0]


def _is_sum(node: fx.Node) -> bool:
    return node.target is reduce_scatter or (node.target is all_reduce and node.args[2] == "sum")


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and views_its_arguments(node.target) and len(node.all_input_nodes) == 1
