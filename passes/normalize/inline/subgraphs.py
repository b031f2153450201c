"""Inline graphs that a graph calls to change the grad mode.

Before:                                                           After:

    (inner) (x): y = aten.cos(x); return (y,)
    outer = wrap_with_set_grad_enabled(False, inner, x)               detach = aten.detach(x)
    item = outer[0]                                                   y = aten.cos(detach)

A region without gradients computes on detached inputs: then no result of it carries a gradient, and neither does what it writes in place.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import may_require_gradient
from passes.graph.fake_tensors import fake_mode, fake_result
from passes.graph.provenance import place_of
from passes.graph.schemas import returns_argument
from passes.ir.errors import TraceError
from passes.ir.torch_private import HigherOrderOperator, OpOverload

_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_GRAPH_ARGUMENT: Mapping[Any, int] = {_GRAD_MODE: 1, _AUTOCAST: 4}
"""Calls that can be inlined -> which argument is the called graph; its own arguments follow."""

_OF_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of operators whose results have sizes that depend on values: these are never the argument itself."""

_REMEDIES: Mapping[str, str] = {
    "while_loop": "make a number of steps that Python knows, for step in range(n), and keep what is finished with torch.where",
    "flex_attention": "call torch.nn.attention.flex_attention.flex_attention itself, not compiled, or scaled_dot_product_attention",
}
"""Name of an operator that cannot be inlined -> what to do instead."""


def inline_subgraphs(module: fx.GraphModule, without_gradient: Collection[str] = ()) -> None:
    """Inline every called graph, in place.

    Args:
        without_gradient: placeholders that never require a gradient: buffers and constants.

    Raises:
        TraceError: a graph is called by anything but a change of grad mode or a region of autocast, whose casts are written.
    """
    for node in list(module.graph.nodes):
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            carriers = may_require_gradient(module.graph, without_gradient)
            _inline(module, node, carriers)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


def _inline(module: fx.GraphModule, call: fx.Node, carriers: Collection[fx.Node], *, around: bool = True) -> None:
    """Replace a call by the nodes of the graph that it calls, and its items by their results; ``around``: whether gradients flow there."""
    inner, arguments, grad_enabled = _callee(module, call, around=around)
    graph = module.graph
    detached: dict[fx.Node, fx.Node] = {}

    def detached_in_no_grad(node: fx.Node) -> fx.Node:
        if grad_enabled or node not in carriers:
            return node
        if node not in detached:
            detached[node] = graph.call_function(torch.ops.aten.detach.default, (node,))
            detached[node].meta = {**call.meta, "val": node.meta["val"].detach()}
        return detached[node]

    originals: dict[fx.Node, Any] = {}

    def read(node: fx.Node) -> Any:
        value = originals[node]
        return detached_in_no_grad(value) if isinstance(value, fx.Node) else value

    results: Any = ()
    with graph.inserting_before(call):
        values = iter(arguments)
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                originals[node] = next(values)
            elif node.op == "get_attr":
                originals[node] = adopt(module, call, inner, node)
            elif node.op == "call_function":
                nested = isinstance(node.target, HigherOrderOperator)
                originals[node] = graph.node_copy(node, originals.__getitem__ if nested else read)
            else:
                results = fx.map_arg(node.args[0], lambda result: _result(result, originals, read))
    for item in list(call.users):
        assert item.target is operator.getitem, "the results of a called graph are read one by one"
        item.replace_all_uses_with(results[item.args[1]])
        graph.erase_node(item)
    graph.erase_node(call)
    for node in originals.values():
        if isinstance(node, fx.Node) and isinstance(node.target, HigherOrderOperator):
            _inline(module, node, carriers, around=grad_enabled)


def _result(result: fx.Node, originals: Mapping[fx.Node, Any], read: Callable[[fx.Node], Any]) -> Any:
    """Return the caller's value of a result; for an argument that operations return as it is, that argument, with its autograd history."""
    source = result
    while (returned := _returned_argument(source)) is not None:
        source = returned
    return originals[source] if source is not result and source.op == "placeholder" else read(result)


def _returned_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that an operation returns, not as another tensor: one that it writes, or one that needs no conversion."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if arguments := mutated_arguments(node):
        return arguments[0] if returns_argument(node.target) else None
    if _OF_VALUES.intersection(node.target.tags):
        return None
    with fake_mode(node.graph):
        value = fake_result(node)
    return next((each for each in node.all_input_nodes if each.meta.get("val") is value), None)


def _callee(module: fx.GraphModule, call: fx.Node, *, around: bool) -> tuple[fx.GraphModule, tuple[Any, ...], bool]:
    """Return the called graph, its arguments, and whether gradients flow in it."""
    position = _GRAPH_ARGUMENT.get(call.target)
    if position is None:
        raise TraceError(
            f"the model calls a nested graph through {call.target}, which cannot be partitioned",
            place=place_of(call),
            remedy=_REMEDIES.get(str(call.target), "write it with plain tensor operations"),
        )
    attribute, *arguments = call.args[position:]
    assert isinstance(attribute, fx.Node)
    inner = module.get_submodule(str(attribute.target))
    assert isinstance(inner, fx.GraphModule)
    assert call.target is not _AUTOCAST or not call.args[2], "casts have been written"
    return inner, tuple(arguments), bool(call.args[0]) if call.target is _GRAD_MODE else around


def adopt(module: fx.GraphModule, call: fx.Node, inner: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Move a graph nested in a called graph to the calling module; return the get_attr node that reads it there."""
    taken = dict(module.named_children())
    names = (f"{call.name}_{node.name}_{number}" if number else f"{call.name}_{node.name}" for number in itertools.count())
    name = next(name for name in names if name not in taken)
    module.add_submodule(name, inner.get_submodule(str(node.target)))
    adopted = module.graph.get_attr(name)
    adopted.meta = dict(node.meta)
    return adopted
