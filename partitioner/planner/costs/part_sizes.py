"""Local shapes of one rank's shard, from layouts alone: no graph is rewritten.

Sizes are in terms of the rank's own rows. Of uneven shards they are those of the largest one: the slowest rank determines the time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import sympy
from torch import fx

from cost_models.graph_cost import Fetched, Shapes
from passes.analysis.axes import Axes, TensorAxes, is_item, returned_values
from passes.ir.comm.index_ranges import from_text, length
from passes.ir.graph import ModelGraph
from passes.ir.layout import Layout, Partial, Replicate, Shard
from passes.ir.mesh import GATHERED_AGAIN, GATHERED_ONCE, SCATTERED_ONCE
from passes.ir.tensor_spec import TensorSpec
from passes.rules.loops import Size
from passes.spmd.halo.overlap import interior_of
from passes.spmd.halo.regions import OperandForm, Slide, operand_form, shared_halo_slides, slides_of
from passes.spmd.local_shapes import Extents
from passes.spmd.propagate.layouts import Layouts


class PartSizes:
    """Shapes under layouts (``cost_models.graph_cost.Parts``).

    Args:
        graph: the whole model.
        rows: the mesh dimensions that shard the batch.
        shapes: of the whole model's values.

    Attributes:
        extents: the lengths of the shards of axes.
        gathered_again: parameters, and casts of them, that the backward gathers a second time instead of saving them gathered (FSDP).
        gathered_once: those that are gathered once a step, and kept whole until its last backward (ZeRO).
    """

    def __init__(self, graph: ModelGraph, axes: Axes, layouts: Layouts, rows: Sequence[str], shapes: Shapes) -> None:
        self._graph, self._axes, self._layouts, self._shapes = graph, axes, layouts, shapes
        self._counts = tuple(count for _, count in layouts.mesh)
        self._n_row_parts = math.prod(count for name, count in layouts.mesh if name in rows)
        self.gathered_again, self.gathered_once = (self._sharded_over(names) for names in (GATHERED_AGAIN, GATHERED_ONCE))
        self._known: dict[tuple[int, tuple[int, ...]], Size] = {}
        self._known_parts: dict[Hashable, TensorSpec] = {}
        self.extents = Extents(axes.sizes, layouts.mesh, (0,) * len(layouts.mesh), graph.batch, self._n_row_parts, axes.segments)
        self._known_slides: dict[str, tuple[Slide, ...]] = {}

    def _sharded_over(self, names: Sequence[str]) -> frozenset[str]:
        """Return the parameters, and the casts of them, that one of the named mesh dimensions shards."""
        indices = [index for index, (name, _) in enumerate(self._layouts.mesh) if name in names]
        held = (*self._graph.parameters, *self._layouts.casts)
        return frozenset(name for name in held if any(isinstance(self._layouts.results[name][0][index], Shard) for index in indices))

    @cached_property
    def summed(self) -> frozenset[str]:
        """The calls whose results are the sums of what ranks compute."""
        layouts = self._layouts.results.items()
        return frozenset(name for name, of_results in layouts if any(isinstance(each, Partial) for layout in of_results for each in layout))

    @cached_property
    def scattered_once(self) -> dict[str, Size]:
        """Parameter -> bytes of its whole gradient, of those whose gradients are added before they are scattered (``"zero1"``)."""
        whole = {name: Replicate() for name, _ in self._layouts.mesh if name in SCATTERED_ONCE}
        found: dict[str, Size] = {}
        for node in self._graph.graph.nodes:
            if node.name in self._graph.parameters and node.name in self._layouts.results:
                layout = self._layouts.results[node.name][0]
                gathered = tuple(whole.get(name, placement) for (name, _), placement in zip(self._layouts.mesh, layout, strict=True))
                if gathered != layout:
                    found[node.name] = self.part(self._shapes[node][0], self._axes.of(node.name), gathered).bytes
        return found

    def results(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        """Return the local shapes of a node's results."""
        shapes = self._shapes[node]
        layouts = self._layouts.results.get(node.name)
        if layouts is None or len(layouts) != len(shapes):
            return tuple(self._own_rows(shape) for shape in shapes)
        tensors = self._axes.tensors[node.name]
        parts = tuple(self.part(shape, axes, layout) for shape, axes, layout in zip(shapes, tensors, layouts, strict=True))
        return tuple(self._wide(part, node.name) for part in parts)

    def operands(self, call: fx.Node) -> Mapping[fx.Node, tuple[TensorSpec, ...]]:
        """Return the local shapes of a call's operands: operand -> the shapes of its results."""
        shapes = {}
        for place, (operand, need) in enumerate(self._read(call)):
            part = self.part(self._shapes[operand][0], self._axes.of(operand.name), need)
            is_wide = operand.name in self._layouts.wide and call.op != "output" and self._holding(call, place) == "computed"
            shapes[operand] = (self._wide(part, operand.name) if is_wide else part,)
        return shapes

    def fetched(self, call: fx.Node) -> Mapping[fx.Node, tuple[Fetched, ...]]:
        """Return operand -> the copies that a call makes of its local shard: with halos (by mesh dimension) and padding."""
        if call.op == "output" or not (self._layouts.fetched or self._layouts.wide or self._slides(call)):
            return {}
        interior = interior_of(self._axes.loops[call.name], self._slides(call)) if call.name in self._layouts.overlapped else None
        local_shapes, copies_of = self.operands(call), {}
        for place, (operand, _) in enumerate(self._read(call)):
            shape = local_shapes[operand][0]
            is_fetched = operand.name in self._layouts.fetched and self._holding(call, place) == "fetched"
            slides = [*shared_halo_slides(operand.name, self._layouts, self.extents)] if is_fetched else []
            copies: list[Fetched] = []
            for slide in (*slides, *(each for each in self._slides(call) if each.window.operand == place)):
                if interior is not None and slide is interior.slide:
                    borders = interior.border_slide
                    copies.append(Fetched(_with_halo(shape, borders), borders.wanted, is_sent=True, is_beside=True))
                elif not slide.is_identity:
                    shape = _with_halo(shape, slide)
                    copies.append(Fetched(shape, slide.wanted, is_sent=not slide.is_local))
            if copies:
                copies_of[operand] = tuple(sorted(copies, key=lambda copy: copy.is_beside))
        return copies_of

    def _read(self, call: fx.Node) -> Sequence[tuple[fx.Node, Layout]]:
        """Return the operands of a call, each with the layout that the call needs."""
        needs = self._layouts.needs.get(call.name, ())
        if is_item(call) or not needs:
            return ()
        operands = returned_values(call) if call.op == "output" else self._axes.operands[call.name]
        return list(zip(operands, needs, strict=True))

    def _slides(self, call: fx.Node) -> tuple[Slide, ...]:
        if call.name not in self._known_slides:
            is_call = call.name in self._axes.loops and call.name in self._layouts.cuts
            self._known_slides[call.name] = slides_of(call.name, self._axes, self._layouts, self.extents) if is_call else ()
        return self._known_slides[call.name]

    def _holding(self, call: fx.Node, place: int) -> OperandForm:
        """Return how a rank has operand number ``place``: its own shard, with recomputed elements, or with fetched ones."""
        return operand_form(call.name, place, self._axes, self._layouts, self.extents)[0]

    def _wide(self, part: TensorSpec, name: str) -> TensorSpec:
        """Return a local shape with the halo that ranks recompute (``Layouts.wide``), of the slowest rank: the one with most overlap."""
        if name not in self._layouts.wide:
            return part
        shape = list(part.shape)
        for placement, intervals in zip(self._layouts.results[name][0], self._layouts.wide[name], strict=False):
            if intervals is not None:
                assert isinstance(placement, Shard)
                shape[placement.dimension] = max(stop - start for start, stop in intervals)
        return replace(part, shape=tuple(shape))

    def part(self, shape: TensorSpec, axes: TensorAxes, layout: Layout) -> TensorSpec:
        """Return the local shape of a tensor in a layout."""
        key = (axes, layout, shape.dtype)
        if key not in self._known_parts:
            sizes = tuple(self._dimension(each, dimension, layout) for dimension, each in enumerate(axes))
            self._known_parts[key] = TensorSpec(sizes, shape.dtype)
        return self._known_parts[key]

    def whole_along(self, node: fx.Node, layout: Layout, index: int) -> Size:
        """Return the bytes of a value in a layout, replicated along mesh dimension number ``index`` instead."""
        return self._whole_along(node, layout, index).bytes

    def runs(self, node: fx.Node, layout: Layout, index: int, shard: Shard) -> Size:
        """Return the number of contiguous runs of memory in a shard of such a value: one for each index of the axes outside of it."""
        whole, axes = (*layout[:index], Replicate(), *layout[index + 1 :]), self._axes.of(node.name)
        own = axes[shard.dimension]
        runs = self._dimension(own[: own.index(shard.axis)] if shard.axis in own else (), shard.dimension, whole)
        for size in self._whole_along(node, layout, index).shape[: shard.dimension]:
            runs = runs * size
        return runs

    def _whole_along(self, node: fx.Node, layout: Layout, index: int) -> TensorSpec:
        whole = (*layout[:index], Replicate(), *layout[index + 1 :])
        return self.part(self._shapes[node][0], self._axes.of(node.name), whole)

    def axis(self, axis: int, counts: tuple[int, ...]) -> Size:
        """Return the local size of an axis, sharded by each count in sequence: size 10, counts (2, 2) -> 3."""
        key = (axis, counts)
        if key not in self._known:
            size = self._in_own_rows(self._axes.sizes[axis])
            for count in counts:
                size = -(-size // count) if isinstance(size, int) else size / count
            self._known[key] = int(size) if not isinstance(size, int) and size.is_Integer else size
        return self._known[key]

    def _dimension(self, axes: Sequence[int], dimension: int, layout: Layout) -> Size:
        """Return the local size of one dimension of a tensor; ``axes``: its axes, outermost first."""
        placements = zip(layout, self._counts, strict=True)
        shards = [(shard.axis, count) for shard, count in placements if isinstance(shard, Shard) and shard.dimension == dimension]
        size: Size = 1
        for axis in axes:
            size = size * self.axis(axis, tuple(count for sharded, count in shards if sharded == axis))
        return size

    def _own_rows(self, shape: TensorSpec) -> TensorSpec:
        return replace(shape, shape=tuple(self._in_own_rows(size) for size in shape.shape))

    def _in_own_rows(self, size: Size) -> Size:
        """Return a size as a formula of the rank's batch: the global batch is a multiple of it."""
        batch = self._graph.batch
        if batch is None or self._n_row_parts == 1 or not isinstance(size, sympy.Expr):
            return size
        return size.subs(batch, self._n_row_parts * batch)


def _with_halo(part: TensorSpec, slide: Slide) -> TensorSpec:
    """Return a local shape with its dimension of a window replaced by the elements read, of the rank that reads most."""
    shape, most = list(part.shape), max(map(length, from_text(slide.wanted)))
    own = slide.window.reach.size if slide.owned is None else max(slide.owned)
    shape[slide.window.dimension] = shape[slide.window.dimension] * most // own if slide.window.part is not None else most
    return replace(part, shape=tuple(shape))
