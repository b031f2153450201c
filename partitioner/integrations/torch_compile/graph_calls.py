"""Calls of graphs inside a graph of Dynamo, as operations that a trace follows.

tag_activation_checkpoint(body, x)         body(x): which values are recomputed is a decision of the plan
invoke_subgraph(body, name, x)             body(x)
autograd_function_apply(fwd, bwd, x)       a torch.autograd.Function with these two graphs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.ir.torch_private import set_grad_mode

_OPERANDS = {"tag_activation_checkpoint": 1, "invoke_subgraph": 2}
"""Operation that calls one graph -> the position of the first argument of the graph."""


class GraphInterpreter(fx.Interpreter):
    """Runs a graph node by node, and the graphs that it calls, too: each node is traced with its own metadata."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors reach the user as they are

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a graph by its nodes; call any other module."""
        module = self.fetch_attr(target)
        return GraphInterpreter(module).run(*args) if isinstance(module, fx.GraphModule) else super().call_module(target, args, kwargs)


def inline_calls(graph: fx.Graph, owner: nn.Module) -> None:
    """Replace operations that call graphs, which are attributes of ``owner``."""
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in _OPERANDS:
            node.op, node.target = "call_module", node.args[0].target
            node.args, node.kwargs = node.args[_OPERANDS[name] :], {}
        elif name == "autograd_function_apply":
            forward, backward = (getattr(owner, str(argument.target)) for argument in node.args[:2])
            function = _function(forward, backward, node.kwargs.get("non_differentiable_idx", ()))
            node.target, node.args, node.kwargs = function.apply, node.args[2:], {}
    graph.eliminate_dead_code(lambda node: node.op != "get_attr")


def _function(forward_graph: fx.GraphModule, backward_graph: fx.GraphModule, not_differentiable: Sequence[int]) -> type[Any]:
    """Return the custom function that Dynamo has traced as two graphs."""
    for module in (forward_graph, backward_graph):
        for node in list(module.graph.nodes):  # autograd sets the mode around both
            if node.target is set_grad_mode:
                module.graph.erase_node(node)
        module.recompile()

    class GraphFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs, saved = forward_graph(*args)
            ctx.places = [isinstance(value, Tensor) for value in saved]
            ctx.others = [value for value in saved if not isinstance(value, Tensor)]
            ctx.save_for_backward(*(value for value in saved if isinstance(value, Tensor)))
            leaves = outputs if isinstance(outputs, tuple | list) else (outputs,)
            ctx.mark_non_differentiable(*(leaves[index] for index in not_differentiable))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
            return backward_graph(*gradients, *(next(tensors if is_tensor else others) for is_tensor in ctx.places))

    return GraphFunction
