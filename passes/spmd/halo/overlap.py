"""Overlap the halo exchange: compute interior elements first, and the borders when the halo has arrived.

A convolution, kernel 3, padding 1, height 16 over two ranks; rank 0 has 0 .. 7:

    halo = halo_exchange(x)        _1 0:2 6:9      what both borders read, in one message
    inner = conv2d(x)              1 .. 6          while it moves
    first = conv2d(halo[0:3])      0
    last = conv2d(halo[3:6])       7
    result = cat(first, inner, last)

The gradient goes the same way back: borders first, whose gradients move while that of the interior is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.analysis.axes import Axes
from passes.ir.comm.index_ranges import Runs, length, to_text
from passes.rules.loops import Loops
from passes.spmd.halo.regions import Slide, slides_of
from passes.spmd.local_shapes import Extents
from passes.spmd.propagate import Intervals, Layouts

__all__ = ["Interior", "interior_of", "variety"]


@dataclass(frozen=True)
class Interior:
    """One call in pieces.

    Attributes:
        slide: what brings its halo.
        dimension: of the result.
        pieces: the steps in front of the interior, of the interior, and behind it, each for all ranks.
    """

    slide: Slide
    dimension: int
    pieces: tuple[Intervals, Intervals, Intervals]

    @property
    def share(self) -> float:
        """The least share of its steps that a rank computes meanwhile."""
        pairs = zip(self.pieces[1], self.slide.parts, strict=True)
        return min((inner[1] - inner[0]) / (whole[1] - whole[0]) for inner, whole in pairs)

    @property
    def of_borders(self) -> Slide:
        """What brings the operand of both borders, one behind the other."""
        before, _, after = self.pieces
        borders = zip(before, after, strict=True)
        return replace(self.slide, wanted=to_text((*self._reads(one), *self._reads(other)) for one, other in borders))

    def _reads(self, steps: tuple[int, int]) -> Runs:
        return self.slide.window.reach.reads(*steps) if steps[0] < steps[1] else ()

    def read(self, piece: int) -> tuple[int, int]:
        """Where what a piece reads stands on this rank: in its own elements, that of a border in what was brought."""
        place = self.slide.place
        if piece == 1:
            (run,) = self._reads(self.pieces[1][place])
            start = run.start - sum((self.slide.owned or ())[:place])
            return start, start + run.count
        sizes = [length(self._reads(steps[place])) for steps in self.pieces]
        return (0, sizes[0]) if piece == 0 else (sizes[0], sizes[0] + sizes[2])

    def of_piece(self, piece: int) -> Slide:
        """The slide of a piece alone."""
        return replace(self.slide, parts=self.pieces[piece])

    @property
    def places(self) -> tuple[int, ...]:
        """Of each piece on this rank: how many steps it has, and where what it reads starts and ends."""
        steps = [piece[self.slide.place] for piece in self.pieces]
        return tuple(number for piece, (start, stop) in enumerate(steps) for number in (stop - start, *self.read(piece)))


def interior_of(loops: Loops, slides: Sequence[Slide]) -> Interior | None:
    """The interior of a call, between the borders of the last exchange that it waits for; None where it is computed in one piece.

    That is where nothing is exchanged; where a part is another operation, or slides over one of two factors of a dimension; where the
    windows slide along no one dimension of a single result; and where some rank has no interior, or no border.
    """
    exchanged = [slide for slide in slides if not slide.is_local]
    can_be_split = not any(slide.window.reach.written or slide.window.part is not None for slide in slides)
    if not exchanged or not can_be_split or len(loops.results) != 1:
        return None
    slide = exchanged[-1]
    dimensions = [index for index, factors in enumerate(loops.results[0]) if factors == (slide.window.factor,)]
    inside = [_inside(slide, rank) for rank in range(len(slide.parts))]
    interiors = tuple(each for each in inside if each is not None)
    if len(dimensions) != 1 or len(interiors) < len(inside):
        return None
    if any(interior == part for interior, part in zip(interiors, slide.parts, strict=True)):  # a rank without a border
        return None
    before = tuple((start, first) for (start, _), (first, _) in zip(slide.parts, interiors, strict=True))
    after = tuple((end, stop) for (_, stop), (_, end) in zip(slide.parts, interiors, strict=True))
    return Interior(slide, dimensions[0], (before, interiors, after))


def _inside(slide: Slide, rank: int) -> tuple[int, int] | None:
    """The steps of a rank that read its own elements alone, in order."""
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


def variety(axes: Axes, layouts: Layouts, extents: Extents) -> tuple[int, ...]:
    """What else than sizes of parts makes one rank's graph unlike another's.

    How much a call reads, what it cuts off, where it starts; of a call in pieces, where each of them stands.
    """
    found: list[int] = []
    for name, loops in axes.loops.items():
        if not (loops.windows or layouts.wide):
            continue
        slides = slides_of(name, axes, layouts, extents)
        for slide in slides:
            found += [slide.size, slide.skip, slide.parts[slide.place][0] if slide.window.reach.written else 0]
        interior = interior_of(loops, slides) if name in layouts.overlapped else None
        if interior is not None:
            found += interior.places
    return tuple(found)
