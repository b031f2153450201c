"""Changes of layout: from how a value lies to how a call reads it, one mesh dimension at a time.

    from          to            operator             moved a rank (a ring of k, n bytes the whole value)
    Partial       Replicate     all_reduce           2 n (k-1)/k
    Partial       Shard         reduce_scatter       n (k-1)/k
    Shard         Varying       all_gather           n (k-1)/k
    Shard         Replicate     replicate            n (k-1)/k
    Shard(a)      Shard(b)      exchange             n (k-1)/k²
    Replicate     Shard         take                 nothing
    Replicate     Varying       vary                 nothing (its backward reduces)
    Replicate     Partial       keep_first           nothing

Each change is made once, for all readers that need it; a partial sum is reduced once, for all readers of whatever layout.

Where several mesh dimensions cut one axis, the outer parts hold the inner ones: an axis is cut from the outermost on, and put together from
the innermost on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.analysis.axes import TensorAxes
from passes.graph.dependencies import is_differentiable
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.functional import all_gather, all_reduce, exchange, keep_first, reduce_scatter, replicate, take, vary
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, Varying, shards_of
from passes.rules.loops import Size
from passes.spmd.local_shapes import Extents, product
from passes.stages.boundary_layouts import stage_within

__all__ = ["CHANGE", "Change", "Resharder"]

aten = torch.ops.aten

Emit = Callable[..., fx.Node]

CHANGE = "change_of_layout"
"""The key of a ``Change`` in ``meta["custom"]``, which tracing hands on from call to call, and from a forward to its backward."""


@dataclass(frozen=True)
class Change:
    """A change of layout, for readers of a program.

    Attributes:
        value: the node of the whole graph.
        before, after: how it lay, and how it lies then; the gradient goes the other way. Equal where windows read beyond a rank's part.
    """

    value: str
    before: Layout
    after: Layout


class _Value:
    """One tensor of the whole graph: how it lies, and its copies in other layouts."""

    def __init__(self, name: str, node: fx.Node, place: int, layout: Layout, axes: TensorAxes) -> None:
        self.name = name
        self.place = place
        self.layout = layout
        self.axes = axes
        self.copies: dict[Layout, fx.Node] = {layout: node}
        self._original = layout, node

    def alone(self) -> _Value:
        """Return the same value without its copies in other layouts."""
        layout, node = self._original
        return _Value(self.name, node, self.place, layout, self.axes)


class Resharder:
    """Knows how every value lies, and writes the changes that readers ask for.

    Args:
        extents: sizes at the rank's coordinate.
        emit: writes a call.
        write_size: writes a size.
    """

    def __init__(self, extents: Extents, emit: Emit, write_size: Callable[[Size], fx.Node | int]) -> None:
        self._extents = extents
        self._emit = emit
        self._write_size = write_size
        self._values: dict[fx.Node, _Value] = {}
        self._of_stages: dict[tuple[fx.Node, int], _Value] = {}  # of a value and a stage that reads it

    def register(self, node: fx.Node, place: int, copy: fx.Node, layout: Layout, axes: TensorAxes) -> None:
        """A value of the whole graph and this rank's part of it; of a call that gives several, the items register themselves."""
        if place == 0 and isinstance(copy.meta["val"], torch.Tensor):
            self._values[node] = _Value(node.name, copy, place, layout, axes)

    def knows(self, node: fx.Node) -> bool:
        """Whether a value is registered."""
        return node in self._values

    def read(self, node: fx.Node, need: Layout, reader: fx.Node) -> fx.Node:
        """This rank's part of a value in the layout that a reader needs: reduced, exchanged, gathered and cut, in this order."""
        value = self._seen_by(node, reader)
        value.layout = self._reduced(value, need, node)  # for all readers; the other changes are this reader's
        layout = self._exchanged(value, need, node)
        layout = self._gathered(value, layout, need, node)
        layout = self._cut(value, layout, need, node)
        return value.copies[layout]

    def _seen_by(self, node: fx.Node, reader: fx.Node) -> _Value:
        """A value as the stage of a reader knows it: changes of layout do not cross to stages that other ranks share."""
        stage = stage_within(reader)
        if stage is None or stage == stage_within(node):
            return self._values[node]
        if (node, stage) not in self._of_stages:
            self._of_stages[node, stage] = self._values[node].alone()
        return self._of_stages[node, stage]

    def _reduced(self, value: _Value, need: Layout, like: fx.Node) -> Layout:
        """Partial sums are summed, and cut on the way where the reader wants a shard. Those come first: then the others move less."""
        layout = value.layout
        scattered = [index for index, wanted in enumerate(need) if isinstance(wanted, Shard)]
        for index in (*scattered, *(index for index in reversed(range(len(need))) if index not in scattered)):
            have, wanted = layout[index], need[index]
            if isinstance(have, Partial) and not isinstance(wanted, Partial):
                is_cut_inside = wanted in layout[index + 1 :]  # an axis is cut from the outermost mesh dimension on
                can_scatter = isinstance(wanted, Shard) and have.operation == "sum" and not is_cut_inside
                layout = self._change(value, layout, index, wanted if can_scatter else Replicate(), like)
        return layout

    def _gathered(self, value: _Value, layout: Layout, need: Layout, like: fx.Node) -> Layout:
        """Shards that the reader does not want are put together, the innermost first; also those of an axis that is cut anew outside."""
        for index in reversed(range(len(need))):
            have, wanted = layout[index], need[index]
            if isinstance(have, Shard) and have != wanted:
                layout = self._change(value, layout, index, wanted if isinstance(wanted, Varying) else Replicate(), like)
            elif isinstance(have, Shard) and _is_recut(have, layout[:index], need[:index]):
                layout = self._change(value, layout, index, Replicate(), like)
        return layout

    def _cut(self, value: _Value, layout: Layout, need: Layout, like: fx.Node) -> Layout:
        """Shard what is replicated, or mark it as varying, over the outermost mesh dimension first."""
        for index, wanted in enumerate(need):
            if layout[index] != wanted:
                layout = self._change(value, layout, index, wanted, like)
        return layout

    def _exchanged(self, value: _Value, need: Layout, like: fx.Node) -> Layout:
        """A value with every part that can be exchanged for a part of another axis: in the order in which that leaves all parts nested.

        height/tile0, width/tile1   ->   batch/tile0, width/tile1   ->   batch/tile0/tile1     outermost first
        batch/tile0/tile1           ->   batch/tile0, width/tile1   ->   height/tile0, width/tile1
        """
        layout = value.layout
        while (index := next((place for place in range(len(need)) if _can_exchange(layout, place, need)), None)) is not None:
            layout = self._change(value, layout, index, need[index], like)
        return layout

    def _change(self, value: _Value, layout: Layout, index: int, to: Placement, like: fx.Node) -> Layout:
        """One change over one mesh dimension, if it has not been made."""
        changed = (*layout[:index], to, *layout[index + 1 :])
        if changed not in value.copies:
            written = self._write(value, layout, index, to, like)
            _annotate(written, value.copies[layout], Change(value.name, layout, changed))
            value.copies[changed] = written
        return changed

    def _write(self, value: _Value, layout: Layout, index: int, to: Placement, like: fx.Node) -> fx.Node:
        source, have = value.copies[layout], layout[index]
        over, _ = self._extents.mesh[index]
        label = f"{value.name}_{{}}_{over}"
        if isinstance(have, Partial) and isinstance(to, Replicate):
            return self._emit(all_reduce, (source, over, have.operation), {}, label.format("all_reduce"), like)
        if isinstance(have, Partial) and isinstance(to, Shard) and have.operation == "sum":
            return self._along(reduce_scatter, value, layout, index, to, label.format("reduce_scatter"), like)
        if isinstance(have, Replicate) and isinstance(to, Varying):
            if not is_differentiable(source):
                return source
            return self._emit(vary, (source, over), {}, label.format("vary"), like)
        if isinstance(have, Replicate) and isinstance(to, Partial):
            return self._emit(keep_first, (source, over), {}, label.format("first"), like)
        if isinstance(have, Replicate) and isinstance(to, Shard):
            return self._along(take, value, layout, index, to, label.format("take"), like)
        if isinstance(have, Shard) and isinstance(to, Varying | Replicate):
            operator, word = (all_gather, "all_gather") if isinstance(to, Varying) else (replicate, "replicate")
            return self._along(operator, value, layout, index, have, label.format(word), like)
        if isinstance(have, Shard) and isinstance(to, Shard):
            return self._exchange(value, layout, index, have, to, label.format("exchange"), like)
        raise AssertionError(f"no change from {have} to {to}")

    def _along(self, operator: Any, value: _Value, layout: Layout, index: int, shard: Shard, name: str, like: fx.Node) -> fx.Node:
        """A collective along an axis: where the axis is not the outermost of its dimension, that is unfolded around it."""
        source = value.copies[layout]
        over, count = self._extents.mesh[index]
        kept = shards_of(layout, shard.dimension)
        parts = self._extents.parts(shard.axis, index, kept)
        place = self._extents.coordinate[index]
        outer, inner = self._around(value, layout, shard)
        is_outermost = outer == 1
        sizes = [product((part, inner)) for part in parts] if is_outermost else list(parts)
        uneven: tuple[Any, Any] = ([], 0) if all(size == sizes[0] for size in sizes) else self._written(sizes, place)
        if is_outermost:
            return self._emit(operator, (source, shard.dimension, over, count, *uneven), {}, name, like)
        shape = [size_of(size) for size in source.meta["val"].shape]
        local = self._extents.axis(shard.axis, kept)
        unfolded = self.reshaped(source, shape, shard.dimension, (outer, local, inner), f"{name}_unfolded", like)
        moved = self._emit(operator, (unfolded, shard.dimension + 1, over, count, *uneven), {}, f"{name}_parts", like)
        merged = product((outer, size_of(moved.meta["val"].shape[shard.dimension + 1]), inner))
        return self.reshaped(moved, shape, shard.dimension, (merged,), name, like)

    def _written(self, sizes: Sequence[Size], place: int) -> tuple[list[Any], Any]:
        """Emit the sizes of all parts; return them, and that of part ``place``."""
        written = [self._write_size(size) for size in sizes]
        return written, written[place]

    def reshaped(
        self, source: fx.Node, shape: Sequence[Size], dimension: int, instead: Sequence[Size], name: str, like: fx.Node
    ) -> fx.Node:
        """Write one dimension as others."""
        sizes = [self._write_size(size) for size in (*shape[:dimension], *instead, *shape[dimension + 1 :])]
        return self._emit(aten.reshape.default, (source, sizes), {}, name, like)

    def _around(self, value: _Value, layout: Layout, shard: Shard) -> tuple[Size, Size]:
        """The sizes, on this rank, of what a dimension holds outside and inside an axis."""
        axes = value.axes[shard.dimension]
        position = axes.index(shard.axis)
        kept = shards_of(layout, shard.dimension)
        sizes = [self._extents.axis(axis, kept) for axis in axes]
        return product(sizes[:position]), product(sizes[position + 1 :])

    def _exchange(self, value: _Value, layout: Layout, index: int, have: Shard, to: Shard, name: str, like: fx.Node) -> fx.Node:
        over, count = self._extents.mesh[index]
        place = self._extents.coordinate[index]
        inner: list[Size] = []
        for shard in (have, to):
            outside, inside = self._around(value, layout, shard)
            if outside != 1:
                changed = self._change(value, layout, index, Replicate(), like)
                return self._write(value, changed, index, to, like)
            inner.append(inside)
        concat = [product((part, inner[0])) for part in self._extents.parts(have.axis, index, shards_of(layout, have.dimension))]
        split = [product((part, inner[1])) for part in self._extents.parts(to.axis, index, shards_of(layout, to.dimension))]
        even = len(set(concat)) == 1 and len(set(split)) == 1
        sizes: tuple[Any, ...] = ([], 0, [], 0) if even else (*self._written(split, place), *self._written(concat, place))
        return self._emit(exchange, (value.copies[layout], to.dimension, have.dimension, over, count, *sizes), {}, name, like)


def _annotate(written: fx.Node, source: fx.Node, change: Change) -> None:
    """Annotate the calls that lead from one copy of a value to another with the change of layout."""
    while written is not source:
        written.meta["custom"] = {CHANGE: change}
        written = written.all_input_nodes[0]


def _can_exchange(layout: Layout, index: int, need: Layout) -> bool:
    """Whether a part can be exchanged for the part that is needed: nothing lies inside of either, or is still to be laid around it."""
    have, wanted = layout[index], need[index]
    if not isinstance(have, Shard) or not isinstance(wanted, Shard) or have.dimension == wanted.dimension:
        return False
    around = (pair for pair in zip(layout[:index], need[:index], strict=True) if pair[0] != pair[1])
    inside = any(_cuts_axis(place, have.axis, wanted.axis) for place in layout[index + 1 :])
    return not inside and not any(_cuts_axis(place, wanted.axis) for pair in around for place in pair)


def _cuts_axis(place: Placement, *axes: int) -> bool:
    return isinstance(place, Shard) and place.axis in axes


def _is_recut(shard: Shard, layout: Layout, need: Layout) -> bool:
    """Whether a shard lies in parts, over outer mesh dimensions, that change."""
    return any(have != wanted and shard in (have, wanted) for have, wanted in zip(layout, need, strict=True))
