"""Tile a call: the loops that tiles cut, and the box of each operand that a box of the result is computed from."""

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

aten = torch.ops.aten

Kind: TypeAlias = Literal["tiles", "reduction", "statistics", "whole"]
"""``"tiles"``: each tile computes a box of the result; ``"reduction"``: tiles are reduced to the result; ``"statistics"``: they are reduced
to statistics, then each computes a box; ``"whole"``: the call is not tiled."""

_STATISTICS = (aten.batch_norm, aten.group_norm, aten.instance_norm)
"""Normalisations over space, which need statistics of all tiles first."""

_CHANNELS = 1
"""The dimension of their input that has a scale and a shift for each index."""


@dataclass(frozen=True)
class Read:
    """How a call reads one operand along one grid dimension.

    Attributes:
        span: the dimension of the operand.
        factor: the loop over it; None: it is read whole.
        window: the window of the loop that slides over it; None: the loop reads one element a step.
    """

    span: Span
    factor: int | None
    window: Window | None

    @property
    def is_short(self) -> bool:
        """Return whether the dimension is too short to be cut."""
        return self.span.axis < 0


@dataclass(frozen=True)
class TileCall:
    """One call, tiled.

    Attributes:
        kind: see ``Kind``.
        spans: for each grid dimension, the dimension of the result that it cuts.
        factors: for each grid dimension, the loop that it cuts.
        reads: for each operand, its reads along each grid dimension; None if the operand has no dimension along it.
    """

    node: fx.Node
    loops: Loops
    kind: Kind
    spans: tuple[Span | None, ...]
    factors: tuple[int | None, ...]
    reads: tuple[tuple[Read | None, ...], ...]

    def needs(self, box: Box) -> list[Box]:
        """Return the box of each operand that a box of the result is computed from."""
        needs: list[Box] = []
        for reads in self.reads:
            need = tuple(self._need(read, box, index) for index, read in enumerate(reads))
            needs.append(aligned(need, [None if read is None else read.span for read in reads]))
        return needs

    def _need(self, read: Read | None, box: Box, index: int) -> tuple[int, int] | None:
        """Return the interval of an operand that is read along grid dimension ``index``, from the first element to the last."""
        if read is None or read.is_short:
            return None
        steps = box[index]
        if read.factor is None or steps is None:
            return 0, read.span.size
        if read.window is not None:
            runs = [run for run in read.window.reach.reads(*steps) if run.step]
            ends = [end for run in runs for end in (run.start, run.start + run.step * (run.count - 1))]
            return (min(ends), max(ends) + 1) if ends else (0, 1)
        inner = self._inner(index)
        return steps[0] // inner * read.span.inner, -(-steps[1] // inner) * read.span.inner

    def _inner(self, index: int) -> int:
        """Return the number of elements of the result (of the operands, if it is reduced) for each index of the cut axis."""
        span = self.spans[index]
        if span is not None:
            return span.inner
        return next(read.span.inner for read in (reads[index] for reads in self.reads) if read is not None)


def tile_call(node: fx.Node, axes: Axes, grid: TileGrid) -> TileCall | None:
    """Return a call with the loops and reads of its tiles; None for a call that is computed whole."""
    loops = axes.loops.get(node.name)
    if loops is None or not isinstance(node.meta.get("val"), Tensor) or is_item(node) or draws(node):
        return None
    spans = grid.spans(axes, axes.of(node.name))
    operands = [grid.spans(axes, axes.of(operand.name)) for operand in axes.operands[node.name]]
    if spans is None or any(each is None for each in operands):
        return None
    factors = tuple(_factor(loops, axes, node.name, span) for span in spans)
    kind: Kind = "tiles" if any(spans) else "reduction"
    reductions = [None if factor is None else loops.factors[factor].reduction for factor in factors]
    if packet(node.target) in _STATISTICS and "whole" in reductions:
        if not _merges_statistics(node, loops, spans, factors):
            return None
        input_reads = tuple(None if span is None else Read(span, 0, None) for span in spans)
        no_reads = (None,) * len(spans)
        return TileCall(node, loops, "statistics", spans, factors, (input_reads, *(no_reads for _ in operands[1:])))
    if mutated_arguments(node):
        return None  # each tile would write a buffer again
    if kind == "reduction":
        factors = tuple(_reduced_factor(loops, axes, node.name, cut) for cut in grid.axes)
        if not any(factor is not None for factor in factors):
            return None
    allowed = ("sum", "mean", "max", "min") if kind == "reduction" else (None,)
    if any(factor is not None and loops.factors[factor].reduction not in allowed for factor in factors):
        return None
    if any(span is not None and factor is None for span, factor in zip(spans, factors, strict=True)):
        return None
    reads = tuple(_reads(loops, place, operand_spans or (), factors) for place, operand_spans in enumerate(operands))
    pairs = [pair for each in reads for pair in zip(each, factors, strict=True)]
    windowed = {factor for read, factor in pairs if read is not None and read.window is not None}
    if any(span is not None and span.inner != 1 and factor in windowed for span, factor in zip(spans, factors, strict=True)):
        return None
    return TileCall(node, loops, kind, spans, factors, reads)


def _merges_statistics(node: fx.Node, loops: Loops, spans: Sequence[Span | None], factors: Sequence[int | None]) -> bool:
    """Return whether the statistics of all tiles merge into one scale and shift of each channel, the same for all tiles.

    They do not after a view that makes space the channels, or rows that are normalised separately: each tile would need its own.
    """
    if packet(node.target) is aten.instance_norm and not takes_own_statistics(bound_arguments(node)):
        return False
    cut = [(span, factor) for span, factor in zip(spans, factors, strict=True) if span is not None]
    return all(factor is not None and loops.factors[factor].reduction == "whole" and span.dimension != _CHANNELS for span, factor in cut)


def _factor(loops: Loops, axes: Axes, name: str, span: Span | None) -> int | None:
    """Return the outermost loop over a dimension of the result, if it runs over the cut axis."""
    if span is None:
        return None
    factors = loops.results[0][span.dimension]
    return factors[0] if factors and axes.factors[name][factors[0]][:1] == (span.axis,) else None


def _reduced_factor(loops: Loops, axes: Axes, name: str, cut: frozenset[int]) -> int | None:
    """Return the loop over a cut axis that no result has, if there is one only."""
    in_results = {factor for dimensions in loops.results for dimension in dimensions for factor in dimension}
    over_cut_axis = [factor for factor, each in enumerate(axes.factors[name]) if len(each) == 1 and each[0] in cut]
    reduced = [factor for factor in over_cut_axis if factor not in in_results]
    return reduced[0] if len(reduced) == 1 else None


def _reads(loops: Loops, place: int, spans: Sequence[Span | None], factors: Sequence[int | None]) -> tuple[Read | None, ...]:
    """Return how operand ``place`` is read along each grid dimension."""
    return tuple(
        _short_read(loops, place, factor) if span is None else _read(loops, place, span, factor)
        for span, factor in zip(spans, factors, strict=True)
    )


def _short_read(loops: Loops, place: int, factor: int | None) -> Read | None:
    """Return the read by a window over a dimension that is too short to be cut: tiles read from the whole; None without a window."""
    for window in loops.windows:
        if factor is not None and (window.operand, window.factor) == (place, factor):
            return Read(Span(window.dimension, -1, 1, window.reach.size), factor, window)
    return None


def _read(loops: Loops, place: int, span: Span, factor: int | None) -> Read:
    """Return how operand ``place`` is read along a cut dimension: by the loop, by a window of it, or whole."""
    if factor is not None:
        if loops.operands[place][span.dimension][:1] == (factor,):
            return Read(span, factor, None)
        for window in loops.windows:
            if (window.operand, window.dimension, window.factor) == (place, span.dimension, factor):
                return Read(span, factor, window if window.part is None else _in_elements(window, span.inner))
    return Read(span, None, None)


def _in_elements(window: Window, inner: int) -> Window:
    """Return a window over the outer factor of a dimension in elements of the dimension, ``inner`` for each index of the factor."""
    reach = window.reach
    elements = replace(reach, first=reach.first * inner, last=reach.last * inner + inner - 1, size=reach.size * inner)
    return replace(window, reach=elements)
