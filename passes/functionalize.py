"""Write in-place operations as functional ones wherever no other name of the memory sees the difference.

Before:                                            After:

    x = aten.clone(input)                              x = aten.clone(input)
    first = aten.select(x, 1, 0)                       first = aten.select(x, 1, 0)
    written = aten.copy_(first, y)                     written = aten.copy(first, y)
                                                       x_1 = aten.select_scatter(x, written, 1, 0)
    z = aten.relu_(x)                                  z = aten.relu(x_1)

A write through a view is carried back to what the view was taken of. Left in place: writes to parameters, buffers and constants (they are
meant to last), and writes to memory that is read later through a name that the write cannot be carried to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from passes.aliasing import aliasing, mutated_arguments
from passes.operators import bound_arguments
from passes.size_expression import size_of

__all__ = ["functionalize"]

aten = torch.ops.aten


def functionalize(graph: fx.Graph, inputs: Collection[str]) -> tuple[str, ...]:
    """Rewrite in place.

    Args:
        inputs: placeholders whose memory may be left unwritten: the inputs of the model.

    Returns:
        Those inputs that the graph wrote in place and does not any more.
    """
    rewriter = _Rewriter(graph)
    unwritten: dict[str, None] = {}
    for node in list(graph.nodes):
        target = functional(node.target) if node.op == "call_function" else None
        if target is None:
            continue
        if torch.Tag.inplace_view in node.target.tags:
            rewriter.replace_view(node, target)
            continue
        names = rewriter.names_of_memory(node)
        if any(name.op == "placeholder" and name.name not in inputs for name in names):
            continue
        chain = rewriter.chain(node, names)
        if not chain:
            continue
        call = rewriter.functional_call(node, target)
        value = _run(call, node, chain[0])
        if value is not None:
            rewriter.rewrite(node, call, value, chain)
            unwritten.update((name.name, None) for name in names if name.op == "placeholder")
    return tuple(unwritten)


_Call = tuple[OpOverload, tuple[Any, ...], Mapping[str, Any]]
"""An operation with its arguments."""


class _Rewriter:
    """A graph while its writes become functional: the position of every node, and the memory that its value was in."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order: dict[fx.Node, float] = {node: position for position, node in enumerate(graph.nodes)}
        self._storages = dict(aliasing(graph).storages)

    def replace_view(self, node: fx.Node, target: OpOverload) -> None:
        """``squeeze_`` and its like change a name, not memory."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.target = target
        for user in self._users_behind(source, node):
            user.replace_input_with(source, node)

    def names_of_memory(self, node: fx.Node) -> list[fx.Node]:
        """Every node whose value may share memory with what a node writes."""
        storages = self._storages[mutated_arguments(node)[0].name]
        return [other for other in self._order if storages & self._storages.get(other.name, frozenset())]

    def chain(self, node: fx.Node, names: Collection[fx.Node]) -> list[fx.Node]:
        """The written name, what it is a view of, and so on, as far as later nodes read them.

        Empty when a later node reads a name that is not on this way: then the write has to stay.
        """
        read_later = {name for name in names if self._order[name] < self._order[node] and self._users_behind(name, node)}
        chain = [mutated_arguments(node)[0]]
        while read_later - set(chain) and chain[-1].target in _SCATTERS:
            source = chain[-1].args[0]
            assert isinstance(source, fx.Node)
            chain.append(source)
        return [] if read_later - set(chain) else chain

    def functional_call(self, node: fx.Node, target: OpOverload) -> _Call:
        """The functional operation with its arguments.

        ``aten.copy`` has no derivative: ``copy_`` becomes a clone of what it copies, brought to the type and shape of what it writes.
        """
        if target is not aten.copy.default:
            return target, node.args, node.kwargs
        written, source = node.args[:2]
        assert isinstance(written, fx.Node)
        assert isinstance(source, fx.Node)
        before = written.meta["val"]
        for conversion, argument, needed in (
            (aten.to.dtype, before.dtype, source.meta["val"].dtype != before.dtype),
            (aten.expand_as.default, written, source.meta["val"].shape != before.shape),
        ):
            if needed:
                with node.graph.inserting_before(node):
                    converted = node.graph.call_function(conversion, (source, argument))
                self._order[converted] = self._order[node] - 0.5
                like = argument.meta["val"] if isinstance(argument, fx.Node) else argument
                converted.meta = {**node.meta, "val": conversion(source.meta["val"], like)}
                source = converted
        return aten.clone.default, (source,), {"memory_format": torch.contiguous_format}

    def rewrite(self, node: fx.Node, call: _Call, value: Tensor, chain: Sequence[fx.Node]) -> None:
        """Make the write functional and give every name of the chain its new value behind it."""
        dtype = node.meta["val"].dtype
        behind = {name: self._users_behind(name, node) for name in chain}
        node.target, node.args, node.kwargs = call[0], call[1], dict(call[2])
        node.meta["val"] = value
        current = node
        if value.dtype != dtype:
            current = self._insert(node, aten.to.dtype, (node, dtype), chain[0])
            node.replace_all_uses_with(current, delete_user_cb=lambda user: user is not current)
        for view, name in zip([None, *chain], chain, strict=False):
            if view is not None:
                scatter, arguments = _SCATTERS[view.target](view, current)
                current = self._insert(current, scatter, arguments, name)
            for user in behind[name]:
                user.replace_input_with(name, current)

    def _users_behind(self, name: fx.Node, node: fx.Node) -> list[fx.Node]:
        return [user for user in name.users if self._order[user] > self._order[node]]

    def _insert(self, node: fx.Node, target: Any, arguments: tuple[Any, ...], name: fx.Node) -> fx.Node:
        """A node behind another, that takes the place of a name from here on."""
        with node.graph.inserting_after(node):
            new = node.graph.call_function(target, arguments)
        fakes = fx.map_arg(arguments, lambda source: source.meta["val"])
        new.meta = {**node.meta, "val": target(*fakes)}
        self._order[new] = self._order[node]
        self._storages[new.name] = self._storages[name.name]
        return new


def functional(operator: Any) -> OpOverload | None:
    """The operation that computes what an in-place one writes: ``aten.add.Tensor`` of ``aten.add_.Tensor``; None when there is none."""
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    name, _, overload = operator.name().removeprefix("aten::").partition(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    if operator in _UNLIKE_NAMES:
        return _UNLIKE_NAMES[operator]
    return getattr(getattr(aten, name.removesuffix("_"), None), overload or "default", None)


_UNLIKE_NAMES: Mapping[OpOverload, OpOverload | None] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.ldexp_.default: aten.ldexp.Tensor,
    aten.normal_.default: aten.normal_functional.default,
    aten.polygamma_.default: None,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.transpose_.default: aten.transpose.int,
}
"""In-place operations whose functional form has another name or none; by their own name they would find one with other arguments."""


def _run(call: _Call, node: fx.Node, written: fx.Node) -> Tensor | None:
    """The fake result of the functional operation; None when it lies in memory in another way, and that may matter.

    None, too, where the functional form does not take these arguments: the operation then stays in place, which is always right.
    """
    target, args, kwargs = call
    args, kwargs = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    before = node.meta["val"]
    try:
        value = target(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    if not isinstance(value, Tensor) or value.shape != before.shape:
        return None
    same_strides = [size_of(size) for size in value.stride()] == [size_of(size) for size in before.stride()]
    return value if same_strides or written.target in _SCATTERS else None


# -- writing through views: (view, its new value) -> the operation that gives the new value of what it is a view of ---------------------


def _scatter_slice(view: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    bound = bound_arguments(view)
    return aten.slice_scatter.default, (bound["self"], value, bound["dim"], bound["start"], bound["end"], bound["step"])


def _scatter_select(view: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    bound = bound_arguments(view)
    return aten.select_scatter.default, (bound["self"], value, bound["dim"], bound["index"])


def _undo_unsqueeze(view: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.squeeze.dim, (value, bound_arguments(view)["dim"])


def _undo_transpose(view: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    bound = bound_arguments(view)
    return aten.transpose.int, (value, bound["dim0"], bound["dim1"])


def _undo_permute(view: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    dims = [dim % len(bound_arguments(view)["dims"]) for dim in bound_arguments(view)["dims"]]
    return aten.permute.default, (value, [dims.index(position) for position in range(len(dims))])


def _undo_view(view: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.reshape_as.default, (value, view.args[0])


_SCATTERS: Mapping[Any, Callable[[fx.Node, fx.Node], tuple[Any, tuple[Any, ...]]]] = {
    aten.permute.default: _undo_permute,
    aten.select.int: _scatter_select,
    aten.slice.Tensor: _scatter_slice,
    aten.transpose.int: _undo_transpose,
    aten.unsqueeze.default: _undo_unsqueeze,
    aten.view.default: _undo_view,
}
