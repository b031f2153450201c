"""Return the results that a training step reads, and no others: of a model that returns its loss, this alone.

Before:                                         After:

    loss = cross_entropy_loss(logits, labels)       loss = cross_entropy_loss(logits, labels)
    return (loss, logits, key, value)               return (loss, None, None, None)

Other results are neither gathered nor kept. New values of inputs that forward writes are always returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor, fx

from passes.graph.lazy_graph_module import rewritten
from passes.ir.graph import Attribute, ModelGraph, Output, Written
from passes.ir.program import call_loss
from passes.ir.torch_private import pytree

_UNFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of ``call_loss``, and of a class that checks the values that it is built from."""


def own_loss(graph: ModelGraph) -> int | None:
    """Return the index of the output that is the loss, of a model that returns its loss; None for any other.

    None also where the structure that the model returns cannot hold the loss alone.
    """
    values = {node.name: node.meta["val"] for node in graph.graph.output_node().all_input_nodes}
    leaves = [output.constant if output.node is None else _stand_in(values[output.node]) for output in graph.leaves]
    try:
        loss = call_loss(pytree.tree_unflatten(leaves, graph.output_tree), None, None)
        index = next((place for place, leaf in enumerate(leaves) if leaf is loss), None)  # None: a constant is the loss
        if index is not None:
            pytree.tree_unflatten([leaf if place == index else None for place, leaf in enumerate(leaves)], graph.output_tree)
    except _UNFIT:
        return None
    return index


def _stand_in(value: object) -> Tensor:
    """Return a tensor of one number for one of one number, and of two for any other."""
    is_number = isinstance(value, Tensor) and all(size == 1 for size in value.shape)
    return torch.zeros(()) if is_number else torch.zeros(2)


def results_of_step(graph: ModelGraph, attributes: Collection[int] = (), *, has_own_loss: bool = True) -> tuple[int, ...] | None:
    """Return the indices of the results that a training step reads; None: all.

    Args:
        attributes: indices of the results in attributes of modules that its loss function reads.
        has_own_loss: whether the step's loss is that which the model returns, if it returns one.
    """
    loss = own_loss(graph) if has_own_loss else None
    kept = tuple(
        place
        for place, output in enumerate(graph.outputs)
        if isinstance(output.destination, Written)
        or (output.destination is None and loss in (None, place))
        or (isinstance(output.destination, Attribute) and place in attributes)
    )
    return None if len(kept) == len(graph.outputs) else kept


def results_in_parts(graph: ModelGraph) -> tuple[int, ...] | None:
    """Return the indices of the results that microbatches can compute, all but attributes that mix rows; None: all."""
    mixed = {place for place, each in enumerate(graph.outputs) if isinstance(each.destination, Attribute) and each.combine == "mixed"}
    return tuple(place for place in range(len(graph.outputs)) if place not in mixed) if mixed else None


def return_only(graph: ModelGraph, kept: Collection[int]) -> ModelGraph:
    """Return a model that gives some of its results, and None for all others; what it computes stays unchanged."""
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        copies[node] = copied.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    (returned,) = graph.graph.output_node().args
    assert isinstance(returned, tuple | list)
    alone = tuple(value if place in kept else None for place, value in enumerate(returned))
    copied.output(fx.map_arg(alone, copies.__getitem__))
    outputs = tuple(
        output if place in kept else Output(output.name, None, None, "same", None, destination=output.destination)
        for place, output in enumerate(graph.outputs)
    )
    return dataclasses.replace(rewritten(graph, copied, {}), outputs=outputs)


def graph_of_step(graph: ModelGraph) -> ModelGraph:
    """Return the part of a model that a training step computes: if it returns its loss, the loss alone.

    A model with an output that mixes rows stays unchanged: its forward cannot be cut into microbatches.
    """
    kept = results_of_step(graph, has_own_loss=not graph.mixed) if graph.training else None
    return graph if kept is None else return_only(graph, kept)
