"""Values recomputed by the backward instead of saved: the policy of ``recompute``.

    "none"        keeps every value that the backward reads
    "selective"   keeps what is expensive; recomputes, cheapest per byte first, until no more than half of the bytes is left:
                    1. values larger than all that they are made from: scores and weights of attention from queries and keys, embeddings
                       from indices, copies in a wider type; what was gathered from other ranks, of which the own part is kept; masks of
                       dropout that are larger than what the dropped values are made from, drawn from the state of the generator
                    2. all else that is no weight contraction and comes from no other rank: norms, activations, fused attention, masks
                  A residual sum is kept instead of the product that it adds, and a value that is made from more than three kept
                  ones of its size
    "full"        keeps the stage's arguments and the values that enter its regions (``StageGraph.regions``); everything else is computed
                  again
    "by region"   treats the values of each region by its own policy (``StageGraph.policies``); keeps those that enter a region

A value that is larger than what it is made from costs less than one byte read for each that it gives back; a norm or an activation
reads as much as it gives back; a contraction with weights reads the weights too, and multiplies. Random draws are expensive where they are
no part of what is made again anyway: one that is drawn takes a CPU as long as 20 that are copied, and gives back a byte. In a transformer
with decomposed attention, the first step leaves what Korthikanti et al. (Reducing Activation Recomputation in Large Transformer
Models, 2022) keep: 34 of the 34 + 5 heads x length / width bytes an element.

Whatever the policy, results of random operations other than masks and of operations that write to buffers are saved: computing them again
would draw other numbers or update twice. Views of parameters are taken again, never saved.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from passes.autograd.joint_graph import JointNodes, computed_by
from passes.autograd.trace_joint import Joint
from passes.graph.aliasing import OWN_MEMORY, memory_keys
from passes.graph.fake_tensors import fake_mode
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.functional import COLLECTIVES, all_gather, keep_first, local_index, put_runs, replicate, take, take_runs, vary
from passes.normalize.randomness.functional_rng import dropout_mask, dropout_mask_again, dropout_mask_with_state
from passes.spmd.decompose.ring_attention import RING_STATE

__all__ = ["Recompute", "kept_values"]

aten = torch.ops.aten

Recompute: TypeAlias = Literal["none", "selective", "full", "by region"]
"""Values recomputed by the backward instead of saved."""

GATHERS = frozenset({all_gather, replicate})
"""Collectives whose results ``"selective"`` does not keep: they are the parts of several ranks, of which this rank has its own."""

LOCAL = frozenset({vary, take, keep_first, local_index, take_runs, put_runs})
"""Operators beside the collectives for which nothing is sent."""

CONTRACTIONS = frozenset({aten.addmm.default, aten.mm.default, aten.convolution.default, aten.mkldnn_rnn_layer.default})
EXPENSIVE = CONTRACTIONS | (frozenset(COLLECTIVES) - GATHERS - LOCAL) | frozenset(RING_STATE)
"""Values that ``"selective"`` saves: contractions with weights, and results of communication."""

ENOUGH = 0.5
"""The part of the bytes of ``"none"`` down to which ``"selective"`` makes values again."""


MOST_SOURCES = 3
"""Kept values of at least its size from which ``"selective"`` makes a value again, at most: as many as fused attention reads."""


def kept_values(joint: Joint, recompute: Recompute) -> tuple[JointNodes, frozenset[fx.Node]]:
    """Return the nodes of a joint graph, and the forward values that are saved if the backward needs them.

    Masks that the backward draws again are drawn with the state of the generator: the graph changes (``_draw_again``).
    """
    policies = joint.stage.policies

    def policy_of(node: fx.Node) -> str:
        return policies.get(joint.sources.get(node, ""), "none") if recompute == "by region" else recompute

    repeated_masks = [mask for mask in _masks(joint) if policy_of(mask) == "full"]
    if recompute == "selective" or "selective" in policies.values():
        nodes, selected = _select(joint, lambda node: policy_of(node) == "selective", repeated_masks)
    else:
        nodes, selected = JointNodes(joint, _draw_again(joint, repeated_masks)), frozenset()
    entering = _values_entering_regions(joint, nodes) if recompute != "selective" else frozenset()

    def is_kept(node: fx.Node) -> bool:
        policy = policy_of(node)
        if policy == "selective":
            return node in selected or node in entering
        return node not in nodes.bound_views if policy == "none" else nodes.cannot_repeat(node) or node in entering

    return nodes, frozenset(filter(is_kept, nodes.forward))


def _values_entering_regions(joint: Joint, nodes: JointNodes) -> frozenset[fx.Node]:
    """Return the values that one region of recomputation computes and another reads; none if the stage is one region."""
    regions = joint.stage.regions
    region_of = {node: regions[joint.sources[node]] for node in nodes.forward if joint.sources.get(node) in regions}
    crossing = (
        node
        for node, region in region_of.items()
        if isinstance(node.meta.get("val"), Tensor) and any(region_of.get(user, region) != region for user in node.users)
    )
    return frozenset(node for node in crossing if node not in nodes.bound_views)


def _select(joint: Joint, may: Callable[[fx.Node], bool], masks: Iterable[fx.Node]) -> tuple[JointNodes, frozenset[fx.Node]]:
    """Keep all but values larger than their sources; if that saves more than ``ENOUGH``, keep only what is expensive to repeat.

    Args:
        may: whether the policy of a value is ``"selective"``.
        masks: those of other policies that are drawn again.
    """
    again = _draw_again(joint, [*masks, *filter(may, _masks_larger_than_sources(joint))])
    nodes = JointNodes(joint, again)
    sizes, gradients = _Sizes(nodes), joint.gradients.values()
    kept = frozenset(node for node, sources in _sources(nodes, sizes).items() if node in nodes.forward and sources == {node})
    enough = ENOUGH * sizes.saved(_forward_values(nodes, lambda node: node not in nodes.bound_views), gradients)
    if sizes.saved(kept, gradients) <= enough:
        return nodes, _after_sums(kept, nodes, sizes, joint, may)
    nodes = JointNodes(joint, {**again, **_draw_again(joint, filter(may, _masks(joint)))})
    sizes = _Sizes(nodes)
    kept = _after_sums(_forward_values(nodes, lambda node: _is_expensive(node, nodes)), nodes, sizes, joint, may)
    return nodes, kept | _of_many_sources(kept, nodes, sizes)


def _after_sums(
    kept: frozenset[fx.Node], nodes: JointNodes, sizes: _Sizes, joint: Joint, may: Callable[[fx.Node], bool]
) -> frozenset[fx.Node]:
    """Keep the result of a call instead of an operand that no other call reads, if it has no more elements.

    A residual sum is kept instead of the product that it adds. Else the first sum that the backward recomputes would need all sums
    before it, of all blocks. Where the sum has another policy or region, the operand stays: nothing else keeps the sum.
    """
    regions, sources = joint.stage.regions, joint.sources
    found = set(kept)
    for node in nodes.forward:
        is_movable = node in found and may(node) and node not in nodes.bound_views and not nodes.cannot_repeat(node)
        result = _only_reader(node, nodes) if is_movable else None
        if result is None or result in found or not may(result):
            continue
        is_within = regions.get(sources.get(node, "")) == regions.get(sources.get(result, ""))
        if is_within and sizes.elements(result) <= sizes.elements(node):
            found.remove(node)
            found.add(result)
    return frozenset(found)


def _of_many_sources(kept: frozenset[fx.Node], nodes: JointNodes, sizes: _Sizes) -> frozenset[fx.Node]:
    """Return the values that are made from more than ``MOST_SOURCES`` kept ones of at least their size, these among them.

    In a ResNet, whose sums are recomputed, every fourth block.
    """
    made_from: dict[fx.Node, frozenset[fx.Node]] = {}
    found = set[fx.Node]()
    for node in nodes.forward:
        inputs = (nodes.again.get(source, source) for source in computed_by(node).all_input_nodes)
        sources = frozenset[fx.Node]().union(*(made_from.get(source, frozenset()) for source in inputs))
        is_value = isinstance(node.meta.get("val"), Tensor) and node not in nodes.bound_views and not nodes.is_view(computed_by(node))
        if is_value and node not in kept and sum(sizes.of(source) >= sizes.of(node) for source in sources) > MOST_SOURCES:
            found.add(node)
        made_from[node] = frozenset({node}) if node in kept or node in found else sources
    return frozenset(found)


def _only_reader(node: fx.Node, nodes: JointNodes) -> fx.Node | None:
    """Return the first call that has another computed operand, of those that alone read a value, and each other's result."""
    while len(node.users) == 1:
        (reader,) = node.users
        if reader not in nodes.forward or nodes.writers(node) or nodes.writers(reader):
            return None
        if any(
            operand in nodes.forward and isinstance(operand.meta.get("val"), Tensor)
            for operand in reader.all_input_nodes
            if operand is not node
        ):
            return reader if isinstance(reader.meta.get("val"), Tensor) else None
        node = reader
    return None


def _forward_values(nodes: JointNodes, keep: Callable[[fx.Node], bool]) -> frozenset[fx.Node]:
    return frozenset(node for node in nodes.forward if keep(node))


def _is_expensive(node: fx.Node, nodes: JointNodes) -> bool:
    return (computed_by(node).target in EXPENSIVE and node not in nodes.bound_views) or nodes.cannot_repeat(node) or _is_uneven(node, nodes)


def _is_uneven(node: fx.Node, nodes: JointNodes) -> bool:
    """Return whether a gather is along a mesh dimension whose ranks have parts of different sizes.

    Every rank saves by its own sizes. One that gathers a value again while another has saved it waits for a message that is not sent.
    """
    return computed_by(node).target in GATHERS and node not in nodes.bound_views and node.args[2] in nodes.uneven_dimensions


def _sources(nodes: JointNodes, sizes: _Sizes, drawn: Collection[fx.Node] = ()) -> dict[fx.Node, frozenset[fx.Node]]:
    """Map each value to the kept values it is recomputed from; to itself if kept: expensive, or no larger than its sources.

    Args:
        drawn: masks that are drawn from nothing.
    """
    found: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset() if node in nodes.bound else frozenset({node}) for node in nodes.inputs}
    for node in nodes.forward:
        inputs = (nodes.again.get(source, source) for source in computed_by(node).all_input_nodes)
        made_from = frozenset[fx.Node]().union(*(found[source] for source in inputs))
        is_expensive = _is_expensive(node, nodes) and node not in drawn
        is_free = node in nodes.bound_views or computed_by(node).target in GATHERS or nodes.is_view(computed_by(node))
        is_value = isinstance(node.meta.get("val"), Tensor)
        is_kept = is_expensive or (is_value and not is_free and sizes.of(node) <= sum(sizes.of(source) for source in made_from))
        found[node] = frozenset({node}) if is_kept else made_from
    return found


def _masks(joint: Joint) -> list[fx.Node]:
    """Return the dropout masks that the forward draws and does not return."""
    return [node for node in joint.graph.nodes if node.target is dropout_mask and node not in joint.outputs]


def _masks_larger_than_sources(joint: Joint) -> list[fx.Node]:
    """Return the masks whose used part is larger than the kept values that the dropped-out values are recomputed from."""
    masks = _masks(joint)
    if not masks:
        return []
    nodes = JointNodes(joint, {})
    sizes = _Sizes(nodes)
    sources = _sources(nodes, sizes, drawn=masks)

    def is_larger(part: fx.Node) -> bool:
        for reader in (user for user in part.users if user in nodes.forward):
            values = {value for value in reader.all_input_nodes if isinstance(value.meta.get("val"), Tensor)} - {part}
            made_from = frozenset[fx.Node]().union(*(sources[value] for value in values))
            if not (sizes.of(part) > sum(map(sizes.of, made_from)) if values else is_larger(reader)):
                return False
        return True

    return [mask for mask in masks if is_larger(mask)]


class _Sizes:
    """Bytes of values at the number of rows that the stage was traced with."""

    def __init__(self, nodes: JointNodes) -> None:
        self._nodes = nodes
        counts = (node.meta["val"] for node in nodes.inputs if isinstance(node.meta.get("val"), torch.SymInt))
        rows = next((count for count in counts if count.node.expr.is_Symbol), None)
        self._symbol = None if rows is None else rows.node.expr
        self._rows = 1 if rows is None else int(rows.node.hint or 1)
        self._known: dict[fx.Node, int] = {}

    def of(self, node: fx.Node) -> int:
        """Return the bytes of a value; 0 if it is no tensor."""
        if node not in self._known:
            value = node.meta.get("val")
            self._known[node] = bytes_of(value, self._symbol, self._rows) if isinstance(value, Tensor) else 0
        return self._known[node]

    def elements(self, node: fx.Node) -> int:
        """Return the number of elements of a value."""
        return self.of(node) // int(node.meta["val"].element_size())

    def saved(self, kept: Collection[fx.Node], gradients: Iterable[fx.Node]) -> int:
        """Return the bytes that the forward saves for the backward if it keeps these values, shared memory counted once."""
        nodes = self._nodes
        body = nodes.needed(gradients, lambda node: node.op == "placeholder" or node in kept, in_backward=True)
        memory: dict[Any, int] = {}
        for node in nodes.read_in_backward(body) | set(gradients):
            if node in kept and isinstance(node.meta.get("val"), Tensor):
                ((_, key),) = memory_keys(node)
                memory[key] = max(memory.get(key, 0), self.of(node))
        return sum(memory.values())


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
