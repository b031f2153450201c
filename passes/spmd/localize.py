"""Write one rank's graph: the rank's shard of every value, and the collectives that reshard values.

Before (whole shapes), heads and ffn over two ranks:                After, on each rank:

    h = linear(x, w1, b1)        x (8, 16), w1 (64, 16)                 x_vary = vary(x)
    a = gelu(h)                                                         h = linear(x_vary, w1, b1)        w1 (32, 16)
    y = linear(a, w2, b2)        w2 (16, 64)                            a = gelu(h)
    z = add(x, y)                                                       b2_first = keep_first(b2)
                                                                        y = linear(a, w2, b2_first)       w2 (16, 32)
                                                                        y_all_reduce = all_reduce(y)
                                                                        z = add(x, y_all_reduce)

Every reshard is emitted once for all its readers. Each call is run on fake tensors of the shards, to check shapes.
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

from passes.analysis.axes import Axes, is_item, returned_values
from passes.analysis.routed_rows import GROUP
from passes.graph.buffer_writes import verify_writes
from passes.graph.fake_tensors import FakeTensorCache, fake_mode
from passes.graph.lazy_graph_module import rewritten
from passes.graph.provenance import place_of
from passes.graph.schemas import bound_arguments, call_with, packet, tensor_operands
from passes.graph.symbolic_sizes import emit_size, size_of, traced_size
from passes.ir.errors import PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.layout import Shard
from passes.ir.tensor_spec import RowCount
from passes.ir.torch_private import pytree
from passes.rules.loops import LocalCall, Loops, Size
from passes.rules.ops.channel_statistics import channel_statistics
from passes.rules.ops.grouped_mm import grouped_mm
from passes.spmd.decompose.builder import PartWriter, ReductionCut, ReductionWriter
from passes.spmd.decompose.expert_routes import RouteWriter
from passes.spmd.decompose.pooling_resize import WindowWriter, write_windows
from passes.spmd.decompose.registry import decomposition_of
from passes.spmd.decompose.ring_attention import ring_attention
from passes.spmd.halo.emit import HaloWriter
from passes.spmd.halo.overlap import Interior, interior_of
from passes.spmd.halo.regions import Slide, slides_of, window_dimensions
from passes.spmd.local_shapes import Extents, product
from passes.spmd.propagate.layouts import Cut, Layouts
from passes.spmd.reshard import Resharder

aten = torch.ops.aten

_OF_THE_BATCH = (aten.batch_norm, packet(channel_statistics))
"""Operators whose statistics are over the whole batch or, with ``batchnorm="local"``, over a rank's own samples."""


def localize(
    graph: ModelGraph,
    axes: Axes,
    layouts: Layouts,
    extents: Extents,
    fakes: FakeTensorCache,
    *,
    local_statistics: bool = False,
    stages: Mapping[str, int] | None = None,
) -> ModelGraph:
    """Return the graph of a rank.

    Args:
        extents: the sizes of its shards. The graph's batch is the rank's own rows.
        fakes: of this graph (``fakes_of``), for all of its ranks.
        local_statistics: whether batch normalisation uses the statistics of the rank's own samples.
        stages: call -> the stage that computes it; None: one does.
    """
    return _Localizer(graph, axes, layouts, extents, fakes, local_statistics, stages).run()


def fakes_of(graph: fx.Graph) -> FakeTensorCache:
    """Return the fake results of a graph's calls, by which equal calls of its ranks are not run again."""
    fakes = FakeTensorCache()
    for node in graph.nodes:
        if node.op == "call_function":
            fakes.add_traced(node, _emitted(node.target))
    return fakes


def _emitted(function: Any) -> Any:
    """Return the function that ranks call in place of one of the model: ``view`` is ``reshape``, since strides of shards may differ."""
    return aten.reshape.default if function is aten.view.default else function


class _Localizer:
    """Copies the graph call by call.

    Attributes:
        copies: node -> the rank's copy of it, as computed; the resharder and the halo writer have its other layouts.
        reader: the node that is copied now; emitted calls are marked as written for it.
    """

    def __init__(
        self,
        graph: ModelGraph,
        axes: Axes,
        layouts: Layouts,
        extents: Extents,
        fakes: FakeTensorCache,
        local_statistics: bool,
        stages: Mapping[str, int] | None,
    ) -> None:
        self.local_statistics = local_statistics
        self.graph = graph
        self.axes = axes
        self.layouts = layouts
        self.extents = extents
        self.target = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.batch: fx.Node | None = None
        self._has_whole_batch = False
        self.reader = ""
        self._fakes = fakes
        self._named = {node.name: node for node in graph.graph.nodes} if layouts.equal_casts else {}
        self.resharder = Resharder(self.extents, self.emit, self._size_node, stages)
        self.halos = HaloWriter(axes, layouts, extents, self.emit, self.resharder)
        routed = Resharder(self.extents, self.emit, self._size_node, stages)
        self.routes = RouteWriter(axes, layouts, extents, self.emit, routed, self.halos.own_part)

    def run(self) -> ModelGraph:
        """Copy all nodes; return the graph with the rank's batch size, inputs and outputs."""
        with fake_mode(self.graph.graph):
            for node in self.graph.graph.nodes:
                if node.op == "placeholder":
                    self._placeholder(node)
                elif node.op != "output":
                    self.reader = node.name
                    self._emit_whole_batch()
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
        """Copy a placeholder, with a value of the shard's shape."""
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

    def _emit_whole_batch(self) -> None:
        """Emit the whole batch size once, for sizes of the graph: the placeholder ``batch`` has only the rank's own rows."""
        if self.batch is None or self.extents.n_row_parts == 1 or self._has_whole_batch:
            return
        self._has_whole_batch = True
        count = self.extents.n_row_parts
        node = self.target.create_node("call_function", operator.mul, (self.batch, count), {}, name="whole_batch")
        node.meta["val"] = self.batch.meta["val"] * count
        original = next(each for each in self.graph.graph.nodes if each.name == "batch")
        self.copies[original] = node

    def _inputs(self) -> tuple[Any, ...]:
        """Return the inputs, with the shapes of the rank's rows if the batch has a fixed size."""
        if self.graph.batch is not None or self.extents.n_row_parts == 1:
            return self.graph.inputs
        placeholders = [node for node in self.target.nodes if node.op == "placeholder"]
        shapes = {node.name: tuple(node.meta["val"].shape) for node in placeholders if isinstance(node.meta.get("val"), Tensor)}
        inputs = self.graph.inputs
        return tuple(leaf if leaf.placeholder is None else replace(leaf, shape=shapes[leaf.placeholder]) for leaf in inputs)

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        """Emit a call on operands in the layouts that it needs."""
        value = node.meta.get("val")
        if node.name in self.layouts.equal_casts:
            self._share(node, self._named[self.layouts.equal_casts[node.name]])
            return
        if is_item(node) and isinstance(node.args[0], fx.Node) and node.args[0].name in self.layouts.results:
            self._register(node, self._copy(node))
            return
        if not isinstance(value, Tensor | tuple | list):
            self.copies[node] = self._copy(node)
            return
        operands = tensor_operands(node)
        if self.routes.is_routed(node):
            self._register(node, self._routed_call(node, operands))
            return
        needs = enumerate(zip(operands, self.layouts.needs[node.name], strict=True))
        parts = [self.halos.part(node, place, operand, need) for place, (operand, need) in needs]
        if any(self.layouts.cuts[node.name]):
            self._register(node, self._sharded_call(node, operands, parts))
        else:
            self._register(node, self._copy(node, dict(zip(operands, parts, strict=True))))

    def _share(self, node: fx.Node, first: fx.Node) -> None:
        """Emit nothing for a call that computes the same as an earlier one."""
        self.copies[node] = self.copies[first]
        self.resharder.share(node, first)

    def _routed_call(self, node: fx.Node, operands: Sequence[fx.Node]) -> fx.Node:
        """Emit a call on the rows whose experts this rank stores."""
        parts = []
        for place, (operand, need) in enumerate(zip(operands, self.layouts.needs[node.name], strict=True)):
            if node.target is grouped_mm and place == GROUP:
                parts.append(self.routes.local_group(node, operand, need))
            elif self.routes.reads_rows(node, operand):
                parts.append(self.routes.part(node, operand, need))
            else:
                parts.append(self.halos.part(node, place, operand, need))
        return self._sharded_call(node, operands, parts)

    def _register_routed(self, node: fx.Node, copy: fx.Node) -> None:
        """Make the copy of a node that is computed where experts are stored known to readers, and check the shapes of its values."""
        rows = self.routes.row_count(node)
        values = [copy.meta["val"]] if isinstance(copy.meta["val"], Tensor) else copy.meta["val"]
        for value, layout, axes in zip(values, self.layouts.results[node.name], self.axes.tensors[node.name], strict=True):
            expected = (rows, *self.halos.shape(node, axes, layout)[1:])
            self._check_shape(node, expected, value)
        self.routes.register(node, copy)
        if isinstance(copy.meta["val"], Tensor) and self.routes.is_read_elsewhere(node):
            own = self.routes.own_rows(node)
            own.meta["part_of"] = node.name
            self.resharder.register(node, 0, own, self.layouts.results[node.name][0], self.axes.of(node.name))

    def _register(self, node: fx.Node, copy: fx.Node) -> None:
        """Make the copy of a node known to readers, and check the shapes of its values."""
        self.copies[node] = copy
        if self.routes.is_routed(node):
            self._register_routed(node, copy)
            return
        if node.name in self.layouts.wide:
            self.halos.register_wide(node, copy)
        else:
            copy.meta["part_of"] = node.name
        for place, (layout, axes) in enumerate(zip(self.layouts.results[node.name], self.axes.tensors[node.name], strict=True)):
            if node.name not in self.layouts.wide:
                self.resharder.register(node, place, copy, layout, axes)
            is_alone = isinstance(copy.meta["val"], Tensor)
            value = copy.meta["val"] if is_alone else copy.meta["val"][place]
            if is_alone or _is_read(node, place):  # what a kernel gives for its backward may depend on whether there is one
                self._check_shape(node, self.halos.shape(node, axes, layout), value)

    def _check_shape(self, node: fx.Node, expected: Sequence[Size], value: Tensor) -> None:
        """Raise PartitionError if a part of a value has another shape than its layout says."""
        if not _equal(expected, [traced_size(size) for size in value.shape]):
            raise PartitionError(
                f"a part of {node.name} ({node.target}) has shape {tuple(value.shape)} where {expected} was expected",
                place=place_of(node),
                remedy="the rule of this operation is wrong: passes/rules",
            )

    def _copy(self, node: fx.Node, parts: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        """Emit a call with the same arguments: ``parts`` instead of the operands in it, the copies of other nodes."""

        def local(argument: fx.Node) -> fx.Node:
            return (parts or {}).get(argument, self.copies[argument])

        return self.emit(node.target, fx.map_arg(node.args, local), fx.map_arg(node.kwargs, local), node.name, node)

    def _sharded_call(self, node: fx.Node, operands: Sequence[fx.Node], parts: Sequence[fx.Node]) -> fx.Node:
        """Emit a call of which a mesh dimension cuts a loop, in pieces, decomposed or as the same operation on shards.

        Args:
            operands: its tensors, in the order of the schema.
            parts: this rank's parts of them, without the halos that are still to be exchanged.
        """
        loops = self.axes.loops[node.name]
        slides = slides_of(node.name, self.axes, self.layouts, self.extents)
        interior = interior_of(loops, slides) if node.name in self.layouts.overlapped else None
        if interior is not None:
            return self._emit_in_pieces(node, operands, parts, slides, interior)
        parts = self.halos.fetch(node, operands, parts, slides)
        if node.name in self.layouts.rings:
            return self._emit_ring(node, self._local_arguments(node, parts))
        cuts = self.layouts.cuts[node.name]
        reduced = [index for index, cut in enumerate(cuts) if cut is not None and loops.factors[cut.factor].reduction == "whole"]
        if reduced and not (self.local_statistics and packet(node.target) in _OF_THE_BATCH):
            return self._decompose_reduction(node, loops, self._local_arguments(node, parts), reduced)
        if any(slide.window.reach.written for slide in slides):
            return self._decompose_windows(node, loops, self._local_arguments(node, parts), slides)
        return self._scale_mean(node, loops, self._emit_on_shards(node, parts, slides))

    def _local_arguments(self, node: fx.Node, parts: Sequence[fx.Node]) -> dict[str, Any]:
        """Return parameter -> argument of a call, with this rank's parts (in the order of the schema) instead of its tensors."""
        remaining = iter(parts)

        def local(argument: fx.Node) -> fx.Node:
            return next(remaining) if isinstance(argument.meta.get("val"), Tensor) else self.copies[argument]

        return {name: fx.map_arg(value, local) for name, value in bound_arguments(node).items()}

    def _emit_on_shards(self, node: fx.Node, parts: Sequence[fx.Node], slides: Sequence[Slide], piece: Slide | None = None) -> fx.Node:
        """Emit the same operation on this rank's operands, with local sizes; of ``piece``, if given, instead of all its steps."""
        loops, arguments = self.axes.loops[node.name], self._local_arguments(node, parts)
        if loops.localize is not None:
            sizes = loops.localize(self._local_call(node, loops, parts, slides, piece))
            arguments.update({name: pytree.tree_map_only(sympy.Expr, self._size_node, value) for name, value in sizes.items()})
        copy = self.emit(node.target, *call_with(node, arguments), node.name, node)
        for slide in slides:
            copy = self._slice_to_own_steps(node, loops, slide, copy)
        return copy

    # -- windows -------------------------------------------------------------------------------------------------------------------

    def _emit_in_pieces(
        self, node: fx.Node, operands: Sequence[fx.Node], parts: Sequence[fx.Node], slides: Sequence[Slide], interior: Interior
    ) -> fx.Node:
        """Emit a call in pieces: the interior during the halo exchange, then both borders, and their concatenation."""
        slide, others = interior.slide, [each for each in slides if each is not interior.slide]
        place, dimension = slide.window.operand, slide.window.dimension
        parts = self.halos.fetch(node, operands, parts, others)
        border_rows = self.halos.fetch(node, operands, parts, [interior.border_slide])[place]
        results: dict[int, fx.Node] = {}
        for piece, source in ((1, parts[place]), (0, border_rows), (2, border_rows)):
            start, stop = interior.local_interval(piece)
            if start < stop:
                is_whole = (start, stop) == (0, source.meta["val"].shape[dimension])
                name = f"{source.name}_inner" if piece == 1 else f"{source.name}_border"
                rows = source if is_whole else self.emit(aten.slice.Tensor, (source, dimension, start, stop), {}, name, node)
                piece_parts = [rows if index == place else part for index, part in enumerate(parts)]
                piece_slide = interior.piece_slide(piece)
                results[piece] = self._emit_on_shards(node, piece_parts, [*others, piece_slide], piece_slide)
        in_order = [results[piece] for piece in sorted(results)]
        whole = self.emit(aten.cat.default, (in_order, interior.dimension), {}, f"{node.name}_whole", node)
        return self._scale_mean(node, self.axes.loops[node.name], whole)

    def _slice_to_own_steps(self, node: fx.Node, loops: Loops, slide: Slide, copy: fx.Node) -> fx.Node:
        """Slice a result to this rank's own steps, if the window computes more than these."""
        if slide.window.reach.skip == 0:
            return copy
        (dimension,) = [index for index, factors in enumerate(loops.results[0]) if slide.window.factor in factors]
        own_steps = (copy, dimension, slide.skip, slide.skip + slide.count)
        return self.emit(aten.slice.Tensor, own_steps, {}, f"{node.name}_own_{slide.over}", node)

    def _decompose_windows(self, node: fx.Node, loops: Loops, arguments: Mapping[str, Any], slides: Sequence[Slide]) -> fx.Node:
        """Emit the decomposition of a windowed call that is not the same operation on a shard."""
        emit = functools.partial(self.emit, like=node)
        return write_windows(node, WindowWriter(emit, arguments, node.name, window_dimensions(loops, slides)))

    def _decompose_reduction(self, node: fx.Node, loops: Loops, arguments: Mapping[str, Any], indices: Sequence[int]) -> fx.Node:
        """Emit the decomposition of a call that reduces over an axis which the mesh dimensions ``indices`` shard."""
        reduced: list[ReductionCut] = []
        layout = [None if cut is None else Shard(cut.axis, 0) for cut in self.layouts.cuts[node.name]]
        for index in indices:
            cut = self.layouts.cuts[node.name][index]
            assert cut is not None
            inner = self._inner_size(node, cut)
            sizes = tuple(product((part, inner)) for part in self.extents.parts(cut.axis, index, layout))
            own_size = sizes[self.extents.coordinate[index]]
            reduced.append(ReductionCut(self.extents.mesh[index][0], loops.factors[cut.factor].name, sizes, own_size))
        decomposition = decomposition_of(node, reduced[0].factor)
        assert decomposition is not None
        whole_sizes = {factor.name: self.extents.whole(factor.size) for factor in loops.factors}
        axes_of = zip(loops.factors, self.axes.factors[node.name], strict=True)
        own_sizes = {factor.name: product(self.extents.axis(axis, layout) for axis in axes) for factor, axes in axes_of}
        emit = functools.partial(self.emit, like=node)
        return decomposition.on_part(ReductionWriter(emit, arguments, node.name, self._size_node, tuple(reduced), whole_sizes, own_sizes))

    def _emit_ring(self, node: fx.Node, arguments: Mapping[str, Any]) -> fx.Node:
        """Emit attention whose keys and values go round the ranks of a mesh dimension."""
        ring = self.layouts.rings[node.name]
        over, count = self.extents.mesh[ring.dimension]
        emit = functools.partial(self.emit, like=node)
        return ring_attention(PartWriter(emit, arguments, node.name), over, count, is_zigzag=ring.is_zigzag)

    def _inner_size(self, node: fx.Node, cut: Cut) -> Size:
        """Return the product of the sizes of a factor's axes inside the sharded one."""
        axes = self.axes.factors[node.name][cut.factor]
        return product(self.extents.whole(self.extents.sizes[axis]) for axis in axes[axes.index(cut.axis) + 1 :])

    def _scale_mean(self, node: fx.Node, loops: Loops, copy: fx.Node) -> fx.Node:
        """Scale a mean over a shard by the shard's fraction of the axis, so that the sum over ranks is the mean of the whole."""
        share = sympy.Integer(1)
        for index, cut in enumerate(self.layouts.cuts[node.name]):
            if cut is not None and loops.factors[cut.factor].reduction == "mean":
                layout = tuple(Shard(cut.axis, 0) if place == index else None for place in range(len(self.extents.mesh)))
                whole = self.extents.whole(self.extents.sizes[cut.axis])
                share *= sympy.cancel(sympy.sympify(self.extents.axis(cut.axis, layout)) / whole)
        if share == 1:
            return copy
        return self.emit(aten.mul.Tensor, (copy, float(share)), {}, f"{node.name}_share", node)

    def _local_call(self, node: fx.Node, loops: Loops, parts: Sequence[fx.Node], slides: Sequence[Slide], piece: Slide | None) -> LocalCall:
        """Return the sizes of this rank's part of a call, or of a piece of it (see ``_emit_on_shards``)."""
        results, cuts = self.layouts.results[node.name], self.layouts.cuts[node.name]
        factors = []
        for factor, axes in enumerate(self.axes.factors[node.name]):
            layout = [Shard(cut.axis, 0) if cut is not None and cut.factor == factor else None for cut in cuts]
            factors.append(product(self.extents.axis(axis, layout) for axis in axes))
        for index, start, stop in self.halos.computed_intervals(node):
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
            arguments=bound_arguments(node),
            operands=tuple(tuple(size_of(size) for size in part.meta["val"].shape) for part in parts),
            results=tuple(map(tuple, shapes)),
            factors=tuple(factors),
            cut=frozenset(cut.factor for cut in cuts if cut is not None),
        )

    # -- results -------------------------------------------------------------------------------------------------------------------

    def _outputs(self) -> dict[str, str]:
        """Emit the output, with results in the layouts that it needs; return result -> name of the returned node."""
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
        """Emit a call, as ranks call it, with its fake value."""
        assert callable(function)
        function = _emitted(function)
        node = self.target.create_node("call_function", function, args, dict(kwargs), name=name)
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "part_of")}
        node.meta["written_for"] = self.reader
        self._fakes.describe(node)
        return node

    def _size_node(self, size: Size) -> fx.Node | int:
        """Emit a size given in the rank's own rows; return an int unchanged."""
        if isinstance(size, int):
            return size
        if isinstance(size, RowCount):
            return self.routes.size_node(size)
        assert self.batch is not None
        return emit_size(self.target, size, self.graph.batch, self.batch)

    def _symbolic(self, shape: Sequence[Size]) -> list[Any]:
        """Return a shape with symbolic ints of the trace instead of expressions."""
        if self.batch is None:
            return list(shape)
        symbol, value = self.graph.batch, self.batch.meta["val"]
        return [size if isinstance(size, int) else sympy.lambdify(symbol, size)(value) for size in shape]


def _is_read(node: fx.Node, place: int) -> bool:
    """Return whether a call reads a result of a call that gives several."""
    return any(not is_item(user) or (user.args[1] == place and user.users) for user in node.users)


def _equal(first: Sequence[Size], second: Sequence[Size]) -> bool:
    return len(first) == len(second) and all(sympy.expand(left - right) == 0 for left, right in zip(first, second, strict=True))
