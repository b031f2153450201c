"""Which nodes of a program compute gradients of parameters: what they make stays until the optimizer has read it."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from passes.ancestors import with_ancestors
from passes.ir import communication, microbatch
from passes.ir.program import Program, StoreGradients
from passes.ir.unsummed import AddUnsummed

__all__ = ["gradient_nodes", "passed_on"]

_PASS_GRADIENTS = frozenset(
    {operator.getitem, operator.add, microbatch.add_gradients, microbatch.add_gradients_in_place, communication.wait}
    | {communication.all_reduce, communication.reduce_scatter}
)
"""What stands between the computation of a gradient and its store."""


def gradient_nodes(program: Program) -> set[fx.Node]:
    """The nodes whose values become gradients of parameters."""
    stack: list[fx.Node] = []
    for node in program.module.graph.nodes:
        if node.op == "call_module" and isinstance(program.module.get_submodule(str(node.target)), StoreGradients | AddUnsummed):
            stack += node.all_input_nodes
    return passed_on(stack)


def passed_on(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and what they are sums, items or results of communication of."""
    return with_ancestors(nodes, lambda node: node.all_input_nodes if node.target in _PASS_GRADIENTS else ())
