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
    Shard          beyond its ends    halo_exchange     halo_exchange

Each change is made once for all readers, in the unit of the first. Gradients of parameters that every rank has whole are summed once a
step. Small parameters that ranks hold in parts go many in a message (``passes.emit.coalesce_collectives``): each is priced as its part of
one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from torch import Tensor, fx

from cost_models.collectives.algorithms import Collective, GroupLinks
from partitioner.planner.costs.part_sizes import PartSizes
from partitioner.planner.solvers.stage_problem import Floats
from passes.analysis.axes import Axes, returned_values
from passes.emit.coalesce_collectives import ALONE_BYTES, BUNDLE_BYTES
from passes.emit.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from passes.ir.comm.index_ranges import segments
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Placement, Replicate, Shard, Varying
from passes.rules.loops import Size
from passes.spmd.decompose.registry import SINGLE_BYTES, decomposition_of
from passes.spmd.halo.regions import operand_form, shared_halo_slides, slides_of
from passes.spmd.propagate import Layouts

__all__ = [
    "Exchange",
    "GradientSum",
    "collectives_between",
    "counted_together",
    "find_exchanges",
    "find_gradient_sums",
    "find_halos",
    "part_of_message",
    "reduced_in_parts",
    "shares_of_bucket",
    "sum_seconds",
]


@dataclass(frozen=True)
class Exchange:
    """One collective of every microbatch, and its dual in the backward.

    Attributes:
        reader: the node that waits for it.
        size: bytes of the whole value, for one microbatch.
        dimension: the mesh dimension whose ranks communicate.
        forward: the collective of the forward; None: nothing is sent.
        backward: the collective of the backward; None: nothing is sent.
        again: a second collective of the backward: the all_gather of a parameter that is not saved gathered.
        runs: number of contiguous runs of memory in a rank's shard: more than one are copied into a message or out of it.
        held: whether the value is stored sharded (a parameter): small ones are coalesced (``passes.emit.coalesce_collectives``).
        together: number of small stored values to coalesce with; 0: unknown.
    """

    reader: str
    size: Size
    dimension: str
    forward: Collective | None
    backward: Collective | None
    again: Collective | None = None
    runs: Size = 1
    held: bool = False
    together: int = 0

    def in_stages(self, count: int) -> Exchange:
        """Return the collective in a model of ``count`` stages: each stage coalesces only its own, equal share of the small ones."""
        return replace(self, together=-(-self.together // count)) if self.together and count > 1 else self

    def seconds(self, size: float, links: GroupLinks, runs: float = 1) -> tuple[float, float]:
        """Return the seconds forward and backward; ``size``: bytes, ``runs``: contiguous runs of memory, as numbers."""
        forward, backward, again = (self._seconds(kind, size, links, runs) for kind in (self.forward, self.backward, self.again))
        return forward, backward + again

    def _seconds(self, kind: Collective | None, size: float, links: GroupLinks, runs: float) -> float:
        if kind is None:
            return 0.0
        if kind == "all_to_all":  # of what a rank holds
            size /= links.n_ranks
        messages = part_of_message(kind, size, links.n_ranks, self.together) if self.held and kind in _BUNDLED else 1.0
        saved = (1 - messages) * links.seconds(kind, 0.0) if messages < 1 else 0.0
        return links.seconds(kind, size) - saved + _COPIES[kind][runs > 1 or messages < 1] * links.copying(size)


def part_of_message(kind: Collective, size: float, n_ranks: int, together: int = 0) -> float:
    """Return the fraction of a coalesced message that a stored value of ``size`` bytes takes; 1 if it is large enough to be sent alone.

    Args:
        together: number of values that can be coalesced; 0: any.
    """
    sent = size if kind == "reduce_scatter" else size / n_ranks
    return 1.0 if sent >= ALONE_BYTES else max(sent / BUNDLE_BYTES, 1 / together if together else 0.0)


def counted_together(found: Iterable[Exchange], mesh: Mapping[str, int], copies: Callable[[str], Sequence[str]]) -> Iterator[Exchange]:
    """Set ``Exchange.together`` of stored values: the number of small ones along the same mesh dimension.

    Args:
        mesh: mesh dimension -> number of ranks.
        copies: the calls of the whole model that a call of a folded block stands for.
    """
    every = list(found)
    small = Counter[str]()
    for each in every:
        if each.held and float(each.size) < ALONE_BYTES * mesh[each.dimension]:
            small[each.dimension] += len(copies(each.reader))
    return (replace(each, together=small[each.dimension]) if each.held else each for each in every)


_BUNDLED: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
"""What goes in bundles of values that ranks hold in parts."""

_COPIES: Mapping[Collective, tuple[int, int]] = {
    "all_reduce": (1, 1),
    "all_gather": (0, 1),
    "reduce_scatter": (0, 1),
    "all_to_all": (1, 2),
    "halo_exchange": (0, 0),
}
"""How often a rank copies what is sent, where parts are one run of memory and where they are several.

What is summed is summed in a copy; parts that lie one after another are sent from where they lie. What a halo is put together with is no
part of the message, and not counted.
"""


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


def shares_of_bucket(sizes: Floats) -> Floats:
    """Return the fraction of a bucket that each gradient takes: gradients are not divided, so it is 1 / n if n of this size fill one."""
    return 1 / np.ceil(BUCKET_BYTES / np.maximum(sizes, 1.0))


def sum_seconds(size: float, buckets: float, largest: float, links: GroupLinks) -> float:
    """Return the seconds of summing gradients in buckets, without overlap of the bytes sent.

    The latency of a bucket overlaps the backward, except for the fraction in which processors compute nothing (``host_share``).

    Args:
        size: bytes of all gradients.
        buckets: number of buckets that they fill (``shares_of_bucket``).
        largest: fraction of a bucket that the largest gradient fills. The first, small bucket contains at least one gradient.
    """
    more = max(math.ceil(buckets - max(FIRST_BUCKET_BYTES / BUCKET_BYTES, largest) - _ROUNDING), 0)
    beginning = 2 * links.seconds("all_reduce", BUCKET_BYTES) - links.seconds("all_reduce", 2 * BUCKET_BYTES)
    return links.seconds("all_reduce", size) + links.copying(size) + more * links.ring.host_share * beginning


_ROUNDING = 1e-6
"""Of a sum of shares, and what gradients of no bytes have."""

_CHANGES: Mapping[tuple[type[Placement], type[Placement]], tuple[Collective | None, Collective | None]] = {
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


def collectives_between(have: Placement, need: Placement) -> tuple[Collective | None, Collective | None]:
    """Return the collectives that reshard a value and, in the backward, its gradient; None if nothing is sent."""
    return (None, None) if have == need else _CHANGES.get((type(have), type(need)), (None, None))


def find_exchanges(graph: ModelGraph, axes: Axes, layouts: Layouts, sizes: PartSizes, flowing: frozenset[str]) -> list[Exchange]:
    """Return every collective of a microbatch; ``flowing``: the nodes that have a gradient."""
    found: dict[object, Exchange] = {}
    for node in graph.graph.nodes:
        if node.name not in layouts.needs:
            continue
        operands = returned_values(node) if node.op == "output" else axes.operands[node.name]
        read = zip(operands, layouts.needs[node.name], strict=True)
        changes = (_changes(operand, need, node.name, layouts, sizes, flowing) for operand, need in read)
        halos, inside = find_halos(node, axes, layouts, sizes, flowing), _inside(node, axes, layouts, sizes, flowing)
        for key, exchange in itertools.chain(*changes, halos, inside):
            found.setdefault(key, exchange)
    last = graph.computing_nodes()[-1].name if graph.computing_nodes() else ""
    return [replace(each, reader=last) if each.reader == "output" else each for each in found.values()]


def _changes(
    operand: fx.Node, need: tuple[Placement, ...], reader: str, layouts: Layouts, sizes: PartSizes, flowing: frozenset[str]
) -> Iterator[tuple[object, Exchange]]:
    """Yield the collectives that reshard one operand to the layout that a call needs, by a key that equal ones share."""
    have = layouts.results[operand.name][0]
    for index, ((name, _), lies, wanted) in enumerate(zip(layouts.mesh, have, need, strict=True)):
        forward, backward = collectives_between(lies, wanted)
        backward = backward if operand.name in flowing else None
        again: Collective | None = "all_gather" if backward is not None and operand.name in sizes.gathered_again else None
        if forward is not None or backward is not None:
            size = sizes.whole_along(operand, need if isinstance(wanted, Shard) else have, index)
            cut = next((each for each in (wanted, lies) if isinstance(each, Shard)), None)
            runs = 1 if cut is None else sizes.runs(operand, need if cut is wanted else have, index, cut.dimension)
            key = (operand.name, index, "sum" if isinstance(lies, Partial) else wanted)
            held = operand.name in layouts.stored and isinstance(lies, Shard)
            yield key, Exchange(reader, size, name, forward, backward, again, runs, held)


def find_halos(node: fx.Node, axes: Axes, layouts: Layouts, sizes: PartSizes, flowing: frozenset[str]) -> Iterator[tuple[object, Exchange]]:
    """Yield the halo exchanges of a call, by a key that equal ones share: priced by the largest message between two ranks."""
    if node.op != "call_function" or node.name not in axes.loops:
        return
    extents = sizes.extents
    slides = [(slide, slide.window.operand) for slide in slides_of(node.name, axes, layouts, extents)]
    for place, operand in enumerate(axes.operands[node.name]):
        if operand.name in layouts.fetched and operand_form(node.name, place, axes, layouts, extents)[0] == "fetched":
            slides += [(slide, place) for slide in shared_halo_slides(operand.name, layouts, extents)]
    for slide, place in slides:
        if slide.is_local or slide.owned is None:
            continue
        read = segments(slide.owned, slide.wanted)
        pairs = ((reader, owner, copies) for reader, by_owner in enumerate(read) for owner, copies in enumerate(by_owner))
        most = max(sum(copy.count for copy in copies) for reader, owner, copies in pairs if reader != owner)
        operand = axes.operands[node.name][place]
        (part,) = sizes.operands(node)[operand]
        backward: Collective | None = "halo_exchange" if operand.name in flowing else None
        key = (operand.name, slide.over, slide.window.dimension, slide.wanted)
        yield key, Exchange(node.name, part.bytes * most / max(slide.owned), slide.over, "halo_exchange", backward)


def _inside(node: fx.Node, axes: Axes, layouts: Layouts, sizes: PartSizes, flowing: frozenset[str]) -> Iterator[tuple[object, Exchange]]:
    """Yield the all_reduces of a decomposed reduction over a sharded axis: statistics for each row of its first operand."""
    for index, factor in reduced_in_parts(node.name, axes, layouts):
        inside = decomposition_of(node, axes.loops[node.name].factors[factor].name)
        if inside is None or not isinstance(node.meta["val"], Tensor):
            continue
        name, whole = layouts.mesh[index][0], cast(Size, 1)
        for each, held in zip(axes.loops[node.name].factors, axes.factors[node.name], strict=True):
            for axis in held if each.reduction == "whole" else ():
                whole = whole * sizes.axis(axis, ())
        operand = axes.operands[node.name][0]
        size = sizes.whole_along(operand, layouts.needs[node.name][0], index) / whole
        if inside.single:
            size = size * max(SINGLE_BYTES // operand.meta["val"].dtype.itemsize, 1)
        for place, numbers in enumerate(inside.sends):
            yield (node.name, index, place), Exchange(node.name, size * numbers, name, "all_reduce", None)
        for place, numbers in enumerate(inside.returns if node.name in flowing else ()):
            yield (node.name, index, "back", place), Exchange(node.name, size * numbers, name, None, "all_reduce")


def reduced_in_parts(node: str, axes: Axes, layouts: Layouts) -> Iterator[tuple[int, int]]:
    """Yield (index of a mesh dimension, loop number) if the dimension shards a loop over which the call reduces internally."""
    for index, cut in enumerate(layouts.cuts.get(node, ())):
        if cut is not None and axes.loops[node].factors[cut.factor].reduction == "whole":
            yield index, cut.factor


def find_gradient_sums(layouts: Layouts, size_of: Mapping[str, Size], flowing: frozenset[str]) -> list[GradientSum]:
    """Return the gradients that are summed once a step: those of parameters that every rank uses on a part of the work."""
    return [
        GradientSum(name, float(size_of[name]), layouts.mesh[index][0])
        for name, indices in layouts.varying.items()
        for index in sorted(indices)
        if name in flowing
    ]
