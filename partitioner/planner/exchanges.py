"""What the ranks that share a stage send each other, and how long it takes: from layouts alone, no graph is written.

    a value lies   and is read as     forward           backward
    Partial        Replicate          all_reduce        -
    Partial        Varying            all_reduce        all_reduce
    Partial        Shard              reduce_scatter    all_gather
    Shard          Replicate          all_gather        -
    Shard          Varying            all_gather        reduce_scatter
    Shard          Shard (another)    all_to_all        all_to_all
    Replicate      Shard              -                 all_gather
    Replicate      Varying            -                 all_reduce

Each change is made once for all readers, in the unit of the first. Gradients of parameters that every rank has whole are summed once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from cost_models import communication
from cost_models.hardware import Link
from partitioner.planner.part_sizes import PartSizes
from passes.axes import Axes, returned_values
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Placement, Replicate, Shard, Varying
from passes.layouts import Layouts
from passes.rules.loops import Size

__all__ = ["Exchange", "GradientSum", "find_exchanges", "find_gradient_sums"]


@dataclass(frozen=True)
class Exchange:
    """One collective of every microbatch, and its dual in the backward.

    Attributes:
        reader: the node that waits for it.
        size: bytes of the whole value, for one microbatch.
        count: how many ranks.
        link: between them.
        forward: how long it takes, by bytes, ranks and link; None: nothing is sent.
        backward: the same for the backward.
        again: what the backward does besides: a parameter that is not kept whole is gathered once more.
    """

    reader: str
    size: Size
    count: int
    link: Link
    forward: str | None
    backward: str | None
    again: str | None = None

    def seconds(self, size: float) -> tuple[float, float]:
        """Forward and backward, for so many bytes."""
        forward, backward, again = (self._of(kind, size) for kind in (self.forward, self.backward, self.again))
        return forward, backward + again

    def _of(self, kind: str | None, size: float) -> float:
        return 0.0 if kind is None else float(_FORMULAS[kind](size, self.count, self.link))


@dataclass(frozen=True)
class GradientSum:
    """The gradient of a parameter, summed once a step.

    Attributes:
        parameter: its placeholder.
        size: bytes.
        dimension: the mesh dimension that it is summed over.
    """

    parameter: str
    size: float
    dimension: str


def _held_all_to_all(size: float, count: int, link: Link) -> float:
    """Of a rank's own part of the value."""
    return float(communication.all_to_all(size / count, count, link))


_FORMULAS: Mapping[str, Callable[[float, int, Link], float]] = {
    "all_reduce": communication.all_reduce,
    "all_gather": communication.all_gather,
    "reduce_scatter": communication.reduce_scatter,
    "all_to_all": _held_all_to_all,
}

_CHANGES: Mapping[tuple[type[Placement], type[Placement]], tuple[str | None, str | None]] = {
    (Partial, Replicate): ("all_reduce", None),
    (Partial, Varying): ("all_reduce", "all_reduce"),
    (Partial, Shard): ("reduce_scatter", "all_gather"),
    (Shard, Replicate): ("all_gather", None),
    (Shard, Varying): ("all_gather", "reduce_scatter"),
    (Shard, Shard): ("all_to_all", "all_to_all"),
    (Replicate, Shard): (None, "all_gather"),
    (Replicate, Varying): (None, "all_reduce"),
}
"""How a value lies and how it is read -> the collectives."""


def find_exchanges(
    graph: ModelGraph, axes: Axes, layouts: Layouts, sizes: PartSizes, links: Mapping[str, Link], flowing: frozenset[str]
) -> list[Exchange]:
    """Every collective of a microbatch.

    Args:
        links: mesh dimension -> the slowest link between its ranks.
        flowing: the nodes that have a gradient.
    """
    found: dict[object, Exchange] = {}
    for node in graph.graph.nodes:
        if node.name not in layouts.needs:
            continue
        operands = returned_values(node) if node.op == "output" else axes.operands[node.name]
        for operand, need in zip(operands, layouts.needs[node.name], strict=True):
            for key, exchange in _changes(operand, need, node.name, layouts, sizes, links, flowing):
                found.setdefault(key, exchange)
        for key, exchange in _inside(node, axes, layouts, sizes, links, flowing):
            found.setdefault(key, exchange)
    last = graph.computing_nodes()[-1].name if graph.computing_nodes() else ""
    return [Exchange(**{**vars(each), "reader": last}) if each.reader == "output" else each for each in found.values()]


def _changes(
    operand: fx.Node,
    need: tuple[Placement, ...],
    reader: str,
    layouts: Layouts,
    sizes: PartSizes,
    links: Mapping[str, Link],
    flowing: frozenset[str],
) -> Iterator[tuple[object, Exchange]]:
    """What brings one operand into the layout that a call reads it in."""
    have = layouts.results[operand.name][0]
    for index, ((name, count), lies, wanted) in enumerate(zip(layouts.mesh, have, need, strict=True)):
        kinds = _CHANGES.get((type(lies), type(wanted))) if lies != wanted else None
        if kinds is None:
            continue
        forward, backward = kinds
        backward = backward if operand.name in flowing else None
        again = "all_gather" if backward is not None and operand.name in sizes.gathered_again else None
        if forward is not None or backward is not None:
            size = sizes.whole_along(operand, need if isinstance(wanted, Shard) else have, index)
            key = (operand.name, index, "sum" if isinstance(lies, Partial) else wanted)
            yield key, Exchange(reader, size, count, links[name], forward, backward, again)


def _inside(
    node: fx.Node, axes: Axes, layouts: Layouts, sizes: PartSizes, links: Mapping[str, Link], flowing: frozenset[str]
) -> Iterator[tuple[object, Exchange]]:
    """What a call sends that reduces over what is cut: statistics, one number for each element of the other loops, twice each way."""
    for index, ((name, count), cut) in enumerate(zip(layouts.mesh, layouts.cuts.get(node.name, ()), strict=False)):
        if cut is None or axes.loops[node.name].factors[cut.factor].reduction != "whole" or not isinstance(node.meta["val"], Tensor):
            continue
        whole: Size = 1
        for axis in axes.factors[node.name][cut.factor]:
            whole = whole * sizes.axis(axis, ())
        size = sizes.whole_along(node, layouts.results[node.name][0], index) / whole
        backward = "all_reduce" if node.name in flowing else None
        for place in range(_STATISTICS):
            yield (node.name, index, place), Exchange(node.name, size, count, links[name], "all_reduce", backward)


_STATISTICS = 2
"""Sums that an operation that reduces inside needs: of the values and of their squares, or a maximum and a sum."""


def find_gradient_sums(layouts: Layouts, size_of: Mapping[str, Size], flowing: frozenset[str]) -> list[GradientSum]:
    """What is summed once a step: the gradients of the parameters that every rank uses on a part of the work."""
    return [
        GradientSum(name, float(size_of[name]), layouts.mesh[index][0])
        for name, indices in layouts.varying.items()
        for index in sorted(indices)
        if name in flowing
    ]
