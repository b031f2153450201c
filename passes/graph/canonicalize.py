"""Remove no-ops: calls that return their input unchanged, from traced backwards (``simplify``) and from models (``remove_noise``).

Before:                                        After:

    detach = aten.detach(weight)
    t = aten.t(detach)                             t = aten.t(weight)
    t_1 = aten.t(t)                                mm = aten.mm(gradient, weight)
    mm = aten.mm(gradient, t_1)

Programs run without autograd, so ``detach`` is the identity; a transpose of a transpose and a slice of everything are too.

``remove_noise`` takes a graph without in-place writes (after ``passes.normalize.functional.functionalize``), and removes unread values too:

Before:                                              After:

    a = aten.to.dtype(x, float32)      (x is float32)
    b = aten.dropout(a, 0.1, False)
    c = aten.alias(b)
    d = aten.relu(c)                                     d = aten.relu(x)

Calls that write memory, draw random numbers or check values stay, read or not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import may_require_gradient
from passes.graph.schemas import bound_arguments, drops_nothing
from passes.ir.graph import VARIES
from passes.ir.torch_private import OpOverload

aten = torch.ops.aten
_EVERYTHING = 2**63 - 1


def simplify(graph: fx.Graph) -> None:
    """Replace the no-ops of a traced backward by their inputs, in place; ``detach`` is one, since programs run without autograd."""
    for node in list(graph.nodes):
        source = _no_op_source(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and node.target in _VIEWS:
            graph.erase_node(node)


_VIEWS = frozenset({aten.t.default, aten.detach.default, aten.slice.Tensor, aten.view.default, aten.sym_size.int})


def _no_op_source(node: fx.Node) -> fx.Node | None:
    """Return the node whose value a no-op returns; None for other nodes."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if node.target is aten.detach.default:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        inner = source.args[0]
        return inner if isinstance(inner, fx.Node) else None
    return source if node.target is aten.slice.Tensor and _slices_everything(node) else None


# -- no-ops of a model -------------------------------------------------------------------------------------------------------------


_ASSERT_METADATA = aten._assert_tensor_metadata.default  # noqa: SLF001
_ASSERT_NUMBER = aten._assert_scalar.default  # noqa: SLF001


def remove_noise(graph: fx.Graph, without_gradient: Collection[str] = ()) -> None:
    """Remove no-ops, proved assertions and unread values of a model, in place.

    ``without_gradient``: placeholders that never require a gradient; ``detach`` is a no-op on values that depend on these alone.
    """
    carriers = may_require_gradient(graph, without_gradient)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _ASSERT_METADATA or _is_size_assertion(node):
            graph.erase_node(node)
        elif _returns_input(node, carriers):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    remove_dead(graph)


def _returns_input(node: fx.Node, carriers: Collection[fx.Node]) -> bool:
    """Return whether a call returns its first argument unchanged; ``carriers``: the nodes that may require a gradient."""
    if node.target is aten.detach.default:
        return node.args[0] not in carriers
    if node.target is aten.lift_fresh_copy.default:
        return not any(user.op == "output" for user in node.users)
    return node.target in _IDENTITIES and _IDENTITIES[node.target](node)


def remove_dead(graph: fx.Graph) -> None:
    """Remove nodes without users and side effects, in place."""
    for node in reversed(list(graph.nodes)):
        is_unread = node.op in ("call_function", "get_attr") and not node.users
        if is_unread and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Return whether a node does more than compute a value: it writes memory, running statistics among it, or calls a graph that does."""
    if node.op != "call_function":
        return bool(node.is_impure())
    called = (_called_graph(argument) for argument in node.all_input_nodes)
    calls_effect = any(has_effect(inner) for graph in called if graph is not None for inner in graph.nodes if inner.op == "call_function")
    return calls_effect or bool(node.is_impure() or mutated_arguments(node))


def _called_graph(argument: fx.Node) -> fx.Graph | None:
    """Return the graph that an argument of a higher-order operator names; None of other arguments."""
    if argument.op != "get_attr" or argument.graph.owning_module is None:
        return None
    called = operator.attrgetter(str(argument.target))(argument.graph.owning_module)
    return called.graph if isinstance(called, fx.GraphModule) else None


def _input_value(node: fx.Node) -> Tensor:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    assert isinstance(value, Tensor)
    return value


def _is_size_assertion(node: fx.Node) -> bool:
    """Return whether a node asserts something about sizes, which the trace has proved; assertions about values must stay."""
    return node.target is _ASSERT_NUMBER and not _reads_values(node.args[0])


def _reads_values(argument: Any) -> bool:
    """Return whether a number depends on the elements of a tensor, not on sizes alone."""
    if not isinstance(argument, fx.Node) or argument.op == "placeholder":
        return False
    if isinstance(argument.target, OpOverload):
        return True
    return any(_reads_values(source) for source in argument.all_input_nodes)


def _converts_nothing(node: fx.Node) -> bool:
    """Return whether a conversion keeps dtype and device, and asks for neither a copy nor a memory format."""
    before, after, bound = _input_value(node), node.meta["val"], bound_arguments(node)
    must_copy = bound.get("copy") or bound.get("memory_format") not in (None, torch.preserve_format)
    return not must_copy and before.dtype == after.dtype and before.device == after.device


def _slices_everything(node: fx.Node) -> bool:
    """Return whether a slice goes from the first to the last element in steps of one, for all sizes of the inputs."""
    if VARIES in node.meta:
        return False
    bound = bound_arguments(node)
    return bound["start"] in (None, 0) and bound["end"] in (None, _EVERYTHING) and bound["step"] == 1


def _is_contiguous_already(node: fx.Node) -> bool:
    """Return whether a call of ``contiguous`` takes the result of an equal call of ``contiguous``."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.contiguous.default:
        return False
    return source.args[1:] == node.args[1:] and source.kwargs == node.kwargs


_IDENTITIES: Mapping[Any, Callable[[fx.Node], bool]] = {
    aten.alias.default: lambda _: True,
    aten.contiguous.default: _is_contiguous_already,
    aten.slice.Tensor: _slices_everything,
    **{op.default: drops_nothing for op in (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout)},
    **dict.fromkeys((aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default), _converts_nothing),
}
"""Op -> whether a call of it returns its first argument unchanged."""
