"""Collectives between the ranks that share a stage, and their seconds, from layouts alone: no graph is rewritten.

    a value is     and is read as     forward           backward
    Partial        Replicate          all_reduce        -
    Partial        Varying            all_reduce        all_reduce
    Partial        Shard              reduce_scatter    all_gather
    Shard          Replicate          all_gather        -
    Shard          Varying            all_gather        reduce_scatter
    Shard          Shard (another)    all_to_all        all_to_all
    Replicate      Shard              -                 all_gather
    Replicate      Varying            -                 all_reduce
    Shard          beyond its ends    halo_exchange     halo_exchange

Each reshard runs once for all readers, in the unit of the first. Gradients of replicated parameters are summed once a step. Collectives of
small sharded parameters are coalesced (``passes.emit.coalesce_collectives``): each is priced as its fraction of a message.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor, fx

from cost_models.collectives.algorithms import Collective, GroupLinks
from partitioner.planner.costs.part_sizes import PartSizes
from partitioner.planner.solvers.stage_memory import Floats
from passes.analysis.axes import Axes, returned_values
from passes.analysis.routed_rows import has_rows_of
from passes.emit.coalesce_collectives import ALONE_BYTES, BUNDLE_BYTES, bytes_of_bundle
from passes.emit.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from passes.ir.comm.index_ranges import largest_message
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Placement, Replicate, Shard, Varying
from passes.rules.loops import Size
from passes.spmd.decompose.registry import SINGLE_BYTES, decomposition_of
from passes.spmd.halo.regions import operand_form, shared_halo_slides, slides_of
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.reshard import gather_order


@dataclass(frozen=True)
class Exchange:
    """One collective of every microbatch, and its dual in the backward.

    Attributes:
        reader: the node that waits for it.
        size: bytes of the whole value, for one microbatch.
        dimension: the mesh dimension whose ranks communicate.
        forward: the collective of the forward; None: nothing is sent.
        backward: the collective of the backward; None: nothing is sent.
        regather: a second collective of the backward: the all_gather of a parameter that is not saved gathered, a block of a ring.
        runs: number of contiguous runs of memory in a rank's shard: more than one are copied into a message or out of it.
        is_stored: whether the value is stored sharded (a parameter, or a cast of one): small ones are coalesced.
        wider: bytes of the gradient that is sent, in bytes of the value: other than 1 for a parameter, or a cast of one, whose gradient is
            summed in another type.
        n_coalesced: number of small stored values that can share a message; 0: unknown.
        value: the node whose value is resharded, for reports; empty where a call sends parts of several.
        n_readers: how many calls read it so: the backward adds their gradients before it sends one.
        is_beside: whether the backward sends it while the reader's weight half is computed.
        is_uneven: whether ranks store parts of different sizes, which share messages with others of that kind alone.
        is_ahead: whether the forward may send it while it computes calls before its reader.
        is_returned: whether the model returns it: the last call stands for its reader.
    """

    reader: str
    size: Size
    dimension: str
    forward: Collective | None
    backward: Collective | None
    regather: Collective | None = None
    runs: Size = 1
    is_stored: bool = False
    n_coalesced: int = 0
    wider: float = 1.0
    value: str = field(default="", compare=False)
    n_readers: int = 1
    is_beside: bool = False
    is_uneven: bool = False
    is_ahead: bool = False
    is_returned: bool = False

    def in_stages(self, count: int) -> Exchange:
        """Return the collective in a model of ``count`` stages: each stage coalesces only its own, equal share of the small ones."""
        return replace(self, n_coalesced=-(-self.n_coalesced // count)) if self.n_coalesced and count > 1 else self

    def seconds(self, size: float, links: GroupLinks, runs: float = 1) -> tuple[float, float]:
        """Return the seconds forward and backward; ``size``: bytes, ``runs``: contiguous runs of memory, as numbers."""
        forward, backward = self._seconds(self.forward, size, links, runs), self._seconds(self.backward, size * self.wider, links, runs)
        return forward, backward + self.regathering(size, links, runs)

    def regathering(self, size: float, links: GroupLinks, runs: float = 1) -> float:
        """Return the seconds of ``regather``; arguments as of ``seconds``."""
        return self._seconds(self.regather, size, links, runs)

    def is_coalesced(self, size: float, links: GroupLinks) -> bool:
        """Return whether a value of ``size`` bytes shares a message with others when it is gathered."""
        return fraction_of_message("all_gather", size, links.n_ranks, self.n_coalesced) < 1

    def _seconds(self, kind: Collective | None, size: float, links: GroupLinks, runs: float) -> float:
        """Return the seconds of one collective: its messages, minus the latency that coalescing saves, and copies to and from them."""
        if kind is None:
            return 0.0
        if kind == "all_to_all":  # of one rank's shard
            size /= links.n_ranks
        can_coalesce = self.is_stored and kind in _COALESCED
        messages = fraction_of_message(kind, size, links.n_ranks, self.n_coalesced) if can_coalesce else 1.0
        saved = (1 - messages) * links.seconds(kind, 0.0) if messages < 1 else 0.0
        return links.seconds(kind, size) - saved + _COPIES[kind][runs > 1 or messages < 1] * links.copying(size)


def fraction_of_message(kind: Collective, size: float, n_ranks: int, n_coalesced: int = 0) -> float:
    """Return the fraction of a coalesced message that a stored value of ``size`` bytes takes; 1 if it is large enough to be sent alone.

    Args:
        n_coalesced: number of values that can share the message; 0: any.
    """
    sent, bundle = (size, BUNDLE_BYTES) if kind == "reduce_scatter" else (size / n_ranks, bytes_of_bundle(n_ranks))
    return 1.0 if sent >= ALONE_BYTES else max(sent / bundle, 1 / n_coalesced if n_coalesced else 0.0)


def with_coalescing_counts(
    exchanges: Sequence[Exchange], graph: fx.Graph, mesh: Mapping[str, int], copies: Callable[[str], Sequence[str]]
) -> Iterator[Exchange]:
    """Set ``Exchange.n_coalesced`` of stored values: the number of small ones of one type along the same mesh dimension.

    Args:
        graph: that computes the values.
        mesh: mesh dimension -> number of ranks.
        copies: the calls of the whole model that a call of a folded block stands for.
    """
    types = {node.name: getattr(node.meta.get("val"), "dtype", None) for node in graph.nodes}
    small = Counter[tuple[str, object, bool]]()
    for each in exchanges:
        if each.is_stored and float(each.size) < ALONE_BYTES * mesh[each.dimension]:
            small[each.dimension, types.get(each.value), each.is_uneven] += len(copies(each.reader))
    for each in exchanges:
        count = small[each.dimension, types.get(each.value), each.is_uneven] if each.is_stored else each.n_coalesced
        yield replace(each, n_coalesced=count)


_COALESCED: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
"""The collectives of small stored values that are coalesced."""

_COPIES: Mapping[Collective, tuple[int, int]] = {
    "all_reduce": (1, 1),
    "all_gather": (0, 1),
    "reduce_scatter": (0, 1),
    "all_to_all": (1, 2),
    "halo_exchange": (0, 0),
}
"""Copies of a message that a rank makes if shards are one contiguous run of memory, and if they are several.

Sums are computed in a copy; contiguous shards are sent without one. The concatenation of a halo is not part of the message.
"""


@dataclass(frozen=True)
class GradientSum:
    """The gradient of a parameter, summed once a step.

    Attributes:
        parameter: its placeholder.
        size: bytes.
        dimension: the mesh dimension that it is summed over.
        held: bytes of the stored gradient.
    """

    parameter: str
    size: float
    dimension: str
    held: float


def shares_of_bucket(sizes: Floats) -> Floats:
    """Return the fraction of a bucket that each gradient takes: gradients are not divided, so it is 1 / n if n of this size fill one."""
    return 1 / np.ceil(BUCKET_BYTES / np.maximum(sizes, 1.0))


class SumSeconds(NamedTuple):
    """The seconds of summing gradients in buckets.

    Attributes:
        sent: of messages.
        computing: of processors, for copies into buckets and the beginnings of messages.
    """

    sent: float
    computing: float

    @property
    def alone(self) -> float:
        """Seconds without overlap."""
        return self.sent + self.computing


def sum_seconds(size: float, buckets: float, largest: float, links: GroupLinks) -> SumSeconds:
    """Return the seconds of summing gradients in buckets.

    Args:
        size: bytes of all gradients.
        buckets: number of buckets that they fill (``shares_of_bucket``).
        largest: fraction of a bucket that the largest gradient fills. The first, small bucket contains at least one gradient.
    """
    more = max(math.ceil(buckets - max(FIRST_BUCKET_BYTES / BUCKET_BYTES, largest) - _ROUNDING), 0)
    beginning = 2 * links.seconds("all_reduce", BUCKET_BYTES) - links.seconds("all_reduce", 2 * BUCKET_BYTES)
    return SumSeconds(links.seconds("all_reduce", size), links.copying(size) + more * links.ring.host_share * beginning)


_ROUNDING = 1e-6
"""Margin for the rounding of sums of fractions, and for gradients of no bytes."""

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
"""(layout of a value, layout that a call needs) -> the collectives, forward and backward."""


def collectives_between(have: Placement, need: Placement) -> tuple[Collective | None, Collective | None]:
    """Return the collectives that reshard a value and, in the backward, its gradient; None if nothing is sent."""
    return (None, None) if have == need else _CHANGES.get((type(have), type(need)), (None, None))


def find_exchanges(
    graph: ModelGraph,
    axes: Axes,
    layouts: Layouts,
    sizes: PartSizes,
    flowing: frozenset[str],
    sent: Mapping[str, float],
    stages: Mapping[str, int] | None = None,
) -> list[Exchange]:
    """Return every collective of a microbatch.

    Args:
        flowing: the nodes that have a gradient.
        sent: parameter -> bytes of its gradient where ranks sum it, in bytes of the parameter.
        stages: call -> the stage that computes it, each of which gathers the parameters that it reads; None: one stage computes all.
    """
    exchanges: dict[object, Exchange] = {}
    readers = defaultdict[object, set[str]](set)
    widths = _widths(graph, layouts, sent)
    for node in graph.graph.nodes:
        if node.name not in layouts.needs:
            continue
        operands = returned_values(node) if node.op == "output" else axes.operands[node.name]
        reads = zip(operands, layouts.needs[node.name], strict=True)
        reshards = (_reshards(operand, need, node.name, layouts, sizes, flowing, widths) for operand, need in reads)
        halos = find_halos(node, axes, layouts, sizes, flowing)
        decomposed = _decomposed_reductions(node, axes, layouts, sizes, flowing)
        ring = _ring_messages(node, axes, layouts, sizes, flowing)
        routed = _routed_rows(node, axes, layouts, sizes, flowing)
        for key, exchange in itertools.chain(*reshards, halos, decomposed, ring, routed):
            stage = stages.get(node.name) if stages is not None and exchange.is_stored else None
            exchanges.setdefault((key, stage), exchange)
            readers[key, stage].add(node.name)
    last = graph.computing_nodes()[-1].name if graph.computing_nodes() else ""
    found = [replace(each, n_readers=len(readers[key])) for key, each in exchanges.items()]
    return [replace(each, reader=last, is_returned=True) if each.reader == "output" else each for each in found]


def _widths(graph: ModelGraph, layouts: Layouts, sent: Mapping[str, float]) -> dict[str, float]:
    """Return parameter, or cast of one -> the bytes of an element of the gradient that is summed, in those of the value."""
    parameter_of = {**{name: name for name in graph.parameters}, **layouts.casts}
    sizes = {node.name: node.meta["val"].dtype.itemsize for node in graph.graph.nodes if node.name in parameter_of}
    return {name: sent[parameter] * sizes[parameter] / sizes[name] for name, parameter in parameter_of.items()}


def _reshards(
    operand: fx.Node,
    need: tuple[Placement, ...],
    reader: str,
    layouts: Layouts,
    sizes: PartSizes,
    flowing: frozenset[str],
    widths: Mapping[str, float],
) -> Iterator[tuple[object, Exchange]]:
    """Yield the collectives that reshard one operand to the layout that a call needs, by a key that equal ones share."""
    whole = layouts.results[operand.name][0]
    order = gather_order(whole, need)
    for index, ((name, _), source, target) in enumerate(zip(layouts.mesh, whole, need, strict=True)):
        gathered = order[: order.index(index)] if index in order else ()
        have = tuple(Replicate() if each in gathered else placement for each, placement in enumerate(whole))
        forward, backward = collectives_between(source, target)
        backward = backward if operand.name in flowing else None
        regather: Collective | None = "all_gather" if backward is not None and operand.name in sizes.gathered_again else None
        if forward is not None or backward is not None:
            size = sizes.whole_along(operand, need if isinstance(target, Shard) else have, index)
            shard = next((placement for placement in (target, source) if isinstance(placement, Shard)), None)
            runs = 1 if shard is None else sizes.runs(operand, need if shard is target else have, index, shard)
            value = layouts.equal_casts.get(operand.name, operand.name)
            key = (value, index, "sum" if isinstance(source, Partial) else target)
            is_stored = (operand.name in layouts.stored or operand.name in layouts.casts) and isinstance(source, Shard)
            wider, is_uneven = widths.get(operand.name, 1.0), is_stored and _is_uneven(operand, source, whole, layouts)
            found = Exchange(reader, size, name, forward, backward, regather, runs, is_stored, wider=wider, value=operand.name)
            yield key, replace(found, is_uneven=is_uneven)


def _is_uneven(operand: fx.Node, source: Placement, stored: tuple[Placement, ...], layouts: Layouts) -> bool:
    """Return whether the ranks of all mesh dimensions that shard the same dimension of a stored value have parts of different sizes."""
    if not isinstance(source, Shard):
        return False
    of_same = (
        count
        for (_, count), each in zip(layouts.mesh, stored, strict=True)
        if isinstance(each, Shard) and each.dimension == source.dimension
    )
    return bool(operand.meta["val"].shape[source.dimension] % math.prod(of_same))


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
        operand = axes.operands[node.name][place]
        (part,) = sizes.operands(node)[operand]
        backward: Collective | None = "halo_exchange" if operand.name in flowing else None
        key = (operand.name, slide.over, slide.window.dimension, slide.wanted)
        size = part.bytes * largest_message(slide.owned, slide.wanted) / max(slide.owned)
        yield key, Exchange(node.name, size, slide.over, "halo_exchange", backward)


def _decomposed_reductions(
    node: fx.Node, axes: Axes, layouts: Layouts, sizes: PartSizes, flowing: frozenset[str]
) -> Iterator[tuple[object, Exchange]]:
    """Yield the all_reduces of a decomposed reduction over a sharded axis: statistics for each row of its first operand."""
    for index, factor in reduced_in_parts(node.name, axes, layouts):
        decomposition = decomposition_of(node, axes.loops[node.name].factors[factor].name)
        if decomposition is None or not isinstance(node.meta["val"], Tensor):
            continue
        name, n_reduced = layouts.mesh[index][0], cast(Size, 1)
        for loop, axes_of_loop in zip(axes.loops[node.name].factors, axes.factors[node.name], strict=True):
            for axis in axes_of_loop if loop.reduction == "whole" else ():
                n_reduced = n_reduced * sizes.axis(axis, ())
        operand = axes.operands[node.name][0]
        row_bytes = sizes.whole_along(operand, layouts.needs[node.name][0], index) / n_reduced  # one number for each row
        if decomposition.widened:
            row_bytes = row_bytes * max(SINGLE_BYTES // operand.meta["val"].dtype.itemsize, 1)
        for place, numbers in enumerate(decomposition.sends):
            yield (node.name, index, place), Exchange(node.name, row_bytes * numbers, name, "all_reduce", None)
        for place, numbers in enumerate(decomposition.returns if node.name in flowing else ()):
            yield (node.name, index, "back", place), Exchange(node.name, row_bytes * numbers, name, None, "all_reduce")


def _ring_messages(
    node: fx.Node, axes: Axes, layouts: Layouts, sizes: PartSizes, flowing: frozenset[str]
) -> Iterator[tuple[object, Exchange]]:
    """Yield the messages of keys and values that go round the ranks: in the backward once more, with their gradients."""
    ring = layouts.rings.get(node.name)
    if ring is None:
        return
    (name, count), parts = layouts.mesh[ring.dimension], sizes.operands(node)
    query, *blocks = axes.operands[node.name][:3]
    for place, operand in enumerate(blocks):
        (part,) = parts[operand]
        back: Collective | None = "halo_exchange" if operand.name in flowing else None
        for step in range(1, count):
            yield (node.name, "ring", place, step), Exchange(node.name, part.bytes, name, "halo_exchange", back, back)
    for place, operand in enumerate((query, *blocks, query) if ring.is_zigzag else ()):  # the result has the size of the queries
        (part,) = parts[operand]
        back = "halo_exchange" if operand.name in flowing else None
        yield (node.name, "zigzag", place), Exchange(node.name, part.bytes, name, "halo_exchange", back)


def _routed_rows(
    node: fx.Node, axes: Axes, layouts: Layouts, sizes: PartSizes, flowing: frozenset[str]
) -> Iterator[tuple[object, Exchange]]:
    """Yield the rows that go to the ranks of their experts for a call, and those that come back for a reader elsewhere."""
    operands = returned_values(node) if node.op == "output" else axes.operands[node.name]
    here = layouts.routes.get(node.name)
    for operand, need in zip(operands, layouts.needs[node.name], strict=True):
        there = layouts.routes.get(operand.name)
        if there == here:
            continue
        goes = here if here is not None and has_rows_of(axes, operand.name, here.group) else None
        for route, direction in ((there, "back"), (goes, "there")):
            if route is not None:
                size = sizes.whole_along(operand, need, route.dimension)
                back: Collective | None = "all_to_all" if operand.name in flowing else None
                name, _ = layouts.mesh[route.dimension]
                yield (operand.name, route, direction), Exchange(node.name, size, name, "all_to_all", back)


def reduced_in_parts(node: str, axes: Axes, layouts: Layouts) -> Iterator[tuple[int, int]]:
    """Yield (index of a mesh dimension, loop number) if the dimension shards a loop over which the call reduces internally."""
    for index, cut in enumerate(layouts.cuts.get(node, ())):
        if cut is not None and axes.loops[node].factors[cut.factor].reduction == "whole":
            yield index, cut.factor


def find_gradient_sums(
    layouts: Layouts, size_of: Mapping[str, Size], flowing: frozenset[str], sent: Mapping[str, float]
) -> list[GradientSum]:
    """Return the gradients that are summed once a step: those of parameters that every rank uses on a part of the work.

    Args:
        sent: parameter -> bytes of its gradient where ranks sum it, in bytes of the parameter.
    """
    return [
        GradientSum(name, float(size_of[name]) * sent[name], layouts.mesh[index][0], float(size_of[name]))
        for name, indices in layouts.varying.items()
        for index in sorted(indices)
        if name in flowing
    ]
