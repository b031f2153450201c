"""What every node of a model costs, and which values its backward keeps alive.

Repeated layers are priced once: the price of a node depends on its operator and on the sizes of what it touches, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx
from torch._ops import OpOverload

from cost_models.node_work import described
from cost_models.operations import OperationCost, operation_cost, tensor_shapes
from cost_models.sizes import Size
from passes.aliasing import allocations, mutated_arguments
from passes.gradient_flow import may_require_gradient
from passes.ir.collectives import COLLECTIVES
from passes.ir.graph import ModelGraph
from passes.operators import bound_arguments, node_leaves

__all__ = ["GraphCost", "graph_cost", "nodes_with_gradient"]


@dataclass(frozen=True)
class GraphCost:
    """The price of a model, as formulas in its batch symbol.

    Attributes:
        batch: the symbol; None when all is numbers.
        nodes: computing node -> its price.
        saved: computing node -> the allocations that its backward keeps.
        allocation_bytes: allocation -> its size.
        maker: allocation -> the node that makes it.
        gradients: nodes whose gradient the backward computes.
        unknown: operators that are not in the table, by name, sorted: priced by their bytes alone.
    """

    batch: sympy.Symbol | None
    nodes: Mapping[str, OperationCost]
    saved: Mapping[str, tuple[int, ...]]
    allocation_bytes: Mapping[int, Size]
    maker: Mapping[int, str]
    gradients: frozenset[str]
    unknown: tuple[str, ...]


def nodes_with_gradient(graph: ModelGraph) -> frozenset[str]:
    """The nodes whose gradient a training step computes: parameters that require one, and what depends on them differentiably."""
    trained = {
        node.name for node in graph.graph.nodes if node.name in graph.parameters and getattr(node.meta.get("val"), "requires_grad", False)
    }
    untrained = [node.name for node in graph.graph.nodes if node.op == "placeholder" and node.name not in trained]
    return frozenset(node.name for node in may_require_gradient(graph.graph, without=untrained))


def graph_cost(graph: ModelGraph, *, differentiate: bool) -> GraphCost:
    """Price every node.

    Args:
        differentiate: whether there is a backward.
    """
    flowing = nodes_with_gradient(graph) if differentiate else frozenset()
    memory = allocations(graph.graph)
    stationary = {
        allocation for name in (*graph.parameters, *graph.buffers, *graph.constants) for allocation in memory.lies_in.get(name, ())
    }
    weights = _parameter_values(graph)
    shapes = {node: tensor_shapes(node.meta.get("val")) for node in graph.graph.nodes}
    priced: dict[Any, OperationCost] = {}
    nodes: dict[str, OperationCost] = {}
    saved: dict[str, tuple[int, ...]] = {}
    for node in graph.computing_nodes():
        bound = bound_arguments(node) if isinstance(node.target, OpOverload) else {}
        arguments = {name: described(value) for name, value in bound.items()}
        gradients = _gradients(node, bound, flowing, weights)
        is_view = _is_view(node, memory.lies_in)
        held = frozenset(name for name, value in bound.items() if any(leaf.name in graph.parameters for leaf in node_leaves(value)))
        key = (node.target, shapes[node], tuple(arguments.items()), tuple(gradients.items()), is_view, held)
        if key not in priced:
            priced[key] = operation_cost(node, shapes[node], arguments, gradients, is_view=is_view, weights=held)
        nodes[node.name] = priced[key]
        kept = (leaf.name for name in priced[key].saves for leaf in ([node] if name.startswith("result") else node_leaves(bound[name])))
        keys = dict.fromkeys(allocation for name in kept for allocation in memory.lies_in[name] if allocation not in stationary)
        saved[node.name] = tuple(keys)
    calls = [node for node in graph.computing_nodes() if node.target not in COLLECTIVES]
    unknown = {str(node.target) for node in calls if not nodes[node.name].known}
    maker: dict[int, str] = {}
    for name, lies_in in memory.lies_in.items():
        for allocation in lies_in:
            maker.setdefault(allocation, name)
    return GraphCost(graph.batch, nodes, saved, memory.bytes, maker, flowing, tuple(sorted(unknown)))


def _parameter_values(graph: ModelGraph) -> frozenset[str]:
    """Parameters, and what is computed from them alone: their gradients belong to the weight half."""
    values = set(graph.parameters)
    for node in graph.computing_nodes():
        if node.all_input_nodes and all(argument.name in values for argument in node.all_input_nodes):
            values.add(node.name)
    return frozenset(values)


def _gradients(node: fx.Node, bound: Mapping[str, Any], flowing: frozenset[str], weights: frozenset[str]) -> dict[str, str]:
    """Argument -> which half of the backward computes its gradient; empty when the node takes no part in the backward."""
    if node.name not in flowing:
        return {}
    gradients = {}
    for name, value in bound.items():
        leaves = [leaf for leaf in node_leaves(value) if leaf.name in flowing]
        if leaves:
            gradients[name] = "weight" if all(leaf.name in weights for leaf in leaves) else "activation"
    return gradients


def _is_view(node: fx.Node, lies_in: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the node's tensors lie in memory of its arguments, and it writes none of it."""
    if not lies_in.get(node.name) or mutated_arguments(node):
        return False
    sources = {allocation for argument in node.all_input_nodes for allocation in lies_in.get(argument.name, ())}
    return sources.issuperset(lies_in[node.name])
