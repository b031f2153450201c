"""What the ranks along a mesh dimension read of an operand whose loop slides over it: the halo of a call.

A convolution, kernel 3, padding 1, height 16 over two ranks:

    rank 0   makes 0 .. 7      reads _1 0:9      has 0 .. 7
    rank 1   makes 8 .. 15     reads 7:16 _1     has 8 .. 15

Two dimensions of space are fetched one after the other: the second fetch takes with it what the first has brought, so corners come, too.

Where ranks compute more than their own part of a value (``passes.spmd.halo.wide``), it lies in intervals that overlap. A call that reads no
more than that finds it all there; one that reads the operand element by element slides over it, too, by a window of one element.
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
from passes.spmd.propagate import Cut, Intervals, Layouts

__all__ = ["Holding", "Slide", "fetch_of", "held_for", "own_part_of", "slides_of", "space_of"]

Holding: TypeAlias = Literal["own", "computed", "fetched"]
"""Of a value: a rank's own part; that and the overlap that the rank has computed; that and what was fetched once for several readers."""


@dataclass(frozen=True)
class Slide:
    """One loop that slides and is cut, and one operand of it.

    Attributes:
        over: the mesh dimension.
        place: this rank's along it.
        window: what slides where.
        owned: how many elements of the operand each rank has; None where each has all.
        wanted: what each reads (``passes.ir.comm.index_ranges``), counted from the first element.
        parts: for each rank the first step of its part of the loop, and the one behind the last.
        held: for each rank the interval of the operand that it has, where they overlap; None where one begins at the end of another.
    """

    over: str
    place: int
    window: Window
    owned: tuple[int, ...] | None
    wanted: str
    parts: Intervals
    held: Intervals | None = None

    @property
    def own(self) -> int:
        """How many elements this rank has."""
        return self.window.reach.size if self.owned is None else self.owned[self.place]

    @property
    def size(self) -> int:
        """How many elements this rank reads, padding counted."""
        return length(from_text(self.wanted)[self.place])

    @property
    def skip(self) -> int:
        """How many results stand before this rank's own."""
        return self.window.reach.skipped(self.parts[self.place][0])

    @property
    def count(self) -> int:
        """How many steps this rank has."""
        start, stop = self.parts[self.place]
        return stop - start

    @property
    def first(self) -> int:
        """The first element that this rank reads."""
        return from_text(self.wanted)[self.place][0].start

    @property
    def is_local(self) -> bool:
        """Whether every rank reads its own elements alone."""
        if self.owned is None or self.held is not None:
            return True
        read = segments(self.owned, self.wanted)
        return not any(copies for reader, each in enumerate(read) for owner, copies in enumerate(each) if owner != reader)

    @property
    def local_wanted(self) -> str:
        """What each rank reads, counted from its own first element; where ``is_local``."""
        if self.owned is None:
            return self.wanted
        starts = [start for start, _ in self.held or _intervals(self.owned)]
        return to_text(_moved(runs, start) for runs, start in zip(from_text(self.wanted), starts, strict=True))

    @property
    def is_as_it_lies(self) -> bool:
        """Whether every rank reads what it has, as it has it."""
        whole = None if self.owned is None else to_text((Run(0, size),) for size in self.owned)
        return self.is_local and self.local_wanted == whole


def _moved(runs: Runs, start: int) -> Runs:
    return tuple(Run(run.start - start * (run.step != 0), run.count, run.step) for run in runs)


def slides_of(name: str, axes: Axes, layouts: Layouts, extents: Extents) -> tuple[Slide, ...]:
    """The slides of a call, in the order in which they are fetched."""
    if name not in axes.loops or not (axes.loops[name].windows or layouts.wide):
        return ()
    found = []
    for index, cut in enumerate(layouts.cuts[name]):
        for window in _windows(name, index, axes, layouts):
            assert cut is not None
            parts = _steps(name, index, cut, axes, layouts, extents)
            place = layouts.needs[name][window.operand][index]
            owned = held = None
            if isinstance(place, Shard):
                held = held_for(name, window.operand, axes, layouts, extents)[1][index]
                inside = _inner(extents, axes.under(name, window))
                sizes = _parts(extents, place.axis, index)
                owned = tuple(size * inside for size in sizes) if held is None else tuple(stop - start for start, stop in held)
            wanted = to_text(window.reach.reads(start, stop) for start, stop in parts)
            found.append(Slide(extents.mesh[index][0], extents.coordinate[index], window, owned, wanted, parts, held))
    return tuple(found)


def held_for(name: str, place: int, axes: Axes, layouts: Layouts, extents: Extents) -> tuple[Holding, tuple[Intervals | None, ...]]:
    """Return the form in which a call reads an operand, and the intervals of it that ranks have; None where these are their own parts.

    It is the form with overlap if the call reads the operand in its layout, and no more of it than each rank has.
    """
    operand = axes.operands[name][place].name
    if layouts.needs[name][place] == layouts.results[operand][0]:
        if operand in layouts.wide and _is_enough(layouts.wide[operand], name, place, axes, layouts, extents):
            return "computed", layouts.wide[operand]
        if operand in layouts.fetched and _is_enough(layouts.fetched[operand], name, place, axes, layouts, extents):
            return "fetched", layouts.fetched[operand]
    return "own", (None,) * len(layouts.mesh)


def _is_enough(held: Sequence[Intervals | None], name: str, place: int, axes: Axes, layouts: Layouts, extents: Extents) -> bool:
    """Whether ranks have all that they read of an operand."""
    for index, intervals in enumerate(held):
        if intervals is None:
            continue
        cut = layouts.cuts[name][index]
        window = next((each for each in _windows(name, index, axes, layouts) if each.operand == place), None)
        if cut is None or window is None:
            return False
        steps = _steps(name, index, cut, axes, layouts, extents)
        if not all(_holds(own, window.reach.reads(*part)) for own, part in zip(intervals, steps, strict=True)):
            return False
    return True


def _holds(own: tuple[int, int], runs: Runs) -> bool:
    """Whether an interval contains all elements of runs; padding (step 0) is no element."""
    ends = [end for run in runs if run.step for end in (run.start, run.start + run.step * (run.count - 1))]
    return all(own[0] <= end < own[1] for end in ends)


def own_part_of(name: str, layouts: Layouts, extents: Extents) -> tuple[Slide, ...]:
    """Return the slides that slice a value computed with overlap to each rank's own part."""
    return _between(name, layouts.wide[name], layouts, extents, to_own=True)


def fetch_of(name: str, layouts: Layouts, extents: Extents) -> tuple[Slide, ...]:
    """Return the slides that fetch the halo of a value that several calls share."""
    return _between(name, layouts.fetched[name], layouts, extents, to_own=False)


def _between(name: str, overlapping: Sequence[Intervals | None], layouts: Layouts, extents: Extents, *, to_own: bool) -> tuple[Slide, ...]:
    """Return slides from overlapping intervals to own parts (``to_own``), or from own parts to overlapping intervals."""
    found = []
    for index, intervals in enumerate(overlapping):
        place = layouts.results[name][0][index]
        if intervals is not None:
            assert isinstance(place, Shard)
            own = _intervals(_parts(extents, place.axis, index))
            window = Window(0, place.dimension, None, Reach(STEP, STEP, own[-1][1]))
            parts, held = (own, intervals) if to_own else (intervals, None)
            owned = tuple(stop - start for start, stop in held or own)
            wanted = to_text(window.reach.reads(start, stop) for start, stop in parts)
            found.append(Slide(extents.mesh[index][0], extents.coordinate[index], window, owned, wanted, parts, held))
    return tuple(found)


def _windows(name: str, index: int, axes: Axes, layouts: Layouts) -> Iterator[Window]:
    """What slides over operands where a loop is cut; where somebody computes more than its own part, also what runs over them."""
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
    """For each rank along a mesh dimension, its part of the loop that is cut."""
    intervals = layouts.wide[name][index] if name in layouts.wide else None
    if intervals is not None:
        return intervals
    inner = _inner(extents, axes.factors[name][cut.factor])
    return _intervals([size * inner for size in _parts(extents, cut.axis, index)])


def space_of(loops: Loops, slides: Sequence[Slide]) -> tuple[Along, ...]:
    """All dimensions that windows slide over, those that are cut and those that are not."""
    found = []
    rank = len(loops.operands[0])
    for window in loops.windows:
        slide = next((each for each in slides if each.window == window), None)
        steps = 1 if window.factor is None else loops.factors[window.factor].size
        assert isinstance(steps, int)
        start, stop = (0, steps) if slide is None else slide.parts[slide.place]
        first = 0 if slide is None else slide.first
        found.append(Along(window.dimension - rank, window.reach, start, stop, steps, first, slide is not None))
    return tuple(found)


def _parts(extents: Extents, axis: int, index: int) -> list[int]:
    return [int(size) for size in extents.parts(axis, index, (None,) * len(extents.mesh))]


def _inner(extents: Extents, axes: Sequence[int]) -> int:
    """Return how many elements of a dimension one step of its outermost axis spans."""
    return math.prod(int(extents.sizes[axis]) for axis in axes[1:])


def _intervals(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return adjacent intervals of the given sizes: (3, 2) gives (0, 3), (3, 5)."""
    return tuple((sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes)))
