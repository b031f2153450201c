"""One call, as it looks along one mesh dimension: what a cut of one of its loops reads and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from passes.inside.table import inside_of
from passes.ir.layout import Partial, Placement, Replicate, Shard, Varying
from passes.operators import bound_arguments
from passes.rules.loops import Loops

__all__ = ["CallAlong", "Cut", "bytes_moved"]


@dataclass(frozen=True)
class Cut:
    """How one call is cut over one mesh dimension.

    Attributes:
        factor: the loop that is cut.
        axis: which of its axes.
    """

    factor: int
    axis: int


@dataclass(frozen=True)
class CallAlong:
    """One call, as it looks along one mesh dimension.

    Attributes:
        node, loops, operands: what is called.
        lying: how each operand lies now; None for one that is held by ranks and may still lie anyhow.
        slid: where windows of a factor slide, operand and dimension, -> how the operand lies along it if the factor is cut.
    """

    node: fx.Node
    loops: Loops | None
    operands: tuple[fx.Node, ...]
    lying: tuple[Placement | None, ...]
    slid: Mapping[int, Mapping[int, Placement]]

    def allows(self, factor: int, *, is_outermost: bool) -> bool:
        """Whether the loop can be cut. A maximum has no gradient when its parts are reduced: it is cut where it needs none.

        Args:
            is_outermost: whether the axis that is cut is the outermost of the loop: its parts are then runs of places.
        """
        assert self.loops is not None
        found = self.loops.factors[factor]
        if found.reduction == "whole":
            inside = inside_of(self.node, found.name)
            return inside is not None and (is_outermost or not inside.by_place)
        if found.reduction in ("max", "min"):
            value = self.node.meta["val"]
            return isinstance(value, Tensor) and not value.dtype.is_floating_point
        return True

    def having(self, factor: int) -> list[int]:
        """The operands that have the loop, or over which it slides."""
        assert self.loops is not None
        return [*self.loops.running[factor], *self.slid.get(factor, {})]

    def need_of_sum(self, place: int) -> Placement:
        """How an operand is read by a call that parts of sums go through."""
        return Partial() if self.lying[place] == Partial() else Varying()

    def need(self, cut: Cut | None, place: int) -> Placement:
        """How an operand is read; one whose numbers do not matter, as it lies."""
        if self.loops is not None and place in self.loops.unread:
            return self.lying[place] or Replicate()
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.operands[place]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        if place in self.slid.get(cut.factor, {}):
            return self.slid[cut.factor][place]
        factor = self.loops.factors[cut.factor]
        if place in self.loops.added and factor.reduction == "sum":
            return Partial()
        inside = inside_of(self.node, factor.name) if factor.reduction == "whole" else None
        arguments = bound_arguments(self.node) if inside is not None and inside.whole else {}
        if inside is not None and any(arguments[name] is self.operands[place] for name in inside.whole):
            return Replicate()
        return Varying()

    def gives(self, cut: Cut | None, place: int) -> Placement:
        """How a result lies."""
        if cut is None or self.loops is None:
            return Replicate()
        for dimension, factors in enumerate(self.loops.results[place]):
            if cut.factor in factors:
                return Shard(cut.axis, dimension)
        factor = self.loops.factors[cut.factor]
        if factor.reduction == "whole":
            inside = inside_of(self.node, factor.name)
            return Partial() if inside is not None and inside.gives == "sum" else Replicate()
        return Partial(factor.reduction) if factor.reduction in ("max", "min") else Partial()

    def comes_together(self, cut: Cut) -> bool:
        """Whether a cut needs the whole of what lies in parts, or gives parts of a sum."""
        needs = (self.need(cut, place) for place in range(len(self.operands)))
        gathers = any(isinstance(lies, Shard) and not isinstance(need, Shard) for lies, need in zip(self.lying, needs, strict=True))
        return gathers or isinstance(self.gives(cut, 0), Partial)


def bytes_moved(lies: Placement | None, need: Placement, is_parameter: bool) -> float:
    """Bytes that a change of layout moves, forward and backward, in sizes of the value (a ring; the number of ranks taken as large)."""
    if lies == need or isinstance(need, Partial):
        return 0.0
    if lies is None:
        return 2.0 if isinstance(need, Varying) and is_parameter else 0.0
    if isinstance(lies, Replicate):
        return 2.0 if isinstance(need, Varying) else 1.0 if isinstance(need, Shard) else 0.0
    if isinstance(lies, Shard):
        return 1.0 if isinstance(need, Replicate | Shard) else 2.0
    return 4.0 if isinstance(need, Varying) else 2.0
