"""Cast parameters where they are stored: a cast commutes with a gather, and with a sum of gradients.

    over "fsdp"      before                                      after

    forward          w (ffn/2) -> replicate -> to(bfloat16)      w (ffn/2) -> to(bfloat16) -> all_gather     2 bytes an element, not 4
    backward         all_reduce -> to(float32) -> take           to(float32) -> reduce_scatter               sums in float32

A cast to a smaller type, and the views that lead to it from a parameter, are computed in the layout in which the parameter is stored.
Over a mesh dimension that shards the parameter they are computed on the shard, and readers gather the result. Over one where all readers
are Varying they are Varying, too: the gradient is a partial sum up to the parameter, which has the wider type, and is summed as that of a
parameter that is not cast. (The backward of a gather reduces before the cast: ``passes.autograd.precision.wide_sums`` exchanges the two.)

Equal casts of one stage (of a layer that is called several times) are one value, which is gathered once.

A cast to a wider type stays where it is: its argument is the smaller message, and its gradient has the wider type already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

from torch import Tensor, fx

from passes.analysis.axes import Axes
from passes.analysis.layout_facts import LayoutFacts
from passes.graph.equivalence import argument_key
from passes.ir.layout import Placement, Replicate, Shard, Varying
from passes.ir.mesh import WIDTH
from passes.spmd.propagate.layouts import Cut, Layouts, reads_of_values
from passes.stages.boundary_layouts import is_whole


def cast_where_stored(facts: LayoutFacts, layouts: Layouts, stages: Mapping[str, int] | None = None) -> Layouts:
    """Return the layouts with casts of parameters to a smaller type in the layouts in which the parameters are stored.

    Args:
        stages: call -> the stage that computes it; None: one does.
    """
    members = _casts_of_parameters(facts)
    if not members:
        return layouts
    placements = _Placements(facts, layouts)
    for node in members:
        placements.shard(node)
    for node in reversed(members):
        placements.vary(node)
    return placements.layouts(members, stages or {})


def _casts_of_parameters(facts: LayoutFacts) -> dict[fx.Node, str]:
    """Return each cast of a parameter to a smaller type, and the views from which such casts alone are computed -> the parameter."""
    parameters = {name: name for name in facts.graph.parameters}
    found: dict[str, str] = dict(parameters)
    candidates: list[tuple[fx.Node, str]] = []
    for node in facts.graph.graph.nodes:
        if _is_linear(node, facts) and (source := found.get(facts.axes.operands[node.name][0].name)) is not None:
            found[node.name] = source
            candidates.append((node, source))
    members: dict[fx.Node, str] = {}
    for node, source in reversed(candidates):
        if _is_narrowing(node, facts.axes) or (node.users and all(user in members for user in node.users)):
            members[node] = source
    return dict(reversed(members.items()))


def _is_linear(node: fx.Node, facts: LayoutFacts) -> bool:
    """Return whether a call is linear in its only tensor, and writes nothing: a cast or a view."""
    loops = facts.axes.loops.get(node.name)
    if node.op != "call_function" or loops is None or not isinstance(node.meta.get("val"), Tensor):
        return False
    is_linear = frozenset({0}) in loops.linear and len(facts.axes.operands[node.name]) == 1
    return is_linear and not loops.windows and node.name not in facts.written


def _is_narrowing(node: fx.Node, axes: Axes) -> bool:
    before, after = axes.operands[node.name][0].meta["val"].dtype, node.meta["val"].dtype
    return bool(before.is_floating_point and after.is_floating_point and after.itemsize < before.itemsize)


class _Placements:
    """The placements of casts and of their operands, as far as they are decided."""

    def __init__(self, facts: LayoutFacts, layouts: Layouts) -> None:
        self.axes, self.graph = facts.axes, facts.graph
        self.before = layouts
        self.cuts: dict[str, list[Cut | None]] = {}
        self.needs: dict[str, list[Placement]] = {}
        self.results: dict[str, list[Placement]] = {}
        self._reads = reads_of_values(facts, layouts)
        self._sharded: set[str] = set()

    def shard(self, node: fx.Node) -> None:
        """Compute a replicated call on the shard of its operand, over the mesh dimensions that shard it."""
        name, (operand,) = node.name, self.axes.operands[node.name]
        self.cuts[name], self.needs[name] = list(self.before.cuts[name]), list(self.before.needs[name][0])
        self.results[name] = list(self.before.results[name][0])
        for index, have in enumerate(self.results.get(operand.name) or self.before.results[operand.name][0]):
            if isinstance(have, Shard) and self._is_replicated(node, index) and (found := self._cut_on(node, have)) is not None:
                self.cuts[name][index], self.needs[name][index] = found[0], have
                self.results[name][index] = found[1]
                self._sharded.add(name)

    def vary(self, node: fx.Node) -> None:
        """Make a replicated call Varying over the mesh dimensions over which all its readers are, if its operand is no shard."""
        name, (operand,) = node.name, self.axes.operands[node.name]
        for index, have in enumerate(self.results.get(operand.name) or self.before.results[operand.name][0]):
            reads = {layout[index] for layout in self._reads_of(node)}
            if reads == {Varying()} and not isinstance(have, Shard) and self._is_replicated(node, index):
                self.needs[name][index] = self.results[name][index] = Varying()

    def _is_replicated(self, node: fx.Node, index: int) -> bool:
        must_be = self.before.mesh[index][0] == WIDTH and is_whole(node)
        return not must_be and self.needs[node.name][index] == self.results[node.name][index] == Replicate()

    def _cut_on(self, node: fx.Node, have: Shard) -> tuple[Cut, Shard] | None:
        """Return the cut of a call on a shard of its operand, and the shard that it gives; None: no shard of the result is that."""
        loops, of_result = self.axes.loops[node.name], self.axes.of(node.name)
        for factor in loops.operands[0][have.dimension]:
            dimensions = [place for place, factors in enumerate(loops.results[0]) if factor in factors]  # none of what is summed over
            if self.axes.is_aligned(node.name, factor, have.axis) and [of_result[place].count(have.axis) for place in dimensions] == [1]:
                return Cut(factor, have.axis), Shard(have.axis, dimensions[0])
        return None

    def _reads_of(self, node: fx.Node) -> Iterable[Sequence[Placement]]:
        """Yield the layouts in which the readers of a value read it."""
        for reader, layout in self._reads.get(node.name, ()):
            yield self.needs.get(reader, layout)

    def _equal(self, members: Iterable[fx.Node], stages: Mapping[str, int]) -> dict[str, str]:
        """Return sharded call -> the first one of its stage that computes the same, if that is another."""
        first: dict[Hashable, str] = {}
        found: dict[str, str] = {}
        for node in members:
            form = argument_key((node.args, node.kwargs), lambda each: found.get(each.name, each.name))
            same = first.setdefault((node.target, form, tuple(self.results[node.name]), stages.get(node.name)), node.name)
            if same != node.name and node.name in self._sharded:
                found[node.name] = same
        return found

    def layouts(self, members: Mapping[fx.Node, str], stages: Mapping[str, int]) -> Layouts:
        """Return the layouts of all values, with those of the casts, and of the parameters that all readers now read as Varying."""
        before = self.before
        cuts, needs, results = dict(before.cuts), dict(before.needs), dict(before.results)
        for node in members:
            cuts[node.name], needs[node.name] = tuple(self.cuts[node.name]), (tuple(self.needs[node.name]),)
            results[node.name] = (tuple(self.results[node.name]),)
        varying = dict(before.varying)
        placeholders = {node.name: node for node in self.graph.graph.nodes if node.op == "placeholder"}
        for name in dict.fromkeys(members.values()):
            reads, layout = list(self._reads_of(placeholders[name])), before.stored[name]
            varying[name] = frozenset(
                index
                for index, place in enumerate(layout)
                if not isinstance(place, Shard) and all(isinstance(read[index], Varying) for read in reads)
            )
            results[name] = (tuple(Varying() if index in varying[name] else place for index, place in enumerate(layout)),)
        casts = {node.name: name for node, name in members.items()}
        equal = self._equal(members, stages)
        return dataclasses.replace(before, cuts=cuts, needs=needs, results=results, varying=varying, casts=casts, equal_casts=equal)
