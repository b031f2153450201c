"""Overlap the halo exchange: compute interior elements first, and the borders when the halo has arrived.

A convolution, kernel 3, padding 1, height 16 over two ranks; rank 0 has 0 .. 7:

    halo = halo_exchange(x)        _1 0:2 6:9      the operand of both borders, in one message
    inner = conv2d(x)              1 .. 6          during the exchange
    first = conv2d(halo[0:3])      0
    last = conv2d(halo[3:6])       7
    result = cat(first, inner, last)

The backward runs in reverse: borders first, whose gradients are exchanged while that of the interior is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.analysis.axes import Axes
from passes.ir.comm.index_ranges import Runs, length, to_text
from passes.rules.loops import Loops
from passes.spmd.halo.regions import Slide, slides_of
from passes.spmd.local_shapes import Extents
from passes.spmd.propagate.layouts import Intervals, Layouts


@dataclass(frozen=True)
class Interior:
    """One call in three pieces: the border before the interior (0), the interior (1) and the border after it (2).

    Attributes:
        slide: the halo exchange.
        dimension: the dimension of the result that is divided.
        pieces: for each piece, the interval of steps on each rank.
    """

    slide: Slide
    dimension: int
    pieces: tuple[Intervals, Intervals, Intervals]

    @property
    def share(self) -> float:
        """Return the smallest fraction of its steps that a rank computes during the exchange."""
        pairs = zip(self.pieces[1], self.slide.parts, strict=True)
        return min((interior[1] - interior[0]) / (whole[1] - whole[0]) for interior, whole in pairs)

    @property
    def border_slide(self) -> Slide:
        """Return the slide that fetches the operands of both borders, one after the other."""
        borders = zip(self.pieces[0], self.pieces[2], strict=True)
        return replace(self.slide, wanted=to_text((*self._reads(before), *self._reads(after)) for before, after in borders))

    def piece_slide(self, piece: int) -> Slide:
        """Return the slide of one piece."""
        return replace(self.slide, parts=self.pieces[piece])

    def _reads(self, steps: tuple[int, int]) -> Runs:
        return self.slide.window.reach.reads(*steps) if steps[0] < steps[1] else ()

    def local_interval(self, piece: int) -> tuple[int, int]:
        """Return the interval that a piece reads: of this rank's own elements (1), or of those that ``border_slide`` fetches (0, 2)."""
        place = self.slide.place
        if piece == 1:
            (run,) = self._reads(self.pieces[1][place])
            start = run.start - sum((self.slide.owned or ())[:place])
            return start, start + run.count
        sizes = [length(self._reads(steps[place])) for steps in self.pieces]
        return (0, sizes[0]) if piece == 0 else (sizes[0], sizes[0] + sizes[2])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return for each piece on this rank: its number of steps, and the interval that it reads."""
        steps = [piece[self.slide.place] for piece in self.pieces]
        return tuple(number for piece, (start, stop) in enumerate(steps) for number in (stop - start, *self.local_interval(piece)))


def interior_of(loops: Loops, slides: Sequence[Slide]) -> Interior | None:
    """Return the interior of a call, between the borders of its last halo exchange; None if the call is not computed in pieces.

    It is not if there is no exchange; if a shard needs a decomposition, or a window slides over one of two factors of a dimension; if the
    call has several results, or none with a dimension of the window's loop alone; or if some rank has no interior, or no border.
    """
    exchanged = [slide for slide in slides if not slide.is_local]
    can_be_split = not any(slide.window.reach.written or slide.window.part is not None for slide in slides)
    if not exchanged or not can_be_split or len(loops.results) != 1:
        return None
    slide = exchanged[-1]
    dimensions = [index for index, factors in enumerate(loops.results[0]) if factors == (slide.window.factor,)]
    n_ranks = len(slide.parts)
    interiors = tuple(filter(None, (_interior_steps(slide, rank) for rank in range(n_ranks))))
    if len(dimensions) != 1 or len(interiors) < n_ranks:
        return None
    if any(interior == part for interior, part in zip(interiors, slide.parts, strict=True)):  # a rank without a border
        return None
    before = tuple((start, first) for (start, _), (first, _) in zip(slide.parts, interiors, strict=True))
    after = tuple((end, stop) for (_, stop), (_, end) in zip(slide.parts, interiors, strict=True))
    return Interior(slide, dimensions[0], (before, interiors, after))


def _interior_steps(slide: Slide, rank: int) -> tuple[int, int] | None:
    """Return the interval of a rank's steps that read its own elements alone, in order; None if there are none."""
    assert slide.owned is not None
    low, reach = sum(slide.owned[:rank]), slide.window.reach
    high = low + slide.owned[rank]

    def is_own(start: int, stop: int) -> bool:
        runs = reach.reads(start, stop)
        return len(runs) == 1 and runs[0].step == 1 and low <= runs[0].start and runs[0].start + runs[0].count <= high

    start, stop = slide.parts[rank]
    while start < stop and not is_own(start, start + 1):
        start += 1
    while start < stop and not is_own(stop - 1, stop):
        stop -= 1
    return (start, stop) if start < stop and is_own(start, stop) else None


def window_offsets(axes: Axes, layouts: Layouts, extents: Extents) -> tuple[int, ...]:
    """Return the numbers, apart from sizes of shards, in which a rank's graph differs from another's.

    For each window: the elements read, the surplus results, the results, and, for a decomposition, the first step. For a call in
    pieces: their offsets.
    """
    offsets: list[int] = []
    for name, loops in axes.loops.items() if axes.has_windows or layouts.wide else ():
        if not (loops.windows or layouts.wide):
            continue
        slides = slides_of(name, axes, layouts, extents)
        for slide in slides:
            offsets += [slide.size, slide.skip, slide.count, slide.parts[slide.place][0] if slide.window.reach.written else 0]
        interior = interior_of(loops, slides) if name in layouts.overlapped else None
        if interior is not None:
            offsets += interior.offsets
    return tuple(offsets)
