"""Find the elements that each rank reads of an operand under a sharded window: its own part and the halo.

A convolution, kernel 3, padding 1, height 16 over two ranks (``_1``: one element of padding):

    rank 0   computes 0 .. 7      reads _1 0:9      has 0 .. 7
    rank 1   computes 8 .. 15     reads 7:16 _1     has 8 .. 15

Halos of two dimensions are fetched one after the other: the second fetch includes the rows of the first, hence the corners.

If ranks compute more than their own part of a value (``passes.spmd.halo.wide``), their intervals overlap. A call that reads no more than
its rank's interval needs no exchange; an elementwise call then has a window of one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from passes.analysis.axes import Axes
from passes.ir.comm.index_ranges import Run, Runs, from_text, length, segments, to_text
from passes.ir.layout import Shard
from passes.ir.mesh import TILES
from passes.rules.loops import Loops
from passes.rules.window import STEP, Reach, Window
from passes.spmd.decompose.pooling_resize import Along
from passes.spmd.local_shapes import Extents
from passes.spmd.propagate.layouts import Cut, Intervals, Layouts

OperandForm: TypeAlias = Literal["own", "computed", "fetched"]
"""The form of a value on a rank: its own part; with the overlap that it computes; with the halo fetched once for several readers."""


@dataclass(frozen=True)
class Slide:
    """One sharded window over one operand, along one mesh dimension.

    Attributes:
        over: the mesh dimension.
        place: this rank's coordinate along it.
        window: the dimension of the operand, and the loop whose window slides over it.
        owned: the number of elements of the operand on each rank; None if each has all.
        wanted: the elements that each rank reads (``passes.ir.comm.index_ranges``), counted from the first of the whole dimension.
        parts: the interval of steps of the loop that each rank computes.
        intervals: the interval of the operand that each rank has, if these overlap; else None.
    """

    over: str
    place: int
    window: Window
    owned: tuple[int, ...] | None
    wanted: str
    parts: Intervals
    intervals: Intervals | None = None

    @property
    def own(self) -> int:
        """Return the number of elements that this rank has."""
        return self.window.reach.size if self.owned is None else self.owned[self.place]

    @property
    def size(self) -> int:
        """Return the number of elements that this rank reads, with padding."""
        return length(from_text(self.wanted)[self.place])

    @property
    def skip(self) -> int:
        """Return the number of surplus results before this rank's own."""
        return self.window.reach.skipped(self.parts[self.place][0])

    @property
    def count(self) -> int:
        """Return the number of steps that this rank computes."""
        start, stop = self.parts[self.place]
        return stop - start

    @property
    def first(self) -> int:
        """Return the first element that this rank reads."""
        return from_text(self.wanted)[self.place][0].start

    @property
    def is_local(self) -> bool:
        """Return whether every rank has all elements that it reads."""
        if self.owned is None or self.intervals is not None:
            return True
        reads = segments(self.owned, self.wanted)
        return not any(copies for reader, by_owner in enumerate(reads) for owner, copies in enumerate(by_owner) if owner != reader)

    @property
    def local_wanted(self) -> str:
        """Return ``wanted`` of an ``is_local`` slide, counted from the first element of each rank's own."""
        if self.owned is None:
            return self.wanted
        starts = [start for start, _ in self.intervals or _intervals(self.owned)]
        return to_text(_shifted(runs, start) for runs, start in zip(from_text(self.wanted), starts, strict=True))

    @property
    def is_identity(self) -> bool:
        """Return whether every rank reads all elements that it has, in order and without padding."""
        whole = None if self.owned is None else to_text((Run(0, size),) for size in self.owned)
        return self.is_local and self.local_wanted == whole


def _shifted(runs: Runs, start: int) -> Runs:
    """Return runs counted from ``start``; padding (step 0) stays unchanged."""
    return tuple(Run(run.start - start * (run.step != 0), run.count, run.step) for run in runs)


def slides_of(name: str, axes: Axes, layouts: Layouts, extents: Extents) -> tuple[Slide, ...]:
    """Return the slides of a call, in the order in which they are fetched."""
    if name not in axes.loops or not (axes.loops[name].windows or layouts.wide):
        return ()
    slides = []
    for index, cut in enumerate(layouts.cuts[name]):
        for window in _windows(name, index, axes, layouts):
            assert cut is not None
            parts = _steps(name, index, cut, axes, layouts, extents)
            placement = layouts.needs[name][window.operand][index]
            owned = intervals = None
            if isinstance(placement, Shard):
                intervals = operand_form(name, window.operand, axes, layouts, extents)[1][index]
                inner = _inner(extents, axes.under(name, window))
                sizes = _parts(extents, placement.axis, index)
                owned = tuple(size * inner for size in sizes) if intervals is None else tuple(stop - start for start, stop in intervals)
            wanted = to_text(window.reach.reads(start, stop) for start, stop in parts)
            slides.append(Slide(extents.mesh[index][0], extents.coordinate[index], window, owned, wanted, parts, intervals))
    return tuple(slides)


def operand_form(name: str, place: int, axes: Axes, layouts: Layouts, extents: Extents) -> tuple[OperandForm, tuple[Intervals | None, ...]]:
    """Return the form in which a call reads operand ``place``, and the intervals of it that ranks have; None: their own parts.

    It is a form with overlap if the call reads the operand in its layout, and on no rank more of it than the overlap.
    """
    operand = axes.operands[name][place].name
    if layouts.needs[name][place] == layouts.results[operand][0]:
        if operand in layouts.wide and _is_enough(layouts.wide[operand], name, place, axes, layouts, extents):
            return "computed", layouts.wide[operand]
        if operand in layouts.fetched and _is_enough(layouts.fetched[operand], name, place, axes, layouts, extents):
            return "fetched", layouts.fetched[operand]
    return "own", (None,) * len(layouts.mesh)


def _is_enough(overlapping: Sequence[Intervals | None], name: str, place: int, axes: Axes, layouts: Layouts, extents: Extents) -> bool:
    """Return whether ranks have all elements that they read of operand ``place`` in overlapping intervals."""
    for index, intervals in enumerate(overlapping):
        if intervals is None:
            continue
        cut = layouts.cuts[name][index]
        window = next((each for each in _windows(name, index, axes, layouts) if each.operand == place), None)
        if cut is None or window is None:
            return False
        steps = _steps(name, index, cut, axes, layouts, extents)
        if not all(_contains(interval, window.reach.reads(*part)) for interval, part in zip(intervals, steps, strict=True)):
            return False
    return True


def _contains(interval: tuple[int, int], runs: Runs) -> bool:
    """Return whether an interval contains all elements of runs; padding (step 0) is no element."""
    ends = [end for run in runs if run.step for end in (run.start, run.start + run.step * (run.count - 1))]
    return all(interval[0] <= end < interval[1] for end in ends)


def own_part_slides(name: str, layouts: Layouts, extents: Extents) -> tuple[Slide, ...]:
    """Return the slides that slice a value computed with overlap to each rank's own part."""
    return _to_slides(name, layouts.wide[name], layouts, extents, to_own=True)


def shared_halo_slides(name: str, layouts: Layouts, extents: Extents) -> tuple[Slide, ...]:
    """Return the slides that fetch the halo of a value that several calls share."""
    return _to_slides(name, layouts.fetched[name], layouts, extents, to_own=False)


def _to_slides(
    name: str, overlapping: Sequence[Intervals | None], layouts: Layouts, extents: Extents, *, to_own: bool
) -> tuple[Slide, ...]:
    """Return slides from overlapping intervals to own parts (``to_own``), or from own parts to overlapping intervals."""
    slides = []
    for index, intervals in enumerate(overlapping):
        placement = layouts.results[name][0][index]
        if intervals is not None:
            assert isinstance(placement, Shard)
            own = _intervals(_parts(extents, placement.axis, index))
            window = Window(0, placement.dimension, None, Reach(STEP, STEP, own[-1][1]))
            parts, available = (own, intervals) if to_own else (intervals, None)
            owned = tuple(stop - start for start, stop in available or own)
            wanted = to_text(window.reach.reads(start, stop) for start, stop in parts)
            slides.append(Slide(extents.mesh[index][0], extents.coordinate[index], window, owned, wanted, parts, available))
    return tuple(slides)


def _windows(name: str, index: int, axes: Axes, layouts: Layouts) -> Iterator[Window]:
    """Yield the windows of the loop that a mesh dimension cuts; for operands or results with overlap also windows of one element."""
    cut, loops = layouts.cuts[name][index], axes.loops[name]
    if cut is None:
        return
    yield from (window for window in loops.windows if window.factor == cut.factor)
    for place, (operand, dimensions) in enumerate(zip(axes.operands[name], loops.operands, strict=True)):
        is_wide = name in layouts.wide or operand.name in layouts.wide
        for dimension, factors in enumerate(dimensions):
            if is_wide and factors == (cut.factor,) and layouts.mesh[index][0] in TILES:
                size = math.prod(int(axes.sizes[axis]) for axis in axes.of(operand.name)[dimension])
                yield Window(place, dimension, cut.factor, Reach(STEP, STEP, size))


def _steps(name: str, index: int, cut: Cut, axes: Axes, layouts: Layouts, extents: Extents) -> Intervals:
    """Return the interval of steps of the cut loop that each rank along a mesh dimension computes."""
    intervals = layouts.wide[name][index] if name in layouts.wide else None
    if intervals is not None:
        return intervals
    inner = _inner(extents, axes.factors[name][cut.factor])
    return _intervals([size * inner for size in _parts(extents, cut.axis, index)])


def window_dimensions(loops: Loops, slides: Sequence[Slide]) -> tuple[Along, ...]:
    """Return all dimensions over which windows slide, sharded or not, with the steps that this rank computes."""
    dimensions = []
    rank = len(loops.operands[0])
    for window in loops.windows:
        slide = next((each for each in slides if each.window == window), None)
        steps = 1 if window.factor is None else loops.factors[window.factor].size
        assert isinstance(steps, int)
        start, stop = (0, steps) if slide is None else slide.parts[slide.place]
        first = 0 if slide is None else slide.first
        dimensions.append(Along(window.dimension - rank, window.reach, start, stop, steps, first, slide is not None))
    return tuple(dimensions)


def _parts(extents: Extents, axis: int, index: int) -> list[int]:
    """Return the sizes of the shards of an axis over one mesh dimension alone."""
    return [int(size) for size in extents.parts(axis, index, (None,) * len(extents.mesh))]


def _inner(extents: Extents, axes: Sequence[int]) -> int:
    """Return how many elements of a dimension one step of its outermost axis spans."""
    return math.prod(int(extents.sizes[axis]) for axis in axes[1:])


def _intervals(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return adjacent intervals of the given sizes: (3, 2) gives (0, 3), (3, 5)."""
    return tuple((sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes)))
