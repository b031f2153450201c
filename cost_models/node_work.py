"""What one node of a program does: of a forward or of a backward, which after differentiation are operators alike.

mm(gradient, weight)                    a product as any other: its rule says which
convolution_backward(gradient, ...)     the gradients of the products of the convolution that it names
native_layer_norm_backward(...)         reads and writes its tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from cost_models.calls import Call
from cost_models.contractions import Products, attention, attention_gradients, operand_gradients
from cost_models.operation_table import Operation
from cost_models.operations import forward_work, line_of, tensor_shapes
from cost_models.sizes import TensorShape
from cost_models.work import NO_WORK, Family, Work
from passes.aliasing import shares_memory
from passes.operators import bound_arguments, packet
from passes.size_expression import size_of

__all__ = ["call_of_node", "call_work", "node_work"]

aten = torch.ops.aten


def call_of_node(node: fx.Node, shapes: Mapping[fx.Node, tuple[TensorShape, ...]] | None = None) -> Call:
    """Return the call of an operator.

    Args:
        node: a ``call_function`` of an operator.
        shapes: of the tensors that nodes give; None: as ``meta["val"]`` has them.
    """
    assert isinstance(node.target, OpOverload)
    arguments = tuple((name, described(value, shapes)) for name, value in bound_arguments(node).items())
    return Call(node.target, arguments, tensor_shapes(node.meta.get("val")) if shapes is None else shapes[node])


def described(value: Any, shapes: Mapping[fx.Node, tuple[TensorShape, ...]] | None = None) -> Any:
    """An argument with its nodes replaced by what a price may depend on; hashable.

    Args:
        value: the argument.
        shapes: of the tensors that nodes give; None: as ``meta["val"]`` has them.
    """
    if isinstance(value, fx.Node):
        held = value.meta.get("val")
        if isinstance(held, int | torch.SymInt):
            return size_of(held)
        of_node = tensor_shapes(held) if shapes is None else shapes[value]
        return of_node[0] if len(of_node) == 1 and not isinstance(held, list | tuple) else of_node
    if isinstance(value, list | tuple):
        return tuple(described(item, shapes) for item in value)
    return value


def node_work(node: fx.Node, shapes: Mapping[fx.Node, tuple[TensorShape, ...]] | None = None) -> Work:
    """Return the work of a node as a formula in the batch symbol; nothing for views and for nodes that call no operator.

    Args:
        node: of a model, a stage or a program.
        shapes: of the tensors that nodes give; None: as ``meta["val"]`` has them.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return NO_WORK
    call = call_of_node(node, shapes)
    return NO_WORK if not call.results or shares_memory(node) else call_work(call)


def call_work(call: Call) -> Work:
    """What a call does that is no view, in symbols or in numbers as its sizes are."""
    return forward_work(call, _line(call.operator))


def _line(target: OpOverload) -> Operation:
    """The line of the table; differentiated graphs hold some operators more."""
    name = target.overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        return Operation(_attention_backward if name.endswith("_backward") else _attention_forward, family="attention")
    if packet(target) is aten.convolution_backward:
        return Operation(_convolution_backward, family="convolution")
    return line_of(target) or Operation(family=_family(target))


def _family(target: OpOverload) -> Family:
    """Of a backward that moves bytes alone: that of its forward."""
    if torch.Tag.pointwise in target.tags:
        return "pointwise"
    name = target.overloadpacket.__name__
    if "norm" in name or "softmax" in name:
        return "normalisation"
    if "loss" in name:
        return "reduction"
    return "pointwise" if name.endswith("_backward") and "pool" not in name and "embedding" not in name else "movement"


def _flash(call: Call) -> Call:
    """Fused attention as the plain one."""
    plain = aten.scaled_dot_product_attention.default
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    known = {**call.arguments, "attn_mask": mask, "enable_gqa": call.shape("query")[-3:-2] != call.shape("key")[-3:-2]}
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, value = call.shape("query"), call.shape("value")
    result = TensorShape((*query[:-1], value[-1]), call.arguments["query"].dtype)
    return Call(plain, tuple((name, known.get(name)) for name in names), (result,))


def _attention_forward(call: Call) -> Products:
    return attention(_flash(call))


def _attention_backward(call: Call) -> Products:
    return attention_gradients(_flash(call))


def _convolution_backward(call: Call) -> Products:
    """The gradients that the output mask asks for."""
    gradient = call.arguments["grad_output"]
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    values = tuple((name, None if name == "bias" else call.arguments[name]) for name in names)
    gradients = operand_gradients("input", "weight", windowed=True)(Call(aten.convolution.default, values, (gradient,)))
    mask = call.arguments["output_mask"]
    return tuple(product for name, wanted in zip(("input", "weight"), mask, strict=False) if wanted for product in gradients[name])
