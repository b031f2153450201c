"""Assign a layout to every value, given the axes that each mesh dimension cuts.

One walk in graph order, each mesh dimension by itself. A call is cut over the axis that is assigned to the mesh dimension and that it
loops over; it needs operands without this axis whole. With heads and ffn cut over ``tensor``:

    call                  cut over   needs                           gives
    linear (q, k, v)      heads      x Varying, weight Shard         Shard(heads)
    attention             heads      q, k, v Shard                   Shard(heads)
    linear (project)      heads      x Shard, weight Shard           Partial      all_reduce at its first reader
    add, layer_norm       nothing    Replicate                       Replicate

A call that could be cut over several assigned axes takes one that also cuts a parameter, and then the one that moves fewest bytes. Over
tiles axes of space come first, others where no axis of space can be cut (early in a model the height, late the batch).
Partial sums pass through calls that are linear in them, so that two of them are added before they are reduced. A partial sum that meets no
other one is reduced before a call that can be cut: as many bytes are sent, and each rank computes its own part only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes, is_item, returned_values
from passes.analysis.axis_names import beside_rows, space_axes
from passes.analysis.layout_facts import LayoutFacts
from passes.analysis.routed_rows import MATRICES, Route, find_routes
from passes.graph.dependencies import is_differentiable
from passes.graph.schemas import bound_arguments, draws
from passes.ir.graph import ModelGraph, Results, Written
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, Varying
from passes.ir.mesh import SEQUENCE, TILES, WIDTH
from passes.rules.loops import Loops
from passes.rules.ops.grouped_mm import grouped_mm
from passes.spmd.decompose.registry import decomposition_of
from passes.spmd.decompose.ring_attention import can_ring, is_causal
from passes.stages.boundary_layouts import is_whole

__all__ = ["CallAlong", "Cut", "Intervals", "LayoutWalk", "Layouts", "assign_layouts", "bytes_moved", "cuttable_axes"]

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""For each rank along a mesh dimension, where its interval starts and stops."""


@dataclass(frozen=True)
class Ring:
    """How the keys and values of an attention call go round ranks.

    Attributes:
        dimension: the index of their mesh dimension.
        is_zigzag: whether each rank then has an early and a late piece of the sequence, so that a causal mask spares all the same work.
    """

    dimension: int
    is_zigzag: bool


@dataclass(frozen=True)
class Layouts:
    """The layout of every value: a placement for each dimension of ``mesh``.

    Attributes:
        mesh: name and size of the mesh dimensions that cut axes, outermost first.
        cuts: call -> its cut over each mesh dimension; None: no loop is cut.
        needs: call -> the layout in which it reads each tensor operand; ``"output"`` -> that of each returned node.
        results: node -> the layout of each tensor that it gives, as computed.
        stored: parameter, buffer or constant -> the layout in which ranks hold it.
        varying: parameter -> the mesh dimensions over which every use is Varying: its gradient is reduced over them once, at the end.
        wide: call -> for each mesh dimension, the interval of its result that each rank computes, if that is more than its own part
            (``passes.spmd.halo.wide``); else None.
        fetched: value -> the same for intervals that ranks fetch once for several readers.
        overlapped: calls whose interior is computed during their halo exchange (``passes.spmd.halo.overlap``).
        rings: attention call -> the ranks round which its keys and values go (``decompose.ring_attention``).
        routes: call that is computed where experts are stored -> how rows get there (``decompose.expert_routes``). All that is said of such
            a call holds if each rank receives as many rows as it has.
        casts: cast of a parameter to a smaller type, or view that leads to one -> the parameter (``passes.spmd.commute.parameter_casts``).
        equal_casts: one of them -> an earlier one that is the same value.
    """

    mesh: tuple[tuple[str, int], ...]
    cuts: Mapping[str, tuple[Cut | None, ...]]
    needs: Mapping[str, tuple[Layout, ...]]
    results: Mapping[str, tuple[Layout, ...]]
    stored: Mapping[str, Layout]
    varying: Mapping[str, frozenset[int]]
    wide: Mapping[str, tuple[Intervals | None, ...]] = field(default_factory=dict)
    fetched: Mapping[str, tuple[Intervals | None, ...]] = field(default_factory=dict)
    overlapped: frozenset[str] = frozenset()
    rings: Mapping[str, Ring] = field(default_factory=dict)
    routes: Mapping[str, Route] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    equal_casts: Mapping[str, str] = field(default_factory=dict)


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


_WHOLE = Replicate()


class LayoutWalk:
    """Assigns layouts node by node, in graph order.

    Attributes:
        assigned: for each mesh dimension, the axes that it cuts -> their priority, 0 for the most expensive.
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
        self.assigned = [{axis: priority for priority, axis in enumerate(assigned.get(name, ()))} for name, _ in mesh]
        self.rows = rows
        self.beside_rows = [beside_rows(graph, axes, assigned.get(name, ()) if name in rows else ()) for name, _ in mesh]
        self.form = form
        self.stored = stored
        self.inputs = {leaf.placeholder: leaf for leaf in graph.inputs}
        self.weights = {**graph.parameters, **graph.buffers, **graph.constants}
        in_tiles = any(name in TILES for name, _ in mesh)
        self.space = frozenset(axis for each in space_axes(axes).values() for axis in each) if in_tiles else frozenset[int]()
        self._exchanged_heads = facts.heads if attention == "ulysses" else frozenset[int]()
        self._in_rings, self._in_zigzag = attention in ("ring", "zigzag"), attention == "zigzag"
        self._rings: dict[str, Ring] = {}
        self._routes = find_routes(graph, axes, mesh, rows, self.assigned, stages)
        self.current: dict[tuple[str, int], list[Placement | None]] = {}
        self._unambiguous: dict[tuple[str, Cut], bool] = {}
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
            nothing_to_cut = call_axes.isdisjoint(self.assigned[mesh_dimension]) and not has_partial
            if nothing_to_cut or (self.mesh[mesh_dimension][0] == WIDTH and is_whole(node)):
                self._replicate_call(loops, current, needs, results)
                cuts.append(None)
                continue
            placements = self._window_placements(node, loops, operands, mesh_dimension)
            ring = self._ring_placements(node, operands, mesh_dimension) if self._in_rings else {}
            call = CallAlong(node, loops, tuple(operands), current, {**placements, **ring})
            route = self._route(node, mesh_dimension)
            cut = self._cheapest_cut(call, mesh_dimension, cuts) if route is None else self._cut_of_rows(call, route)
            if cut is not None and cut.factor in ring:
                self._rings[node.name] = Ring(mesh_dimension, self._in_zigzag and self._has_two_pieces(node, operands, mesh_dimension))
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
            is_on_every_rank = current == Replicate() and self._has_no_gradient(source)
            is_in_dimension = outermost in self.axes.of(source.name)[window.dimension]
            can_be_sharded = is_in_dimension and (outermost in self.assigned[mesh_dimension] or isinstance(current, Shard))
            is_sharded = can_be_sharded and self.fits(outermost, mesh_dimension) and not is_on_every_rank
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

    def _cheapest_cut(self, call: CallAlong, mesh_dimension: int, outer: Sequence[Cut | None]) -> Cut | None:
        """Return the cheapest cut of a call over a mesh dimension that the assignment allows; None: the call is replicated.

        Args:
            outer: the cuts over the outer mesh dimensions. A windowed loop is cut over one of them only: no halo of a shard of a shard.
        """
        if call.loops is None or draws(call.node):
            return None
        if self._exchanged_heads and (by_heads := self._cut_by_heads(call, mesh_dimension)) is not None:
            return by_heads
        allowed: list[Cut] = []
        for factor, axes in enumerate(self.axes.factors[call.node.name]):
            is_windowed = factor in call.windowed
            for axis in axes[:1] if is_windowed else axes:  # shards of a windowed loop are intervals
                cut = Cut(factor, axis)
                if axis not in self.assigned[mesh_dimension] or not self.fits(axis, mesh_dimension) or (is_windowed and cut in outer):
                    continue
                if not call.allows(factor, is_outermost=axis == axes[0]) or not self._is_unambiguous(call, cut):
                    continue
                if self._is_worthwhile(call, cut) and self._can_write(call, cut):
                    allowed.append(cut)
        if len(allowed) > 1:
            return min(allowed, key=lambda cut: self._price(call, cut, mesh_dimension))
        return allowed[0] if allowed else None

    def _cut_by_heads(self, call: CallAlong, mesh_dimension: int) -> Cut | None:
        """Return the cut of attention by its heads over a sequence dimension (Ulysses); None: another call, or too few heads.

        A call is one of attention if it compares positions: two of its loops are sequences that the dimension shards, those of queries and
        of keys. Sharded operands are exchanged by all_to_all, so they must have the heads, outermost in a dimension; all but masks, which
        have both sequences.
        """
        if self.mesh[mesh_dimension][0] != SEQUENCE:
            return None
        assert call.loops is not None
        loops, factors, sequences = call.loops, self.axes.factors[call.node.name], self.assigned[mesh_dimension]
        compared = {factor for factor, axes in enumerate(factors) if not sequences.keys().isdisjoint(axes)}
        if len(compared) < 2:
            return None
        sharded = [place for place, current in enumerate(call.current) if isinstance(current, Shard)]
        exchanged = [loops.operands[place] for place in sharded if not compared.issubset(chain(*loops.operands[place]))]
        inner = range(mesh_dimension + 1, len(self.mesh))
        for factor, axes in enumerate(factors):
            if not axes or axes[0] not in self._exchanged_heads or any(axes[0] in self.assigned[other] for other in inner):
                continue  # over an inner mesh dimension, too, shards of heads would have to be sharded again
            cut = Cut(factor, axes[0])
            has_heads = all(any(dimension[:1] == (factor,) for dimension in tensor) for tensor in (*exchanged, *loops.results))
            if (
                has_heads
                and self.fits(axes[0], mesh_dimension)
                and call.allows(factor, is_outermost=True)
                and self._is_unambiguous(call, cut)
            ):
                return cut
        return None

    def _ring_placements(self, node: fx.Node, operands: Sequence[fx.Node], mesh_dimension: int) -> dict[int, dict[int, Placement]]:
        """Return the loop of queries -> keys and values -> their shards, of attention in which these go round the ranks; else nothing.

        Parts must be of one size, and cut over one mesh dimension: then every rank does the same at every step.
        """
        loops, (name, count) = self.axes.loops.get(node.name), self.mesh[mesh_dimension]
        if name != SEQUENCE or loops is None or not can_ring(node, operands, self.facts.with_gradient):
            return {}
        query, key = (self.axes.of(operand.name)[-2] for operand in operands[:2])
        sizes = [self.axes.sizes[axis] for axis in (*query, *key)]
        others = [axes for other, axes in enumerate(self.assigned) if other != mesh_dimension]
        is_cut = all(axis in self.assigned[mesh_dimension] and not any(axis in axes for axes in others) for axis in (*query, *key))
        is_even = len(query) == len(key) == 1 and all(isinstance(size, int) and size % count == 0 for size in sizes)
        if not (is_cut and is_even):
            return {}
        (queries,) = loops.operands[0][-2]
        return {queries: {place: Shard(key[0], len(self.axes.of(operands[place].name)) - 2) for place in (1, 2)}}

    def _has_two_pieces(self, node: fx.Node, operands: Sequence[fx.Node], mesh_dimension: int) -> bool:
        """Return whether every rank can have two pieces of one size of a causal call's queries, and the same of its keys."""
        query, key = (self.axes.sizes[self.axes.of(operand.name)[-2][0]] for operand in operands[:2])
        return is_causal(node) and query == key and query % (2 * self.mesh[mesh_dimension][1]) == 0

    def _can_write(self, call: CallAlong, cut: Cut) -> bool:
        """Return whether a call writes its mutated operands in a layout that can be stored: not Varying, nor a sharded buffer."""
        mutated = self.facts.written.get(call.node.name)
        if mutated is None:
            return True
        needs = {operand.name: call.need(cut, position) for position, operand in enumerate(call.operands) if operand.name in mutated}
        sharded_buffer = any(isinstance(need, Shard) and name in self.graph.updates for name, need in needs.items())
        return not sharded_buffer and not any(isinstance(need, Varying) for need in needs.values())

    def fits(self, axis: int, mesh_dimension: int) -> bool:
        """Return whether every rank gets a shard of the axis; one of symbolic size is sharded over row dimensions only."""
        size = self.axes.sizes[axis]
        if not isinstance(size, int):
            return self.mesh[mesh_dimension][0] in self.rows
        # Several mesh dimensions may cut one axis, each within the shards of the outer ones.
        lengths = [length for other, (_, length) in enumerate(self.mesh) if axis in self.assigned[other] or other == mesh_dimension]
        return size >= math.prod(lengths)

    def _is_unambiguous(self, call: CallAlong, cut: Cut) -> bool:
        """Return whether parts of the axis are the same steps of the loop in all operands, and no dimension has the axis twice.

        Rows times rows, flattened, have it twice; (rows, 16), flattened and viewed as (2, 8 rows), has other axes than its loops.
        """
        key = (call.node.name, cut)
        if key not in self._unambiguous:
            tensors = (*(self.axes.of(operand.name) for operand in call.operands), *self.axes.tensors[call.node.name])
            is_once = all(axes.count(cut.axis) < 2 for axes in chain(*tensors))
            self._unambiguous[key] = is_once and self.axes.is_aligned(call.node.name, *cut)
        return self._unambiguous[key]

    def _is_worthwhile(self, call: CallAlong, cut: Cut) -> bool:
        """Return whether a cut saves work or memory without a gather: an operand is sharded already, or can be for free.

        Free are parameters, and, along an axis of activations, values without a gradient (words, positions, inputs). A call that contracts,
        or has no operands, is always worth it.
        """
        assert call.loops is not None
        positions = call.operands_with(cut.factor)
        for position in positions:
            operand, current = call.operands[position], call.current[position]
            if isinstance(current, Shard | Partial) or (current is None and operand.name in self.graph.parameters):
                return True
            if cut.axis not in self.facts.parameter_axes and self._has_no_gradient(operand):
                return True
        contracts = any(factor.reduction == "sum" for factor in call.loops.factors) and len(call.operands) > 1
        return not call.operands or (contracts and bool(positions))

    def _has_no_gradient(self, node: fx.Node) -> bool:
        return node.name in self.inputs or not is_differentiable(node)

    def _price(self, call: CallAlong, cut: Cut, mesh_dimension: int) -> tuple[bool, bool, bool, bool, bool, float, int]:
        """Return a key that orders cuts over a mesh dimension, the cheapest first.

        Over rows, cuts are last that gather a shard or give a partial sum, unless the axis was assigned for just that (weights are larger
        than activations): a parameter's axis may exchange rows only (tokens go to their experts). Over tiles, axes of space are first.
        Then follow axes of parameters, first those that the call itself reads (a sequence may be an axis of learned positions); cuts
        without a reduction inside the call; fewest bytes moved; priority in the assignment.
        """
        assert call.loops is not None
        by_rows, in_tiles = self.mesh[mesh_dimension][0] in self.rows, self.mesh[mesh_dimension][0] in TILES
        moves_rows = by_rows and call.gathers_or_sums(cut) and cut.axis not in self.beside_rows[mesh_dimension]
        is_beside_space = in_tiles and cut.axis not in self.space
        reduction = call.loops.factors[cut.factor].reduction
        moved = 0.0
        shards_parameter = False
        for position, (operand, current) in enumerate(zip(call.operands, call.current, strict=True)):
            need, is_parameter = call.need(cut, position), operand.name in self.graph.parameters
            shards_parameter |= is_parameter and isinstance(need, Shard)
            moved += bytes_moved(current, need, is_parameter) * self.bytes.of(operand)
        if reduction not in (None, "whole"):
            moved += 2 * self.bytes.of(call.node)
        has_parameter_axis = shards_parameter if by_rows else cut.axis in self.facts.parameter_axes
        priority = self.assigned[mesh_dimension][cut.axis]
        return moves_rows, is_beside_space, not shards_parameter, not has_parameter_axis, reduction == "whole", moved, priority

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


# -- one call ----------------------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """The loop (``factor``) of a call that one mesh dimension cuts, and the cut one of the loop's axes."""

    factor: int
    axis: int


class CallAlong(NamedTuple):
    """One call along one mesh dimension.

    Attributes:
        node, loops, operands: the call.
        current: the placement of each operand now; None for a weight of which no reader has decided it.
        windowed: factor -> operand over which its window slides -> the placement in which the operand is read if the factor is cut.
    """

    node: fx.Node
    loops: Loops | None
    operands: tuple[fx.Node, ...]
    current: tuple[Placement | None, ...]
    windowed: Mapping[int, Mapping[int, Placement]]

    def allows(self, factor: int, *, is_outermost: bool) -> bool:
        """Return whether a loop can be cut; that of a floating-point maximum cannot: its reduction over ranks has no gradient.

        Args:
            is_outermost: whether the outermost axis of the loop is cut, so that each shard is a contiguous interval.
        """
        assert self.loops is not None
        loop = self.loops.factors[factor]
        if loop.reduction == "whole":
            decomposition = decomposition_of(self.node, loop.name)
            return decomposition is not None and (is_outermost or not decomposition.by_place)
        if loop.reduction in ("max", "min"):
            value = self.node.meta["val"]
            return isinstance(value, Tensor) and not value.dtype.is_floating_point
        return True

    def operands_with(self, factor: int) -> list[int]:
        """Return the positions of operands that have the loop, or over which its window slides."""
        assert self.loops is not None
        return [*self.loops.running[factor], *self.windowed.get(factor, {})]

    def added_to_sums(self) -> frozenset[int] | None:
        """Return the operands that a call adds to its partial sums; None if it is not linear in these."""
        assert self.loops is not None
        partial = {position for position, placement in enumerate(self.current) if placement == Partial()}
        jointly = [linear for linear in self.loops.linear if partial <= linear]
        return min(jointly, key=len) - partial if jointly else None

    def need_of_sum(self, position: int) -> Placement:
        """Return the placement in which a call on partial sums reads the operand at ``position``."""
        return Partial() if self.current[position] == Partial() or position in (self.added_to_sums() or ()) else Varying()

    def need(self, cut: Cut | None, position: int) -> Placement:
        """Return the placement in which the operand at ``position`` is read if the call is cut so; None: the call is replicated."""
        if self.loops is not None and position in self.loops.unread:
            return self.current[position] or Replicate()
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.operands[position]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        if position in self.windowed.get(cut.factor, {}):
            return self.windowed[cut.factor][position]
        factor = self.loops.factors[cut.factor]
        if position in self.loops.added and factor.reduction == "sum":
            return Partial()
        decomposition = decomposition_of(self.node, factor.name) if factor.reduction == "whole" else None
        if decomposition is not None and decomposition.whole:
            arguments = bound_arguments(self.node)
            if any(arguments[name] is self.operands[position] for name in decomposition.whole):
                return Replicate()
        return Varying()

    def result(self, cut: Cut | None, position: int) -> Placement:
        """Return the placement of the result at ``position`` if the call is cut so; None: the call is replicated."""
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.results[position]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        factor = self.loops.factors[cut.factor]
        if factor.reduction == "whole":
            decomposition = decomposition_of(self.node, factor.name)
            return Partial() if decomposition is not None and decomposition.gives == "sum" else Replicate()
        return Partial(factor.reduction) if factor.reduction in ("max", "min") else Partial()

    def gathers_or_sums(self, cut: Cut) -> bool:
        """Return whether a cut gathers a sharded operand, or gives a partial sum."""
        needs = (self.need(cut, position) for position in range(len(self.operands)))
        gathers = any(isinstance(have, Shard) and not isinstance(need, Shard) for have, need in zip(self.current, needs, strict=True))
        return gathers or isinstance(self.result(cut, 0), Partial)


def cuttable_axes(graph: ModelGraph, axes: Axes) -> frozenset[int]:
    """Return the axes over which some call could be cut, whatever is cut before it: not those of a kernel, say."""
    found: set[int] = set()
    for node in graph.graph.nodes:
        if node.name in axes.loops and not draws(node):
            call = CallAlong(node, axes.loops[node.name], (), (), {})
            for factor, of_factor in enumerate(axes.factors[node.name]):
                found.update(axis for place, axis in enumerate(of_factor) if call.allows(factor, is_outermost=place == 0))
    return frozenset(found.difference(axes.segments))


def bytes_moved(current: Placement | None, need: Placement, is_parameter: bool) -> float:
    """Return the traffic of a change of placement and of its gradient's, in sizes of the value, for a ring of many ranks."""
    if current == need or isinstance(need, Partial):
        return 0.0
    if current is None:
        return 2.0 if isinstance(need, Varying) and is_parameter else 0.0
    if isinstance(current, Replicate):
        if isinstance(need, Varying):
            return 2.0
        return 1.0 if isinstance(need, Shard) else 0.0
    if isinstance(current, Shard):
        return 1.0 if isinstance(need, Replicate | Shard) else 2.0
    return 4.0 if isinstance(need, Varying) else 2.0
