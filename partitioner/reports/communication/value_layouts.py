"""The layout of a value over a mesh as text, by the names of its axes.

[batch/data, sequence, hidden]                 rows over data
[3*heads/tensor*head, hidden]                  a dimension of three axes, cut by the heads
[batch, sequence, hidden] partial over tensor  every rank of tensor has a part of the sum
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from partitioner.reports.communication.purpose import items_of
from partitioner.reports.sources import Explained
from passes.analysis.axes import Axes, TensorAxes
from passes.ir.comm.functional import GRADIENT
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, Varying
from passes.spmd.reshard import CHANGE, Change

_UNNAMED = ("rest", "features")


def axes_text(axes: Axes, names: Sequence[str], tensor: TensorAxes, over: Callable[[int, int], Sequence[str]]) -> str:
    """Return a tensor's dimensions by the names of their axes, each with the mesh dimensions that shard it: ``"[batch/data, hidden]"``.

    Args:
        names: the names of all axes.
        tensor: the axes of each dimension.
        over: returns the mesh dimensions of an axis, from its position among the tensor's axes and its dimension.
    """
    words, position = [], 0
    for dimension, axes_of_dimension in enumerate(tensor):
        parts = []
        for axis in axes_of_dimension:
            base = names[axis].partition("[")[0]
            parts.append("/".join([base if base not in _UNNAMED else _size(axes.sizes[axis]), *over(position, dimension)]))
            position += 1
        words.append("*".join(parts) or "1")
    return f"[{', '.join(words)}]"


def _size(size: object) -> str:
    """Format a size: ``"12"``; ``"2*batch"`` for a symbolic size, whose only symbol is the batch."""
    if not isinstance(size, sympy.Expr):
        return str(size)
    return str(size.subs(dict.fromkeys(size.free_symbols, sympy.Symbol("batch")))).replace(" ", "")


class ValueLayouts:
    """Returns the layouts of the values of a partitioned model as text."""

    def __init__(self, explained: Explained) -> None:
        self._axes = explained.cut.axes
        self._names = explained.axis_names
        self._mesh = explained.cut.layouts.mesh
        self._results = explained.cut.layouts.results
        self._known: dict[str, tuple[str, Layout]] = {}  # node of a rank's graph -> value of the whole model, its layout
        for part in {id(part): part for part in explained.cut.parts}.values():
            for node in part.graph.nodes:
                layout = self._layout_of(node)
                if layout is not None:
                    self._known[node.name] = layout

    def _layout_of(self, node: fx.Node) -> tuple[str, Layout] | None:
        """Return the value of the whole model that a node of a rank's graph holds a shard of, and its layout; None if there is none."""
        change = _custom(node).get(CHANGE)
        if change is not None:
            return change.value, change.after
        name = str(node.meta.get("part_of", node.name))
        if len(self._axes.tensors.get(name, ())) != 1:
            return None
        layouts = self._results.get(name, ((Replicate(),) * len(self._mesh),))
        return name, layouts[0]

    def of(self, value: str, *, gradient: bool = False) -> str:
        """Return the layout of a value of a rank's graph, or of its gradient; empty if it is not known."""
        if value not in self._known:
            return ""
        name, layout = self._known[value]
        return self._text(name, _gradient(layout) if gradient else layout)

    def of_change(self, change: Change, *, gradient: bool) -> str:
        """Return a change of layout, ``"[rows/data, ffn] -> [rows, ffn]"``; for the gradient, in the opposite direction.

        A halo exchange does not change the layout: ``"[batch, height/tile0] -> with borders"``.
        """
        if change.before == change.after:
            return f"{self._text(change.value, change.before)} -> {'without' if gradient else 'with'} borders"
        before, after = (_gradient(change.after), _gradient(change.before)) if gradient else (change.before, change.after)
        return f"{self._text(change.value, before)} -> {self._text(change.value, after)}"

    def _text(self, name: str, layout: Layout) -> str:
        """Return the layout of a value of the whole model as text: ``"[batch, hidden] partial over tensor"``."""
        tensor = self._axes.tensors[name][0]
        axes = list(itertools.chain.from_iterable(tensor))
        placements = [(mesh_dimension, placement) for (mesh_dimension, _), placement in zip(self._mesh, layout, strict=True)]

        def over(position: int, dimension: int) -> list[str]:
            return [mesh_dimension for mesh_dimension, placement in placements if placement == Shard(axes[position], dimension)]

        partial = [mesh_dimension for mesh_dimension, placement in placements if isinstance(placement, Partial)]
        text = axes_text(self._axes, self._names, tensor, over)
        return f"{text} partial over {' and '.join(partial)}" if partial else text


def changes_of(collective: fx.Node) -> list[tuple[Change, bool]]:
    """Return the changes of layout that a collective carries out, each with whether it is of a gradient."""
    custom = [_custom(item) for item in items_of(collective)]
    return [(of_item[CHANGE], GRADIENT in of_item) for of_item in custom if CHANGE in of_item]


def _custom(node: fx.Node) -> Mapping[str, Any]:
    custom: Mapping[str, Any] = node.meta.get("custom") or {}
    return custom


def _gradient(layout: Layout) -> Layout:
    """Return the layout of the gradient of a value, see ``passes.ir.layout``: Varying becomes Partial, Partial becomes Replicate."""
    others: Mapping[type, Placement] = {Varying: Partial(), Partial: Replicate()}
    return tuple(others.get(type(placement), placement) for placement in layout)
