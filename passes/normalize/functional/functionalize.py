"""Write in-place operations as functional ones: afterwards no call writes memory, except declared writes to buffers.

New values of inputs are handed back: they become results of the graph.

Before:                                            After:

    x = aten.clone(input)                              x = aten.clone(input)
    first = aten.select(x, 1, 0)                       first = aten.select(x, 1, 0)
    written = aten.copy_(first, y)                     written = aten.clone(y)
                                                       x_1 = aten.select_scatter(x, written, 1, 0)
    z = aten.relu_(x)                                  z = aten.relu(x_1)
    n = aten.add_(buffer, 1)                           n = aten.add(buffer, 1)
                                                       copy_ = aten.copy_(buffer, n)       the declared write

Every tensor is a base or a view of another. A write through any name of a base gives the base a new value
(``view_inverses``); a later reader of any other name takes its view again from the new value. A write to a buffer is declared once, by a
``copy_`` of its new value after the last write. Normalisations in training write their running statistics themselves, which is declared,
too.

A write through a detached name changes values without gradients: the base keeps its history and takes the new numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY, mutated_arguments, viewed_node, writes_statistics
from passes.graph.dependencies import is_differentiable
from passes.graph.fake_tensors import fake_mode, fake_result
from passes.graph.provenance import place_of
from passes.graph.schemas import (
    bound_arguments,
    draws_random_numbers,
    functional,
    out_parameters,
    packet,
    views_its_arguments,
)
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import TraceError
from passes.ir.torch_private import OpOverload
from passes.normalize.functional.view_inverses import View, inverse
from passes.normalize.randomness.draw_order import FILLED, draw_in_rows, laid_out_anew

aten = torch.ops.aten

_UNTRACKED = frozenset(
    {
        aten.channel_shuffle, aten.native_channel_shuffle, aten.unsafe_chunk, aten.unsafe_split, aten.unsafe_split_with_sizes,
        aten._unsafe_view,  # noqa: SLF001
    }
)  # fmt: skip
"""Operators whose results may share memory with their argument, unseen by autograd: a write changes its numbers alone."""

_STATISTICS_AS_RESULTS: Mapping[Any, OpOverload] = {
    aten._batch_norm_with_update: aten._batch_norm_with_update_functional.default,  # noqa: SLF001
    aten._native_batch_norm_legit: aten._native_batch_norm_legit_functional.default,  # noqa: SLF001
    aten.native_batch_norm: aten._native_batch_norm_legit_functional.default,  # noqa: SLF001
}
"""Normalisation -> the one that returns new running statistics after its other results."""


def functionalize(
    graph: fx.Graph,
    inputs: Collection[str] = (),
    buffers: Collection[str] = (),
    constants: Collection[str] = (),
    *,
    differentiable: bool = True,
) -> dict[str, fx.Node]:
    """Replace in-place operations of a graph by functional ones, in place.

    Args:
        inputs: placeholders whose memory may be left unwritten: the inputs of the model.
        buffers: placeholders whose new values are written at the end.
        constants: other placeholders that never require a gradient.
        differentiable: whether the graph will be differentiated; False for one that holds its backward already.

    Returns:
        Those inputs that the graph wrote in place and does not any more, with their new values.

    Raises:
        TraceError: an operator writes in place what cannot be written otherwise, or writes a parameter or a constant.
    """
    if not any(node.op == "call_function" and mutated_arguments(node) for node in graph.nodes):
        return {}
    with fake_mode(graph):
        return _Functionalizer(graph, inputs, buffers, constants, differentiable).run()


@dataclass(eq=False)
class _Base:
    """A tensor that is no view: how often it was written, and the placeholder that it is."""

    placeholder: fx.Node | None
    version: int = 0
    declared: fx.Node | None = None


@dataclass(eq=False)
class _Name:
    """One tensor of the model: a base, or a view.

    Attributes:
        base: the memory that it shares.
        value: the node that computed its value, last updated at ``version`` of the base.
        parent: the tensor that it is a view of; None for a base.
        view: the call that made the view.
        source: the argument of that call for ``parent``.
    """

    base: _Base
    value: fx.Node
    version: int
    parent: _Name | None = None
    view: View | None = None
    source: fx.Node | None = None


class _Functionalizer:
    """A graph while its writes become functional."""

    def __init__(
        self, graph: fx.Graph, inputs: Collection[str], buffers: Collection[str], constants: Collection[str], differentiable: bool
    ) -> None:
        self._graph = graph
        self._inputs, self._buffers = frozenset(inputs), frozenset(buffers)
        self._without_gradient = self._buffers | frozenset(constants)
        self._differentiable = differentiable
        self._parents = {node: parent for node in graph.nodes if (parent := viewed_node(node)) is not None}
        self._names: dict[fx.Node, _Name] = {}
        self._read_by: dict[fx.Node, dict[_Name, tuple[fx.Node, int]]] = {}
        self._results: dict[fx.Node, list[_Name]] = {}
        self._lists: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._renewed: set[fx.Node] = set()
        self._with_gradient: set[fx.Node] = set()
        self._unwritten: dict[str, fx.Node] = {}
        self._laid_out_anew: set[fx.Node] = set()
        self._at: fx.Node
        self._like: fx.Node

    def run(self) -> dict[str, fx.Node]:
        for node in list(self._graph.nodes):
            if node.op == "placeholder":
                self._names[node] = _Name(_Base(node), node, 0)
                if node.name not in self._without_gradient and is_differentiable(node):
                    self._with_gradient.add(node)
            else:
                self._visit(node)
        if self._laid_out_anew:
            for node in self._graph.find_nodes(op="call_function", target=aten.view.default):
                node.target = aten.reshape.default
            draw_in_rows(self._graph, {node.name for node in laid_out_anew(self._graph, self._laid_out_anew.__contains__)})
        return self._unwritten

    def _visit(self, node: fx.Node) -> None:
        self._at = self._like = node
        is_call = node.op == "call_function"
        written = [self._names[each] for each in mutated_arguments(node)] if is_call else []
        statistics = self._statistics(node, written)
        is_changed = self._update_arguments(node, statistics)
        if written and not statistics:
            assert isinstance(node.target, OpOverload)
            if packet(node.target) in _STATISTICS_AS_RESULTS:
                self._return_statistics(node, written)
            elif torch.Tag.inplace_view in node.target.tags:
                self._rebind(node, written[0])
            else:
                self._write(node, written)
            return
        if statistics:
            self._update_buffers(node)
        self._track_gradient(node)
        self._register_result(node, is_changed)

    def _refuse(self, node: fx.Node, problem: str, remedy: str) -> NoReturn:
        raise TraceError(problem, place=place_of(node), remedy=remedy)

    # -- reading -------------------------------------------------------------------------------------------------------------------

    def _update_arguments(self, node: fx.Node, besides: Collection[_Name]) -> bool:
        """Replace a node's arguments by their values after all writes so far; return whether any argument changed."""
        is_changed = False
        seen = self._read_by[node] = {}
        for source in node.all_input_nodes:
            name = self._names.get(source)
            if name is None or name in besides:
                continue
            value = self._current_value(name)
            seen[name] = value, name.version
            if value is not source:
                node.replace_input_with(source, value)
                is_changed = True
        return is_changed

    def _current_value(self, name: _Name) -> fx.Node:
        """Return the node of a name's value after all writes so far."""
        if name.version != name.base.version:
            assert name.parent is not None
            before, value = name.value, self._view_of(name, self._current_value(name.parent))
            if self._is_detached(name) and before in self._with_gradient:
                value = self._with_history(before, value)
            name.value, name.version = value, name.base.version
        return name.value

    def _view_of(self, name: _Name, value: fx.Node) -> fx.Node:
        """Return the view of a name, taken of another value of its parent."""
        assert name.view is not None
        call, item = name.view

        def of(source: fx.Node) -> fx.Node:
            return value if source is name.source else source

        target = aten.reshape.default if call.target is aten.view.default else call.target
        arguments, keywords = fx.map_arg(call.args, of), fx.map_arg(call.kwargs, of)
        if item is None:
            return self._emit(target, *arguments, **keywords)
        if (call, value) not in self._lists:
            self._lists[call, value] = self._emit(target, *arguments, **keywords)
        return self._emit(operator.getitem, self._lists[call, value], item)

    def _register_result(self, node: fx.Node, is_changed: bool) -> None:
        """Register the result of a node as a base, as a view, or as the tensor that it was written to."""
        traced = node.meta.get("val")
        if node.op == "output" or not isinstance(traced, Tensor | tuple | list):
            return
        parent = self._parents.get(node)
        # A view, or a list of tensors, was traced with other arguments: compute its fake value anew.
        if (is_changed or not self._renewed.isdisjoint(node.all_input_nodes)) and (parent is not None or not isinstance(traced, Tensor)):
            self._renew(node)
        if not isinstance(traced, Tensor):
            return
        call = node
        item: int | None = None
        if node.target is operator.getitem:
            assert isinstance(node.args[0], fx.Node)
            assert isinstance(node.args[1], int)
            call, item = node.args[0], node.args[1]
        # An item of a call that wrote in place: the tensor that it was written to.
        if call in self._results:
            assert item is not None
            self._names[node] = self._results[call][item]
        elif parent is None:
            self._names[node] = _Name(_Base(None), node, 0)
        else:
            above = self._names[parent]
            source, version = self._read_by[call][above]
            self._names[node] = _Name(above.base, node, version, above, (call, item), source)

    def _renew(self, node: fx.Node) -> None:
        """Compute a node's fake value anew, since its arguments are no longer those that it was traced with."""
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        node.meta = {key: value for key, value in node.meta.items() if key != OWN_MEMORY}
        node.meta["val"] = fake_result(node)
        self._renewed.add(node)

    # -- writing -------------------------------------------------------------------------------------------------------------------

    def _write(self, node: fx.Node, written: list[_Name]) -> None:
        """Compute what a call writes, and store it."""
        target = functional(node.target)
        if target is None:
            self._refuse(
                node,
                f"the model calls {node.target}, which writes into its arguments and has no functional form",
                "write it with operations that return new tensors",
            )
        traced = [name.value.meta["val"] for name in written]
        if draws_random_numbers(target):
            node.meta[FILLED] = node.meta["val"]
        if target is aten.copy.default:
            source = node.args[1]
            if isinstance(source, fx.Node) and source is written[0].value:  # the rest of self.steps += 1 for a buffer
                node.target, node.args, node.kwargs = aten.alias.default, (source,), {}
                self._names[node] = written[0]
                self._track_gradient(node)
                return
            self._make_copy(node)
        else:
            outs = out_parameters(node.target)
            bound = {name: value for name, value in bound_arguments(node).items() if name not in outs} if outs else {}
            node.args, node.kwargs = ((), bound) if outs else (node.args, node.kwargs)
            node.target = target
        self._describe(node)
        self._at = node.next
        values = [node] if isinstance(node.meta["val"], Tensor) else [self._emit(operator.getitem, node, i) for i in range(len(written))]
        self._results[node] = written
        self._names[node] = written[0]
        for name, value, before in zip(written, values, traced, strict=True):
            self._store(name, self._like_before(node, value, before))

    def _describe(self, node: fx.Node) -> None:
        """Compute the fake value of a call that became functional; refuse the call if PyTorch cannot."""
        try:
            value = fake_result(node)
        except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
            self._refuse(node, f"{node.target} cannot be computed here without writing in place: {error}", "write it with other operations")
        node.meta = {key: entry for key, entry in node.meta.items() if key != OWN_MEMORY}
        node.meta["val"] = value
        self._track_gradient(node)

    def _make_copy(self, node: fx.Node) -> None:
        """Replace ``copy_`` by a clone of its source, in the dtype and shape of its target: ``aten.copy`` has no derivative.

        What is overwritten gets a gradient of zeros, as under autograd: where it may require a gradient, every element is chosen from
        the copied tensor, none from the overwritten one.
        """
        written, source = node.args[:2]
        assert isinstance(written, fx.Node)
        before = written.meta["val"]
        if not isinstance(source, fx.Node):
            source = self._emit(aten.full_like.default, written, source)
        if source.meta["val"].device != before.device:
            source = self._emit(aten.to.device, source, before.device, source.meta["val"].dtype)
        if source.meta["val"].dtype != before.dtype:
            source = self._emit(aten.to.dtype, source, before.dtype)
        if source.meta["val"].shape != before.shape:
            source = self._emit(aten.expand_as.default, source, written)
        if written in self._with_gradient and self._differentiable:
            everywhere = self._emit(aten.ones_like.default, written, dtype=torch.bool)
            node.target, node.args, node.kwargs = aten.where.self, (everywhere, source, written), {}
        else:
            node.target, node.args, node.kwargs = aten.clone.default, (source,), {"memory_format": torch.contiguous_format}

    def _like_before(self, node: fx.Node, value: fx.Node, before: Tensor) -> fx.Node:
        """Return the value in the dtype of the written tensor; its shape cannot change."""
        found = value.meta["val"]
        sizes = [list(map(size_of, each.size())) for each in (found, before)]
        if sizes[0] != sizes[1]:
            self._refuse(
                node,
                f"{node.target} would change the size of what it writes, {sizes[1]}, to {sizes[0]}",
                "write into a tensor of the size of the result",
            )
        self._compare_strides(value, before)
        return value if found.dtype == before.dtype else self._emit(aten.to.dtype, value, before.dtype)

    def _compare_strides(self, value: fx.Node, before: Tensor) -> None:
        """Record a value whose strides differ from those of the memory that it replaces."""
        if list(map(size_of, value.meta["val"].stride())) != list(map(size_of, before.stride())):
            self._laid_out_anew.add(value)

    def _store(self, name: _Name, value: fx.Node) -> None:
        """Give a name its new value, and everything that it is a view of."""
        above = name.parent
        while above is not None:
            self._current_value(above)
            above = above.parent
        base = name.base
        base.version += 1
        name.value, name.version = value, base.version
        while name.parent is not None:
            assert name.view is not None
            assert name.source is not None
            parent, before, view = name.parent, name.parent.value, name
            value = inverse(name.view, name.source, before, value, self._emit, functools.partial(self._view_of, view))
            if self._is_detached(name):
                value = self._with_history(before, value)
            self._compare_strides(value, before.meta["val"])
            parent.value, parent.version = value, base.version
            name = parent
        if base.placeholder is not None:
            self._declare(base, base.placeholder, value)

    def _declare(self, base: _Base, placeholder: fx.Node, value: fx.Node) -> None:
        """Handle a write to a placeholder: copy_ to a buffer, the new value of an input, an error for a parameter or constant."""
        if placeholder.name in self._buffers:
            if base.declared is not None:
                self._graph.erase_node(base.declared)
            base.declared = self._emit(aten.copy_.default, placeholder, value)
            self._with_gradient.discard(base.declared)
        elif placeholder.name in self._inputs:
            self._unwritten[placeholder.name] = value
        else:
            what = "a constant tensor" if placeholder.name in self._without_gradient else "a parameter"
            self._refuse(
                self._like,
                f"the model writes into {what} in its forward",
                "keep what forward changes in a buffer (register_buffer); change parameters between steps, outside of forward "
                "(embeddings: without max_norm)",
            )

    def _rebind(self, node: fx.Node, written: _Name) -> None:
        """Make ``squeeze_`` and its like, which change a name and no memory, a new view that takes the name's place."""
        target, source = functional(node.target), node.args[0]
        lasts = written.value.op == "placeholder" and written.value.name not in self._inputs
        # To detach what never requires a gradient changes nothing that lasts.
        changes = lasts and not (node.target is aten.detach_.default and written.value.name in self._without_gradient)
        if target is None or not _is_view(target) or changes:
            self._refuse(
                node,
                f"the model calls {node.target}, which changes the size or memory of a tensor in place",
                "use the form that returns a new tensor",
            )
        assert isinstance(source, fx.Node)
        node.target = target
        self._track_gradient(node)
        self._renew(node)
        new = _Name(written.base, node, written.version, written, (node, None), source)
        for other in [other for other, name in self._names.items() if name is written]:
            self._names[other] = new
        self._names[node] = new

    # -- statistics ----------------------------------------------------------------------------------------------------------------

    def _statistics(self, node: fx.Node, written: list[_Name]) -> list[_Name]:
        """Return the buffers that a normalisation updates; none where it is given tensors without later readers."""
        if node.op != "call_function" or not written or not writes_statistics(node):
            return []
        if all(
            name.base.placeholder is not None and name.parent is None and name.base.placeholder.name in self._buffers for name in written
        ):
            return written
        if packet(node.target) in _STATISTICS_AS_RESULTS:
            return []
        last = all(set(source.users) == {node} and source.op != "placeholder" for source in mutated_arguments(node))
        if not last or packet(node.target) not in (aten.batch_norm, aten.instance_norm):
            self._refuse(
                node,
                "a normalisation updates running statistics that are no buffers of the model",
                "register running_mean and running_var as buffers (register_buffer), and pass them as they are",
            )
        bound = bound_arguments(node)
        node.args, node.kwargs = tuple(None if name in ("running_mean", "running_var") else each for name, each in bound.items()), {}
        written.clear()
        return []

    def _update_buffers(self, node: fx.Node) -> None:
        """Have a normalisation write the buffers themselves, whatever earlier write its arguments are the results of.

        Those writes have been declared before it, and stay: it reads what they left in the buffers.
        """
        for source in mutated_arguments(node):
            name = self._names[source]
            assert name.base.placeholder is not None
            node.replace_input_with(source, name.base.placeholder)
            name.base.version += 1
            name.value, name.version, name.base.declared = name.base.placeholder, name.base.version, None

    def _return_statistics(self, node: fx.Node, written: list[_Name]) -> None:
        """Have a normalisation return the statistics that it would write into tensors that are no buffers."""
        node.target = _STATISTICS_AS_RESULTS[packet(node.target)]
        self._describe(node)
        self._at = node.next
        n_results = len(node.meta["val"])
        values = [self._emit(operator.getitem, node, n_results - len(written) + place) for place in range(len(written))]
        for name, value in zip(written, values, strict=True):
            self._store(name, value)

    # -- gradients -----------------------------------------------------------------------------------------------------------------

    def _is_detached(self, name: _Name) -> bool:
        """Return whether no gradient passes from a view to its parent.

        So it is for ``detach``, a view as another dtype that has no gradients, and views that autograd does not track (``_UNTRACKED``).
        """
        if not self._differentiable or name.view is None:
            return False
        call, _ = name.view
        if call.target is aten.detach.default or packet(call.target) in _UNTRACKED:
            return True
        return name.source in self._with_gradient and call not in self._with_gradient

    def _with_history(self, before: fx.Node, value: fx.Node) -> fx.Node:
        """Return new numbers with the gradient of the old ones, as after a write under no_grad: ``before - before.detach() + value``."""
        if value in self._with_gradient:
            value = self._emit(aten.detach.default, value)
        if before not in self._with_gradient:
            return value
        zeros = self._emit(aten.sub.Tensor, before, self._emit(aten.detach.default, before))
        return self._emit(aten.add.Tensor, zeros, value)

    def _track_gradient(self, node: fx.Node) -> None:
        """Note whether a node's value may require a gradient."""
        reached = any(source in self._with_gradient for source in node.all_input_nodes)
        if reached and node.target is not aten.detach.default and is_differentiable(node):
            self._with_gradient.add(node)

    # -- new nodes -----------------------------------------------------------------------------------------------------------------

    def _emit(self, target: Any, /, *arguments: Any, **keywords: Any) -> fx.Node:
        """Insert a call at the current position."""
        with self._graph.inserting_before(self._at):
            node = self._graph.call_function(target, arguments, keywords)
        node.meta = {key: value for key, value in self._like.meta.items() if key not in ("val", OWN_MEMORY)}
        node.meta["val"] = fake_result(node) if target is not aten.copy_.default else arguments[0].meta["val"]
        self._track_gradient(node)
        return node


def _is_view(target: OpOverload) -> bool:
    return torch.Tag.inplace_view not in target.tags and views_its_arguments(target)
