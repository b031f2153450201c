"""Read the values of tensors that a trace knows: those made of constants, of sizes and of buffers, and of nothing else.

    mask = torch.ones(x.shape[1]).tril()       full, tril: the graph so far has their arguments
    if mask.all(): ...                         they are computed, and the decision is a constant of the trace
    if (x > 0).all(): ...                      values of an input: refused by name, as before

A size that such a value depends on is fixed, so that the trace serves no other one. Sizes of tensors whose values are not read stay open.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef

from passes.graph.schemas import bound_arguments
from passes.ir.errors import TraceError
from passes.ir.torch_private import OngoingTrace, OpOverload, is_wrapped, no_dispatch_modes, tree_map_only

aten = torch.ops.aten

_READ = frozenset({aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.allclose.default})  # noqa: SLF001
"""Operators whose result is a plain value."""

_SIZED = frozenset({aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor})  # noqa: SLF001
"""Operators whose values decide how large their result is."""

_LIKE = frozenset(
    {
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
        *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
    }
)
"""Operators that read the size and the type of their first argument, and none of its values."""


class KnownValues:
    """Computes decisions of a model by the values that its trace knows.

    Args:
        model: the model, before it is traced.
        without_values: ids of tensors that are not known.

    Attributes:
        read: the buffers that were read, by name, with their values.
    """

    def __init__(self, model: nn.Module, without_values: Collection[int]) -> None:
        self._model, self._buffers, self._without_values = model, dict(model.named_buffers()), without_values
        self.read: dict[str, Tensor] = {}

    def _buffer_of(self, node: fx.Node, trace: OngoingTrace) -> Tensor | None:
        """Return the buffer of a placeholder: the model holds the tensors of the trace in its place."""
        name = next((name for name, tensor in self._model.named_buffers() if trace.node_of(tensor) is node), None)
        if name is None or self._buffers[name].is_meta:
            return None
        return self.read.setdefault(name, self._buffers[name].detach().clone())

    def result(self, function: Any, args: Any, kwargs: Mapping[str, Any], ongoing: Callable[[], OngoingTrace]) -> Any:
        """Return the result of a call that is traced, which is not written into the graph; ``NotImplemented``: trace it."""
        if function not in _READ and function not in _SIZED and function is not aten.index.Tensor:
            return NotImplemented
        trace = ongoing()
        values = _Values(trace, self._without_values, lambda node: self._buffer_of(node, trace))
        if function is aten.index.Tensor:
            return _index(values, *args)
        known = values.of_all(args)
        if any(value is None and each is not None for value, each in zip(known, args, strict=True)):
            return NotImplemented
        with no_dispatch_modes(), torch.no_grad():
            found = function(*known, **kwargs)
        return tree_map_only(Tensor, trace.constant, found) if function in _SIZED else found


def refuse_written_buffers(program: ExportedProgram, read: Collection[str]) -> None:
    """Raise TraceError where forward writes a buffer by whose values it decides: the next call would decide otherwise."""
    written = {storage for node in program.graph.nodes for storage in _written(node)}
    names = program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        name = names.get(node.name) if node.op == "placeholder" else None
        if name in read and _storages(node) & written:
            raise TraceError(
                f"forward decides by the values of the buffer {name}, and writes it: the next call may decide otherwise",
                remedy="compute both cases and choose with torch.where, or decide outside of the model and pass the decision to it",
            )


def _index(values: _Values, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Trace an index by masks as one by the positions that they choose, if the masks are known."""
    masks = [index if index is not None and index.dtype in (torch.bool, torch.uint8) else None for index in indices]
    known = values.of_all(masks)
    if not any(mask is not None for mask in masks) or any(
        mask is not None and value is None for mask, value in zip(masks, known, strict=True)
    ):
        return NotImplemented
    positions: list[Tensor | None] = []
    for index, value in zip(indices, known, strict=True):
        if value is None:
            positions.append(index)
        else:
            with no_dispatch_modes():
                chosen = value.nonzero(as_tuple=True)
            positions += [values.trace.constant(each) for each in chosen]
    return values.trace.call(aten.index.Tensor, x, positions)


class _Values:
    """Values of nodes of a graph that is being traced.

    Args:
        trace: writes the graph.
        without_values: ids of constants that are not known.
        buffer_of: returns the tensor of a placeholder; None for one of other values.
    """

    def __init__(self, trace: OngoingTrace, without_values: Collection[int], buffer_of: Callable[[fx.Node], Tensor | None]) -> None:
        self.trace, self._without_values, self._buffer_of = trace, without_values, buffer_of

    def of_all(self, arguments: Sequence[Any]) -> list[Any]:
        """Return arguments with the values of tensors; None for a tensor that is not known."""
        with no_dispatch_modes(), torch.no_grad():
            return [self.of(self.trace.node_of(each)) if isinstance(each, Tensor) else each for each in arguments]

    def of(self, node: fx.Node | None) -> Tensor | None:
        """Return the value of a node at the end of its graph; None: it is not known."""
        needed = None if node is None else _needed(node)
        if node is None or needed is None:
            return None
        values: dict[fx.Node, Any] = {}
        for each in node.graph.nodes:
            if each in needed:
                values[each] = self._value(each, values)
                if values[each] is None:
                    return None
        found: Tensor = values[node]
        return found if found.dtype == node.meta["val"].dtype else None  # autocast has computed it in another type

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        traced = node.meta.get("val")
        if isinstance(traced, torch.SymInt | torch.SymBool):
            return operator.index(traced) if isinstance(traced, torch.SymInt) else bool(traced)
        if node.op == "placeholder":
            return self._buffer_of(node)
        if node.op == "get_attr":
            constant = self.trace.attribute(str(node.target))
            return constant.detach().clone() if isinstance(constant, Tensor) and id(constant) not in self._without_values else None

        def value(each: fx.Node) -> Any:
            return values[each] if each in values else _empty(each.meta["val"])

        args: Any = fx.map_arg(node.args, value)
        kwargs: dict[str, Any] = {name: fx.map_arg(each, value) for name, each in node.kwargs.items()}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = "cpu"
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _empty(like: Tensor) -> Tensor:
    device = "cpu" if like.is_meta else like.device
    return torch.empty([int(size) for size in like.shape], dtype=like.dtype, device=device)


def _needed(node: fx.Node) -> set[fx.Node] | None:
    """Return the nodes whose values decide that of a node, writes into their memory among them; None where one is not known."""
    writes = [(each, storages) for each in node.graph.nodes if (storages := _written(each))]
    needed, pending, memory = set[fx.Node](), [node], set[int]()
    while pending:
        each = pending.pop()
        if each in needed:
            continue
        if not _is_known(each):
            return None
        needed.add(each)
        memory |= _storages(each)
        pending += _inputs(each)
        if not pending:
            pending += [write for write, storages in writes if write not in needed and storages & memory]
    return needed


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node reads; sizes are known without them."""
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool):
        return []
    if node.target in _LIKE:
        return [each for each in node.all_input_nodes if each is not node.args[0]]
    return node.all_input_nodes


def _is_known(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        return not isinstance(value, torch.SymFloat) and value.node.has_hint()
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded not in node.target.tags


def _storages(node: fx.Node) -> set[int]:
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else (value,)
    return {StorageWeakRef(each.untyped_storage()).cdata for each in tensors if isinstance(each, Tensor) and not is_wrapped(each)}


def _written(node: fx.Node) -> set[int]:
    """Return the storages that a node writes into."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:  # noqa: SLF001  no public name
        return set()
    given = bound_arguments(node)
    names = [each.name for each in node.target._schema.arguments if each.alias_info is not None and each.alias_info.is_write]  # noqa: SLF001
    return {storage for name in names if isinstance(given.get(name), fx.Node) for storage in _storages(given[name])}
