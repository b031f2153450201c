"""List the calls that one call of a model becomes in programs: the calls of autograd are timed.

    linear(x, weight, bias)  ->  forward          addmm(bias, x, weight.t())
                                 backward_input   mm(dy, weight)
                                 backward_weight  mm(dy.t(), x), sum(dy)

A stage of this one call goes through the passes that every stage goes through, so that what it becomes has the sizes and forms that
programs have: what was timed for a plan is what a simulation of its programs looks up.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, fx

from cost_models.ops.call import arguments_with
from cost_models.ops.cost import call_of_node
from cost_models.ops.work import Gradients, Half
from passes.autograd.partition_joint import split_backward
from passes.autograd.trace_joint import differentiate
from passes.graph.aliasing import shares_memory
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.ir.errors import TraceError
from passes.ir.tensor_spec import TensorSpec
from passes.ir.torch_private import FakeTensorMode, OpOverload
from passes.rules.call import Call
from passes.stages.split import StageGraph

Kernels: TypeAlias = Mapping[Half, tuple[Call, ...]]
"""For each part of a call the calls that it becomes."""

_KINDS = ("weight", "activation", "")


def kernels_of(call: Call, gradients: Gradients, device: torch.device) -> Kernels | None:
    """Return the calls of each part of a call, without views; None where it cannot be differentiated alone.

    Args:
        call: all sizes are numbers.
        gradients: which arguments' gradients are wanted.
        device: where it runs, which decides what kernels autograd picks.
    """
    if not _can_be_called(call):
        return None
    stage = _stage_of(call, dict(gradients), device)
    try:
        joint = differentiate(stage, _differentiable(stage), frozenset(stage.outputs), device)
    except TraceError:  # it is priced by a ratio then
        return None
    parts = split_backward(joint, "none")
    graphs: dict[Half, fx.GraphModule | None] = {
        "forward": parts.forward,
        "backward_input": parts.backward_input,
        "backward_weight": parts.backward_weight,
    }
    return {half: () if module is None else tuple(_kernels(module.graph)) for half, module in graphs.items()}


def _can_be_called(call: Call) -> bool:
    """Return whether the operator accepts these sizes: estimated sizes (windows of unequal tiles) need not fit."""
    meta = torch.device("meta")
    try:
        call.operator(**arguments_with(call, lambda _, shape: torch.empty(shape.shape, dtype=shape.dtype, device=meta), meta))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    return True


def _stage_of(call: Call, gradients: Mapping[str, str], device: torch.device) -> StageGraph:
    """Return the call as a stage; arguments with weight gradients are its parameters, and come first."""
    graph, of_kind = fx.Graph(), defaultdict[str, list[str]](list)

    def placeholder(name: str, shape: TensorSpec) -> fx.Node:
        kind = gradients.get(name, "")
        node = graph.placeholder(f"{name}_{len(graph.nodes)}")
        node.meta["val"] = torch.empty(shape.shape, dtype=shape.dtype, device=device, requires_grad=bool(kind))
        of_kind[kind].append(node.name)
        return node

    with FakeTensorMode():
        by_kind = sorted(call.values, key=lambda pair: _KINDS.index(gradients.get(pair[0], "")))
        arguments = arguments_with(replace(call, values=tuple(by_kind)), placeholder, device)
        node = graph.call_function(call.operator, (), arguments)
        node.meta["val"] = call.operator(**fx.map_arg(arguments, lambda each: each.meta["val"]))
        outputs = _differentiable_results(graph, node)
    graph.output(tuple(outputs))
    return StageGraph(
        index=0,
        module=LazyGraphModule({}, graph),
        parameters=tuple(of_kind["weight"]),
        buffers=(),
        constants=(),
        model_inputs=(),
        values=(*of_kind["activation"], *of_kind[""]),
        outputs=tuple(each.name for each in outputs),
        has_batch=False,
        device=device,
    )


def _differentiable(stage: StageGraph) -> frozenset[str]:
    return frozenset(node.name for node in stage.module.graph.find_nodes(op="placeholder") if node.meta["val"].requires_grad)


def _differentiable_results(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Return the differentiable tensors among the call's results."""
    if isinstance(node.meta["val"], Tensor):
        return [node]
    items = []
    for index, value in enumerate(node.meta["val"]):
        if isinstance(value, Tensor) and value.requires_grad:
            items.append(graph.call_function(operator.getitem, (node, index)))
            items[-1].meta["val"] = value
    return items


def _kernels(graph: fx.Graph) -> Iterator[Call]:
    """Yield the calls of a graph that take time: operators whose results are no views, without copies for the border of a stage."""
    for node in graph.nodes:
        is_for_border = node.target is torch.ops.aten.clone.default and all(user.op == "output" for user in node.users)
        if node.op == "call_function" and isinstance(node.target, OpOverload) and not shares_memory(node) and not is_for_border:
            call = call_of_node(node)
            if call.outputs:
                yield call
