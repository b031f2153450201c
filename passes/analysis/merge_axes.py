"""Take two neighbouring axes as one where each alone is too short for a mesh dimension.

    grouped-query attention, 2 heads of keys and values with 2 queries each, over 4 ranks

        q weight [(heads group head), hidden]     ->   [(heads*group head), hidden]      cut into 4
        k weight [(heads head), hidden]                                                  whole on every rank

Where the two stand side by side in one dimension they become one axis; where one stands alone it stays what it is, uncut. So queries are
cut and each rank takes the keys and values that it needs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from passes.analysis.axes import Axes, TensorAxes, find_axes
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, Mesh

__all__ = ["find_axes_to_cut", "merge_short_axes"]


def find_axes_to_cut(graph: ModelGraph, mesh: Mesh) -> Axes:
    """The axes of a model as a mesh can cut them."""
    axes = find_axes(graph.graph)
    for name, count in mesh.cutting.dimensions:
        if name not in ROWS:
            axes = merge_short_axes(graph, axes, count)
    return axes


def merge_short_axes(graph: ModelGraph, axes: Axes, count: int) -> Axes:
    """Merge neighbours in dimensions of parameters that are shorter than ``count`` each and not together.

    Only those that make up a dimension of their own somewhere: heads of queries do, the three of a fused q, k and v with its heads do not.
    """
    alone = {dimension for tensors in axes.tensors.values() for tensor in tensors for dimension in tensor if len(dimension) == 2}
    pairs: dict[tuple[int, int], None] = {}
    for name in graph.parameters:
        for dimension in axes.of(name) if name in axes.tensors else ():
            neighbours = (pair for pair in itertools.pairwise(dimension) if pair in alone)
            pairs.update(dict.fromkeys(pair for pair in neighbours if _is_short(axes, *pair, count)))
    for pair in pairs:
        axes = _merged(axes, pair)
    return axes


def _is_short(axes: Axes, outer: int, inner: int, count: int) -> bool:
    """Whether two neighbours are too short alone. The inside of a head is never cut: attention needs it whole."""
    one, other = axes.sizes[outer], axes.sizes[inner]
    if "head" in axes.roles[inner]:
        return False
    return isinstance(one, int) and isinstance(other, int) and 1 < one < count and 1 < other < count <= one * other


def _merged(axes: Axes, pair: tuple[int, int]) -> Axes:
    new = len(axes.sizes)
    outer, inner = (axes.sizes[axis] for axis in pair)
    assert isinstance(outer, int)
    assert isinstance(inner, int)
    roles = Counter(axes.roles[pair[0]]) + Counter(axes.roles[pair[1]])

    def dimension(each: tuple[int, ...]) -> tuple[int, ...]:
        found: list[int] = []
        for axis in each:
            if found and (found[-1], axis) == pair:
                found[-1] = new
            else:
                found.append(axis)
        return tuple(found)

    def tensor(each: TensorAxes) -> TensorAxes:
        return tuple(dimension(axes_of_dimension) for axes_of_dimension in each)

    return replace(
        axes,
        sizes=(*axes.sizes, outer * inner),
        tensors={name: tuple(tensor(each) for each in tensors) for name, tensors in axes.tensors.items()},
        factors={name: tuple(dimension(each) for each in factors) for name, factors in axes.factors.items()},
        roles=(*axes.roles, roles),
    )
