"""Compute positions and masks on each rank in the layout in which they are read, instead of sending parts of them.

    Over "sequence", with queries cut:

    before   arange (sequence/4) -> all_gather -+                       after   arange (sequence) ---+
             arange (sequence/4) ---------------+- le (16, 4) -> all_to_all     arange (sequence/4) --+- le (4, 16)

A value is taken for replicable (``passes.analysis.replicable``) along a mesh dimension if all that it is computed from is there whole on
every rank: then any part of it can be computed from parts of that. Nodes are visited in reverse order. If all readers of a value read the
same shard, only that shard is computed; else the whole value, of which each reader takes its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor, fx

from passes.analysis.axes import Axes, is_item, returned_values
from passes.analysis.layout_facts import LayoutFacts
from passes.ir.layout import Layout, Placement, Replicate, Shard
from passes.ir.mesh import ROWS
from passes.spmd.propagate.call_along import CallAlong
from passes.spmd.propagate.layouts import Cut, Layouts
from passes.stages.boundary_layouts import is_whole


def computed_where_read(facts: LayoutFacts, layouts: Layouts) -> Layouts:
    """Return the layouts after each replicable value has taken the layout that its readers need."""
    free = _free_dimensions(facts, layouts)
    if not free:
        return layouts
    axes = facts.axes
    cuts, needs, results = dict(layouts.cuts), dict(layouts.needs), dict(layouts.results)
    reads: dict[str, list[Layout]] = {}
    for node in reversed(facts.graph.graph.nodes):
        if node.name in free:
            own = _layout_for(node, axes, layouts, free[node.name], reads.get(node.name, ()))
            cuts[node.name], needs[node.name], results[node.name] = own
        operands = returned_values(node) if node.op == "output" else axes.operands.get(node.name, ())
        for operand, need in zip(operands, needs.get(node.name, ()), strict=False):
            reads.setdefault(operand.name, []).append(need)
    return dataclasses.replace(layouts, cuts=cuts, needs=needs, results=results)


def _free_dimensions(facts: LayoutFacts, layouts: Layouts) -> dict[str, frozenset[int]]:
    """Return call -> the mesh dimensions over which every rank could compute all of it, or any part, from its own values.

    Dimensions that cut the batch are none of them: each rank has its own rows of the inputs.
    """
    axes = facts.axes
    candidates = frozenset(index for index, (name, _) in enumerate(layouts.mesh) if name not in ROWS)
    free: dict[str, frozenset[int]] = {}
    for node in facts.graph.graph.nodes:
        if node.name not in facts.replicable or not _is_free_to_choose(node, axes, layouts):
            continue
        found = candidates
        for operand in axes.operands[node.name]:
            held = layouts.results.get(operand.name, ((),))[0]
            found &= free.get(operand.name) or frozenset(index for index, place in enumerate(held) if place == Replicate())
        if found:
            free[node.name] = found
    return free


def _is_free_to_choose(node: fx.Node, axes: Axes, layouts: Layouts) -> bool:
    """Return whether a call gives one tensor, has a rule without windows, and need not be whole."""
    loops = axes.loops.get(node.name)
    is_call = node.name in layouts.cuts and isinstance(node.meta.get("val"), Tensor) and not is_item(node)
    return is_call and loops is not None and not loops.windows and not is_whole(node)


def _layout_for(
    node: fx.Node, axes: Axes, layouts: Layouts, free: frozenset[int], reads: Sequence[Layout]
) -> tuple[tuple[Cut | None, ...], tuple[Layout, ...], tuple[Layout, ...]]:
    """Return the cuts of a call, and the layouts of its operands and of its result, as readers need it over the dimensions ``free``."""
    cuts, result = list(layouts.cuts[node.name]), list(layouts.results[node.name][0])
    needs = [list(need) for need in layouts.needs[node.name]]
    operands = axes.operands[node.name]
    call = CallAlong(node, axes.loops[node.name], operands, (None,) * len(operands), {})
    for index in free:
        cuts[index] = _cut_read(node, axes, {read[index] for read in reads})
        result[index] = call.result(cuts[index], 0)
        for position, need in enumerate(needs):
            need[index] = call.need(cuts[index], position)
    return tuple(cuts), tuple(map(tuple, needs)), (tuple(result),)


def _cut_read(node: fx.Node, axes: Axes, reads: set[Placement]) -> Cut | None:
    """Return the cut of a call that gives the part that all readers take; None where they take different parts, or need a whole."""
    if len(reads) != 1:
        return None
    (read,) = reads
    if not isinstance(read, Shard):
        return None
    loops, operands = axes.loops[node.name], axes.operands[node.name]
    tensors = [*(axes.of(operand.name) for operand in operands), axes.of(node.name)]
    if any([axis for dimension in tensor for axis in dimension].count(read.axis) > 1 for tensor in tensors):
        return None  # rows times rows: no shard says which of them is cut
    for factor in loops.results[0][read.dimension]:
        if loops.factors[factor].reduction is None and axes.is_aligned(node.name, factor, read.axis):
            return Cut(factor, read.axis)
    return None
