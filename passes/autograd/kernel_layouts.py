"""Give kernels the memory format that they check for.

A composite operation such as ``group_norm`` calls ``contiguous`` on its input before it calls the kernel. Tracing omits that call where
the fake tensor is contiguous already. The tensor of a run may have other strides than its fake: a convolution of one row returns
channels-last strides, for example, and ``native_group_norm`` refuses them. So the call is written into the graph again; it copies nothing
where the tensor has the format.

Channels-last is written as a copy. A tensor of one row may be contiguous in channels-last order and still have a batch stride that the
kernel does not recognise as channels-last; ``contiguous`` would return it unchanged.

The backward of a batch normalisation on the CPU errs, in torch 2.13, where height or width is one and that dimension of the input or of the
gradient has a stride of no memory format (a permuted image): it reads one in the other's order. Its arguments get a format there, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.schemas import bound_arguments, call_with
from passes.normalize.randomness.kernel_order import suggested_format

aten = torch.ops.aten

LAYOUT_SENSITIVE: Mapping[Any, tuple[str, ...]] = {
    aten.native_group_norm.default: ("input",),
    aten.native_group_norm_backward.default: ("grad_out", "input"),
}
"""Kernel -> the arguments that it takes in one memory format alone."""

_AMBIGUOUS: Mapping[Any, tuple[str, ...]] = {aten.native_batch_norm_backward.default: ("grad_out", "input")}
"""Likewise where a dimension of space has size one: then a tensor may be contiguous in several formats, and have the strides of none."""


def request_layouts(graph: fx.Graph) -> None:
    """Pass layout-sensitive arguments of kernels through ``contiguous``, with the memory format that their fake tensors have."""
    requested: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        names = _names(node)
        bound = bound_arguments(node) if names else {}
        for name in names:
            source = bound[name]
            if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), Tensor):
                if source not in requested:
                    requested[source] = _in_format(graph, source, node)
                bound[name] = requested[source]
        if names:
            node.args, node.kwargs = call_with(node, bound)


def _names(node: fx.Node) -> tuple[str, ...]:
    """Return the arguments of a call that get a memory format."""
    if node.op != "call_function":
        return ()
    ambiguous = _AMBIGUOUS.get(node.target, ())
    if ambiguous and 1 in bound_arguments(node)["input"].meta["val"].shape[2:]:
        return ambiguous
    return LAYOUT_SENSITIVE.get(node.target, ())


def _in_format(graph: fx.Graph, source: fx.Node, reader: fx.Node) -> fx.Node:
    memory_format = suggested_format(source.meta["val"])
    with graph.inserting_before(reader):
        if memory_format is torch.contiguous_format:
            formatted = graph.call_function(aten.contiguous.default, (source,))
        else:
            formatted = graph.call_function(aten.clone.default, (source,), {"memory_format": memory_format})
    formatted.meta = {**reader.meta, "val": source.meta["val"].contiguous(memory_format=memory_format)}
    return formatted
