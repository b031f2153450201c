"""Merge two neighbouring axes into one where each alone is too short to shard over a mesh dimension.

    grouped-query attention, 2 heads of keys and values with 2 queries each, over 4 ranks

        q weight [(heads group head), hidden]     ->   [(heads*group head), hidden]      cut into 4
        k weight [(heads head), hidden]                                                  whole on every rank

Where a dimension holds both, they become one axis; where it holds one of them, that axis stays and is not sharded. So queries are sharded,
and each rank takes the keys and values that it needs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from passes.analysis.axes import Axes, TensorAxes, find_axes
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, Mesh
from passes.rules.ops.fused_heads import find_fused_heads


def find_axes_to_cut(graph: ModelGraph, mesh: Mesh) -> Axes:
    """Return the axes of a model, with short ones merged so that the mesh can shard them."""
    counts = [count for name, count in mesh.cutting.dimensions if name not in ROWS]
    axes = find_axes(graph.graph, fused=find_fused_heads(graph.graph, max(counts)) if counts else {})
    for count in counts:
        axes = merge_short_axes(graph, axes, count)
    return axes


def merge_short_axes(graph: ModelGraph, axes: Axes, count: int) -> Axes:
    """Merge neighbouring axes of parameters that are each shorter than ``count``, and together are not.

    Only if the two alone make up a dimension somewhere: (group, head) of queries do, (q/k/v, head) of a fused projection do not.
    """
    dimensions = (dimension for tensors in axes.tensors.values() for tensor in tensors for dimension in tensor)
    two_axis_dimensions = {dimension for dimension in dimensions if len(dimension) == 2}
    pairs: dict[tuple[int, int], None] = {}
    for name in graph.parameters:
        for dimension in axes.of(name) if name in axes.tensors else ():
            for pair in itertools.pairwise(dimension):
                if pair in two_axis_dimensions and _should_merge(axes, *pair, count):
                    pairs[pair] = None
    for pair in pairs:
        axes = _merge(axes, pair)
    return axes


def _should_merge(axes: Axes, outer: int, inner: int, count: int) -> bool:
    """Return whether ``count`` ranks can shard two neighbours only together. The inside of a head is never sharded."""
    size, inner_size = axes.sizes[outer], axes.sizes[inner]
    if "head" in axes.roles[inner] or not isinstance(size, int) or not isinstance(inner_size, int):
        return False
    return 1 < size < count and 1 < inner_size < count <= size * inner_size


def _merge(axes: Axes, pair: tuple[int, int]) -> Axes:
    """Replace an outer and an inner axis by a new one, wherever they are neighbours."""
    new = len(axes.sizes)
    outer, inner = (axes.sizes[axis] for axis in pair)
    assert isinstance(outer, int)
    assert isinstance(inner, int)
    roles = Counter(axes.roles[pair[0]]) + Counter(axes.roles[pair[1]])

    def merged(dimensions: TensorAxes) -> TensorAxes:
        return tuple(merged_dimension(dimension) for dimension in dimensions)

    def merged_dimension(dimension: tuple[int, ...]) -> tuple[int, ...]:
        result: list[int] = []
        for axis in dimension:
            if result and (result[-1], axis) == pair:
                result[-1] = new
            else:
                result.append(axis)
        return tuple(result)

    return replace(
        axes,
        sizes=(*axes.sizes, outer * inner),
        tensors={name: tuple(map(merged, tensors)) for name, tensors in axes.tensors.items()},
        factors={name: merged(factors) for name, factors in axes.factors.items()},
        roles=(*axes.roles, roles),
    )
