"""Inline PyTorch's control flow operators: both branches of ``torch.cond``, every step of ``scan`` and ``map``.

Before:                                                         After:

    (true) (x, w): y = aten.linear(x, w); return (y,)               x_1 = aten.where(p, x, aten.detach(x))
    (false) (x, w): y = aten.cos(x); return (y,)                    w_1 = aten.where(p, w, aten.detach(w))
    cond = cond(p, true, false, (x, w))                             y = aten.linear(x_1, w_1)
    item = cond[0]                                                  x_2 = aten.where(p, aten.detach(x), x)
                                                                    y_1 = aten.cos(x_2)
                                                                    item = aten.where(p, y, y_1)

A graph then computes both branches, and every later phase cuts them as it cuts anything else. Values and gradients are those of the branch
that is chosen, also where the other one divides by zero: the gradient of what a branch reads is replaced by zeros unless it is chosen,
since zero times infinity is not zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import is_differentiable
from passes.graph.provenance import place_of
from passes.graph.schemas import draws
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import TraceError
from passes.ir.torch_private import OpOverload
from passes.normalize.inline.subgraphs import adopt

aten = torch.ops.aten
_COND, _SCAN, _MAP = torch.ops.higher_order.cond, torch.ops.higher_order.scan, torch.ops.higher_order.map_impl
_MOST_STEPS = 256
"""Of a loop that is unrolled: a graph of more steps would take minutes to plan."""


def inline_control_flow(module: fx.GraphModule) -> None:
    """Inline the operators in a graph, and in the graphs that it calls, in place.

    Raises:
        TraceError: a branch draws random numbers or writes memory; sizes decide between branches; or a loop has too many steps, or as
            many as the batch has rows.
    """
    inline: Mapping[Any, Callable[[fx.GraphModule, fx.Node], Sequence[Any]]] = {_COND: _both_branches, _SCAN: _all_steps, _MAP: _all_rows}
    for owner in reversed([each for each in module.modules() if isinstance(each, fx.GraphModule)]):  # the innermost first
        for call in [node for node in owner.graph.nodes if node.op == "call_function" and node.target in inline]:
            with owner.graph.inserting_before(call):
                results = inline[call.target](owner, call)
            for item in list(call.users):
                assert item.target is operator.getitem, "the results of a called graph are read one by one"
                item.replace_all_uses_with(results[item.args[1]])
                owner.graph.erase_node(item)
            owner.graph.erase_node(call)
        for node in list(owner.graph.nodes):
            if node.op == "get_attr" and not node.users:
                owner.graph.erase_node(node)


def _both_branches(owner: fx.GraphModule, call: fx.Node) -> Sequence[fx.Node]:
    """Write both branches of ``cond`` before it; return its results."""
    chosen, *branches, operands = call.args
    if not isinstance(chosen, fx.Node) or not isinstance(chosen.meta.get("val"), Tensor):
        raise TraceError(
            "torch.cond chooses a branch by a size of its inputs, which a graph for all sizes cannot",
            place=place_of(call),
            remedy="decide with Python's if: the model is then traced for each size by itself",
        )
    if chosen.meta["val"].ndim:
        chosen = _call(owner, call, aten.reshape.default, (chosen, []), chosen.meta["val"].reshape([]))
    results = []
    for index, branch in enumerate(branches):
        inner = _graph_of(owner, branch)
        _refuse_effects(inner, call)
        read = [_only_if(owner, call, chosen, operand, index == 0) for operand in operands]  # type: ignore[union-attr]
        results.append(_write_out(owner, call, inner, read))
    values = call.meta["val"]
    return [_call(owner, call, aten.where.self, (chosen, *pair), values[index]) for index, pair in enumerate(zip(*results, strict=True))]


def _only_if(owner: fx.GraphModule, call: fx.Node, chosen: fx.Node, operand: Any, is_first: bool) -> Any:
    """Return an operand that takes up a gradient only if its branch is the chosen one; numbers and integers as they are."""
    if not isinstance(operand, fx.Node) or not is_differentiable(operand):
        return operand
    value = operand.meta["val"]
    detached = _call(owner, call, aten.detach.default, (operand,), value.detach())
    either = (operand, detached) if is_first else (detached, operand)
    return _call(owner, call, aten.where.self, (chosen, *either), value.detach())


def _refuse_effects(inner: fx.GraphModule, call: fx.Node) -> None:
    """Raise TraceError where a branch does something that cannot be undone if it is not chosen."""
    for each in (module for module in inner.modules() if isinstance(module, fx.GraphModule)):
        for node in each.graph.nodes:
            if not isinstance(node.target, OpOverload):
                continue
            does = "draws random numbers" if draws(node) else "writes memory" if mutated_arguments(node) else None
            if does is not None:
                raise TraceError(
                    f"a branch of torch.cond {does} ({node.target}); partitioned, both branches are computed",
                    place=place_of(call),
                    remedy="draw, and write buffers, outside of torch.cond",
                )


def _all_steps(owner: fx.GraphModule, call: fx.Node) -> Sequence[fx.Node]:
    """Write the steps of ``scan`` before it, one after the other; return its results: the last state, and the outputs of the steps."""
    body, state, scanned, further = call.args
    inner = _graph_of(owner, body)
    carried, rows = list(state), []  # type: ignore[arg-type]
    n_steps = _steps(call, scanned, "scan")
    for step in range(n_steps):
        results = _write_out(owner, call, inner, [*carried, *_rows_of(owner, call, scanned, step), *further])  # type: ignore[misc]
        rows.append(results[len(carried) :])
        carried = list(results[: len(carried)])
    return [*carried, *_stacked(owner, call, rows, call.meta["val"][len(carried) :])]


def _all_rows(owner: fx.GraphModule, call: fx.Node) -> Sequence[fx.Node]:
    """Write the steps of ``map`` before it; return its results."""
    body, mapped, further = call.args
    inner = _graph_of(owner, body)
    steps = range(_steps(call, mapped, "map"))
    rows = [_write_out(owner, call, inner, [*_rows_of(owner, call, mapped, step), *further]) for step in steps]  # type: ignore[misc]
    return _stacked(owner, call, rows, call.meta["val"])


def _steps(call: fx.Node, mapped: Any, name: str) -> int:
    """Return the number of steps of a loop over the first dimension of tensors."""
    size = size_of(mapped[0].meta["val"].shape[0])  # a size that was open at first may be a symbol with one value
    if not isinstance(size, int):
        raise TraceError(
            f"{name} goes over a dimension whose size is open, such as the batch",
            place=place_of(call),
            remedy="compute all rows at once: torch.vmap(function)(x)",
        )
    if size > _MOST_STEPS:
        raise TraceError(
            f"{name} makes {size} steps; a graph has each of them, and can have {_MOST_STEPS}",
            place=place_of(call),
            remedy="compute all steps at once where they do not depend on each other: torch.vmap, torch.cumsum",
        )
    return size


def _rows_of(owner: fx.GraphModule, call: fx.Node, mapped: Any, step: int) -> list[fx.Node]:
    return [_call(owner, call, aten.select.int, (each, 0, step), each.meta["val"].select(0, step)) for each in mapped]


def _stacked(owner: fx.GraphModule, call: fx.Node, rows: Sequence[Sequence[fx.Node]], values: Sequence[Tensor]) -> list[fx.Node]:
    """Stack what the steps give."""
    return [_call(owner, call, aten.stack.default, ([row[index] for row in rows],), value) for index, value in enumerate(values)]


def _graph_of(owner: fx.GraphModule, attribute: Any) -> fx.GraphModule:
    inner = owner.get_submodule(str(attribute.target))
    assert isinstance(inner, fx.GraphModule)
    return inner


def _call(owner: fx.GraphModule, call: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    """Add a call with the provenance of the operator."""
    node = owner.graph.call_function(target, args)
    node.meta = {**_provenance(call), "val": value}
    return node


def _provenance(call: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in call.meta.items() if key in ("nn_module_stack", "stack_trace")}


def _write_out(owner: fx.GraphModule, call: fx.Node, inner: fx.GraphModule, arguments: Sequence[Any]) -> Sequence[Any]:
    """Copy a graph before its call; return its results."""
    known = iter(arguments)
    copies: dict[fx.Node, Any] = {}
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(known)
        elif node.op == "get_attr":
            copies[node] = adopt(owner, call, inner, node)
        elif node.op == "output":
            results: Sequence[Any] = fx.map_arg(node.args[0], copies.__getitem__)
            if not all(isinstance(result, fx.Node) and isinstance(result.meta.get("val"), Tensor) for result in results):
                raise TraceError(
                    f"a graph that {call.target} calls returns something other than tensors",
                    place=place_of(call),
                    remedy="return tensors, and compute numbers outside of it",
                )
            return results
        else:
            copies[node] = owner.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**node.meta, **_provenance(call)}
    raise AssertionError("a graph ends with its output")
