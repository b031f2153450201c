"""Write a graph for one batch size: every size a number.

Before (any batch):                              After (a batch of 8):

    rows = batch * 4                                 y = reshape(x, [32, 16])         x (8, 4, 16)
    y = reshape(x, [rows, 16])      x (batch, 4, 16)

Nothing is computed but shapes, as in tracing for that size alone. Passes over numbers are several times faster than over symbols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.fake_tensors import FakeTensorCache
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph
from passes.ir.layout import BATCH
from passes.ir.mesh import ROWS
from passes.ir.plan import Plan
from passes.ir.program import at_batch
from passes.ir.torch_private import FakeTensorMode, enable_python_dispatcher


def fixed_for(graph: ModelGraph, plan: Plan) -> ModelGraph:
    """Return the graph for a plan: fixed to its batch if a mesh dimension without samples cuts the batch like any other axis."""
    cuts_batch = any(name.startswith(BATCH) and dimension not in ROWS for name, dimension in plan.axes)
    return fix_batch(graph, plan.batch_size) if cuts_batch and graph.batch is not None else graph


def fix_batch(graph: ModelGraph, batch_size: int) -> ModelGraph:
    """Return the graph for one batch size.

    Args:
        graph: for any batch, with no ``totals`` yet.
        batch_size: at least 1.
    """
    assert graph.batch is not None
    assert not graph.totals
    target, names = fx.Graph(), dict[fx.Node, Any]()

    def number(size: Any) -> int:
        return int(at_batch(size_of(size), batch_size))

    known = FakeTensorCache()
    with FakeTensorMode(allow_non_fake_inputs=True), enable_python_dispatcher():  # else aten.istft reads values
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                value = node.meta.get("val")
                if isinstance(value, Tensor):
                    sizes, strides = [number(size) for size in value.shape], [number(size) for size in value.stride()]
                    fixed = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
                    names[node] = target.placeholder(node.name)
                    names[node].meta = {**node.meta, "val": fixed.requires_grad_(value.requires_grad)}
                else:
                    assert node.name == "batch"
                    names[node] = batch_size
            elif node.op == "output":
                target.output(fx.map_arg(node.args[0], names.__getitem__))
            else:
                names[node] = _call(target, node, names.__getitem__, known)
    inputs = tuple(dataclasses.replace(leaf, shape=tuple(at_batch(size, batch_size) for size in leaf.shape)) for leaf in graph.inputs)
    outputs = tuple(dataclasses.replace(leaf, constant=at_batch(leaf.constant, batch_size)) for leaf in graph.outputs)
    module = LazyGraphModule({}, target, class_name="Fixed")
    return dataclasses.replace(graph, module=module, inputs=inputs, outputs=outputs, batch=None, batch_size=batch_size)


def _call(target: fx.Graph, node: fx.Node, named: Callable[[fx.Node], Any], known: FakeTensorCache) -> Any:
    """Copy a call; a size becomes its number."""
    assert callable(node.target)
    args, kwargs = fx.map_arg(node.args, named), fx.map_arg(node.kwargs, named)
    if isinstance(node.meta.get("val"), int | torch.SymInt) and not any(isinstance(named(each), fx.Node) for each in node.all_input_nodes):
        return node.target(*args, **kwargs)
    copy = target.create_node("call_function", node.target, args, kwargs, name=node.name)
    copy.meta = dict(node.meta)
    known.describe(copy)
    return copy
