"""Replace a region under ``torch.vmap`` by the batched operations that it stands for.

Before:                                              After:

    _vmap_increment_nesting(6)
    rows = _add_batch_dim(arange, 0, 1)                  unsqueeze = aten.unsqueeze(arange, 1)
    le = aten.le(columns, rows)                          le = aten.le(columns, unsqueeze)
    mask = _remove_batch_dim(le, 1, 6, 0)
    _vmap_decrement_nesting()

Between increment and decrement, values belong to a level of ``vmap`` and cannot leave their rank. The region runs once on fake tensors; the
operations that ``vmap`` dispatches then replace it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from passes.graph.dependencies import boundary, is_differentiable
from passes.graph.provenance import place_of
from passes.ir.errors import TraceError
from passes.ir.graph import Autocast
from passes.ir.torch_private import HigherOrderOperator, make_fx
from passes.normalize.autocast.casts import autocast_in, called_graphs
from passes.normalize.autocast.operation_lists import traced_in

aten = torch.ops.aten

_LEVELS = "torch._functorch.predispatch"
"""Module of the functions that a trace holds for levels of function transforms."""


def inline_vmap(module: fx.GraphModule, autocast: Autocast | None) -> None:
    """Replace every such region of a graph, and of those that it calls for a mode of gradients or of autocast, in place.

    Args:
        autocast: what the graph was traced in; regions of it may say otherwise.

    Raises:
        TraceError: the graph holds another function transform (``torch.func.grad``, ``torch.func.jvp``).
    """
    for node in module.graph.nodes:
        for inner in called_graphs(module, node) if isinstance(node.target, HigherOrderOperator) else ():
            inline_vmap(inner, autocast_in(node, autocast))
    with traced_in(autocast):
        _inline_regions(module)


def _inline_regions(module: fx.GraphModule) -> None:
    while (region := _next_region(module.graph)) is not None:
        for node in region:
            _refuse_custom_function(node)
        sources, results = boundary(region)
        inputs = [source for source in sources if source.op != "get_attr"]
        traced = _trace_below_vmap(module, region, inputs, results)
        _replace(module.graph, region, inputs, results, traced)
    for node in list(module.graph.nodes):
        if _level_function(node) == "lazy_load_decompositions":
            module.graph.erase_node(node)
        elif _level_function(node) is not None:
            raise TraceError(
                "the model transforms a function (torch.func.grad, torch.func.jvp) inside its forward",
                place=place_of(node),
                remedy="compute the derivative outside of the model, or write it out with tensor operations",
            )


def _level_function(node: fx.Node) -> str | None:
    if node.op == "call_function" and getattr(node.target, "__module__", None) == _LEVELS:
        return str(node.target.__name__)  # type: ignore[union-attr]
    return None


def _refuse_custom_function(node: fx.Node) -> None:
    """Refuse a custom autograd function that gradients flow through; running its forward would drop its backward."""
    if node.target is not torch.ops.higher_order.flat_apply:
        return
    if any(is_differentiable(source) for source in node.all_input_nodes if source.op != "get_attr"):
        raise TraceError(
            "the model applies a custom autograd function under torch.vmap, and its backward would be lost",
            place=place_of(node),
            remedy="write the function with differentiable tensor operations",
        )


def _next_region(graph: fx.Graph) -> list[fx.Node] | None:
    """Return the first outermost region, from the increment to the decrement that closes it."""
    region: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        function = _level_function(node)
        depth += (function == "_vmap_increment_nesting") - (function == "_vmap_decrement_nesting")
        if depth or region:
            region.append(node)
        if region and not depth:
            return region
    return None


def _trace_below_vmap(module: fx.GraphModule, region: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    def run(*values: Any) -> tuple[Any, ...]:
        environment = dict(zip(inputs, values, strict=True))

        def value(node: fx.Node) -> Any:
            return getattr(module, str(node.target)) if node.op == "get_attr" else environment[node]

        for node in region:
            if node.op != "get_attr":
                args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                environment[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(environment[node] for node in results)

    with _fake_mode(module.graph):
        return make_fx(run)(*(node.meta["val"] for node in inputs)).graph


@contextlib.contextmanager
def _fake_mode(graph: fx.Graph) -> Iterator[None]:
    """Enter the mode of the graph's fake tensors, so that operations without tensor arguments are fake too."""
    values = (node.meta.get("val") for node in graph.nodes)
    mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"))
    with mode:
        yield


def _replace(graph: fx.Graph, region: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node], traced: fx.Graph) -> None:
    provenance = {key: value for key, value in region[0].meta.items() if key in ("nn_module_stack", "stack_trace")}
    known = iter(inputs)
    copies: dict[fx.Node, Any] = {}
    with graph.inserting_before(region[0]):
        for node in traced.nodes:
            if node.op == "placeholder":
                copies[node] = next(known)
            elif node.op == "output":
                for old, new in zip(results, node.args[0], strict=True):
                    old.replace_all_uses_with(copies[new], delete_user_cb=lambda user: user not in region)
            elif node.target is aten._to_copy.default and not isinstance(node.args[0], fx.Node):  # noqa: SLF001
                copies[node] = _tensor_of_number(graph, node, provenance)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {"val": node.meta["val"], **provenance}
    for node in reversed(region):
        graph.erase_node(node)


def _tensor_of_number(graph: fx.Graph, conversion: fx.Node, provenance: dict[str, Any]) -> fx.Node:
    """Write the tensor that ``vmap`` makes of a number; a call without a tensor among its arguments is no conversion outside of it."""
    value = conversion.meta["val"]
    number = graph.call_function(torch.ops.aten.full.default, ([], conversion.args[0]), {"dtype": value.dtype, "device": value.device})
    number.meta = {"val": torch.empty_like(value), **provenance}
    return number
