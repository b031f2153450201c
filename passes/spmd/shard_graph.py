"""Cut a model's axes over a mesh: one graph for every rank, from which axis goes over which mesh dimension.

find_axes        which dimensions are the same loop
assign_layouts   how every value lies
localize         each rank's graph, with its collectives

rank 0   x[rows 0..3] -> linear(w[0..31]) -> gelu -> linear(w[.., 0..31]) -> all_reduce -> ...
rank 1   x[rows 0..3] -> linear(w[32..63]) -> ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from passes.analysis.axes import Axes, TensorAxes
from passes.ir.graph import ModelGraph, Part, Results
from passes.ir.layout import Layout, Placement, Shard, Varying
from passes.ir.mesh import Mesh
from passes.rules.loops import Size
from passes.spmd.halo.overlap import variety
from passes.spmd.halo.wide import with_halos
from passes.spmd.local_shapes import Extents
from passes.spmd.localize import localize
from passes.spmd.propagate import Layouts, assign_layouts
from passes.spmd.shards import Block, block_of, whole_block

__all__ = ["AxisCut", "CutModel", "cut_axes", "layouts_of_cut"]


@dataclass(frozen=True)
class AxisCut:
    """What is cut over which mesh dimension.

    Attributes:
        mesh: the mesh dimensions that cut axes, outermost first.
        assigned: mesh dimension -> axes that it cuts, dearest first.
        rows: mesh dimensions that cut the batch.
        stored: mesh dimensions over which parameters are held in parts and gathered where they are used.
        local_statistics: whether batch normalisation takes those of a rank's own rows, as DistributedDataParallel does.
        wide: the first and the last call of every run that fetches a wide halo once (``passes.spmd.halo.wide``).
        overlapped: the same of those that compute while halos are on their way (``passes.spmd.halo.overlap``).
    """

    mesh: Mesh
    assigned: Mapping[str, tuple[int, ...]]
    rows: tuple[str, ...]
    stored: tuple[str, ...]
    local_statistics: bool = False
    wide: tuple[tuple[str, str], ...] = ()
    overlapped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CutModel:
    """A model whose axes are cut.

    Attributes:
        graph: the model.
        axes: of its graph.
        cut: what is cut.
        layouts: how every value lies.
        blocks: for each rank, for each parameter, buffer and constant, the block that it holds.
        part: what parts are of the whole.
    """

    graph: ModelGraph
    axes: Axes
    cut: AxisCut
    layouts: Layouts
    blocks: tuple[Mapping[str, Block], ...]
    part: Part

    @cached_property
    def parts(self) -> tuple[ModelGraph, ...]:
        """For each rank of the mesh its graph, written when first asked for; ranks whose parts have equal sizes share one."""
        if self.cut.mesh.size == 1:
            return (self.graph,)
        by_sizes: dict[tuple[object, ...], ModelGraph] = {}
        parts, patterns = [], _cut_patterns(self.layouts)
        for extents in _extents(self.graph, self.axes, self.cut, self.part):
            sizes = (_own_sizes(patterns, extents), variety(self.axes, self.layouts, extents))
            if sizes not in by_sizes:
                local = localize(self.graph, self.axes, self.layouts, extents, local_statistics=self.cut.local_statistics)
                by_sizes[sizes] = replace(local, part=self.part)
            parts.append(by_sizes[sizes])
        return tuple(parts)


def cut_axes(
    graph: ModelGraph, axes: Axes, cut: AxisCut, results: Results = "rows", stored: Mapping[str, Layout] | None = None
) -> CutModel:
    """Cut a model.

    Args:
        axes: of the graph.
        results: what ranks return.
        stored: how ranks hold parameters, buffers and constants already.
    """
    if cut.mesh.size == 1:
        return _whole(graph, axes, cut)
    layouts = layouts_of_cut(graph, axes, cut, results, stored)
    names = cut.mesh.names
    reduced = {name: tuple(names[index] for index in sorted(indices)) for name, indices in layouts.varying.items() if indices}
    part = Part(cut.rows, math.prod(cut.mesh.length(name) for name in cut.rows), results, reduced)
    stored = {name: layouts.stored[name] for name in (*graph.parameters, *graph.buffers, *graph.constants)}
    blocks = tuple(_blocks(axes, stored, _extents(graph, axes, cut, part)))
    return CutModel(graph, axes, cut, layouts, blocks, part)


def _extents(graph: ModelGraph, axes: Axes, cut: AxisCut, part: Part) -> Iterator[Extents]:
    """The sizes of each rank's parts, in order of the ranks."""
    for coordinate in itertools.product(*(range(size) for _, size in cut.mesh.dimensions)):
        yield Extents(axes.sizes, cut.mesh.dimensions, coordinate, graph.batch, part.n_row_parts)


def layouts_of_cut(
    graph: ModelGraph, axes: Axes, cut: AxisCut, results: Results = "rows", stored: Mapping[str, Layout] | None = None
) -> Layouts:
    """How every value lies under a cut, parameters as they are stored: what ``cut_axes`` writes graphs from."""
    layouts = assign_layouts(graph, axes, cut.mesh.dimensions, cut.assigned, cut.rows, results=results, stored=stored)
    # Beside parameters that lie already, a call may be computed whole that the plan has in parts: it then has no halo to pay for.
    return with_halos(graph, axes, _store(graph, axes, layouts, cut), cut.assigned, cut.wide, cut.overlapped, may_lack=stored is not None)


def _whole(graph: ModelGraph, axes: Axes, cut: AxisCut) -> CutModel:
    whole: dict[str, Layout] = dict.fromkeys((*graph.parameters, *graph.buffers, *graph.constants), ())
    blocks = tuple(_blocks(axes, whole, [Extents(axes.sizes, (), (), None, 1)]))
    return CutModel(graph, axes, cut, Layouts((), {}, {}, {}, {}, {}), blocks, graph.part)


_Pattern: TypeAlias = tuple[int, tuple[bool, ...]]
"""An axis, and for each mesh dimension whether it cuts it."""


def _cut_patterns(layouts: Layouts) -> list[_Pattern]:
    """In which ways anything cuts axes.

    Of an axis that several mesh dimensions cut, also the outer of these alone, in whose parts the inner ones lie: of 7 over 2 x 2 ranks the
    third has 2 as the first has, but of 3 and not of 4.
    """
    every = {layout for each in (*layouts.needs.values(), *layouts.results.values()) for layout in each}
    patterns = {
        (place.axis, tuple(isinstance(other, Shard) and other.axis == place.axis for other in layout))
        for layout in every
        for place in layout
        if isinstance(place, Shard)
    }
    outer = {(axis, pattern[:end] + (False,) * (len(pattern) - end)) for axis, pattern in patterns for end in range(1, len(pattern) + 1)}
    return sorted(outer)


def _own_sizes(patterns: Sequence[_Pattern], extents: Extents) -> tuple[Size, ...]:
    """The sizes of a rank's parts of all axes that anything cuts: ranks with equal ones share a graph."""
    return tuple(extents.axis(axis, [Shard(axis, 0) if cut else None for cut in pattern]) for axis, pattern in patterns)


def _blocks(axes: Axes, stored: Mapping[str, Layout], every: Iterable[Extents]) -> Iterator[Mapping[str, Block]]:
    """For each rank, the blocks of what is held: of tensors of equal sizes that are cut alike, it is worked out once.

    Args:
        stored: parameter, buffer or constant -> how it lies.
    """
    alike: dict[Hashable, list[str]] = {}
    for name, layout in stored.items():
        sizes = tuple(tuple(axes.sizes[axis] for axis in dimension) for dimension in axes.of(name))
        cuts = tuple(isinstance(place, Shard) and (place.dimension, axes.of(name)[place.dimension].index(place.axis)) for place in layout)
        alike.setdefault((sizes, cuts), []).append(name)
    for extents in every:
        found: dict[str, Block] = {}
        for names in alike.values():
            found.update(dict.fromkeys(names, _block(axes.of(names[0]), stored[names[0]], extents)))
        yield {name: found[name] for name in stored}


def _block(axes: TensorAxes, layout: Layout, extents: Extents) -> Block:
    if not any(isinstance(place, Shard) for place in layout):
        return whole_block(tuple(_product([extents.sizes[axis] for axis in dimension]) for dimension in axes))
    return block_of(axes, layout, extents)


def _product(sizes: Sequence[object]) -> int:
    result = 1
    for size in sizes:
        assert isinstance(size, int)
        result *= size
    return result


def _store(graph: ModelGraph, axes: Axes, layouts: Layouts, cut: AxisCut) -> Layouts:
    """Hold parameters in parts over ``cut.stored``; elsewhere, where every use is Varying, sum their gradients at the end.

    What nobody reads stays whole: it stays with one rank.
    """
    stored, varying, results = dict(layouts.stored), dict(layouts.varying), dict(layouts.results)
    read = {node.name for node in graph.graph.nodes if node.users}
    for name in graph.parameters:
        layout = list(stored[name])
        for index, dimension in enumerate(cut.mesh.names):
            if name in read and dimension in cut.stored and not isinstance(layout[index], Shard):
                layout[index] = _storage(axes, name, layout, cut.mesh.length(dimension)) or layout[index]
        stored[name] = tuple(layout)
        varying[name] = frozenset(index for index in varying[name] if not isinstance(layout[index], Shard))
        results[name] = (tuple(Varying() if index in varying[name] else place for index, place in enumerate(layout)),)
    return replace(layouts, stored=stored, varying=varying, results=results)


def _storage(axes: Axes, name: str, layout: Sequence[Placement], count: int) -> Shard | None:
    """The axis by which a parameter is held in parts: one that nothing else cuts, divisible and outermost rather than not.

    Where one dimension holds an axis twice (a weight for scores made flat), nothing says which of them a part would be of.
    """
    taken = {place.axis for place in layout if isinstance(place, Shard)}
    candidates = [
        (bool(size % count), dimension, position, axis)
        for dimension, each in enumerate(axes.of(name))
        for position, axis in enumerate(each)
        if axis not in taken and each.count(axis) == 1 and isinstance(size := axes.sizes[axis], int) and size >= count
    ]
    if not candidates:
        return None
    _, dimension, _, axis = min(candidates)
    return Shard(axis, dimension)
