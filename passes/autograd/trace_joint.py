"""Trace a stage forward and backward as one joint graph of ATen operations.

Before, a stage:                                After, the joint graph:

    (weight, x) -> linear -> relu -> (relu,)        (weight, x | relu_gradient)
                                                    -> t, mm, relu | threshold_backward, mm, mm
                                                    -> (relu | weight_gradient, x_gradient)

PyTorch's own autograd derives the backward: the stage is run on fake tensors, ``torch.autograd.grad`` is called on its outputs, and
``make_fx`` records every operation that autograd dispatches. Hence the joint graph computes what eager training computes, operation by
operation. A gradient that autograd calls None is absent here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from passes.autograd.kernel_layouts import request_layouts
from passes.graph.aliasing import mutated_arguments, writes_statistics
from passes.graph.buffer_writes import verify_writes
from passes.graph.canonicalize import simplify
from passes.graph.fake_tensors import fake_mode
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import Place, TraceError
from passes.ir.torch_private import make_fx, pytree, use_lazy_graph_module
from passes.normalize.functional.functionalize import functionalize
from passes.stages.split import StageGraph

_SOURCE = "from_node"
"""Key in ``meta`` under which PyTorch's interpreter records the source nodes of a traced one, the last that of the stage."""


@dataclass(frozen=True)
class Joint:
    """The forward and backward of a stage in one graph.

    Attributes:
        stage: what was differentiated.
        graph: placeholders: those of the stage, then ``<name>_gradient`` for each of ``outputs_with_gradient``.
        outputs: for each output of the stage, its node.
        gradients: input or parameter -> node of its gradient; absent where there is none.
        outputs_with_gradient: outputs (and inputs) whose gradients the backward takes.
        sources: node of the forward -> the node of the stage that it computes.
    """

    stage: StageGraph
    graph: fx.Graph
    outputs: tuple[fx.Node, ...]
    gradients: dict[str, fx.Node]
    outputs_with_gradient: tuple[str, ...]
    sources: Mapping[fx.Node, str]

    @property
    def inputs(self) -> list[fx.Node]:
        """The placeholders of the stage."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        return placeholders[: len(placeholders) - len(self.outputs_with_gradient)]

    @property
    def gradient_placeholders(self) -> list[fx.Node]:
        """The placeholders of the gradients of the outputs."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        return placeholders[len(placeholders) - len(self.outputs_with_gradient) :]


def contiguous_like(value: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a contiguous fake tensor (inside ``fake_mode``) of equal size and dtype: a value received from another rank."""
    return torch.empty(value.shape, dtype=value.dtype, device=device or value.device)


def differentiate(stage: StageGraph, differentiable: frozenset[str], outputs_with_gradient: frozenset[str], device: torch.device) -> Joint:
    """Trace the stage's joint graph.

    Args:
        differentiable: placeholders (parameters, model inputs, values) that gradients are wanted for.
        outputs_with_gradient: outputs whose gradients will be given.
        device: where the stage runs: decides which kernels autograd picks.
    """
    given = [node for node in returned_nodes(stage.module.graph) if node.name in outputs_with_gradient]
    with fake_mode(stage.module.graph):
        inputs = [example_of(node, node.target in stage.bound, device) for node in stage.module.graph.nodes if node.op == "placeholder"]
        gradients = {node.name: contiguous_like(node.meta["val"], device) for node in given}
    return differentiate_from(stage, differentiable, inputs, gradients)


def differentiate_from(
    stage: StageGraph, differentiable: frozenset[str], inputs: Sequence[Any], given: Mapping[str, Tensor], so_far: Sequence[str] = ()
) -> Joint:
    """Trace the stage's joint graph.

    Args:
        differentiable: placeholders that gradients are wanted for.
        inputs: for each placeholder, a fake tensor like what the stage is given (or a size).
        given: output, or input, -> a fake tensor like its gradient.
        so_far: the inputs among ``given``: what is given is added to, as autograd adds to what later readers gave.
    """
    names = stage.bound + stage.arguments
    found: list[str] = []
    open_sizes = [size for value in inputs for size in _sizes(value) if not isinstance(size_of(size), int)]

    def joint(inputs: Sequence[Any], gradients: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
        with torch.enable_grad():
            leaves = [
                value.detach().requires_grad_() if name in differentiable else value for name, value in zip(names, inputs, strict=True)
            ]
            results = _Differentiable(stage.module).run(*leaves)
            wanted = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if name in differentiable]
            roots = [leaves[names.index(name)] if name in so_far else results[stage.outputs.index(name)] for name in given]
            if not roots or not wanted:
                return list(results), []
            found_gradients: Sequence[Tensor | None] = torch.autograd.grad(
                roots, [leaf for _, leaf in wanted], gradients, allow_unused=True
            )
        pairs = [(name, gradient) for (name, _), gradient in zip(wanted, found_gradients, strict=True) if gradient is not None]
        found[:] = [name for name, _ in pairs]
        return list(results), [gradient for _, gradient in pairs]

    try:
        with fake_mode(stage.module.graph), fx.traceback.preserve_node_meta(), use_lazy_graph_module(should_use=True):
            module = make_fx(joint)(list(inputs), list(given.values()))
    except Exception as error:
        raise TraceError(
            f"stage {stage.index} cannot be differentiated: {error}",
            place=_place(stage),
            remedy="check that the model trains on its own with these inputs; for a forward pass alone use training=False",
        ) from error
    if fixed := [size for size in open_sizes if isinstance(size_of(size), int)]:
        raise TraceError(
            f"stage {stage.index} cannot be differentiated: PyTorch derives a backward of one of its operations for {fixed[0]} rows alone",
            place=_place(stage),
            remedy="compute the same with other operations; for a forward pass alone use training=False",
        )
    request_layouts(module.graph)
    return _named(stage, module.graph, tuple(given), found)


def _sizes(value: object) -> tuple[int | torch.SymInt, ...]:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return (value,) if isinstance(value, torch.SymInt) else ()


def _place(stage: StageGraph) -> Place:
    stacks = (node.meta.get("nn_module_stack") or {} for node in stage.module.graph.nodes)
    modules = {list(stack.values())[-1][0] for stack in stacks if stack}
    return Place(module=", ".join(sorted(modules - {""})[:4]))


class _Differentiable(fx.Interpreter):
    """Runs a graph so that all that it computes can be differentiated.

    PyTorch decomposes an LSTM on a CPU in float32 into one of two forms: operations with a backward, or oneDNN's kernel for inference,
    which keeps nothing that a backward could read. It takes the kernel whenever the input sequence requires no gradient, even if the
    weights or the initial state do, as in the first layer of any model. Those get the form that an input with a gradient would have.
    """

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a normalisation its running statistics by names of their own, whose later writes autograd does not count.

        In training its backward does not read them. Autograd keeps them nevertheless, and would refuse a backward after another write:
        a second call of the module may update them by ``copy_``, where its axes are cut, in place of the operation's own update.
        """
        statistics = frozenset(mutated_arguments(n)) if n.op == "call_function" and writes_statistics(n) else frozenset()

        def value(node: fx.Node) -> Any:
            return self.env[node].data if node in statistics else self.env[node]

        return fx.map_arg(n.args, value), fx.map_arg(n.kwargs, value)

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> Any:
        if target is torch.ops.aten.lstm.input and any(_requires_gradient(value) for value in pytree.tree_leaves((args, kwargs))):
            # None: the other settings stay as they are; the defaults would set them, with a warning.
            with torch.backends.mkldnn.flags(enabled=False, deterministic=None, allow_tf32=None, fp32_precision=None):
                return super().call_function(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def _requires_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def example_of(node: fx.Node, bound: bool, device: torch.device) -> Any:
    """Return a fake tensor (or a size) like the argument of a stage, inside ``fake_mode``: bound state keeps its strides."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    if bound and value.device == device:
        return value
    if bound:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    return contiguous_like(value, device)


def _named(stage: StageGraph, traced: fx.Graph, given: Sequence[str], found: Sequence[str]) -> Joint:
    """Copy the traced graph so that its placeholders have the names of the values that they stand for."""
    names = iter([*stage.bound, *stage.arguments, *(f"{name}_gradient" for name in given)])
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.nodes:
        copies[node] = graph.placeholder(next(names)) if node.op == "placeholder" else graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    simplify(graph)  # a buffer read by a detached name is the buffer itself
    functionalize(graph, buffers=(*stage.bound, *stage.arguments), differentiable=False)
    sources = {node: str(node.meta[_SOURCE][-1].name) for node in graph.nodes if _SOURCE in node.meta}
    simplify(graph)
    _allow_any_layout(graph)
    verify_writes(graph, f"differentiating stage {stage.index}")
    results = returned_nodes(graph)
    count = len(stage.outputs)
    return Joint(stage, graph, tuple(results[:count]), dict(zip(found, results[count:], strict=True)), tuple(given), sources)


def _allow_any_layout(graph: fx.Graph) -> None:
    """Let a view be a copy where need be: kernels may return other strides than their fake results (softplus_backward)."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default


def returned_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph's flat output."""
    results, *_ = graph.output_node().args
    assert isinstance(results, Sequence)
    return [result for result in results if isinstance(result, fx.Node)]
