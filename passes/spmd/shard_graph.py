"""Shard a model's axes over a mesh: one graph for every rank, from the axes that each mesh dimension shards.

find_axes        the dimensions that are the same loop
assign_layouts   the layout of every value
localize         each rank's graph, with its collectives

rank 0   x[rows 0..3] -> linear(w[0..31]) -> gelu -> linear(w[.., 0..31]) -> all_reduce -> ...
rank 1   x[rows 0..3] -> linear(w[32..63]) -> ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from passes.analysis.axes import Axes, TensorAxes
from passes.analysis.layout_facts import LayoutFacts
from passes.ir.graph import ModelGraph, Part, Results
from passes.ir.layout import Layout, Placement, Shard, Varying
from passes.ir.mesh import Mesh
from passes.rules.loops import Size
from passes.spmd.commute.gradient_sums import summed_where_small
from passes.spmd.commute.parameter_casts import cast_where_stored
from passes.spmd.commute.replicable_layouts import computed_where_read
from passes.spmd.halo.overlap import window_offsets
from passes.spmd.halo.wide import with_halos
from passes.spmd.local_shapes import Extents
from passes.spmd.localize import fakes_of, localize
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.propagate.walk import assign_layouts
from passes.spmd.shards import Block, block_of, whole_block


@dataclass(frozen=True)
class AxisCut:
    """The axes that each mesh dimension shards.

    Attributes:
        mesh: the mesh dimensions that shard axes, outermost first.
        assigned: mesh dimension -> axes that it shards, most expensive first: a call with several of them prefers the first.
        rows: mesh dimensions that shard the batch.
        stored: mesh dimensions over which parameters are sharded in storage, and gathered before use (FSDP).
        local_statistics: whether batch normalization uses the statistics of a rank's own samples, as DistributedDataParallel does.
        wide: first and last call of each segment with one wide halo (``passes.spmd.halo.wide``).
        overlapped: first and last call of each segment that computes during its halo exchanges (``passes.spmd.halo.overlap``).
        attention: how the ranks of a sequence dimension share attention (``Plan.attention``).
        stages: call -> the stage that computes it; None: one does.
    """

    mesh: Mesh
    assigned: Mapping[str, tuple[int, ...]]
    rows: tuple[str, ...]
    stored: tuple[str, ...]
    local_statistics: bool = False
    wide: tuple[tuple[str, str], ...] = ()
    overlapped: tuple[tuple[str, str], ...] = ()
    attention: str = "gather"
    stages: Mapping[str, int] | None = None


@dataclass(frozen=True)
class CutModel:
    """A sharded model.

    Attributes:
        cut: the axes that are sharded.
        layouts: the layout of every value.
        blocks: for each rank, for each parameter, buffer and constant, the block that it stores.
        part: how a rank's graph relates to the whole one: rows of the batch, results, gradients to reduce.
    """

    graph: ModelGraph
    axes: Axes
    cut: AxisCut
    layouts: Layouts
    blocks: tuple[Mapping[str, Block], ...]
    part: Part

    @cached_property
    def parts(self) -> tuple[ModelGraph, ...]:
        """Return the graph of each rank of the mesh, written on first access; ranks whose shards have equal sizes share one."""
        if self.cut.mesh.size == 1:
            return (self.graph,)
        by_sizes: dict[tuple[object, ...], ModelGraph] = {}
        parts, patterns = [], _cut_patterns(self.layouts)
        fakes = fakes_of(self.graph.graph)
        for extents in _extents(self.graph, self.axes, self.cut, self.part):
            sizes = (_own_sizes(patterns, extents), window_offsets(self.axes, self.layouts, extents))
            if sizes not in by_sizes:
                cut = self.cut
                local = localize(
                    self.graph, self.axes, self.layouts, extents, fakes, local_statistics=cut.local_statistics, stages=cut.stages
                )
                by_sizes[sizes] = replace(local, part=self.part)
            parts.append(by_sizes[sizes])
        return tuple(parts)


def cut_axes(
    graph: ModelGraph,
    axes: Axes,
    cut: AxisCut,
    results: Results = "rows",
    stored: Mapping[str, Layout] | None = None,
    facts: LayoutFacts | None = None,
) -> CutModel:
    """Shard a model; its graphs are written later, by ``CutModel.parts``.

    Args:
        results: whether ranks return whole results or those of their own rows.
        stored: layouts of parameters, buffers and constants that ranks have stored already; None: as the calls prefer.
        facts: those of the graph and its axes, if it is sharded often.
    """
    if cut.mesh.size == 1:
        return _unsharded(graph, axes, cut)
    layouts = layouts_of_cut(facts or LayoutFacts(graph, axes), cut, results, stored)
    names = cut.mesh.names
    reduced = {name: tuple(names[index] for index in sorted(indices)) for name, indices in layouts.varying.items() if indices}
    part = Part(cut.rows, math.prod(cut.mesh.length(name) for name in cut.rows), results, reduced)
    stored = {name: layouts.stored[name] for name in (*graph.parameters, *graph.buffers, *graph.constants)}
    blocks = tuple(_blocks(axes, stored, _extents(graph, axes, cut, part)))
    return CutModel(graph, axes, cut, layouts, blocks, part)


def _extents(graph: ModelGraph, axes: Axes, cut: AxisCut, part: Part) -> Iterator[Extents]:
    """Yield the sizes of each rank's shards, in order of the ranks."""
    for coordinate in itertools.product(*(range(size) for _, size in cut.mesh.dimensions)):
        yield Extents(axes.sizes, cut.mesh.dimensions, coordinate, graph.batch, part.n_row_parts, axes.segments)


def layouts_of_cut(facts: LayoutFacts, cut: AxisCut, results: Results = "rows", stored: Mapping[str, Layout] | None = None) -> Layouts:
    """Return the layout of every value: by the axes; then masks as read, gradients summed, parameters and casts as stored, halos."""
    graph, axes = facts.graph, facts.axes
    known = (graph, axes, cut.mesh.dimensions, cut.assigned, cut.rows)
    layouts = assign_layouts(*known, results=results, stored=stored, facts=facts, attention=cut.attention, stages=cut.stages)
    layouts = summed_where_small(facts, computed_where_read(facts, layouts))
    # With layouts that are stored already, a call may be replicated that the plan has sharded: it then has no halo.
    layouts = cast_where_stored(facts, _with_sharded_storage(graph, axes, layouts, cut, stored or {}), cut.stages)
    return with_halos(graph, axes, layouts, cut.assigned, cut.wide, cut.overlapped, may_lack=stored is not None)


def _unsharded(graph: ModelGraph, axes: Axes, cut: AxisCut) -> CutModel:
    """Return the model for a mesh of one rank."""
    whole: dict[str, Layout] = dict.fromkeys((*graph.parameters, *graph.buffers, *graph.constants), ())
    blocks = tuple(_blocks(axes, whole, [Extents(axes.sizes, (), (), None, 1)]))
    return CutModel(graph, axes, cut, Layouts((), {}, {}, {}, {}, {}), blocks, graph.part)


_Pattern: TypeAlias = tuple[int, tuple[bool, ...]]
"""An axis, and for each mesh dimension whether that shards it."""


def _cut_patterns(layouts: Layouts) -> list[_Pattern]:
    """Return the patterns in which any value shards axes.

    For an axis over several mesh dimensions, this includes the outer ones alone, since inner shards divide their shards: of size 7 over
    2 x 2 ranks the third rank has 2 elements, as the first has, but 2 of 3 and not of 4.
    """
    patterns: set[_Pattern] = set()
    for layout in {layout for tensors in (*layouts.needs.values(), *layouts.results.values()) for layout in tensors}:
        for shard in (placement for placement in layout if isinstance(placement, Shard)):
            pattern = tuple(isinstance(other, Shard) and other.axis == shard.axis for other in layout)
            for end in range(1, len(pattern) + 1):
                patterns.add((shard.axis, pattern[:end] + (False,) * (len(pattern) - end)))
    return sorted(patterns)


def _own_sizes(patterns: Sequence[_Pattern], extents: Extents) -> tuple[Size, ...]:
    """Return the sizes of a rank's shards of all sharded axes: ranks with equal sizes share a graph."""
    return tuple(extents.axis(axis, [Shard(axis, 0) if cut else None for cut in pattern]) for axis, pattern in patterns)


def _blocks(axes: Axes, stored: Mapping[str, Layout], ranks: Iterable[Extents]) -> Iterator[Mapping[str, Block]]:
    """Yield the stored blocks of each rank; tensors of equal shape and sharding share the computation.

    Args:
        stored: parameter, buffer or constant -> its layout.
        ranks: the sizes of each rank's shards.
    """
    alike: dict[Hashable, list[str]] = {}  # (shape, sharding, segments) -> tensors
    for name, layout in stored.items():
        sizes = tuple(tuple(axes.sizes[axis] for axis in dimension) for dimension in axes.of(name))
        cuts = tuple(isinstance(place, Shard) and (place.dimension, axes.of(name)[place.dimension].index(place.axis)) for place in layout)
        segments = tuple(map(axes.segments_of, axes.of(name)))
        alike.setdefault((sizes, cuts, segments), []).append(name)
    for extents in ranks:
        blocks: dict[str, Block] = {}
        for names in alike.values():
            blocks.update(dict.fromkeys(names, _block(axes.of(names[0]), stored[names[0]], extents)))
        yield {name: blocks[name] for name in stored}


def _block(axes: TensorAxes, layout: Layout, extents: Extents) -> Block:
    if not any(isinstance(place, Shard) for place in layout):
        return whole_block(tuple(math.prod(int(extents.sizes[axis]) for axis in dimension) for dimension in axes))
    return block_of(axes, layout, extents)


def _with_sharded_storage(graph: ModelGraph, axes: Axes, layouts: Layouts, cut: AxisCut, given: Container[str]) -> Layouts:
    """Shard parameters in storage over ``cut.stored`` (FSDP); those of ``given`` layouts stay as they are.

    A parameter no longer varies over a dimension that shards it: its gradient is not reduced at the end of the step, since the backward of
    the gather before its use is a reduce_scatter.
    """
    stored, varying, results = dict(layouts.stored), dict(layouts.varying), dict(layouts.results)
    read = {node.name for node in graph.graph.nodes if node.users}
    for name in graph.parameters:
        layout = list(stored[name])
        for index, dimension in enumerate(cut.mesh.names):
            if name not in given and dimension in cut.stored and not isinstance(layout[index], Shard):
                layout[index] = _storage_shard(axes, name, layout, cut.mesh.length(dimension), is_read=name in read) or layout[index]
        stored[name] = tuple(layout)
        varying[name] = frozenset(index for index in varying[name] if not isinstance(layout[index], Shard))
        results[name] = (tuple(Varying() if index in varying[name] else place for index, place in enumerate(layout)),)
    return replace(layouts, stored=stored, varying=varying, results=results)


def _storage_shard(axes: Axes, name: str, layout: Sequence[Placement], count: int, *, is_read: bool) -> Shard | None:
    """Return the axis over which a parameter is sharded in storage: one not sharded yet, preferably divisible and outermost.

    An axis that is twice in one dimension (the flattened weight of a score matrix) is left out: a shard of it would be ambiguous. Of a
    parameter that the graph does not read, a later call may unfold the first dimension into other axes (queries, keys and values in one
    weight): the second one is sharded, and a vector is not.
    """
    taken = {place.axis for place in layout if isinstance(place, Shard)}
    candidates: list[tuple[bool, int, int, int]] = []
    for dimension, axes_of in enumerate(axes.of(name)):
        if not is_read and dimension != 1:
            continue
        for position, axis in enumerate(axes_of):
            size = axes.sizes[axis]
            if axis not in {*taken, *axes.segments} and axes_of.count(axis) == 1 and isinstance(size, int) and size >= count:
                candidates.append((size % count != 0, dimension, position, axis))
    if not candidates:
        return None
    _, dimension, _, axis = min(candidates)
    return Shard(axis, dimension)
