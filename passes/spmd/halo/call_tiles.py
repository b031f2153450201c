"""How a call looks to tiles: which of its loops they cut, and what a part of its result reads of each operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes, is_item
from passes.graph.aliasing import mutated_arguments
from passes.graph.schemas import bound_arguments, draws, packet
from passes.rules.loops import Loops
from passes.rules.window import Window
from passes.spmd.decompose.registry import takes_own_statistics
from passes.spmd.halo.boxes import Box, Span, TileGrid, aligned

__all__ = ["Kind", "Read", "TileCall", "tile_call"]

aten = torch.ops.aten

Kind: TypeAlias = Literal["tiles", "reduction", "statistics", "whole"]
"""A part of the result for each tile; a result that is put together over tiles; the same, of statistics, and then tiles; no tiles."""

_STATISTICS = (aten.batch_norm, aten.group_norm, aten.instance_norm)
"""Normalisations over space, which need statistics of all tiles first."""

_CHANNELS = 1
"""The dimension of what these normalise along which their scale and shift differ."""


@dataclass(frozen=True)
class Read:
    """How a call reads one operand along one grid dimension.

    Attributes:
        span: of the operand.
        factor: the loop that runs or slides over it; None: it is read whole.
        window: what slides; None where the loop runs over it.
    """

    span: Span
    factor: int | None
    window: Window | None

    @property
    def is_short(self) -> bool:
        """Whether the dimension is too short for a tile to have a part of it."""
        return self.span.axis < 0


@dataclass(frozen=True)
class TileCall:
    """One call.

    Attributes:
        kind: see ``Kind``.
        spans: of its result.
        factors: for each grid dimension the loop that is cut.
        reads: for each operand, for each grid dimension, how it is read; None where it has no span.
    """

    node: fx.Node
    loops: Loops
    kind: Kind
    spans: tuple[Span | None, ...]
    factors: tuple[int | None, ...]
    reads: tuple[tuple[Read | None, ...], ...]

    def needs(self, box: Box) -> list[Box]:
        """What a part of the result reads of each operand: of windows, from the first element to the last."""
        found: list[Box] = []
        for reads in self.reads:
            need = tuple(self._need(read, box, index) for index, read in enumerate(reads))
            found.append(aligned(need, [None if read is None else read.span for read in reads]))
        return found

    def _need(self, read: Read | None, box: Box, index: int) -> tuple[int, int] | None:
        if read is None or read.is_short:
            return None
        own = box[index]
        if read.factor is None or own is None:
            return 0, read.span.size
        if read.window is not None:
            runs = [run for run in read.window.reach.reads(*own) if run.step]
            ends = [end for run in runs for end in (run.start, run.start + run.step * (run.count - 1))]
            return (min(ends), max(ends) + 1) if ends else (0, 1)
        inner = self._inner(index)
        return own[0] // inner * read.span.inner, -(-own[1] // inner) * read.span.inner

    def _inner(self, index: int) -> int:
        """How many elements of the box one step of the cut axis has."""
        span = self.spans[index]
        return next(read.span.inner for reads in self.reads if (read := reads[index]) is not None) if span is None else span.inner


def tile_call(node: fx.Node, axes: Axes, grid: TileGrid) -> TileCall | None:
    """How tiles see a call; None for one that is computed whole."""
    loops = axes.loops.get(node.name)
    if loops is None or not isinstance(node.meta.get("val"), Tensor) or is_item(node) or draws(node):
        return None
    spans = grid.spans(axes, axes.of(node.name))
    operands = [grid.spans(axes, axes.of(operand.name)) for operand in axes.operands[node.name]]
    if spans is None or any(each is None for each in operands):
        return None
    factors = tuple(_factor(loops, axes, node.name, span) for span in spans)
    kind: Kind = "tiles" if any(spans) else "reduction"
    if packet(node.target) in _STATISTICS and any(factor is not None and loops.factors[factor].reduction == "whole" for factor in factors):
        if not _merges_statistics(node, loops, spans, factors):
            return None
        of_x = tuple(None if span is None else Read(span, 0, None) for span in spans)
        none = (None,) * len(spans)
        return TileCall(node, loops, "statistics", spans, factors, (of_x, *(none for _ in operands[1:])))
    if mutated_arguments(node):
        return None  # a part would write parts of a buffer, as often as it is computed
    if kind == "reduction":
        factors = tuple(_reduced(loops, axes, node.name, cut) for cut in grid.axes)
        if not any(factor is not None for factor in factors):
            return None
    for factor in factors:
        allowed = ("sum", "mean", "max", "min") if kind == "reduction" else (None,)
        if factor is not None and loops.factors[factor].reduction not in allowed:
            return None
    if any(span is not None and factor is None for span, factor in zip(spans, factors, strict=True)):
        return None
    reads = tuple(
        tuple(
            _short(loops, place, factor) if span is None else _read(loops, place, span, factor)
            for span, factor in zip(each or (), factors, strict=True)
        )
        for place, each in enumerate(operands)
    )
    slid = {factor for each in reads for read, factor in zip(each, factors, strict=True) if read is not None and read.window is not None}
    if any(span is not None and span.inner != 1 and factor in slid for span, factor in zip(spans, factors, strict=True)):
        return None
    return TileCall(node, loops, kind, spans, factors, reads)


def _merges_statistics(node: fx.Node, loops: Loops, spans: Sequence[Span | None], factors: Sequence[int | None]) -> bool:
    """Whether statistics of all tiles give one scale and shift of each channel, which serve all tiles.

    They do not where a view made space the channels, or rows that are normalised each for itself: each tile would need its own.
    """
    if packet(node.target) is aten.instance_norm and not takes_own_statistics(bound_arguments(node)):
        return False
    cut = [(span, factor) for span, factor in zip(spans, factors, strict=True) if span is not None]
    return all(factor is not None and loops.factors[factor].reduction == "whole" and span.dimension != _CHANNELS for span, factor in cut)


def _factor(loops: Loops, axes: Axes, name: str, span: Span | None) -> int | None:
    """The loop over a dimension of the result; it is outermost there."""
    if span is None:
        return None
    factors = loops.results[0][span.dimension]
    return factors[0] if factors and axes.factors[name][factors[0]][:1] == (span.axis,) else None


def _reduced(loops: Loops, axes: Axes, name: str, cut: frozenset[int]) -> int | None:
    """The loop over space that no result has."""
    in_results = {factor for dimensions in loops.results for dimension in dimensions for factor in dimension}
    found = [
        factor for factor, each in enumerate(axes.factors[name]) if factor not in in_results and each and each[0] in cut and len(each) == 1
    ]
    return found[0] if len(found) == 1 else None


def _short(loops: Loops, place: int, factor: int | None) -> Read | None:
    """Windows over a dimension that is too short to be cut: tiles take what they read from the whole."""
    for window in loops.windows:
        if factor is not None and (window.operand, window.factor) == (place, factor):
            return Read(Span(window.dimension, -1, 1, window.reach.size), factor, window)
    return None


def _read(loops: Loops, place: int, span: Span, factor: int | None) -> Read:
    if factor is not None:
        if loops.operands[place][span.dimension][:1] == (factor,):
            return Read(span, factor, None)
        for window in loops.windows:
            if (window.operand, window.dimension, window.factor) == (place, span.dimension, factor):
                return Read(span, factor, window if window.part is None else _of_dimension(window, span.inner))
    return Read(span, None, None)


def _of_dimension(window: Window, inner: int) -> Window:
    """A window over the outer part of a dimension, in elements of the dimension."""
    reach = window.reach
    elements = replace(reach, first=reach.first * inner, last=reach.last * inner + inner - 1, size=reach.size * inner)
    return replace(window, reach=elements)
