"""Placements of the operands and results of one call along one mesh dimension, for each loop that the dimension may cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, fx

from passes.analysis.axes import Axes
from passes.graph.schemas import bound_arguments, draws
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Placement, Replicate, Shard, Varying
from passes.rules.loops import Loops
from passes.spmd.decompose.registry import decomposition_of
from passes.spmd.propagate.layouts import Cut


class CallAlong(NamedTuple):
    """One call along one mesh dimension.

    Attributes:
        node, loops, operands: the call.
        current: the placement of each operand now; None for a weight of which no reader has decided it.
        windowed: factor -> operand over which its window slides -> the placement in which the operand is read if the factor is cut.
    """

    node: fx.Node
    loops: Loops | None
    operands: tuple[fx.Node, ...]
    current: tuple[Placement | None, ...]
    windowed: Mapping[int, Mapping[int, Placement]]

    def allows(self, factor: int, *, is_outermost: bool) -> bool:
        """Return whether a loop can be cut; that of a floating-point maximum cannot: its reduction over ranks has no gradient.

        Args:
            is_outermost: whether the outermost axis of the loop is cut, so that each shard is a contiguous interval.
        """
        assert self.loops is not None
        loop = self.loops.factors[factor]
        if loop.reduction == "whole":
            decomposition = decomposition_of(self.node, loop.name)
            return decomposition is not None and (is_outermost or not decomposition.by_place)
        if loop.reduction in ("max", "min"):
            value = self.node.meta["val"]
            return isinstance(value, Tensor) and not value.dtype.is_floating_point
        return True

    def operands_with(self, factor: int) -> list[int]:
        """Return the positions of operands that have the loop, or over which its window slides."""
        assert self.loops is not None
        return [*self.loops.running[factor], *self.windowed.get(factor, {})]

    def narrows(self) -> bool:
        """Return whether a call casts its only tensor to a smaller type."""
        value = self.node.meta["val"]
        return len(self.operands) == 1 and isinstance(value, Tensor) and value.dtype.itemsize < self.operands[0].meta["val"].dtype.itemsize

    def added_to_sums(self) -> frozenset[int] | None:
        """Return the operands that a call adds to its partial sums; None if it is not linear in these."""
        assert self.loops is not None
        partial = {position for position, placement in enumerate(self.current) if placement == Partial()}
        jointly = [linear for linear in self.loops.linear if partial <= linear]
        return min(jointly, key=len) - partial if jointly else None

    def need_of_sum(self, position: int) -> Placement:
        """Return the placement in which a call on partial sums reads the operand at ``position``."""
        return Partial() if self.current[position] == Partial() or position in (self.added_to_sums() or ()) else Varying()

    def need(self, cut: Cut | None, position: int) -> Placement:
        """Return the placement in which the operand at ``position`` is read if the call is cut so; None: the call is replicated."""
        if self.loops is not None and position in self.loops.unread:
            return self.current[position] or Replicate()
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.operands[position]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        if position in self.windowed.get(cut.factor, {}):
            return self.windowed[cut.factor][position]
        factor = self.loops.factors[cut.factor]
        if position in self.loops.added and factor.reduction == "sum":
            return Partial()
        decomposition = decomposition_of(self.node, factor.name) if factor.reduction == "whole" else None
        if decomposition is not None and decomposition.whole:
            arguments = bound_arguments(self.node)
            if any(arguments[name] is self.operands[position] for name in decomposition.whole):
                return Replicate()
        return Varying()

    def result(self, cut: Cut | None, position: int) -> Placement:
        """Return the placement of the result at ``position`` if the call is cut so; None: the call is replicated."""
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.results[position]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        factor = self.loops.factors[cut.factor]
        if factor.reduction == "whole":
            decomposition = decomposition_of(self.node, factor.name)
            return Partial() if decomposition is not None and decomposition.gives == "sum" else Replicate()
        return Partial(factor.reduction) if factor.reduction in ("max", "min") else Partial()

    def gathers_or_sums(self, cut: Cut) -> bool:
        """Return whether a cut gathers a sharded operand, or gives a partial sum."""
        needs = (self.need(cut, position) for position in range(len(self.operands)))
        gathers = any(isinstance(have, Shard) and not isinstance(need, Shard) for have, need in zip(self.current, needs, strict=True))
        return gathers or isinstance(self.result(cut, 0), Partial)


def cuttable_axes(graph: ModelGraph, axes: Axes) -> frozenset[int]:
    """Return the axes over which some call could be cut, whatever is cut before it: not those of a kernel, say."""
    found: set[int] = set()
    for node in graph.graph.nodes:
        if node.name in axes.loops and not draws(node):
            call = CallAlong(node, axes.loops[node.name], (), (), {})
            for factor, of_factor in enumerate(axes.factors[node.name]):
                found.update(axis for place, axis in enumerate(of_factor) if call.allows(factor, is_outermost=place == 0))
    return frozenset(found.difference(axes.segments))


def bytes_moved(current: Placement | None, need: Placement, is_parameter: bool) -> float:
    """Return the traffic of a change of placement and of its gradient's, in sizes of the value, for a ring of many ranks."""
    if current == need or isinstance(need, Partial):
        return 0.0
    if current is None:
        return 2.0 if isinstance(need, Varying) and is_parameter else 0.0
    if isinstance(current, Replicate):
        if isinstance(need, Varying):
            return 2.0
        return 1.0 if isinstance(need, Shard) else 0.0
    if isinstance(current, Shard):
        return 1.0 if isinstance(need, Replicate | Shard) else 2.0
    return 4.0 if isinstance(need, Varying) else 2.0
