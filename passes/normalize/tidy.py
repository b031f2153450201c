"""Put every ``getitem`` directly after its producer.

Before:                                  After:

    split = aten.split(x, 4)                 split = aten.split(x, 4)
    linear = aten.linear(y, w)               a = split[0]
    a = split[0]                             b = split[1]
    b = split[1]                             linear = aten.linear(y, w)

A cut between two nodes then never separates a list of tensors from its items.

Write assignments by mask as choices, element by element: an assignment by index does not state which rows it mixes.

Before:                                  After:

    y = aten.index_put(x, [x > 0], c)        y = aten.where(x > 0, c, x)

Let every tensor that the model returns be the result of a node, so that a stage computes it.

Before:                          After:

    return (x, linear)               alias = aten.alias(x)
                                     return (alias, linear)

What is returned as it was given (an input, a parameter, a buffer) otherwise has no producer.

Name every computing node after its operation, numbered in the order of the graph.

Before:                                     After:

    slice_scatter_default = ...                 slice_scatter = ...
    add_ = aten.add(x, y)                       add = aten.add(x, y)
    linear_7 = ...                              linear = ...
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from passes.graph.fake_tensors import call_like
from passes.graph.schemas import bound_arguments
from passes.ir.torch_private import OpOverload


def place_getitems(graph: fx.Graph) -> None:
    """Move the items in place; their order is kept."""
    for node in list(graph.nodes):
        last = node
        for item in [user for user in node.users if user.op == "call_function" and user.target is operator.getitem]:
            if last.next is not item:
                last.append(item)
            last = item


# -- write assignments by mask as choices ------------------------------------------------------------------------------------------


def assign_by_mask(graph: fx.Graph) -> None:
    """Rewrite in place the assignments whose values do not depend on how many elements the mask has."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.index_put.default:
            continue
        x, indices, values, accumulate = (bound_arguments(node)[name] for name in ("self", "indices", "values", "accumulate"))
        (n_before, mask), *others = [(place, index) for place, index in enumerate(indices) if index is not None]
        if accumulate or others or mask.meta["val"].dtype != torch.bool:
            continue
        n_behind = x.meta["val"].dim() - n_before - mask.meta["val"].dim()
        if values.meta["val"].dim() > n_behind:
            continue
        with graph.inserting_before(node):
            for _ in range(n_behind):
                mask = call_like(graph, node, torch.ops.aten.unsqueeze.default, mask, -1)
        node.target, node.args, node.kwargs = torch.ops.aten.where.self, (mask, values, x), {}


# -- let every tensor that the model returns be the result of a node, so that a stage computes it ----------------------------------


def compute_outputs(graph: fx.Graph) -> None:
    """Put an alias after every tensor placeholder that the output reads, in place."""
    output = graph.output_node()
    for placeholder in dict.fromkeys(output.all_input_nodes):
        if placeholder.op == "placeholder" and isinstance(placeholder.meta.get("val"), Tensor):
            with graph.inserting_before(output):
                alias = graph.call_function(torch.ops.aten.alias.default, (placeholder,))
            alias.meta = dict(placeholder.meta)
            output.replace_input_with(placeholder, alias)


# -- name every computing node after its operation, numbered in the order of the graph ---------------------------------------------


def name_nodes(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the graph with normalised names; placeholders keep theirs."""
    named = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = named.create_node(node.op, node.target, args, kwargs, name=_name(node))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = named.node_copy(node, copies.__getitem__)
    return named


def _name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target.name().partition("::")[2].partition(".")[0].strip("_") or node.name
    return str(getattr(node.target, "__name__", node.name)).strip("_") or node.name
