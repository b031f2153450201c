"""Write one rank's graph: every value its own part, with the communication that changes of layout need.

Before (whole shapes), heads and ffn over two ranks:                After, on each rank:

    h = linear(x, w1, b1)        x (8, 16), w1 (64, 16)                 x_vary = vary(x)
    a = gelu(h)                                                         h = linear(x_vary, w1, b1)        w1 (32, 16)
    y = linear(a, w2, b2)        w2 (16, 64)                            a = gelu(h)
    z = add(x, y)                                                       b2_first = keep_first(b2)
                                                                        y = linear(a, w2, b2_first)       w2 (16, 32)
                                                                        y_all_reduce = all_reduce(y)
                                                                        z = add(x, y_all_reduce)

Every change of layout is made once for all its readers. Shapes are checked: each call is run on fake parts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes, is_item, returned_values, tensor_operands
from passes.graph.buffer_writes import verify_writes
from passes.graph.fake_tensors import FakeTensorCache, fake_mode
from passes.graph.lazy_graph_module import rewritten
from passes.graph.provenance import place_of
from passes.graph.schemas import bound_arguments, call_with, packet
from passes.graph.symbolic_sizes import emit_size, size_of
from passes.ir.errors import PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.layout import Shard
from passes.ir.torch_private import pytree
from passes.rules.loops import LocalCall, Loops, Size
from passes.spmd.decompose.builder import InsideCut, InsideWriter
from passes.spmd.decompose.pooling_resize import WindowWriter, write_windows
from passes.spmd.decompose.registry import inside_of
from passes.spmd.halo.emit import HaloWriter
from passes.spmd.halo.overlap import Interior, interior_of
from passes.spmd.halo.regions import Slide, slides_of, space_of
from passes.spmd.local_shapes import Extents, product
from passes.spmd.propagate import Cut, Layouts
from passes.spmd.reshard import Resharder

__all__ = ["localize"]

aten = torch.ops.aten


def localize(graph: ModelGraph, axes: Axes, layouts: Layouts, extents: Extents, *, local_statistics: bool = False) -> ModelGraph:
    """Return the graph of a rank.

    Args:
        extents: the sizes of its parts. The graph's batch is the rank's own rows.
        local_statistics: whether batch normalisation takes those of the rank's own part.
    """
    return _Localizer(graph, axes, layouts, extents, local_statistics).run()


class _Localizer:
    """Copies the graph call by call."""

    def __init__(self, graph: ModelGraph, axes: Axes, layouts: Layouts, extents: Extents, local_statistics: bool) -> None:
        self.local_statistics = local_statistics
        self.graph = graph
        self.axes = axes
        self.layouts = layouts
        self.extents = extents
        self.target = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.batch: fx.Node | None = None
        self.has_whole_batch = False
        self.reader = ""
        self.known = FakeTensorCache.like(graph.graph)
        self.resharder = Resharder(self.extents, self.emit, self._size_node)
        self.halos = HaloWriter(axes, layouts, extents, self.emit, self.resharder)

    def run(self) -> ModelGraph:
        with fake_mode(self.graph.graph):
            for node in self.graph.graph.nodes:
                if node.op == "placeholder":
                    self._placeholder(node)
                elif node.op != "output":
                    self.reader = node.name
                    self._whole_batch()
                    self._call(node)
            self.reader = "output"
            returned = self._outputs()
        verify_writes(self.target, "cutting axes")
        names = {node.name for node in self.target.nodes}
        local = rewritten(self.graph, self.target, returned, "Local")
        assert all(each.node is None or each.node in names for each in local.outputs)
        return replace(local, batch_size=self.graph.batch_size // self.extents.n_row_parts, inputs=self._inputs())

    # -- placeholders --------------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        copy = self.target.placeholder(node.name)
        copy.meta = dict(node.meta)
        self.copies[node] = copy
        if node.name == "batch":
            self.batch = copy
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            (layout,) = self.layouts.results[node.name]
            shape = self.extents.shape(self.axes.of(node.name), layout)
            if node.name not in self.graph.parameters or not _equal(shape, [size_of(size) for size in value.shape]):
                fake = torch.empty(self._symbolic(shape), dtype=value.dtype, device=value.device)
                copy.meta["val"] = fake.requires_grad_(value.requires_grad)
            self.resharder.register(node, 0, copy, layout, self.axes.of(node.name))

    def _whole_batch(self) -> None:
        """Emit the size of the whole batch, which sizes of the graph refer to: the placeholder is the number of the rank's rows."""
        if self.batch is None or self.extents.n_row_parts == 1 or self.has_whole_batch:
            return
        self.has_whole_batch = True
        count = self.extents.n_row_parts
        node = self.target.create_node("call_function", operator.mul, (self.batch, count), {}, name="whole_batch")
        node.meta["val"] = self.batch.meta["val"] * count
        original = next(each for each in self.graph.graph.nodes if each.name == "batch")
        self.copies[original] = node

    def _inputs(self) -> tuple[Any, ...]:
        if self.graph.batch is not None or self.extents.n_row_parts == 1:
            return self.graph.inputs
        placeholders = [node for node in self.target.nodes if node.op == "placeholder"]
        shapes = {node.name: tuple(node.meta["val"].shape) for node in placeholders if isinstance(node.meta.get("val"), Tensor)}
        inputs = self.graph.inputs
        return tuple(leaf if leaf.placeholder is None else replace(leaf, shape=shapes[leaf.placeholder]) for leaf in inputs)

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if is_item(node) and isinstance(node.args[0], fx.Node) and node.args[0].name in self.layouts.results:
            copy = self._copy(node, node.args, node.kwargs)
            self._register(node, copy)
            return
        if not isinstance(value, Tensor | tuple | list):
            self.copies[node] = self._copy(node, node.args, node.kwargs)
            return
        operands = tensor_operands(node)
        needs = self.layouts.needs[node.name]
        by_place = [self.halos.part(node, place, operand, need) for place, (operand, need) in enumerate(zip(operands, needs, strict=True))]
        copy = (
            self._cut_call(node, operands, by_place)
            if any(self.layouts.cuts[node.name])
            else self._copy(node, node.args, node.kwargs, dict(zip(operands, by_place, strict=True)))
        )
        self._register(node, copy)

    def _register(self, node: fx.Node, copy: fx.Node) -> None:
        self.copies[node] = copy
        if node.name in self.layouts.wide:
            self.halos.keep_wide(node, copy)
        else:
            copy.meta["part_of"] = node.name
        for place, (layout, axes) in enumerate(zip(self.layouts.results[node.name], self.axes.tensors[node.name], strict=True)):
            if node.name not in self.layouts.wide:
                self.resharder.register(node, place, copy, layout, axes)
            value = copy.meta["val"] if isinstance(copy.meta["val"], Tensor) else copy.meta["val"][place]
            expected = self.halos.shape(node, axes, layout)
            if not _equal(expected, [size_of(size) for size in value.shape]):
                raise PartitionError(
                    f"a part of {node.name} ({node.target}) has shape {tuple(value.shape)} where {expected} was expected",
                    place=place_of(node),
                    remedy="the rule of this operation is wrong: passes/rules",
                )

    def _copy(self, node: fx.Node, args: Any, kwargs: Any, parts: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        def of(argument: fx.Node) -> fx.Node:
            return (parts or {}).get(argument, self.copies[argument])

        return self.emit(node.target, fx.map_arg(args, of), fx.map_arg(kwargs, of), node.name, node)

    def _cut_call(self, node: fx.Node, operands: Sequence[fx.Node], by_place: Sequence[fx.Node]) -> fx.Node:
        """A call on parts: its tensors in order of the schema, its sizes those of the parts."""
        loops = self.axes.loops[node.name]
        arguments = bound_arguments(node)
        slides = slides_of(node.name, self.axes, self.layouts, self.extents)
        interior = interior_of(loops, slides) if node.name in self.layouts.overlapped else None
        if interior is not None:
            return self._in_pieces(node, operands, by_place, slides, interior)
        by_place = self.halos.fetched(node, operands, by_place, slides)
        given = self._given(arguments, by_place)
        cuts = self.layouts.cuts[node.name]
        inside = [index for index, cut in enumerate(cuts) if cut is not None and loops.factors[cut.factor].reduction == "whole"]
        if inside and not (self.local_statistics and packet(node.target) is aten.batch_norm):
            return self._inside_call(node, loops, given, inside)
        if any(slide.window.reach.written for slide in slides):
            return self._written(node, loops, given, slides)
        return self._weighted(node, loops, self._windowed(node, by_place, slides))

    def _given(self, arguments: Mapping[str, Any], by_place: Sequence[fx.Node]) -> dict[str, Any]:
        """The arguments of a call on parts."""
        places = iter(by_place)
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            given[name] = fx.map_arg(value, lambda each: next(places) if isinstance(each.meta.get("val"), Tensor) else self.copies[each])
        return given

    def _windowed(self, node: fx.Node, by_place: Sequence[fx.Node], slides: Sequence[Slide], piece: Slide | None = None) -> fx.Node:
        """Emit the operation itself on this rank's operands, with local sizes among its arguments.

        Args:
            piece: the steps to compute, if not all of this rank's.
        """
        loops, arguments = self.axes.loops[node.name], bound_arguments(node)
        given = self._given(arguments, by_place)
        if loops.localize is not None:
            local = self._local_call(node, loops, arguments, by_place, slides, piece)
            given.update({name: pytree.tree_map_only(sympy.Expr, self._size_node, value) for name, value in loops.localize(local).items()})
        copy = self.emit(node.target, *call_with(node, given), node.name, node)
        for slide in slides:
            copy = self._own_results(node, loops, slide, copy)
        return copy

    # -- windows -------------------------------------------------------------------------------------------------------------------

    def _in_pieces(
        self, node: fx.Node, operands: Sequence[fx.Node], by_place: Sequence[fx.Node], slides: Sequence[Slide], interior: Interior
    ) -> fx.Node:
        """Emit a call in pieces: the interior during the halo exchange, then both borders, and their concatenation."""
        slide, others = interior.slide, [each for each in slides if each is not interior.slide]
        place, dimension = slide.window.operand, slide.window.dimension
        by_place = self.halos.fetched(node, operands, by_place, others)
        borders = self.halos.fetched(node, operands, by_place, [interior.of_borders])[place]
        found: dict[int, fx.Node] = {}
        for piece, source in ((1, by_place[place]), (0, borders), (2, borders)):
            start, stop = interior.read(piece)
            if start < stop:
                is_whole = (start, stop) == (0, source.meta["val"].shape[dimension])
                name = f"{source.name}_inner" if piece == 1 else f"{source.name}_border"
                part = source if is_whole else self.emit(aten.slice.Tensor, (source, dimension, start, stop), {}, name, node)
                parts = [part if index == place else each for index, each in enumerate(by_place)]
                found[piece] = self._windowed(node, parts, [*others, interior.of_piece(piece)], interior.of_piece(piece))
        joined = [found[piece] for piece in sorted(found)]
        return self._weighted(
            node, self.axes.loops[node.name], self.emit(aten.cat.default, (joined, interior.dimension), {}, f"{node.name}_whole", node)
        )

    def _own_results(self, node: fx.Node, loops: Loops, slide: Slide, copy: fx.Node) -> fx.Node:
        """Slice a result to this rank's own steps, if the window computes more than these."""
        if slide.window.reach.skip == 0:
            return copy
        (dimension,) = [index for index, factors in enumerate(loops.results[0]) if slide.window.factor in factors]
        return self.emit(
            aten.slice.Tensor, (copy, dimension, slide.skip, slide.skip + slide.count), {}, f"{node.name}_own_{slide.over}", node
        )

    def _written(self, node: fx.Node, loops: Loops, given: Mapping[str, Any], slides: Sequence[Slide]) -> fx.Node:
        """Emit the decomposition of a windowed call whose part is not the same operation."""
        return write_windows(node, WindowWriter(functools.partial(self.emit, like=node), given, node.name, space_of(loops, slides)))

    def _inside_call(self, node: fx.Node, loops: Loops, given: Mapping[str, Any], indices: Sequence[int]) -> fx.Node:
        """Emit the decomposition of a call that reduces over an axis which the mesh dimensions ``indices`` shard."""
        cuts: list[InsideCut] = []
        layout = [None if each is None else Shard(each.axis, 0) for each in self.layouts.cuts[node.name]]
        for index in indices:
            cut = self.layouts.cuts[node.name][index]
            assert cut is not None
            parts = self.extents.parts(cut.axis, index, layout)
            inner = self._inner(node, cut)
            sizes = tuple(product((part, inner)) for part in parts)
            cuts.append(
                InsideCut(self.extents.mesh[index][0], loops.factors[cut.factor].name, sizes, sizes[self.extents.coordinate[index]])
            )
        inside = inside_of(node, cuts[0].factor)
        assert inside is not None
        factors = {factor.name: self.extents.whole(factor.size) for factor in loops.factors}
        axes_of = zip(loops.factors, self.axes.factors[node.name], strict=True)
        own = {factor.name: product(self.extents.axis(axis, layout) for axis in axes) for factor, axes in axes_of}

        emit = functools.partial(self.emit, like=node)
        return inside.on_part(InsideWriter(emit, given, node.name, self._size_node, tuple(cuts), factors, own))

    def _inner(self, node: fx.Node, cut: Cut) -> Size:
        """Return the product of the sizes of a factor's axes inside the sharded one."""
        axes = self.axes.factors[node.name][cut.factor]
        return product(self.extents.whole(self.extents.sizes[axis]) for axis in axes[axes.index(cut.axis) + 1 :])

    def _weighted(self, node: fx.Node, loops: Loops, copy: fx.Node) -> fx.Node:
        """Scale a mean over a shard by the shard's fraction of the axis, so that the sum over ranks is the mean of the whole."""
        share = sympy.Integer(1)
        for index, cut in enumerate(self.layouts.cuts[node.name]):
            if cut is not None and loops.factors[cut.factor].reduction == "mean":
                layout = tuple(Shard(cut.axis, 0) if place == index else None for place in range(len(self.extents.mesh)))
                share *= sympy.cancel(sympy.sympify(self.extents.axis(cut.axis, layout)) / self.extents.whole(self.extents.sizes[cut.axis]))
        if share == 1:
            return copy
        return self.emit(aten.mul.Tensor, (copy, float(share)), {}, f"{node.name}_share", node)

    def _local_call(
        self,
        node: fx.Node,
        loops: Loops,
        arguments: Mapping[str, Any],
        parts: Sequence[fx.Node],
        slides: Sequence[Slide],
        piece: Slide | None = None,
    ) -> LocalCall:
        results, cuts = self.layouts.results[node.name], self.layouts.cuts[node.name]
        factors = []
        for factor, axes in enumerate(self.axes.factors[node.name]):
            own = [Shard(cut.axis, 0) if cut is not None and cut.factor == factor else None for cut in cuts]
            factors.append(product(self.extents.axis(axis, own) for axis in axes))
        for index, start, stop in self.halos.computed(node):
            cut = cuts[index]
            assert cut is not None
            factors[cut.factor] = stop - start
        for slide in slides:
            if slide.window.part is not None:
                factors[slide.window.part] = slide.size
        shapes = [list(self.halos.shape(node, axes, layout)) for axes, layout in zip(self.axes.tensors[node.name], results, strict=True)]
        if piece is not None:
            assert piece.window.factor is not None
            factors[piece.window.factor] = piece.count
            (dimension,) = [index for index, each in enumerate(loops.results[0]) if piece.window.factor in each]
            shapes[0][dimension] = piece.count
        return LocalCall(
            arguments=arguments,
            operands=tuple(tuple(size_of(size) for size in part.meta["val"].shape) for part in parts),
            results=tuple(map(tuple, shapes)),
            factors=tuple(factors),
            cut=frozenset(cut.factor for cut in cuts if cut is not None),
        )

    # -- results -------------------------------------------------------------------------------------------------------------------

    def _outputs(self) -> dict[str, str]:
        node = self.graph.graph.output_node()
        returned = {value: self.copies[value] for value in node.all_input_nodes}  # sizes among them count the whole batch
        for value, need in zip(returned_values(node), self.layouts.needs["output"], strict=True):
            returned[value] = self.halos.own_part(value, need, node)
        self.target.output(fx.map_arg(node.args[0], returned.__getitem__))
        return {value.name: copy.name for value, copy in returned.items()}

    # -- nodes ---------------------------------------------------------------------------------------------------------------------

    def emit(
        self, function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, like: fx.Node
    ) -> fx.Node:
        """A call with its value on fake parts. These may lie otherwise in memory than the whole did: views are copies where need be."""
        assert callable(function)
        function = aten.reshape.default if function is aten.view.default else function
        node = self.target.create_node("call_function", function, args, dict(kwargs), name=name)
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "part_of")}
        node.meta["written_for"] = self.reader
        self.known.describe(node)
        return node

    def _size_node(self, size: Size) -> fx.Node | int:
        if isinstance(size, int):
            return size
        assert self.batch is not None
        return emit_size(self.target, size, self.graph.batch, self.batch)

    def _symbolic(self, shape: Sequence[Size]) -> list[Any]:
        """A shape as fake tensors take it."""
        if self.batch is None:
            return list(shape)
        symbol, value = self.graph.batch, self.batch.meta["val"]
        return [size if isinstance(size, int) else sympy.lambdify(symbol, size)(value) for size in shape]


def _equal(one: Sequence[Size], other: Sequence[Size]) -> bool:
    return len(one) == len(other) and all(sympy.expand(left - right) == 0 for left, right in zip(one, other, strict=True))
