"""Assign a layout to every value, given the axes that each mesh dimension cuts.

One walk in graph order, each mesh dimension by itself. A call is cut over the axis that is assigned to the mesh dimension and that it
loops over; it needs operands without this axis whole. With heads and ffn cut over ``tensor``:

    call                  cut over   needs                           gives
    linear (q, k, v)      heads      x Varying, weight Shard         Shard(heads)
    attention             heads      q, k, v Shard                   Shard(heads)
    linear (project)      heads      x Shard, weight Shard           Partial      all_reduce at its first reader
    add, layer_norm       nothing    Replicate                       Replicate

Of several assigned axes, ``choose_cut`` chooses one.

Partial sums pass through calls that are linear in them, so that two of them are added before they are reduced. A partial sum that meets no
other one is reduced before a call that can be cut: as many bytes are sent, and each rank computes its own part only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes, is_item, returned_values
from passes.analysis.layout_facts import LayoutFacts
from passes.analysis.routed_rows import MATRICES, Route, find_routes
from passes.ir.graph import ModelGraph, Results, Written
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, Varying
from passes.ir.mesh import WIDTH
from passes.rules.loops import Loops
from passes.rules.ops.grouped_mm import grouped_mm
from passes.spmd.propagate.call_along import CallAlong
from passes.spmd.propagate.choose_cut import CutChoice
from passes.spmd.propagate.layouts import Cut, Layouts, Ring
from passes.stages.boundary_layouts import is_whole

_WHOLE = Replicate()


def assign_layouts(
    graph: ModelGraph,
    axes: Axes,
    mesh: tuple[tuple[str, int], ...],
    assigned: Mapping[str, Sequence[int]],
    rows: Sequence[str],
    *,
    results: Results = "rows",
    stored: Mapping[str, Layout] | None = None,
    facts: LayoutFacts | None = None,
    attention: str = "gather",
    stages: Mapping[str, int] | None = None,
) -> Layouts:
    """Return the layout of every value of a graph.

    Args:
        mesh: the mesh dimensions that cut axes.
        assigned: mesh dimension -> the axes that it cuts, the most expensive first.
        rows: mesh dimensions over which inputs and results with a batch are sharded by rows; every other result is returned whole.
        results: the form of results: ``"whole"`` replicates all; for ``"loss"``, results without rows are Varying.
        stored: the layouts of parameters, buffers and constants; their readers decide those that are missing. None: all of them.
        facts: those of the graph and its axes, if it is walked often.
        attention: how the ranks of a sequence dimension share attention (``Plan.attention``).
        stages: call -> the stage that computes it; None: one does.
    """
    walk = LayoutWalk(facts or LayoutFacts(graph, axes), mesh, assigned, rows, results, stored, attention, stages)
    for node in graph.graph.nodes:
        if node.op == "output":
            walk.output(node)
        elif node.op == "placeholder":
            walk.placeholder(node)
        else:
            walk.call(node)
    return walk.layouts()


class LayoutWalk:
    """Assigns layouts node by node, in graph order.

    Attributes:
        choice: chooses how each call is cut.
        current: (value, index of its tensor) -> its placement over each mesh dimension now; None: a weight of which no reader decided it.
        uses: weight -> the layouts in which it is read.
        cuts, needs, results: those of ``Layouts``, as far as the walk has come.
        facts: those of the graph and its axes.
    """

    def __init__(
        self,
        facts: LayoutFacts,
        mesh: tuple[tuple[str, int], ...],
        assigned: Mapping[str, Sequence[int]],
        rows: Sequence[str],
        form: Results,
        stored: Mapping[str, Layout] | None = None,
        attention: str = "gather",
        stages: Mapping[str, int] | None = None,
    ) -> None:
        self.graph, self.axes = graph, axes = facts.graph, facts.axes
        self.bytes = facts.bytes
        self.facts = facts
        self.mesh = mesh
        self.choice = CutChoice(facts, mesh, assigned, rows, attention)
        self.rows = rows
        self.form = form
        self.stored = stored
        self.inputs = {leaf.placeholder: leaf for leaf in graph.inputs}
        self.weights = {**graph.parameters, **graph.buffers, **graph.constants}
        self._in_rings, self._in_zigzag = attention in ("ring", "zigzag"), attention == "zigzag"
        self._rings: dict[str, Ring] = {}
        self._routes = find_routes(graph, axes, mesh, rows, self.choice.assigned, stages)
        self.current: dict[tuple[str, int], list[Placement | None]] = {}
        self.uses: dict[str, list[Layout]] = {name: [] for name in self.weights}
        self.cuts: dict[str, tuple[Cut | None, ...]] = {}
        self.needs: dict[str, tuple[Layout, ...]] = {}
        self.results: dict[str, tuple[Layout, ...]] = {}

    # -- inputs and results of the graph -------------------------------------------------------------------------------------------

    def placeholder(self, node: fx.Node) -> None:
        """Shard an input by rows or replicate it; leave the layout of a weight to its readers, unless it is stored or updated.

        That of a resident input is treated likewise over the mesh dimensions that do not shard rows.
        """
        stored = None if self.stored is None else self.stored.get(node.name)
        if node.name in self.weights:
            undecided: list[Placement | None] = [_WHOLE if node.name in self.graph.updates else None] * len(self.mesh)
            self.current[node.name, 0] = undecided if stored is None else list(stored)
            return
        if not isinstance(node.meta.get("val"), Tensor):
            return
        leaf = self.inputs.get(node.name)
        layout = self._row_layout(node.name, None if leaf is None else leaf.batch_dim, Replicate())
        self.results[node.name] = (layout,)
        self.current[node.name, 0] = list(layout)
        if leaf is not None and leaf.resident:
            decided = stored or (None,) * len(self.mesh)
            by_dimension = zip(self.mesh, layout, decided, strict=True)
            self.current[node.name, 0] = [by_rows if name in self.rows else place for (name, _), by_rows, place in by_dimension]

    def output(self, node: fx.Node) -> None:
        """Read each result of the model in the layout in which it is returned: sharded by rows, varying (for a loss) or replicated."""
        by_node = {output.node: output for output in self.graph.outputs}
        needs = []
        for value in returned_values(node):
            output = by_node[value.name]
            batch_dim = output.batch_dim if output.combine == "concatenate" and self.form != "whole" else None
            is_written = isinstance(output.destination, Written)
            layout = self._row_layout(value.name, batch_dim, Varying() if self.form == "loss" and not is_written else Replicate())
            self._use(value, layout)
            needs.append(layout)
        self.needs["output"] = tuple(needs)

    def _row_layout(self, name: str, batch_dim: int | None, without_batch: Placement) -> Layout:
        """Return the layout of an input or result: over row dimensions a shard of ``batch_dim``, or ``without_batch`` if that is None."""
        layout: list[Placement] = []
        for dimension, _ in self.mesh:
            if dimension not in self.rows:
                layout.append(Replicate())
            else:
                layout.append(without_batch if batch_dim is None else Shard(self.axes.of(name)[batch_dim][0], batch_dim))
        return tuple(layout)

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def call(self, node: fx.Node) -> None:
        """Assign the layouts of a call that gives tensors; an item of a tuple has the layout of the tuple's tensor."""
        value = node.meta.get("val")
        if is_item(node) and isinstance(value, tuple | list | Tensor):
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            layout = self.results[source.name][index]
            self.results[node.name] = (layout,)
            self.current[node.name, 0] = list(layout)
        elif isinstance(value, tuple | list | Tensor):
            self._call(node, self.axes.operands[node.name])

    def _call(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Choose how a call is cut over each mesh dimension, and record the layouts of its operands and results."""
        if node.target is torch.ops.aten.copy_.default and operands[0].name in self.graph.updates:
            self._write_buffer(node, operands)
            return
        loops = self.axes.loops.get(node.name)
        cuts: list[Cut | None] = []
        needs: list[list[Placement]] = [[] for _ in operands]
        results: list[list[Placement]] = [[] for _ in self.axes.tensors.get(node.name, ())]
        call_axes = self.axes.of_calls.get(node.name, frozenset())
        for mesh_dimension in range(len(self.mesh)):
            current = tuple(self.current[operand.name, 0][mesh_dimension] for operand in operands)
            has_partial = any(isinstance(placement, Partial) for placement in current)
            nothing_to_cut = call_axes.isdisjoint(self.choice.assigned[mesh_dimension]) and not has_partial
            if nothing_to_cut or (self.mesh[mesh_dimension][0] == WIDTH and is_whole(node)):
                self._replicate_call(loops, current, needs, results)
                cuts.append(None)
                continue
            placements = self._window_placements(node, loops, operands, mesh_dimension)
            ring = self.choice.ring_placements(node, operands, mesh_dimension) if self._in_rings else {}
            call = CallAlong(node, loops, tuple(operands), current, {**placements, **ring})
            route = self._route(node, mesh_dimension)
            cut = self.choice.cheapest(call, mesh_dimension, cuts) if route is None else self._cut_of_rows(call, route)
            if cut is not None and cut.factor in ring:
                is_zigzag = self._in_zigzag and self.choice.has_two_pieces(node, operands, mesh_dimension)
                self._rings[node.name] = Ring(mesh_dimension, is_zigzag)
            passes_sum = route is None and self._passes_sum(call) and (cut is None or node.name in self.facts.summed_together)
            cut = None if passes_sum else cut
            cuts.append(cut)
            for position, layout in enumerate(needs):
                layout.append(call.need_of_sum(position) if passes_sum else call.need(cut, position))
            if route is not None and node.target is grouped_mm:
                needs[MATRICES][-1] = Shard(route.experts[node.name], 0)
            for position, layout in enumerate(results):
                layout.append(Partial() if passes_sum else call.result(cut, position))
        for operand, need in zip(operands, needs, strict=True):
            self._use(operand, tuple(need))
        self.cuts[node.name] = tuple(cuts)
        self.needs[node.name] = tuple(tuple(layout) for layout in needs)
        self.results[node.name] = tuple(tuple(layout) for layout in results)
        for position, layout in enumerate(results):
            self.current[node.name, position] = list(layout)

    def is_routed(self, node: fx.Node) -> bool:
        """Return whether a call is computed where experts are stored, or is an item of such a call."""
        return node.name in self._routes

    def _route(self, node: fx.Node, mesh_dimension: int) -> Route | None:
        """Return how the rows of a call go along a mesh dimension to the ranks that store their experts; None: they stay."""
        route = self._routes.get(node.name)
        return route if route is not None and route.dimension == mesh_dimension else None

    def _cut_of_rows(self, call: CallAlong, route: Route) -> Cut:
        """Return the cut of a call that is computed where experts are stored: by rows."""
        assert call.loops is not None
        axis, factors = self.axes.of(route.group)[0][0], self.axes.factors[call.node.name]
        return Cut(next(factor for factor, axes in enumerate(factors) if axes[:1] == (axis,)), axis)

    def _write_buffer(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Give the new value of a buffer the layout in which the buffer is stored; replicate it if that is not decided yet."""
        name = operands[0].name
        layout = (_WHOLE,) * len(self.mesh) if self.stored is None else self.stored[name]
        for operand in operands:
            self._use(operand, layout)
        self.cuts[node.name] = (None,) * len(self.mesh)
        self.needs[node.name] = (layout,) * len(operands)
        self.results[node.name] = (layout,)
        self.current[node.name, 0] = list(layout)

    def _replicate_call(
        self, loops: Loops | None, current: Sequence[Placement | None], needs: Sequence[list[Placement]], results: Sequence[list[Placement]]
    ) -> None:
        """Append Replicate to ``needs`` and ``results`` of a call that is not cut; an operand that it does not read stays unchanged."""
        unread = loops.unread if loops is not None else frozenset()
        for position, layout in enumerate(needs):
            layout.append((current[position] if position in unread else None) or _WHOLE)
        for layout in results:
            layout.append(_WHOLE)

    def _window_placements(
        self, node: fx.Node, loops: Loops | None, operands: Sequence[fx.Node], mesh_dimension: int
    ) -> dict[int, dict[int, Placement]]:
        """Return factor -> operand over which its window slides -> the placement to read it in if the factor is cut.

        That is the shard of the outermost axis under the window, if the axis is assigned, or if the operand is a shard of any axis: one
        shard is exchanged for the other, as no rank needs the whole. It is Varying if the operand is an input that every rank has already,
        if the axis is too short to be sharded, or if the operand's dimension does not have it: a dimension of several loops, of which the
        window slides over one (``Window.part``), may be flattened from other axes than the call's.
        """
        placements: dict[int, dict[int, Placement]] = {}
        for window in loops.windows if loops is not None else ():
            if window.factor is None:
                continue
            source = operands[window.operand]
            outermost, current = self.axes.under(node.name, window)[0], self.current[source.name, 0][mesh_dimension]
            is_on_every_rank = current == Replicate() and self.choice.has_no_gradient(source)
            is_in_dimension = outermost in self.axes.of(source.name)[window.dimension]
            can_be_sharded = is_in_dimension and (outermost in self.choice.assigned[mesh_dimension] or isinstance(current, Shard))
            is_sharded = can_be_sharded and self.choice.fits(outermost, mesh_dimension) and not is_on_every_rank
            placement: Placement = Shard(outermost, window.dimension) if is_sharded else Varying()
            placements.setdefault(window.factor, {})[window.operand] = placement
        return placements

    def _passes_sum(self, call: CallAlong) -> bool:
        """Return whether a call can run on partial sums: it is linear in them, and its result is no larger.

        It reads them alone, or adds whole values to them on the way to another partial sum: the first rank then adds these
        (``table(words) + table(kinds)`` before ``+ table(positions)``, where there are too few kinds to shard).
        """
        partial = {position for position, placement in enumerate(call.current) if placement == Partial()}
        value = call.node.meta["val"]
        if not partial or call.loops is None or not isinstance(value, Tensor) or call.node.name in self.facts.written:
            return False
        added = call.added_to_sums()
        together = self.facts.summed_together
        if added is None or (added and not all(each.name in together for each in (call.node, *call.node.users))):
            return False
        summed = [call.operands[position] for position in partial]
        is_only_reader = all(len(operand.users) == 1 for operand in summed)
        others = [placement for position, placement in enumerate(call.current) if position not in partial]
        others_are_whole = all(isinstance(placement, Replicate | None) for placement in others)
        read = [*summed, *(call.operands[position] for position in added)]
        keeps_dtype = value.dtype.is_floating_point and all(operand.meta["val"].dtype == value.dtype for operand in read)
        if not (is_only_reader and others_are_whole and keeps_dtype):
            return False
        return self.bytes.of(call.node) <= max(self.bytes.of(operand) for operand in summed)

    def _use(self, node: fx.Node, layout: Layout) -> None:
        """Record a read of a value: it decides the layout of an undecided weight, and reduces a partial sum, for all later readers."""
        if node.name in self.weights:
            self.uses[node.name].append(layout)
        current = self.current[node.name, 0]
        for index, (placement, need) in enumerate(zip(current, layout, strict=True)):
            is_reduced = isinstance(placement, Partial) and not isinstance(need, Partial)
            if placement is None or is_reduced:
                # Read as Varying, or (a weight) as Partial, a value stays replicated.
                current[index] = Replicate() if isinstance(need, Varying | Partial) else need

    # -- the result ----------------------------------------------------------------------------------------------------------------

    def layouts(self) -> Layouts:
        """Return the layouts of all values, those of parameters and buffers decided by their uses."""
        given = self.stored or {}
        stored = {name: given[name] if name in given else self._stored(name, uses) for name, uses in self.uses.items()}
        varying = {name: self._varying(stored[name], uses) for name, uses in self.uses.items() if name in self.graph.parameters}
        self.results.update({name: (layout,) for name, layout in stored.items()})
        for name in self.graph.resident:
            self.results[name] = (tuple(place or Replicate() for place in self.current[name, 0]),)
        return Layouts(self.mesh, self.cuts, self.needs, self.results, stored, varying, rings=dict(self._rings), routes=self._routes)

    def _varying(self, stored: Layout, uses: Sequence[Layout]) -> frozenset[int]:
        """Return the mesh dimensions over which every use of a parameter is Varying: its gradient is a partial sum."""
        always = {index for index in range(len(self.mesh)) if uses and all(isinstance(use[index], Varying) for use in uses)}
        return frozenset(index for index in always if not isinstance(stored[index], Shard))

    def _stored(self, name: str, uses: Sequence[Layout]) -> Layout:
        """Return the stored layout: sharded if any use is (other uses gather it), replicated for a buffer that is written."""
        if name in self.graph.updates:
            return (_WHOLE,) * len(self.mesh)
        layout: list[Placement] = []
        for index in range(len(self.mesh)):
            shards = [use[index] for use in uses if isinstance(use[index], Shard)]
            layout.append(max(shards, key=shards.count) if shards else Replicate())
        return tuple(layout)
