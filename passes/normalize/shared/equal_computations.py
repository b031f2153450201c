"""Compute once what a model computes several times.

Before, traced in autocast:                  After:

    to = aten.to(norm, bfloat16)                 to = aten.to(norm, bfloat16)
    q = aten.linear(to, w_q)                     q = aten.linear(to, w_q)
    to_1 = aten.to(norm, bfloat16)
    k = aten.linear(to_1, w_k)                   k = aten.linear(to, w_k)

Ranks that share such a layer then gather one value, and add the parts of its gradient before they sum them over ranks.

Two kinds of values are shared: casts, and tables (rotary tables, masks, but no indices). A table is a value without a gradient that a value
with a gradient is computed from. Values inside of a table stay, so that its rows and columns may be sharded along different axes. The calls
must be of torch, draw no random numbers, and use no memory that is written or returned. A cast of a parameter stays with its reader, which
may be in another stage.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import torch
from torch import Tensor, fx

from passes.graph.aliasing import aliasing, shares_memory
from passes.graph.canonicalize import remove_dead
from passes.graph.dependencies import is_differentiable, may_require_gradient
from passes.graph.equivalence import argument_key
from passes.graph.schemas import bound_arguments, is_deterministic
from passes.graph.symbolic_sizes import traced_size
from passes.ir.torch_private import OpOverload

SHARED_CAST = "shared_cast"
"""Key in ``node.meta`` of a cast that stands for several: its number."""

OWN_CASTS = "own_casts"
"""Key in ``node.meta`` of a reader of shared casts: number of the shared cast -> that of the cast which the model has for this reader."""

aten = torch.ops.aten

_CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.type_as.default})  # noqa: SLF001


def share_equal_computations(graph: fx.Graph, inputs: Collection[str], without_gradient: Collection[str]) -> None:
    """Replace each cast and each table by the first one that is equal, in place.

    Args:
        inputs: placeholders of the model's inputs.
        without_gradient: placeholders that never require a gradient: buffers and constants.
    """
    carriers = may_require_gradient(graph, without_gradient)
    numbers = _numbers_of_values(graph, carriers)
    casts = _casts_of_activations(graph, carriers, inputs)
    shared = (casts | _tables(graph, carriers)) & _fixed(graph)
    first: dict[int, fx.Node] = {}
    for number, node in enumerate(graph.nodes):
        if node in shared and (same := first.setdefault(numbers[node], node)) is not node:
            for reader in node.users if node in casts else ():
                same.meta.setdefault(SHARED_CAST, numbers[node])
                reader.meta[OWN_CASTS] = {**reader.meta.get(OWN_CASTS, {}), numbers[node]: number}
            node.replace_all_uses_with(same)
    if len(first) < len(shared):
        remove_dead(graph)


def _numbers_of_values(graph: fx.Graph, carriers: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return a number for each value: equal for equal casts, and for equal values without a gradient."""
    numbers: dict[fx.Node, int] = {}
    of_forms: dict[Hashable, int] = {}
    for node in graph.nodes:
        numbers[node] = of_forms.setdefault(_form(node, numbers, carriers), len(of_forms))
    return numbers


def _form(node: fx.Node, numbers: Mapping[fx.Node, int], carriers: Collection[fx.Node]) -> Hashable:
    """Return a key that is equal for equal values: the expression of a size, the call, or the node itself."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return "size", traced_size(value)
    if _is_tensor(node) and _only_casts(node):
        return "cast", numbers[node.all_input_nodes[0]], node.meta["val"].dtype
    if node.op != "call_function" or node in carriers or not isinstance(node.target, OpOverload) or not is_deterministic(node.target):
        return node
    return node.target, argument_key(bound_arguments(node), numbers.__getitem__)


def _only_casts(node: fx.Node) -> bool:
    """Return whether a call changes the dtype of a value and nothing else."""
    if node.target not in _CASTS:
        return False
    before, after = (each.meta["val"] for each in (node.all_input_nodes[0], node))
    keeps_strides = bound_arguments(node).get("memory_format") in (None, torch.preserve_format)
    return keeps_strides and before.dtype != after.dtype and (before.device, before.layout) == (after.device, after.layout)


def _casts_of_activations(graph: fx.Graph, carriers: Collection[fx.Node], inputs: Collection[str]) -> set[fx.Node]:
    """Return the casts of values with a gradient, but those that are computed from parameters alone."""
    of_parameters = {node for node in carriers if node.op == "placeholder" and node.name not in inputs}
    found = set()
    for node in graph.nodes:
        if node.all_input_nodes and of_parameters.issuperset(node.all_input_nodes):
            of_parameters.add(node)
        elif node in carriers and _only_casts(node):
            found.add(node)
    return found


def _tables(graph: fx.Graph, carriers: Collection[fx.Node]) -> set[fx.Node]:
    """Return the values without a gradient, computed from others, that a value with a gradient is computed from, through views or not."""
    read_by_carriers: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in carriers and any(user in carriers or (user in read_by_carriers and shares_memory(user)) for user in node.users):
            read_by_carriers.add(node)
    return {
        node for node in read_by_carriers if any(map(_is_tensor, node.all_input_nodes)) and _has_numbers(node) and not shares_memory(node)
    }


def _has_numbers(node: fx.Node) -> bool:
    """Return whether a value is a tensor, and not of indices."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.dtype == torch.bool or is_differentiable(node))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _fixed(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that read and give memory that nothing writes, and give none that the model returns."""
    memory = aliasing(graph)
    returned = {place for result in graph.output_node().all_input_nodes for place in memory.storages.get(result.name, ())}
    unwritten = {node for node in graph.nodes if not memory.written(node)}
    own = (node for node in unwritten if unwritten.issuperset(node.all_input_nodes))
    return frozenset(node for node in own if returned.isdisjoint(memory.storages.get(node.name, ())))
