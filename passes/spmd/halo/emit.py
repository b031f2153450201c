"""Emit halos into a rank's graph: exchange them with the ranks that own them, or slice them from values computed with overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.analysis.axes import Axes, TensorAxes
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm import functional as collectives
from passes.ir.layout import Layout, Shard
from passes.rules.loops import Size
from passes.spmd.halo.regions import Slide, operand_form, own_part_slides, shared_halo_slides
from passes.spmd.local_shapes import Extents
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.reshard import CHANGE, Change, Resharder


class HaloWriter:
    """Emits the operands of windowed calls for one rank: its own part of each, with the halo.

    Args:
        axes, layouts: those of the whole graph.
        extents: the sizes of the rank's shards.
        emit: ``(function, args, kwargs, name, like)`` emits a call.
        resharder: knows the rank's own part of every value.
    """

    def __init__(self, axes: Axes, layouts: Layouts, extents: Extents, emit: Callable[..., fx.Node], resharder: Resharder) -> None:
        self._axes, self._layouts, self._extents = axes, layouts, extents
        self._emit, self._resharder = emit, resharder
        self._wide: dict[fx.Node, fx.Node] = {}
        self._fetched: dict[Any, fx.Node] = {}

    def register_wide(self, node: fx.Node, copy: fx.Node) -> None:
        """Remember the copy of a value that this rank computes beyond its own part."""
        self._wide[node] = copy

    def computed_intervals(self, node: fx.Node) -> list[tuple[int, int, int]]:
        """Return (mesh dimension, start, stop) wherever this rank computes a value beyond its own part."""
        wide = self._layouts.wide.get(node.name, ())
        return [(index, *parts[self._extents.coordinate[index]]) for index, parts in enumerate(wide) if parts is not None]

    def shape(self, node: fx.Node, axes: TensorAxes, layout: Layout) -> tuple[Size, ...]:
        """Return the shape of a value as this rank computes it, with its overlap."""
        shape = list(self._extents.shape(axes, layout))
        for index, start, stop in self.computed_intervals(node):
            place = layout[index]
            assert isinstance(place, Shard)
            shape[place.dimension] = stop - start
        return tuple(shape)

    def part(self, node: fx.Node, place: int, operand: fx.Node, need: Layout) -> fx.Node:
        """Return operand ``place`` of a call: with the overlap that this rank has if that is enough, else its own part in the layout."""
        form, _ = operand_form(node.name, place, self._axes, self._layouts, self._extents)
        if form == "computed":
            return self._wide[operand]
        part = self.own_part(operand, need, node)
        slides = shared_halo_slides(operand.name, self._layouts, self._extents) if form == "fetched" else ()
        return self._fetch_all(operand, part, slides, node)

    def own_part(self, value: fx.Node, need: Layout, reader: fx.Node) -> fx.Node:
        """Return a value in the layout that a reader needs, without the overlap that this rank has computed."""
        if value in self._wide and not self._resharder.knows(value):
            slides = own_part_slides(value.name, self._layouts, self._extents)
            part = self._fetch_all(value, self._wide[value], slides, reader)
            part.meta["part_of"] = value.name
            self._resharder.register(value, 0, part, self._layouts.results[value.name][0], self._axes.of(value.name))
        return self._resharder.read(value, need, reader)

    def _fetch_all(self, value: fx.Node, part: fx.Node, slides: Sequence[Slide], reader: fx.Node) -> fx.Node:
        """Return this rank's ``part`` of a value after several slides, one mesh dimension after the other."""
        for slide in slides:
            part = self._fetch(value, part, slide, self._layouts.results[value.name][0], reader)
        return part

    def fetch(self, node: fx.Node, operands: Sequence[fx.Node], parts: Sequence[fx.Node], slides: Sequence[Slide]) -> list[fx.Node]:
        """Return this rank's parts of the operands of a call, with their halos; equal halos for several calls are exchanged once."""
        with_halos = list(parts)
        for slide in slides:
            place = slide.window.operand
            if not slide.is_identity:
                layout = self._layouts.needs[node.name][place]
                with_halos[place] = self._fetch(operands[place], with_halos[place], slide, layout, node)
        return with_halos

    def _fetch(self, value: fx.Node, source: fx.Node, slide: Slide, layout: Layout, reader: fx.Node) -> fx.Node:
        """Return a value with the halo of one mesh dimension.

        Args:
            value: the node of the whole graph.
            source: this rank's part of it.
            layout: the layout of ``source``.
        """
        dimension, name = slide.window.dimension, f"{value.name}_halo_{slide.over}"
        factors = self._unfolding(source, slide, reader)
        key = (source, dimension, factors, slide.over, slide.owned, slide.wanted, slide.window.reach.fill)
        if key in self._fetched:
            return self._fetched[key]
        if factors is None:
            self._fetched[key] = self._read(value, source, dimension, slide, layout, name, reader)
        else:
            outer, inner = factors
            shape = [size_of(size) for size in source.meta["val"].shape]
            unfolded = self._resharder.reshape_dimension(source, shape, dimension, (outer, slide.own, inner), f"{name}_unfolded", reader)
            read = self._read(value, unfolded, dimension + 1, slide, layout, f"{name}_rows", reader)
            self._fetched[key] = self._resharder.reshape_dimension(read, shape, dimension, (outer * slide.size * inner,), name, reader)
        return self._fetched[key]

    def _unfolding(self, source: fx.Node, slide: Slide, reader: fx.Node) -> tuple[int, int] | None:
        """Return (outer, inner) such that the dimension is outer x ``slide.own`` x inner elements, and the window slides over the middle.

        The dimension is a product of two factors (rows and columns of ``fold``), and the window slides over one of them: the other one is
        outer or inner, and the third number is 1. None: the window slides over the whole dimension.
        """
        window = slide.window
        if window.part is None:
            return None
        factors = self._axes.loops[reader.name].operands[window.operand][window.dimension]
        other_factor = int(source.meta["val"].shape[window.dimension]) // slide.own
        return (1, other_factor) if factors[0] == window.part else (other_factor, 1)

    def _read(self, value: fx.Node, source: fx.Node, dimension: int, slide: Slide, layout: Layout, name: str, reader: fx.Node) -> fx.Node:
        """Emit the slices (``take_runs``) of elements that ranks read, or their exchange if some belong to other ranks."""
        sizes = (slide.own, slide.size, slide.window.reach.fill)
        if slide.is_local:
            return self._emit(collectives.take_runs, (source, dimension, slide.over, slide.local_wanted, *sizes), {}, name, reader)
        assert slide.owned is not None
        exchanged = (source, dimension, slide.over, list(slide.owned), slide.wanted, *sizes)
        halo = self._emit(collectives.halo_exchange, exchanged, {}, name, reader)
        halo.meta["custom"] = {CHANGE: Change(value.name, layout, layout)}
        return halo
