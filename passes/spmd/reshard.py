"""Reshard: change the layout of a value to the one that a call reads, one mesh dimension at a time.

    from          to            operator             bytes moved by a rank (a ring of k; the whole value has n)
    Partial       Replicate     all_reduce           2 n (k-1)/k
    Partial       Shard         reduce_scatter       n (k-1)/k
    Shard         Varying       all_gather           n (k-1)/k
    Shard         Replicate     replicate            n (k-1)/k
    Shard(a)      Shard(b)      exchange             n (k-1)/k²
    Replicate     Shard         take                 nothing
    Replicate     Varying       vary                 nothing (its backward reduces)
    Replicate     Partial       keep_first           nothing
    Varying       Shard         take_runs            nothing (its backward neither: the gradient is a partial sum)

Each change is emitted once, for all readers that need it; a partial sum is reduced once, for readers in any layout.

If several mesh dimensions cut one axis, the inner ones divide the shards of the outer ones: an axis is sharded over the outermost first,
and gathered over the innermost first. Different axes are gathered over the outermost mesh dimension first, whose links are the slowest:

    weight [13, 200] of 512 x 8 ranks       all_gather over fsdp: [6400, 200]       replicate over tensor: [6400, 1600]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.analysis.axes import TensorAxes
from passes.graph.dependencies import is_differentiable
from passes.graph.symbolic_sizes import traced_size
from passes.ir.comm.functional import all_gather, all_reduce, exchange, keep_first, reduce_scatter, replicate, take, take_runs, vary
from passes.ir.comm.index_ranges import Run, to_text
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, Varying, shards_of
from passes.rules.loops import Size
from passes.spmd.local_shapes import Extents, product
from passes.stages.boundary_layouts import stage_within

aten = torch.ops.aten

Emit = Callable[..., fx.Node]

CHANGE = "change_of_layout"
"""The key of a ``Change`` in ``meta["custom"]``, which tracing copies from call to call, and from a forward to its backward."""


@dataclass(frozen=True)
class Change:
    """A change of layout, for the reports of a program.

    Attributes:
        value: the node of the whole graph.
        before, after: its layouts; the gradient changes from ``after`` to ``before``. Equal for a halo exchange.
    """

    value: str
    before: Layout
    after: Layout


class _Value:
    """One tensor of the whole graph: its layout now (partial sums that a reader needed are reduced), and its copies in other layouts."""

    def __init__(self, name: str, node: fx.Node, layout: Layout, axes: TensorAxes) -> None:
        self.name = name
        self.layout = layout
        self.axes = axes
        self.copies: dict[Layout, fx.Node] = {layout: node}
        self._original = layout, node

    def without_copies(self) -> _Value:
        """Return the same value without its copies in other layouts."""
        layout, node = self._original
        return _Value(self.name, node, layout, self.axes)


class Resharder:
    """Knows the layout of every value, and emits the changes that readers need.

    Args:
        extents: the sizes of the rank's shards.
        emit: ``(function, args, kwargs, name, like)`` emits a call, with the metadata of the node ``like``.
        write_size: emits a size.
        stages: call -> the stage that computes it. Without a call, one stage computes all.
    """

    def __init__(
        self, extents: Extents, emit: Emit, write_size: Callable[[Size], fx.Node | int], stages: Mapping[str, int] | None = None
    ) -> None:
        self._extents = extents
        self._emit = emit
        self._write_size = write_size
        self._stages = stages or {}
        self._values: dict[fx.Node, _Value] = {}
        self._in_stage: dict[tuple[fx.Node, int], _Value] = {}  # (value, stage that reads it)

    def register(self, node: fx.Node, place: int, copy: fx.Node, layout: Layout, axes: TensorAxes) -> None:
        """Add result ``place`` of a node of the whole graph, with ``copy``, this rank's part; items of a tuple are nodes of their own."""
        if place == 0 and isinstance(copy.meta["val"], torch.Tensor):
            self._values[node] = _Value(node.name, copy, layout, axes)

    def share(self, node: fx.Node, first: fx.Node) -> None:
        """Make a node stand for the value of an equal one, and for its copies in other layouts."""
        self._values[node] = self._values[first]

    def knows(self, node: fx.Node) -> bool:
        """Return whether a value is registered."""
        return node in self._values

    def read(self, node: fx.Node, need: Layout, reader: fx.Node) -> fx.Node:
        """Return this rank's part of a value in the layout that a reader needs: reduce, exchange, gather and shard, in this order."""
        value = self._value_for(node, reader)
        value.layout = self._reduce(value, need, node)  # for all readers; the other changes are this reader's
        layout = self._exchange_shards(value, value.layout, need, node)
        while to_gather := gather_order(layout, need):  # an axis may be exchanged once the outer shards of the other are gathered
            to = need[to_gather[0]]
            layout = self._change(value, layout, to_gather[0], to if isinstance(to, Varying) else Replicate(), node)
            layout = self._exchange_shards(value, layout, need, node)
        layout = self._shard(value, layout, need, node)
        return value.copies[layout]

    def _value_for(self, node: fx.Node, reader: fx.Node) -> _Value:
        """Return a value as the stage of a reader knows it.

        Copies of parameters in other layouts do not cross to other stages: each stage that reads a tied weight gathers it for itself.
        Copies of other values do not cross to stages whose submeshes differ.
        """
        stage = self._stages.get(reader.name) if node.op == "placeholder" else stage_within(reader)
        if stage is None or stage == stage_within(node):
            return self._values[node]
        if (node, stage) not in self._in_stage:
            self._in_stage[node, stage] = self._values[node].without_copies()
        return self._in_stage[node, stage]

    def _reduce(self, value: _Value, need: Layout, like: fx.Node) -> Layout:
        """Sum partial sums: first by reduce_scatter where a shard is needed, so that the others, by all_reduce, move less."""
        layout = value.layout
        scattered = [index for index, wanted in enumerate(need) if isinstance(wanted, Shard)]
        others = [index for index in reversed(range(len(need))) if index not in scattered]
        for index in (*scattered, *others):
            have, wanted = layout[index], need[index]
            if isinstance(have, Partial) and not isinstance(wanted, Partial):
                is_cut_inside = wanted in layout[index + 1 :]  # an axis is sharded over the outermost mesh dimension first
                can_scatter = isinstance(wanted, Shard) and have.operation == "sum" and not is_cut_inside
                layout = self._change(value, layout, index, wanted if can_scatter else Replicate(), like)
        return layout

    def _shard(self, value: _Value, layout: Layout, need: Layout, like: fx.Node) -> Layout:
        """Shard what is replicated, or mark it as varying, over the outermost mesh dimension first."""
        for index, wanted in enumerate(need):
            if layout[index] != wanted:
                layout = self._change(value, layout, index, wanted, like)
        return layout

    def _exchange_shards(self, value: _Value, layout: Layout, need: Layout, like: fx.Node) -> Layout:
        """Exchange shards of one axis for shards of another, in an order in which inner shards always divide outer ones.

        height/tile0, width/tile1   ->   batch/tile0, width/tile1   ->   batch/tile0/tile1     outermost first
        batch/tile0/tile1           ->   batch/tile0, width/tile1   ->   height/tile0, width/tile1
        """
        while exchangeable := [index for index in range(len(need)) if _can_exchange(layout, index, need)]:
            layout = self._change(value, layout, exchangeable[0], need[exchangeable[0]], like)
        return layout

    def _change(self, value: _Value, layout: Layout, index: int, to: Placement, like: fx.Node) -> Layout:
        """Emit the change to placement ``to`` over mesh dimension ``index``, unless there is a copy; return the new layout."""
        changed = (*layout[:index], to, *layout[index + 1 :])
        if changed not in value.copies:
            written = self._write(value, layout, index, to, like)
            _annotate(written, value.copies[layout], Change(value.name, layout, changed))
            value.copies[changed] = written
        return changed

    def _write(self, value: _Value, layout: Layout, index: int, to: Placement, like: fx.Node) -> fx.Node:
        """Emit the operator of a change over one mesh dimension (see the table above); return the new copy."""
        source, have = value.copies[layout], layout[index]
        over, _ = self._extents.mesh[index]
        label = f"{value.name}_{{}}_{over}"
        if isinstance(have, Partial) and isinstance(to, Replicate):
            return self._emit(all_reduce, (source, over, have.operation), {}, label.format("all_reduce"), like)
        if isinstance(have, Partial) and isinstance(to, Shard) and have.operation == "sum":
            return self._emit_collective(reduce_scatter, value, layout, index, to, label.format("reduce_scatter"), like)
        if isinstance(have, Replicate) and isinstance(to, Varying):
            if not is_differentiable(source):
                return source
            return self._emit(vary, (source, over), {}, label.format("vary"), like)
        if isinstance(have, Replicate) and isinstance(to, Partial):
            return self._emit(keep_first, (source, over), {}, label.format("first"), like)
        if isinstance(have, Replicate) and isinstance(to, Shard):
            return self._emit_collective(take, value, layout, index, to, label.format("take"), like)
        if isinstance(have, Varying) and isinstance(to, Shard):
            return self._emit_collective(take_runs, value, layout, index, to, label.format("part"), like)
        if isinstance(have, Shard) and isinstance(to, Varying | Replicate):
            operator, word = (all_gather, "all_gather") if isinstance(to, Varying) else (replicate, "replicate")
            return self._emit_collective(operator, value, layout, index, have, label.format(word), like)
        if isinstance(have, Shard) and isinstance(to, Shard):
            return self._exchange(value, layout, index, have, to, label.format("exchange"), like)
        raise AssertionError(f"no change from {have} to {to}")

    def _emit_collective(self, operator: Any, value: _Value, layout: Layout, index: int, shard: Shard, name: str, like: fx.Node) -> fx.Node:
        """Emit a collective along the axis of a shard; an axis that is not the outermost of its dimension gets one of its own by reshape.

        weight[(3 heads head), hidden], gathered over heads: reshape to [3, heads, head, hidden], all_gather of dimension 1, reshape back.
        A dimension of segments gets a collective for each of these.
        """
        source = value.copies[layout]
        outer, inner = self._sizes_around(value, layout, shard)
        segments = self._extents.segments.get(value.axes[shard.dimension][-1])
        if segments is None:
            return self._emit_along(operator, source, layout, index, shard, (outer, inner), name, like)
        steps = int(source.meta["val"].shape[shard.dimension]) // sum(segments)
        pieces: list[fx.Node] = []
        for number, (size, end) in enumerate(zip(segments, itertools.accumulate(segments), strict=True)):
            bounds = (shard.dimension, steps * (end - size), steps * end)
            piece = self._emit(aten.slice.Tensor, (source, *bounds), {}, f"{name}_segment{number}", like)
            around = (outer, product((inner, size)) // sum(segments))
            pieces.append(self._emit_along(operator, piece, layout, index, shard, around, f"{name}_moved{number}", like))
        return self._emit(aten.cat.default, (pieces, shard.dimension), {}, name, like)

    def _emit_along(
        self,
        operator: Any,
        source: fx.Node,
        layout: Layout,
        index: int,
        shard: Shard,
        around: tuple[Size, Size],
        name: str,
        like: fx.Node,
    ) -> fx.Node:
        """Emit a collective along an axis of a dimension that is a product of axes.

        Args:
            around: the products of the sizes of the axes outside and inside of the sharded one.
        """
        over, count = self._extents.mesh[index]
        outer_shards = shards_of(layout, shard.dimension)
        parts = self._extents.parts(shard.axis, index, outer_shards)
        place = self._extents.coordinate[index]
        outer, inner = around
        is_outermost = outer == 1
        sizes = [product((part, inner)) for part in parts] if is_outermost else list(parts)
        options: tuple[Any, ...]
        if operator is take_runs:
            starts = itertools.accumulate(map(int, sizes), initial=0)
            options = (to_text((Run(start, int(size)),) for start, size in zip(starts, sizes, strict=False)), sum(sizes), sizes[place], 0.0)
        else:
            options = (count, *(([], 0) if all(size == sizes[0] for size in sizes) else self._write_sizes(sizes, place)))
        if is_outermost:
            return self._emit(operator, (source, shard.dimension, over, *options), {}, name, like)
        shape = [traced_size(size) for size in source.meta["val"].shape]
        local = self._extents.axis(shard.axis, outer_shards)
        unfolded = self.reshape_dimension(source, shape, shard.dimension, (outer, local, inner), f"{name}_unfolded", like)
        moved = self._emit(operator, (unfolded, shard.dimension + 1, over, *options), {}, f"{name}_parts", like)
        merged = product((outer, traced_size(moved.meta["val"].shape[shard.dimension + 1]), inner))
        return self.reshape_dimension(moved, shape, shard.dimension, (merged,), name, like)

    def _write_sizes(self, sizes: Sequence[Size], place: int) -> tuple[list[Any], Any]:
        """Emit the sizes of all parts; return them, and that of part ``place``."""
        written = [self._write_size(size) for size in sizes]
        return written, written[place]

    def reshape_dimension(
        self, source: fx.Node, shape: Sequence[Size], dimension: int, instead: Sequence[Size], name: str, like: fx.Node
    ) -> fx.Node:
        """Emit a reshape of ``source`` that replaces one dimension of its shape by the sizes ``instead``."""
        sizes = [self._write_size(size) for size in (*shape[:dimension], *instead, *shape[dimension + 1 :])]
        return self._emit(aten.reshape.default, (source, sizes), {}, name, like)

    def _sizes_around(self, value: _Value, layout: Layout, shard: Shard) -> tuple[Size, Size]:
        """Return the products of this rank's sizes of the axes outside and inside the sharded one, in its dimension."""
        axes = value.axes[shard.dimension]
        position = axes.index(shard.axis)
        sizes = [self._extents.axis(axis, shards_of(layout, shard.dimension)) for axis in axes]
        return product(sizes[:position]), product(sizes[position + 1 :])

    def _exchange(self, value: _Value, layout: Layout, index: int, have: Shard, to: Shard, name: str, like: fx.Node) -> fx.Node:
        """Emit an exchange of shards; a gather and a new shard if a dimension has segments.

        An axis that is not the outermost of its dimension gets one of its own by reshape:

            logits[(rows time), vocab/tensor] -> logits[(rows time/tensor), vocab]: reshape to [rows, time, vocab], exchange, reshape back
        """
        if any(value.axes[shard.dimension][-1] in self._extents.segments for shard in (have, to)):
            changed = self._change(value, layout, index, Replicate(), like)
            return self._write(value, changed, index, to, like)
        over, count = self._extents.mesh[index]
        place, source = self._extents.coordinate[index], value.copies[layout]
        around = {shard: self._sizes_around(value, layout, shard) for shard in (have, to)}
        unfolded = {shard.dimension for shard, (outer, _) in around.items() if outer != 1}
        sizes_of: dict[Shard, list[Size]] = {}  # for each of both shards, its size on every rank
        dimension_of: dict[Shard, int] = {}
        for shard in sorted(around, key=lambda shard: -shard.dimension):  # the last first: the dimensions before keep their places
            outer, inner = around[shard]
            parts = self._extents.parts(shard.axis, index, shards_of(layout, shard.dimension))
            sizes_of[shard] = list(parts) if outer != 1 else [product((part, inner)) for part in parts]
            dimension_of[shard] = shard.dimension + sum(1 if each == shard.dimension else 2 for each in unfolded if each <= shard.dimension)
            if outer != 1:
                shape = [traced_size(size) for size in source.meta["val"].shape]
                local = self._extents.axis(shard.axis, shards_of(layout, shard.dimension))
                steps = (outer, local, inner)
                source = self.reshape_dimension(source, shape, shard.dimension, steps, f"{name}_unfolded{shard.dimension}", like)
        split, concat = sizes_of[to], sizes_of[have]
        even = len(set(concat)) == 1 and len(set(split)) == 1
        sizes: tuple[Any, ...] = ([], 0, [], 0) if even else (*self._write_sizes(split, place), *self._write_sizes(concat, place))
        arguments = (source, dimension_of[to], dimension_of[have], over, count, *sizes)
        moved = self._emit(exchange, arguments, {}, f"{name}_parts" if unfolded else name, like)
        if not unfolded:
            return moved
        shape = [traced_size(size) for size in value.copies[layout].meta["val"].shape]
        for shard, (outer, inner) in around.items():
            size = traced_size(moved.meta["val"].shape[dimension_of[shard]])
            shape[shard.dimension] = product((outer, size, inner)) if outer != 1 else size
        return self._emit(aten.reshape.default, (moved, [self._write_size(size) for size in shape]), {}, name, like)


def _annotate(written: fx.Node, source: fx.Node, change: Change) -> None:
    """Mark the calls between two copies of a value, from ``written`` back to ``source``, with the change of layout."""
    if written is source:
        return
    written.meta["custom"] = {CHANGE: change}
    for operand in written.all_input_nodes if written.target is aten.cat.default else written.all_input_nodes[:1]:
        _annotate(operand, source, change)


def _can_exchange(layout: Layout, index: int, need: Layout) -> bool:
    """Return whether the shard over a mesh dimension can be exchanged for the needed one.

    No inner mesh dimension may divide either shard, and no outer one may still have to be changed to or from the needed axis.
    """
    have, wanted = layout[index], need[index]
    if not isinstance(have, Shard) or not isinstance(wanted, Shard) or have.dimension == wanted.dimension:
        return False
    if any(_cuts_axis(placement, have.axis, wanted.axis) for placement in layout[index + 1 :]):
        return False
    outer_changes = [pair for pair in zip(layout[:index], need[:index], strict=True) if pair[0] != pair[1]]
    return not any(_cuts_axis(placement, wanted.axis) for pair in outer_changes for placement in pair)


def _cuts_axis(placement: Placement, *axes: int) -> bool:
    return isinstance(placement, Shard) and placement.axis in axes


def gather_order(layout: Layout, need: Layout) -> list[int]:
    """Return the mesh dimensions over which a value is gathered, those that will shard it again last.

    The outermost is the first, but of several that shard one axis the innermost.
    """
    gathered = [
        index
        for index, (have, wanted) in enumerate(zip(layout, need, strict=True))
        if isinstance(have, Shard) and (have != wanted or _is_recut(have, layout[:index], need[:index]))
    ]
    order: list[int] = []
    while gathered:
        free = [index for index in gathered if all(layout[inner] != layout[index] for inner in gathered if inner > index)]
        order.append(min(free, key=lambda index: isinstance(need[index], Shard)))
        gathered.remove(order[-1])
    return order


def _is_recut(shard: Shard, layout: Layout, need: Layout) -> bool:
    """Return whether a shard divides outer shards of its axis that change; ``layout`` and ``need``: of the outer mesh dimensions."""
    return any(have != wanted and shard in (have, wanted) for have, wanted in zip(layout, need, strict=True))
