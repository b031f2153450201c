"""What the ranks along a mesh dimension read of an operand whose loop slides over it: the halo of a call.

A convolution, kernel 3, padding 1, height 16 over two ranks:

    rank 0   makes 0 .. 7      reads _1 0:9      has 0 .. 7
    rank 1   makes 8 .. 15     reads 7:16 _1     has 8 .. 15

Two dimensions of space are fetched one after the other: the second fetch takes with it what the first has brought, so corners come, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.axes import Axes
from passes.extents import Extents
from passes.inside.windows import Along
from passes.ir.layout import Shard
from passes.ir.runs import Run, Runs, from_text, length, segments, to_text
from passes.layouts import Layouts
from passes.rules.loops import Loops
from passes.rules.windows import Window

__all__ = ["Slide", "slides_of", "space_of", "variety"]


@dataclass(frozen=True)
class Slide:
    """One loop that slides and is cut, and one operand of it.

    Attributes:
        over: the mesh dimension.
        place: this rank's along it.
        window: what slides where.
        owned: how many elements of the operand each rank has; None where each has all.
        wanted: what each reads (``passes.ir.runs``), counted from the first element.
        parts: for each rank the first step of its part of the loop, and the one behind the last.
    """

    over: str
    place: int
    window: Window
    owned: tuple[int, ...] | None
    wanted: str
    parts: tuple[tuple[int, int], ...]

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
        if self.owned is None:
            return True
        read = segments(self.owned, self.wanted)
        return not any(copies for reader, each in enumerate(read) for owner, copies in enumerate(each) if owner != reader)

    @property
    def local_wanted(self) -> str:
        """What each rank reads, counted from its own first element; where ``is_local``."""
        if self.owned is None:
            return self.wanted
        starts = [sum(self.owned[:rank]) for rank in range(len(self.owned))]
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
    loops = axes.loops.get(name)
    if loops is None or not loops.windows:
        return ()
    found = []
    for index, cut in enumerate(layouts.cuts[name]):
        for window in loops.windows if cut is not None else ():
            if cut is None or window.factor != cut.factor:
                continue
            inner = _inner(extents, axes.factors[name][cut.factor])
            parts = _intervals([size * inner for size in _parts(extents, cut.axis, index)])
            operand = axes.operands[name][window.operand]
            place = layouts.needs[name][window.operand][index]
            owned = None
            if isinstance(place, Shard):
                inside = _inner(extents, axes.of(operand.name)[window.dimension])
                owned = tuple(size * inside for size in _parts(extents, place.axis, index))
            wanted = to_text(window.reach.reads(start, stop) for start, stop in parts)
            found.append(Slide(extents.mesh[index][0], extents.coordinate[index], window, owned, wanted, parts))
    return tuple(found)


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
    """How much the outermost axis of a dimension holds of it in each of its steps."""
    result = 1
    for axis in axes[1:]:
        result *= int(extents.sizes[axis])
    return result


def _intervals(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes)))


def variety(axes: Axes, layouts: Layouts, extents: Extents) -> tuple[int, ...]:
    """What else than sizes of parts makes one rank's graph unlike another's: how much it reads, what it cuts off, where it starts."""
    found: list[int] = []
    for name, loops in axes.loops.items():
        if loops.windows:
            for slide in slides_of(name, axes, layouts, extents):
                found += [slide.size, slide.skip, slide.parts[slide.place][0] if slide.window.reach.written else 0]
    return tuple(found)
