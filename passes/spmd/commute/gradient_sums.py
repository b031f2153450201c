"""Sum gradients where they are small: a sum over ranks commutes with the backward of a call, which is linear in the gradient.

    28 heads over 8 ranks, which share 4 heads of keys

               before                                               after
    forward    k = linear(x, w), repeated to 28 heads: whole        the same
               each rank takes its heads                            the same
    backward   all_gather of the gradients of 28 heads              the gradient of w is summed, once a step

A call that every rank computes whole, and of which readers take parts or have a part of the gradient each, may have a part of the gradient
itself: it becomes Varying, and its operands are read as Varying. The calls that become Varying are those that make the bytes of the
backward least; a sum that would move without fewer bytes stays where it is. A gradient that is summed for another reader anyway costs
nothing more. No sum of activations moves to a smaller type; gradients of parameters are summed in theirs.

    v, r        values; r reads v                       x(v) = 1: the call that gives v is Varying, and then all readers of v are
    s(v)        bytes of the sum of v's gradient        t(v): bytes of the gathers of v's gradient, for readers that take parts

    minimize    sum over v of  s(v) (max over r of x(r) - x(v)) + t(v) (1 - x(v)),    x(v) <= x(r);    x(v) = 0 for all but candidates

That is a minimum cut: a node for x(v), one for the maximum, infinite edges from r to both, and s(v) from the maximum to x(v).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator

from torch import Tensor, fx

from passes.analysis.axes import is_item
from passes.analysis.layout_facts import LayoutFacts
from passes.graph.dependencies import parameter_values
from passes.graph.schemas import draws
from passes.ir.layout import Layout, Placement, Replicate, Shard, Varying
from passes.ir.mesh import WIDTH
from passes.spmd.commute.min_cut import min_cut
from passes.spmd.propagate.layouts import Layouts, reads_of_values
from passes.stages.boundary_layouts import is_whole


def summed_where_small(facts: LayoutFacts, layouts: Layouts) -> Layouts:
    """Return the layouts with calls Varying over tensor dimensions where that makes the sums of gradients smaller."""
    if not facts.graph.training:
        return layouts
    for index, (name, _) in enumerate(layouts.mesh):
        if name == WIDTH:
            layouts = _Sums(facts, layouts, index).layouts()
    return layouts


class _Sums:
    """The sums of gradients over one mesh dimension."""

    def __init__(self, facts: LayoutFacts, layouts: Layouts, index: int) -> None:
        self.facts, self.axes, self.before, self.index = facts, facts.axes, layouts, index
        self.reads = reads_of_values(facts, layouts)
        self.varying: set[str] = set()
        self._of_parameters = parameter_values(facts.graph)

    def layouts(self) -> Layouts:
        """Return the layouts of all values."""
        for calls in self._connected(self._candidates()):
            self.varying.update(self._cheapest(calls))
        if not self.varying:
            return self.before
        needs, results = dict(self.before.needs), dict(self.before.results)
        for node in self.facts.graph.graph.nodes:
            if node.name in self.varying:
                needs[node.name] = tuple(
                    self._with(need, Varying()) if operand in self.facts.with_gradient else need
                    for operand, need in zip(self.axes.operands[node.name], needs[node.name], strict=True)
                )
                results[node.name] = (self._with(results[node.name][0], Varying()),)
        changed = dataclasses.replace(self.before, needs=needs, results=results)
        return self._with_parameters(changed)

    def _with(self, layout: Layout, place: Placement) -> Layout:
        return (*layout[: self.index], place, *layout[self.index + 1 :])

    def _with_parameters(self, layouts: Layouts) -> Layouts:
        """Return the layouts with the parameters that all readers now read as Varying: their gradients are summed once a step."""
        varying, results = dict(layouts.varying), dict(layouts.results)
        for name, reads in reads_of_values(self.facts, layouts).items():
            is_parameter = name in varying and not isinstance(layouts.stored[name][self.index], Shard)
            if is_parameter and all(isinstance(need[self.index], Varying) for _, need in reads):
                varying[name] |= {self.index}
                results[name] = (self._with(results[name][0], Varying()),)
        return dataclasses.replace(layouts, varying=varying, results=results)

    # -- the calls that could be Varying ---------------------------------------------------------------------------------------------

    def _candidates(self) -> dict[fx.Node, None]:
        """Return the calls that could be Varying, from the last one back."""
        found: dict[fx.Node, None] = {}
        names: set[str] = set()
        for node in reversed(self.facts.graph.graph.nodes):
            reads = self.reads.get(node.name, ())
            if reads and self._is_whole_call(node) and all(name in names or self._is_part(node, need) for name, need in reads):
                found[node] = None
                names.add(node.name)
        return found

    def _is_whole_call(self, node: fx.Node) -> bool:
        """Return whether every rank computes a call whole, and could do so with a part of its gradient."""
        name = node.name
        value, loops = node.meta.get("val"), self.axes.loops.get(name)
        if not isinstance(value, Tensor) or loops is None or is_item(node) or node not in self.facts.with_gradient:
            return False
        if is_whole(node) or draws(node) or name in self.facts.written or any(is_item(user) for user in node.users):
            return False
        places = [*(need[self.index] for need in self.before.needs[name]), self.before.results[name][0][self.index]]
        return not loops.windows and not loops.unread and all(isinstance(place, Replicate) for place in places)

    def _is_part(self, node: fx.Node, need: Layout) -> bool:
        """Return whether a reader has a part of a value's gradient."""
        place = need[self.index]
        if isinstance(place, Shard):
            others = (other for index, other in enumerate(need) if index != self.index)
            return isinstance(self.axes.sizes[place.axis], int) and not any(
                isinstance(other, Shard) and other.dimension == place.dimension for other in others
            )
        return isinstance(place, Varying)

    def _connected(self, calls: Collection[fx.Node]) -> Iterator[list[fx.Node]]:
        """Yield the calls in sets that share no value."""
        members: dict[fx.Node, dict[fx.Node, None]] = {}  # value -> those of its set, one object for all of them
        for node in calls:
            values = (node, *(operand for operand in self.axes.operands[node.name] if operand in self.facts.with_gradient))
            known = {id(of_value): of_value for value in values if (of_value := members.get(value)) is not None}
            joined, *others = sorted(known.values(), key=len, reverse=True) or [{}]
            joined.update(dict.fromkeys(values))
            for other in others:
                joined.update(other)
                members.update(dict.fromkeys(other, joined))
            members.update(dict.fromkeys(values, joined))
        sets: dict[int, list[fx.Node]] = {}
        for node in calls:
            sets.setdefault(id(members[node]), []).append(node)
        yield from sets.values()

    # -- bytes -----------------------------------------------------------------------------------------------------------------------

    def _cheapest(self, calls: Collection[fx.Node]) -> Iterator[str]:
        """Yield the calls that make the bytes of the backward least if they are Varying."""
        names = {node.name for node in calls}
        read = dict.fromkeys(operand for node in calls for operand in self.axes.operands[node.name] if operand in self.facts.with_gradient)
        values = [*calls, *(operand for operand in read if operand.name not in names)]
        places = {value: self._places(value, names) for value in values}
        widest = max((value.meta["val"].dtype.itemsize for value in calls if places[value]), default=0)
        capacities: dict[tuple[object, object], float] = {}
        for value in values:
            known, most, own = places[value], ("maximum", value.name), value.name if value.name in names else _SINK
            size = self.facts.bytes.of(value)
            have = self.before.results[value.name][0][self.index]
            n_parts = sum(isinstance(place, Shard) for place in known)
            if own != _SINK and n_parts:
                capacities[_SOURCE, own] = n_parts * size
            is_summed = Varying() in known
            if is_summed:
                capacities[_SOURCE, most] = math.inf
            is_narrower = value.meta["val"].dtype.itemsize < widest and value.name not in self._of_parameters
            capacities[most, own] = _NEVER * size if is_narrower and not is_summed else size * (1.0 if isinstance(have, Shard) else 2.0)
            for reader in (name for name, _ in self.reads[value.name] if name in names):
                capacities[reader, most] = math.inf
                if own != _SINK:
                    capacities[own, reader] = math.inf
        side = min_cut(capacities, _SOURCE, _SINK)
        yield from (name for name in names if name in side)

    def _places(self, value: fx.Node, candidates: Collection[str]) -> set[Placement]:
        """Return the placements in which a value is read by other calls than the candidates."""
        return {need[self.index] for name, need in self.reads.get(value.name, ()) if name not in candidates}


_SOURCE, _SINK = "", "sink of the network"

_NEVER = 1e6
"""Factor on the bytes of a sum of activations that would move to a smaller type: it stays."""
