"""How a value lies over a mesh, in the names of its axes.

[batch/data, sequence, hidden]                 rows over data
[3*heads/tensor*head, hidden]                  a dimension of three axes, cut by the heads
[batch, sequence, hidden] partial over tensor  every rank of tensor has a part of the sum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from partitioner.reports.sources import Explained
from passes.analysis.axes import Axes, TensorAxes
from passes.analysis.axis_names import axis_names
from passes.ir.comm.functional import GRADIENT
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, Varying
from passes.spmd.reshard import CHANGE, Change

__all__ = ["ValueLayouts", "axes_text", "change_of", "is_of_gradient"]

_UNNAMED = ("rest", "features")


def axes_text(axes: Axes, names: Sequence[str], tensor: TensorAxes, over: Callable[[int, int], Sequence[str]]) -> str:
    """A tensor's dimensions by the names of their axes, each with the mesh dimensions that cut it.

    Args:
        names: of all axes.
        tensor: for each dimension its axes.
        over: the position of an axis in the tensor, and its dimension -> the mesh dimensions.
    """
    words, position = [], 0
    for dimension, each in enumerate(tensor):
        parts = []
        for axis in each:
            base = names[axis].partition("[")[0]
            parts.append("/".join([base if base not in _UNNAMED else _size(axes.sizes[axis]), *over(position, dimension)]))
            position += 1
        words.append("*".join(parts) or "1")
    return f"[{', '.join(words)}]"


def _size(size: object) -> str:
    """A size as it is; one that depends on the batch, in words."""
    if not isinstance(size, sympy.Expr):
        return str(size)
    return str(size.subs(dict.fromkeys(size.free_symbols, sympy.Symbol("batch")))).replace(" ", "")


class ValueLayouts:
    """How the values of a partitioned model lie, as text."""

    def __init__(self, explained: Explained) -> None:
        self._axes = explained.cut.axes
        self._names = axis_names(explained.cut.graph, self._axes)
        self._mesh = explained.cut.layouts.mesh
        self._results = explained.cut.layouts.results
        self._known: dict[str, tuple[str, Layout]] = {}
        for part in {id(part): part for part in explained.cut.parts}.values():
            self._known.update({node.name: found for node in part.graph.nodes if (found := self._found(node)) is not None})

    def _found(self, node: fx.Node) -> tuple[str, Layout] | None:
        """The value of the whole model that a node of a rank's graph is a copy of, and how it lies."""
        change = change_of(node)
        if change is not None:
            return change.value, change.after
        name = str(node.meta.get("part_of", node.name))
        if len(self._axes.tensors.get(name, ())) != 1:
            return None
        layouts = self._results.get(name, ((Replicate(),) * len(self._mesh),))
        return name, layouts[0]

    def original(self, value: str) -> str:
        """The node of the whole model that a node of a rank's graph is a copy of."""
        return self._known[value][0] if value in self._known else value

    def of(self, value: str, *, gradient: bool = False) -> str:
        """How a value of a rank's graph lies, or its gradient; empty where that is not known."""
        if value not in self._known:
            return ""
        name, layout = self._known[value]
        return self._text(name, _gradient(layout) if gradient else layout)

    def of_change(self, change: Change, *, gradient: bool) -> str:
        """A change of layout: ``"[rows/data, ffn] -> [rows, ffn]"``; that of the gradient goes the other way.

        Where nothing changes, windows read beyond a rank's part, or give the gradient of that back.
        """
        if change.before == change.after:
            return f"{self._text(change.value, change.before)} -> {'without' if gradient else 'with'} borders"
        before, after = (_gradient(change.after), _gradient(change.before)) if gradient else (change.before, change.after)
        return f"{self._text(change.value, before)} -> {self._text(change.value, after)}"

    def _text(self, name: str, layout: Layout) -> str:
        def over(position: int, dimension: int) -> list[str]:
            axis = flat[position]
            return [mesh for (mesh, _), place in zip(self._mesh, layout, strict=True) if place == Shard(axis, dimension)]

        tensor = self._axes.tensors[name][0]
        flat = [axis for each in tensor for axis in each]
        partial = [mesh for (mesh, _), place in zip(self._mesh, layout, strict=True) if isinstance(place, Partial)]
        text = axes_text(self._axes, self._names, tensor, over)
        return f"{text} partial over {' and '.join(partial)}" if partial else text


def change_of(node: fx.Node) -> Change | None:
    """What a node says of the change of layout that it carries out."""
    change: Change | None = _custom(node).get(CHANGE)
    return change


def is_of_gradient(node: fx.Node) -> bool:
    """Whether a change of layout is that of a gradient."""
    return GRADIENT in _custom(node)


def _custom(node: fx.Node) -> Mapping[str, Any]:
    custom: Mapping[str, Any] = node.meta.get("custom") or {}
    return custom


def _gradient(layout: Layout) -> Layout:
    """How the gradient of a value lies: see ``passes.ir.layout``."""
    return tuple(_of_gradient(place) for place in layout)


def _of_gradient(place: Placement) -> Placement:
    if isinstance(place, Varying):
        return Partial()
    return Replicate() if isinstance(place, Partial) else place
