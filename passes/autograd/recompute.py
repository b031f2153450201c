"""Values recomputed by the backward instead of saved: the policy of ``recompute``.

    "none"        keeps every value that the backward reads
    "selective"   recomputes the values that the plan names (``Plan.recomputed``; ``planner.costs.memory.checkpoint_selection`` selects
                  them), and of calls that become several, inner values that are larger than all that they are made from: scores and
                  weights of attention. What was gathered from other ranks is gathered again; other messages are saved
    "full"        keeps the stage's arguments and the values that enter its regions (``StageGraph.regions``), as sums over ranks where they
                  are read so; everything else is computed again
    "by region"   treats the values of each region by its own policy (``StageGraph.policies``); keeps those that enter a region

Whatever the policy, results of random operations other than masks and of operations that write to buffers are saved: computing them again
would draw other numbers or update twice. Views of parameters are taken again, never saved.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from passes.analysis.axes import is_item
from passes.autograd.joint_graph import JointNodes, computed_by
from passes.autograd.trace_joint import Joint
from passes.graph.aliasing import OWN_MEMORY
from passes.graph.fake_tensors import fake_mode
from passes.graph.schemas import draws
from passes.ir.comm.functional import (
    COLLECTIVES,
    all_gather,
    all_reduce,
    keep_first,
    local_index,
    put_runs,
    reduce_scatter,
    replicate,
    take,
    take_runs,
    vary,
)
from passes.ir.torch_private import OpOverload
from passes.normalize.randomness.functional_rng import dropout_mask, dropout_mask_again, dropout_mask_with_state
from passes.spmd.decompose.ring_attention import RING_STATE

aten = torch.ops.aten

Recompute: TypeAlias = Literal["none", "selective", "full", "by region"]
"""Values recomputed by the backward instead of saved."""

GATHERS = frozenset({all_gather, replicate})
"""Collectives whose results ``"selective"`` does not keep: they are the parts of several ranks, of which this rank has its own."""

SUMS = frozenset({all_reduce, reduce_scatter})
"""Collectives whose results are sums of what the ranks of a group give, or parts of these."""

OWN_PARTS = frozenset({take, keep_first, take_runs, put_runs})
LOCAL = OWN_PARTS | {vary, local_index}
"""Operators beside the collectives for which nothing is sent; some take a rank's part of a value."""

MESSAGES = (frozenset(COLLECTIVES) - GATHERS - LOCAL) | frozenset(RING_STATE)
"""Results of communication that ``"selective"`` saves."""


def kept_values(joint: Joint, recompute: Recompute) -> tuple[JointNodes, frozenset[fx.Node]]:
    """Return the nodes of a joint graph, and the forward values that are saved if the backward needs them.

    Masks that the backward draws again are drawn with the state of the generator: the graph changes (``_draw_again``).
    """
    policies, calls = joint.stage.policies, _calls(joint)

    def policy_of(node: fx.Node) -> str:
        return policies.get(joint.sources.get(node, ""), "none") if recompute == "by region" else recompute

    def is_drawn_again(mask: fx.Node) -> bool:
        policy = policy_of(mask)
        return policy == "full" or (policy == "selective" and calls.get(mask) in joint.stage.recomputed)

    nodes = JointNodes(joint, _draw_again(joint, filter(is_drawn_again, _masks(joint))))
    entering = _values_entering_regions(joint, nodes) if recompute != "selective" else frozenset()
    selected = _selected(joint, nodes, calls) if "selective" in (recompute, *policies.values()) else frozenset()

    def is_kept(node: fx.Node) -> bool:
        policy = policy_of(node)
        if policy == "selective":
            return node in selected or node in entering
        return node not in nodes.bound_views if policy == "none" else nodes.cannot_repeat(node) or node in entering

    return nodes, frozenset(filter(is_kept, nodes.forward))


def _values_entering_regions(joint: Joint, nodes: JointNodes) -> frozenset[fx.Node]:
    """Return the values that one region of recomputation computes and another reads; none if the stage is one region.

    Instead of what each rank adds to a sum it is the sum, or the rank's part of it, which is no larger and is not sent again.
    """
    regions = joint.stage.regions
    region_of = {node: regions[joint.sources[node]] for node in nodes.forward if joint.sources.get(node) in regions}
    crossing = (
        node
        for node, region in region_of.items()
        if isinstance(node.meta.get("val"), Tensor) and any(region_of.get(user, region) != region for user in node.users)
    )
    entering = set[fx.Node]()
    for node in crossing:
        sums = [user for user in node.users if user.target in SUMS]
        entering.update(sums if len(sums) == len(node.users) else [] if node in nodes.bound_views else [node])
    return frozenset(entering)


def _calls(joint: Joint) -> dict[fx.Node, str]:
    """Return for each node of the forward the call of the model that it is computed for."""
    calls = joint.stage.calls
    return {node: calls[name] for node, name in joint.sources.items()}


def _selected(joint: Joint, nodes: JointNodes, calls: Mapping[fx.Node, str]) -> frozenset[fx.Node]:
    """Return the values that ``"selective"`` saves: results of calls that are not recomputed, and values no larger than their sources.

    A call may become several: attention may become scores, weights and a product, of which the product alone is read by other calls. Inner
    copies of values that are saved for a recomputed call are copied again; what is made from its messages alone is saved instead of them.
    So are its numbers, such as the total weight inside a loss.
    Of ranks with parts of different sizes, all save the same, whatever the sizes: a rank that gathers a value again while another has saved
    values computed from it would wait for a message that is not sent. Of inner values they save the further results of operations, and
    what is computed element by element from a saved value.

    Args:
        calls: node of the forward -> the call of the model that it is computed for.
    """
    results = _results_of_calls(joint, nodes, calls)
    copies, read_again = dict[fx.Node, frozenset[fx.Node]](), set[fx.Node]()
    made_from: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset(() if node in nodes.bound else (node,)) for node in nodes.inputs}
    kept = set[fx.Node]()
    for node in nodes.forward:
        inputs = (nodes.again.get(source, source) for source in computed_by(node).all_input_nodes)
        of_inputs = frozenset[fx.Node]().union(*(made_from[source] for source in inputs))
        is_free = _is_free(node, nodes) or not isinstance(node.meta.get("val"), Tensor)
        if _is_sent_or_drawn(node, nodes):
            kept.add(node)
        elif not is_free and calls.get(node) not in joint.stage.recomputed:
            kept.update([node] if node in results or _is_small(node, of_inputs, nodes) else [])
            if computed_by(node).target is aten.clone.default and node not in results:
                copies[node] = of_inputs
        elif not is_free and (node.meta["val"].ndim == 0 or _replaces_messages(node, of_inputs, nodes, calls)):
            kept.add(node)
        elif not is_free:
            read_again |= of_inputs
        made_from[node] = frozenset({node}) if node in kept else of_inputs
    return frozenset(kept - {copy for copy, sources in copies.items() if sources <= read_again})


def _results_of_calls(joint: Joint, nodes: JointNodes, calls: Mapping[fx.Node, str]) -> set[fx.Node]:
    """Return the values that leave the call of the stage that they are computed for, with those that they are views of."""
    results = set[fx.Node]()
    for node in reversed(nodes.forward):
        readers = [user for user in node.users if user in nodes.forward]
        leaves = node in joint.outputs or any(calls.get(reader) != calls.get(node) for reader in readers)
        if leaves or any(reader in results and (is_item(reader) or nodes.is_view(reader)) for reader in readers):
            results.add(node)
    return results


def _is_small(node: fx.Node, sources: Collection[fx.Node], nodes: JointNodes) -> bool:
    """Return whether an inner value of a call is no larger than what it is made from, on all ranks alike.

    Of parts of different sizes, sums of bytes could be larger on one rank alone. There it is a further result of an operation, or computed
    element by element from a value of its size: unless a rank has a single element, which would be repeated like that of a broadcast value.
    """
    if not nodes.has_uneven_parts:
        return nodes.bytes_of(node) <= sum(map(nodes.bytes_of, sources))
    if is_item(node) or min(nodes.uneven_sizes) <= 1:
        return is_item(node)
    is_elementwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return is_elementwise and any(_has_size_of(source, node, nodes) for source in node.all_input_nodes if source in sources)


def _has_size_of(source: fx.Node, result: fx.Node, nodes: JointNodes) -> bool:
    """Return whether a value is a tensor with as many elements as another one, of at least its width; a size of the batch is none."""
    if not isinstance(source.meta.get("val"), Tensor):
        return False
    width, of_source = (int(each.meta["val"].dtype.itemsize) for each in (result, source))
    return of_source >= width and nodes.bytes_of(source) * width == nodes.bytes_of(result) * of_source


def _replaces_messages(node: fx.Node, sources: Iterable[fx.Node], nodes: JointNodes, calls: Mapping[fx.Node, str]) -> bool:
    """Return whether a value of a recomputed call is saved instead of the messages of the call that it alone is made from, if no larger.

    Such as a mean instead of the sum over ranks. A backward that reads a message, as that of a norm reads its input, needs it saved.
    """
    messages = [each for each in sources if isinstance(each.meta.get("val"), Tensor)]
    are_replaced = all(
        _is_sent_or_drawn(each, nodes) and calls.get(each) == calls.get(node) and each.users.keys() <= {node} for each in messages
    )
    return bool(messages) and are_replaced and nodes.bytes_of(node) <= sum(map(nodes.bytes_of, messages))


def _is_sent_or_drawn(node: fx.Node, nodes: JointNodes) -> bool:
    """Return whether a value comes from other ranks, unless gathered again, or cannot be computed again."""
    is_message = computed_by(node).target in MESSAGES and node not in nodes.bound_views
    return is_message or nodes.cannot_repeat(node)


def _is_free(node: fx.Node, nodes: JointNodes) -> bool:
    """Return whether a value is a view, or gathered again, or the own part of one, but for that of a mask: it is saved, not the whole mask.

    Of ranks with parts of different sizes, one may have a view of its part where another makes a copy: all save it.
    """
    call = computed_by(node)
    if node in nodes.bound_views or call.target in GATHERS or call.target in LOCAL - OWN_PARTS:
        return True
    if call.target in OWN_PARTS and any(draws(computed_by(source)) for source in call.all_input_nodes):
        return False
    return (call.target in OWN_PARTS or nodes.is_view(call)) and not (nodes.has_uneven_parts and not _is_whole(node, nodes))


def _is_whole(node: fx.Node, nodes: JointNodes) -> bool:
    """Return whether a value is gathered, or a view of what is gathered: of one size on all ranks."""
    call = computed_by(node)
    while nodes.is_view(call) or call.target is vary:
        call = computed_by(call.all_input_nodes[0])
    return call.target in GATHERS


def _masks(joint: Joint) -> list[fx.Node]:
    """Return the dropout masks that the forward draws and does not return."""
    return [node for node in joint.graph.nodes if node.target is dropout_mask and node not in joint.outputs]


def _draw_again(joint: Joint, masks: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Have the forward keep the generator's state beside each mask that is larger than that; mask -> the node that draws it again.

    Before:                            After:

        mask = dropout_mask(size, p)       drawn = dropout_mask_with_state(size, p)
                                           mask, state = drawn[0], drawn[1]
                                           again = dropout_mask_again(state, size, p)     for the backward alone
    """
    found: dict[fx.Node, fx.Node] = {}
    with fake_mode(joint.graph):
        for node in masks:
            values = fx.map_arg(node.args, lambda each: each.meta["val"])
            drawn = dropout_mask_with_state(*values)
            if _elements(drawn[0]) <= drawn[1].numel():
                continue
            found.update([_with_state(joint.graph, node, drawn)])
    return found


def _elements(mask: Tensor) -> int:
    """Return the number of elements of a mask at the number of rows that was traced."""
    sizes: Iterable[Any] = mask.shape
    return math.prod(size if isinstance(size, int) else int(size.node.hint or 1) for size in sizes)


def _with_state(graph: fx.Graph, node: fx.Node, drawn: tuple[Tensor, Tensor]) -> tuple[fx.Node, fx.Node]:
    def write(target: Any, arguments: tuple[Any, ...], name: str, value: Any) -> fx.Node:
        written = graph.create_node("call_function", target, arguments, name=name)
        written.meta = {**{key: each for key, each in node.meta.items() if key != OWN_MEMORY}, "val": value}
        return written

    with graph.inserting_before(node):
        both = write(dropout_mask_with_state, node.args, f"{node.name}_drawn", drawn)
        mask = write(operator.getitem, (both, 0), f"{node.name}_of_forward", drawn[0])
        state = write(operator.getitem, (both, 1), f"{node.name}_state", drawn[1])
        again = write(dropout_mask_again, (state, *node.args), f"{node.name}_again", drawn[0].clone())
    node.replace_all_uses_with(mask)
    graph.erase_node(node)
    return mask, again
