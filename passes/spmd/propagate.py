"""Decide how every value lies over the mesh, from which axis is cut over which mesh dimension.

One walk in graph order, each mesh dimension by itself. A call is cut over the axis that is assigned to the mesh dimension and that it
loops over; what it does not loop over it needs whole. With heads and ffn cut over ``tensor``:

    call                  cut over   needs                           gives
    linear (q, k, v)      heads      x Varying, weight Shard         Shard(heads)
    attention             heads      q, k, v Shard                   Shard(heads)
    linear (project)      heads      x Shard, weight Shard           Partial      all_reduce at its first reader
    add, layer_norm       nothing    Replicate                       Replicate

A call that could be cut over several assigned axes takes one that also cuts a parameter, and then the one that moves fewest bytes. Over
tiles space comes first: another axis stands in for it where nothing of space is cut (early in a model the height, late the batch).
Partial sums pass through calls that are linear in them, so that two of them are added before they are reduced. Where no other sum comes on
the way, a call that can be cut has its operand reduced: as much is sent, and each rank computes its part alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes, is_item, returned_values
from passes.analysis.axis_names import beside_rows, space_axes
from passes.analysis.partial_sums import summed_together
from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import is_differentiable
from passes.graph.schemas import bound_arguments, draws
from passes.graph.symbolic_sizes import ValueBytes
from passes.ir.graph import ModelGraph, Results
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, Varying
from passes.ir.mesh import TILES, WIDTH
from passes.rules.loops import Loops
from passes.spmd.decompose.registry import inside_of
from passes.stages.boundary_layouts import is_whole

__all__ = ["CallAlong", "Cut", "Intervals", "LayoutWalk", "Layouts", "assign_layouts", "bytes_moved", "rests_at"]

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""For each rank along a mesh dimension the first element and the one behind the last."""


@dataclass(frozen=True)
class Layouts:
    """How every value lies. Layouts have a placement for each of ``mesh``.

    Attributes:
        mesh: name and size of the mesh dimensions that cut axes, outermost first.
        cuts: call -> how it is cut over each mesh dimension; None where all ranks compute alike.
        needs: call -> for each tensor operand the layout that it is read in; ``"output"`` -> for each returned node.
        results: node -> for each tensor that it gives, its layout as computed.
        stored: parameter, buffer or constant -> the layout in which ranks hold it.
        varying: parameter -> the mesh dimensions over which every use is Varying: its gradient is reduced over them once, at the end.
        wide: call -> for each mesh dimension along which ranks compute more than their own part of its result (``passes.spmd.halo.wide``),
            the interval of each rank.
        fetched: the same of values that are fetched so, once for several readers that would each fetch less.
        overlapped: calls whose interior is computed while their halo is on its way (``passes.spmd.halo.overlap``).
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


def rests_at(placement: Placement) -> Placement:
    """Return the placement in which a value stays after a read: Replicate after a read as Varying, which leaves it as it is."""
    return Replicate() if isinstance(placement, Varying) else placement


def assign_layouts(
    graph: ModelGraph,
    axes: Axes,
    mesh: tuple[tuple[str, int], ...],
    assigned: Mapping[str, Sequence[int]],
    rows: Sequence[str],
    *,
    results: Results = "rows",
    stored: Mapping[str, Layout] | None = None,
    value_bytes: ValueBytes | None = None,
) -> Layouts:
    """Return the layout of every value of a graph.

    Args:
        mesh: the mesh dimensions that cut axes.
        assigned: mesh dimension -> the axes that it cuts, dearest first.
        rows: mesh dimensions over which inputs and results with a batch lie by rows; every other result is returned whole.
        results: in which form; to a loss of a rank's own rows, whole results are Varying.
        stored: how ranks hold parameters, buffers and constants, where that is decided; None: as their readers want.
        value_bytes: of the graph, where it is walked often.
    """
    walk = LayoutWalk(graph, axes, mesh, assigned, rows, results, stored, value_bytes or ValueBytes(graph))
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
    """The walk, with how every value lies so far."""

    def __init__(
        self,
        graph: ModelGraph,
        axes: Axes,
        mesh: tuple[tuple[str, int], ...],
        assigned: Mapping[str, Sequence[int]],
        rows: Sequence[str],
        form: Results,
        stored: Mapping[str, Layout] | None,
        value_bytes: ValueBytes,
    ) -> None:
        self.bytes = value_bytes
        self.graph = graph
        self.axes = axes
        self.mesh = mesh
        self.assigned = [{axis: place for place, axis in enumerate(assigned.get(name, ()))} for name, _ in mesh]
        self.rows = rows
        self.beside_rows = [beside_rows(graph, axes, assigned.get(name, ()) if name in rows else ()) for name, _ in mesh]
        self.form = form
        self.stored = stored
        self.inputs = {leaf.placeholder: leaf for leaf in graph.inputs}
        self.held = {**graph.parameters, **graph.buffers, **graph.constants}
        in_tiles = any(name in TILES for name, _ in mesh)
        self.space = frozenset(axis for each in space_axes(axes).values() for axis in each) if in_tiles else frozenset[int]()
        self.of_parameters = {
            axis for name in graph.parameters if name in axes.tensors for dimension in axes.of(name) for axis in dimension
        }
        self.lies: dict[tuple[str, int], list[Placement | None]] = {}
        self._together = summed_together(graph.graph, axes)
        self._clear: dict[tuple[str, Cut], bool] = {}
        self.uses: dict[str, list[Layout]] = {name: [] for name in self.held}
        self.cuts: dict[str, tuple[Cut | None, ...]] = {}
        self.needs: dict[str, tuple[Layout, ...]] = {}
        self.results: dict[str, tuple[Layout, ...]] = {}

    # -- where the walk starts and ends --------------------------------------------------------------------------------------------

    def placeholder(self, node: fx.Node) -> None:
        if node.name in self.held:
            opened: list[Placement | None] = [_WHOLE if node.name in self.graph.updates else None] * len(self.mesh)
            self.lies[node.name, 0] = opened if self.stored is None else list(self.stored[node.name])
            return
        if not isinstance(node.meta.get("val"), Tensor):
            return
        leaf = self.inputs.get(node.name)
        layout: list[Placement] = []
        for name, _ in self.mesh:
            if name in self.rows and leaf is not None and leaf.batch_dim is not None:
                layout.append(Shard(self.axes.of(node.name)[leaf.batch_dim][0], leaf.batch_dim))
            else:
                layout.append(Replicate())
        self.results[node.name] = (tuple(layout),)
        self.lies[node.name, 0] = list(layout)

    def output(self, node: fx.Node) -> None:
        by_node = {output.node: output for output in self.graph.outputs}
        needs = []
        for value in returned_values(node):
            layout: list[Placement] = []
            output = by_node[value.name]
            for name, _ in self.mesh:
                by_rows = name in self.rows and self.form != "whole"
                if by_rows and output.combine == "concatenate" and output.batch_dim is not None:
                    layout.append(Shard(self.axes.of(value.name)[output.batch_dim][0], output.batch_dim))
                else:
                    layout.append(Varying() if name in self.rows and self.form == "loss" else Replicate())
            self._use(value, tuple(layout))
            needs.append(tuple(layout))
        self.needs["output"] = tuple(needs)

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if is_item(node) and isinstance(value, tuple | list | Tensor):
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            layout = self.results[source.name][index]
            self.results[node.name] = (layout,)
            self.lies[node.name, 0] = list(layout)
        elif isinstance(value, tuple | list | Tensor):
            self._call(node, self.axes.operands[node.name])

    def _call(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        if node.target is torch.ops.aten.copy_.default and operands[0].name in self.graph.updates:
            self._write(node, operands)
            return
        loops = self.axes.loops.get(node.name)
        cuts: list[Cut | None] = []
        needs: list[list[Placement]] = [[] for _ in operands]
        gives: list[list[Placement]] = [[] for _ in self.axes.tensors.get(node.name, ())]
        own = self.axes.of_calls.get(node.name, frozenset())
        for index in range(len(self.mesh)):
            lying = tuple(self.lies[operand.name, 0][index] for operand in operands)
            nothing_to_cut = own.isdisjoint(self.assigned[index]) and not any(isinstance(placement, Partial) for placement in lying)
            if nothing_to_cut or (self.mesh[index][0] == WIDTH and is_whole(node)):
                self._call_alike(loops, lying, needs, gives)
                cuts.append(None)
                continue
            call = CallAlong(node, loops, tuple(operands), lying, self._slid(node, loops, operands, index))
            cut = self._cut(call, index, cuts)
            passing = self._passes_sum(call) and (cut is None or node.name in self._together)
            cut = None if passing else cut
            cuts.append(cut)
            for place, layout in enumerate(needs):
                layout.append(call.need_of_sum(place) if passing else call.need(cut, place))
            for place, layout in enumerate(gives):
                layout.append(Partial() if passing else call.gives(cut, place))
        for operand, need in zip(operands, needs, strict=True):
            self._use(operand, tuple(need))
        self.cuts[node.name] = tuple(cuts)
        self.needs[node.name] = tuple(tuple(layout) for layout in needs)
        self.results[node.name] = tuple(tuple(layout) for layout in gives)
        for place, layout in enumerate(gives):
            self.lies[node.name, place] = list(layout)

    def _write(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Give the new value of a buffer the layout in which the buffer is stored; replicate it if that is not decided yet."""
        name = operands[0].name
        layout = (_WHOLE,) * len(self.mesh) if self.stored is None else self.stored[name]
        for operand in operands:
            self._use(operand, layout)
        self.cuts[node.name] = (None,) * len(self.mesh)
        self.needs[node.name] = (layout,) * len(operands)
        self.results[node.name] = (layout,)
        self.lies[node.name, 0] = list(layout)

    def _call_alike(
        self, loops: Loops | None, lying: Sequence[Placement | None], needs: Sequence[list[Placement]], gives: Sequence[list[Placement]]
    ) -> None:
        """Replicate a call along a mesh dimension that shards none of its loops: it needs whole operands, and gives whole results."""
        unread = loops.unread if loops is not None else frozenset()
        for place, layout in enumerate(needs):
            layout.append((lying[place] if place in unread else None) or _WHOLE)
        for layout in gives:
            layout.append(_WHOLE)

    def _slid(self, node: fx.Node, loops: Loops | None, operands: Sequence[fx.Node], index: int) -> dict[int, dict[int, Placement]]:
        """How operands lie along the dimensions that windows slide over: in parts where they can be cut, else whole.

        What lies in parts of another axis is exchanged for parts of this one, assigned or not: nobody needs the whole. Of an input that
        every rank has, each reads what it needs.
        """
        found: dict[int, dict[int, Placement]] = {}
        for window in loops.windows if loops is not None else ():
            if window.factor is None:
                continue
            source = operands[window.operand]
            outermost, lies = self.axes.under(node.name, window)[0], self.lies[source.name, 0][index]
            has_all = lies == Replicate() and self._has_no_gradient(source)
            is_there = outermost in self.axes.of(source.name)[window.dimension]
            in_parts = is_there and (outermost in self.assigned[index] or isinstance(lies, Shard))
            is_cut = in_parts and self._fits(outermost, index) and not has_all
            found.setdefault(window.factor, {})[window.operand] = Shard(outermost, window.dimension) if is_cut else Varying()
        return found

    def _passes_sum(self, call: CallAlong) -> bool:
        """Whether the call can run on partial sums: it is linear in them, and its result is no larger."""
        parts = {place for place, placement in enumerate(call.lying) if placement == Partial()}
        value = call.node.meta["val"]
        if not parts or call.loops is None or parts not in [set(linear) for linear in call.loops.linear] or not isinstance(value, Tensor):
            return False
        summed = [call.operands[place] for place in parts]
        once = all(len(operand.users) == 1 for operand in summed)
        rest = all(isinstance(placement, Replicate | None) for place, placement in enumerate(call.lying) if place not in parts)
        alike = value.dtype.is_floating_point and all(operand.meta["val"].dtype == value.dtype for operand in summed)
        return once and rest and alike and self.bytes.of(call.node) <= max(self.bytes.of(operand) for operand in summed)

    def _cut(self, call: CallAlong, index: int, outer: Sequence[Cut | None]) -> Cut | None:
        """The cheapest of the cuts that the assignment allows.

        Args:
            outer: what the outer mesh dimensions cut. What slides is cut over one of them: the halo of a part of a part is not written.
        """
        if call.loops is None or draws(call.node):
            return None
        written = {argument.name for argument in mutated_arguments(call.node)}
        allowed: list[tuple[Cut, list[Placement]]] = []
        for factor, axes in enumerate(self.axes.factors[call.node.name]):
            for axis in axes[:1] if factor in call.slid else axes:  # what slides is cut into intervals
                cut = Cut(factor, axis)
                if axis not in self.assigned[index] or not self._fits(axis, index) or not call.allows(factor, is_outermost=axis == axes[0]):
                    continue
                if not self._is_clear(call, cut) or (factor in call.slid and cut in outer):
                    continue
                needs = [call.need(cut, place) for place in range(len(call.operands))]
                writes = {operand.name: need for operand, need in zip(call.operands, needs, strict=True) if operand.name in written}
                if self._is_worthwhile(call, cut) and all(self._can_write(name, need) for name, need in writes.items()):
                    allowed.append((cut, needs))
        if len(allowed) > 1:
            return min(allowed, key=lambda each: self._price(call, each[0], each[1], index))[0]
        return allowed[0][0] if allowed else None

    def _can_write(self, name: str, need: Placement) -> bool:
        """Whether what a call writes in place, where it lies so, is what ranks hold of a buffer (see ``_stored``)."""
        return not isinstance(need, Varying) and not (isinstance(need, Shard) and name in self.graph.updates)

    def _fits(self, axis: int, index: int) -> bool:
        """Whether the axis is long enough for a shard on every rank; one of symbolic size is sharded over row dimensions only."""
        size = self.axes.sizes[axis]
        # Several mesh dimensions may cut one axis, each within the parts of the outer ones.
        dimensions = enumerate(zip(self.mesh, self.assigned, strict=True))
        count = math.prod(length for place, ((_, length), cut) in dimensions if axis in cut or place == index)
        return size >= count if isinstance(size, int) else self.mesh[index][0] in self.rows

    def _is_clear(self, call: CallAlong, cut: Cut) -> bool:
        """Whether the axis is in every operand just where the call loops over it.

        Rows times rows, made flat, hold it twice; (rows, 16), made flat and taken as (2, 8 rows), has other axes than the operand.
        """
        key = (call.node.name, cut)
        if key not in self._clear:
            self._clear[key] = self._is_just_there(call, cut)
        return self._clear[key]

    def _is_just_there(self, call: CallAlong, cut: Cut) -> bool:
        assert call.loops is not None
        operands = [self.axes.of(operand.name) for operand in call.operands]
        pairs = (pair for tensor, held in zip(operands, call.loops.operands, strict=True) for pair in zip(tensor, held, strict=True))
        is_read = all(cut.axis in axes for axes, factors in pairs if cut.factor in factors)
        return is_read and all(each.count(cut.axis) < 2 for tensor in (*operands, *self.axes.tensors[call.node.name]) for each in tensor)

    def _is_worthwhile(self, call: CallAlong, cut: Cut) -> bool:
        """Whether sharding saves work or memory without a gather: an operand is sharded already, or can be for free.

        Free are parameters, and, along an axis of activations, values without a gradient (words, positions, inputs). A call that contracts,
        or has no operands, is always worth it.
        """
        assert call.loops is not None
        having = call.having(cut.factor)
        for place in having:
            is_free = call.lying[place] is None and call.operands[place].name in self.graph.parameters
            if is_free or isinstance(call.lying[place], Shard | Partial):
                return True
            if cut.axis not in self.of_parameters and self._has_no_gradient(call.operands[place]):
                return True
        contracts = any(factor.reduction == "sum" for factor in call.loops.factors) and len(call.operands) > 1
        return not call.operands or (contracts and bool(having))

    def _has_no_gradient(self, node: fx.Node) -> bool:
        return node.name in self.inputs or not is_differentiable(node)

    def _price(self, call: CallAlong, cut: Cut, needs: Sequence[Placement], index: int) -> tuple[bool, bool, bool, bool, bool, float, int]:
        """Of a cut: over tiles space first; axes of parameters, then what needs no reduction inside, then the fewest bytes.

        Of parameters first those that the call itself reads: a sequence may be an axis of learned positions, which it does not.
        Where rows are cut: only the axis of a parameter that the call reads. For its sake what lies in parts is exchanged (tokens go to
        their experts), and neither gathered nor summed, unless it was chosen for just that: where weights are larger than activations.

        Args:
            needs: how the call reads its operands, so cut.
        """
        assert call.loops is not None
        by_rows, beside_space = self.mesh[index][0] in self.rows, self.mesh[index][0] in TILES and cut.axis not in self.space
        together = by_rows and call.gathers_or_sums(cut) and cut.axis not in self.beside_rows[index]
        reads = list(zip(call.operands, call.lying, needs, strict=True))
        is_read = any(operand.name in self.graph.parameters and isinstance(need, Shard) for operand, _, need in reads)
        of_parameter = is_read if by_rows else cut.axis in self.of_parameters
        moved = 0.0
        for operand, lies, need in reads:
            moved += bytes_moved(lies, need, operand.name in self.graph.parameters) * self.bytes.of(operand)
        reduction = call.loops.factors[cut.factor].reduction
        if reduction not in (None, "whole"):
            moved += 2 * self.bytes.of(call.node)
        return together, beside_space, not is_read, not of_parameter, reduction == "whole", moved, self.assigned[index][cut.axis]

    def _use(self, node: fx.Node, layout: Layout) -> None:
        """Record a read of a value in a layout; a partial sum that is read in another layout is reduced, for all readers."""
        if node.name in self.held:
            self.uses[node.name].append(layout)
        lies = self.lies[node.name, 0]
        for index, (placement, need) in enumerate(zip(lies, layout, strict=True)):
            if placement is None or (isinstance(placement, Partial) and not isinstance(need, Partial)):
                lies[index] = rests_at(need) if not (placement is None and isinstance(need, Partial)) else Replicate()

    # -- the result ----------------------------------------------------------------------------------------------------------------

    def layouts(self) -> Layouts:
        """Return the layouts of all values, those of parameters and buffers decided by their uses.

        Over some mesh dimensions a parameter is varying: every rank reads the whole of it for its own part of the work, so its gradient is
        a partial sum.
        """
        stored = {name: self._stored(name, uses) for name, uses in self.uses.items()} if self.stored is None else dict(self.stored)
        varying = {
            name: frozenset(
                index
                for index in range(len(self.mesh))
                if uses and not isinstance(stored[name][index], Shard) and all(isinstance(use[index], Varying) for use in uses)
            )
            for name, uses in self.uses.items()
            if name in self.graph.parameters
        }
        self.results.update({name: (layout,) for name, layout in stored.items()})
        return Layouts(self.mesh, self.cuts, self.needs, self.results, stored, varying)

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


@dataclass(frozen=True)
class Cut:
    """How one call is cut over one mesh dimension.

    Attributes:
        factor: the loop that is cut.
        axis: which of its axes.
    """

    factor: int
    axis: int


@dataclass(frozen=True)
class CallAlong:
    """One call, as it looks along one mesh dimension.

    Attributes:
        node, loops, operands: what is called.
        lying: how each operand lies now; None for one that is held by ranks and may still lie anyhow.
        slid: where windows of a factor slide, operand and dimension, -> how the operand lies along it if the factor is cut.
    """

    node: fx.Node
    loops: Loops | None
    operands: tuple[fx.Node, ...]
    lying: tuple[Placement | None, ...]
    slid: Mapping[int, Mapping[int, Placement]]

    def allows(self, factor: int, *, is_outermost: bool) -> bool:
        """Whether the loop can be cut. A maximum has no gradient when its parts are reduced: it is cut where it needs none.

        Args:
            is_outermost: whether the axis that is cut is the outermost of the loop: its parts are then runs of places.
        """
        assert self.loops is not None
        found = self.loops.factors[factor]
        if found.reduction == "whole":
            inside = inside_of(self.node, found.name)
            return inside is not None and (is_outermost or not inside.by_place)
        if found.reduction in ("max", "min"):
            value = self.node.meta["val"]
            return isinstance(value, Tensor) and not value.dtype.is_floating_point
        return True

    def having(self, factor: int) -> list[int]:
        """Return the positions of operands that have the loop, or over which its window slides."""
        assert self.loops is not None
        return [*self.loops.running[factor], *self.slid.get(factor, {})]

    def need_of_sum(self, place: int) -> Placement:
        """Return the placement in which a call on partial sums reads operand ``place``."""
        return Partial() if self.lying[place] == Partial() else Varying()

    def need(self, cut: Cut | None, place: int) -> Placement:
        """Return the placement in which operand ``place`` is read if the call is sharded by ``cut``; None: the call is replicated."""
        if self.loops is not None and place in self.loops.unread:
            return self.lying[place] or Replicate()
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.operands[place]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        if place in self.slid.get(cut.factor, {}):
            return self.slid[cut.factor][place]
        factor = self.loops.factors[cut.factor]
        if place in self.loops.added and factor.reduction == "sum":
            return Partial()
        inside = inside_of(self.node, factor.name) if factor.reduction == "whole" else None
        arguments = bound_arguments(self.node) if inside is not None and inside.whole else {}
        if inside is not None and any(arguments[name] is self.operands[place] for name in inside.whole):
            return Replicate()
        return Varying()

    def gives(self, cut: Cut | None, place: int) -> Placement:
        """Return the placement of result ``place`` if the call is sharded by ``cut``; None: it is replicated."""
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.results[place]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        factor = self.loops.factors[cut.factor]
        if factor.reduction == "whole":
            inside = inside_of(self.node, factor.name)
            return Partial() if inside is not None and inside.gives == "sum" else Replicate()
        return Partial(factor.reduction) if factor.reduction in ("max", "min") else Partial()

    def gathers_or_sums(self, cut: Cut) -> bool:
        """Whether a cut gathers a sharded operand, or gives a partial sum."""
        needs = (self.need(cut, place) for place in range(len(self.operands)))
        gathers = any(isinstance(lies, Shard) and not isinstance(need, Shard) for lies, need in zip(self.lying, needs, strict=True))
        return gathers or isinstance(self.gives(cut, 0), Partial)


def bytes_moved(lies: Placement | None, need: Placement, is_parameter: bool) -> float:
    """Bytes that a change of layout moves, forward and backward, in sizes of the value (a ring; the number of ranks taken as large)."""
    if lies == need or isinstance(need, Partial):
        return 0.0
    if lies is None:
        return 2.0 if isinstance(need, Varying) and is_parameter else 0.0
    if isinstance(lies, Replicate):
        return 2.0 if isinstance(need, Varying) else 1.0 if isinstance(need, Shard) else 0.0
    if isinstance(lies, Shard):
        return 1.0 if isinstance(need, Replicate | Shard) else 2.0
    return 4.0 if isinstance(need, Varying) else 2.0
