"""Differentiate a tiled stage: the backward visits the tiles of every sweep in reverse order, and recomputes each.

Forward                                   Backward

    c[.., 0:16] = conv2d(x[.., 0:19], w)      c_gradient                                      a whole value, so a whole gradient
    c[.., 16:32] = conv2d(x[.., 13:32], w)    dx, dw = backward of tile 1 (x[.., 13:32], c_gradient[.., 16:32])
                                              x_gradient[.., 13:32] += dx
                                              dx, dw_1 = backward of tile 0 (x[.., 0:19], c_gradient[.., 0:16])
                                              x_gradient[.., 0:19] += dx                      overlaps are added
                                              w_gradient = dw + dw_1

Every region (``passes.tiling.steps``) is a stage of its own, traced by ``passes.autograd.trace_joint`` and cut by
``passes.autograd.partition_joint``, tiles with full recomputation: a forward keeps only whole values. Statistics of a normalisation are
regions and values like others: what is normalised depends on them, their gradients are sums over tiles, and the sweep that gathered them
goes backward, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.recompute import Recompute
from passes.autograd.trace_joint import returned_nodes
from passes.graph.aliasing import OWN_MEMORY, memory_keys
from passes.graph.fake_tensors import fake_mode
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.symbolic_sizes import emit_size
from passes.stages.split import StageGraph
from passes.tiling.backward_builder import GradientWriter, write_out
from passes.tiling.region_cache import Template, Templates
from passes.tiling.steps import Piece, Put, Step, TiledRegion, slices_of, steps_of

__all__ = ["differentiate_tiles", "tiles_requiring_gradient"]


@dataclass(frozen=True)
class _Flow:
    """The flow of gradients in a tiled stage.

    Attributes:
        steps: of the stage, in order.
        requiring: values that autograd would track.
        templates: of the regions that a gradient flows through.
        outputs: the stage's outputs whose gradients are given.
        dependence: value -> the outputs whose gradients its gradient is computed from.
    """

    steps: tuple[Step, ...]
    requiring: frozenset[fx.Node]
    templates: Mapping[TiledRegion, Template]
    outputs: tuple[fx.Node, ...]
    dependence: Mapping[fx.Node, frozenset[str]]


def tiles_requiring_gradient(stage: StageGraph, differentiable: Collection[str]) -> frozenset[str]:
    """Return the outputs of a tiled stage that require a gradient."""
    found = _requiring(steps_of(stage.module.graph), Templates(stage, "full"), _placeholders(stage, differentiable))
    return frozenset(node.name for node in found) & frozenset(stage.outputs)


def differentiate_tiles(
    stage: StageGraph, differentiable: frozenset[str], outputs_with_gradient: frozenset[str], recompute: Recompute
) -> DifferentiatedStage:
    """Return the training graphs of a tiled stage.

    Args:
        differentiable: placeholders whose gradients are wanted.
        outputs_with_gradient: outputs whose gradients the backward gets.
        recompute: for regions that are computed whole; tiles are always recomputed.
    """
    templates = Templates(stage, recompute)
    outputs = tuple(node for node in returned_nodes(stage.module.graph) if node.name in outputs_with_gradient)
    flow = _flow(steps_of(stage.module.graph), templates, _placeholders(stage, differentiable), outputs)
    with fake_mode(stage.module.graph):
        return _Writer(stage, templates, flow).run()


def _placeholders(stage: StageGraph, names: Collection[str]) -> frozenset[fx.Node]:
    return frozenset(node for node in stage.module.graph.nodes if node.op == "placeholder" and node.name in names)


def _requiring(steps: Sequence[Step], templates: Templates, differentiable: frozenset[fx.Node]) -> frozenset[fx.Node]:
    found = set(differentiable)
    for step in steps:
        if isinstance(step, TiledRegion):
            tracked = templates.requiring(step, found)
            found.update(node for node, is_tracked in zip(step.outputs, tracked, strict=True) if is_tracked)
        elif isinstance(step, Put):
            found.update([step.place[0]] if step.tile in found else [])
        elif any(source in found for source in step.node.all_input_nodes):
            found.add(step.node)
    return frozenset(found)


def _flow(steps: Sequence[Step], templates: Templates, differentiable: frozenset[fx.Node], outputs: tuple[fx.Node, ...]) -> _Flow:
    """Follow gradients from the outputs back to the wanted placeholders."""
    requiring = _requiring(steps, templates, differentiable)
    dependence: dict[fx.Node, frozenset[str]] = {node: frozenset({node.name}) for node in outputs if node in requiring}
    found: dict[TiledRegion, Template] = {}
    for step in reversed(steps):
        if isinstance(step, TiledRegion):
            given = [node for node in step.outputs if node in dependence]
            if not given:
                continue
            template = templates.template(step, requiring, given)
            found[step] = template
            inside = dict(zip(template.stage.outputs, step.outputs, strict=True))
            reached = zip((*template.stage.bound, *template.stage.arguments), templates.inputs(step), strict=True)
            for name, node in reached:
                if name in template.training.dependence:
                    of = [dependence[inside[output]] for output in template.training.dependence[name]]
                    dependence[node] = dependence.get(node, frozenset()).union(*of)
        elif isinstance(step, Put):
            whole = step.place[0] if step.tile in requiring else None
            if step.tile is not None and whole in dependence:
                dependence[step.tile] = dependence.get(step.tile, frozenset()) | dependence[whole]
        elif step.node in dependence:
            for source in step.node.all_input_nodes:
                if source in requiring:
                    dependence[source] = dependence.get(source, frozenset()) | dependence[step.node]
    return _Flow(tuple(steps), requiring, found, tuple(node for node in outputs if node in requiring), dependence)


class _Writer:
    """Writes the forward, then the backward."""

    def __init__(self, stage: StageGraph, templates: Templates, flow: _Flow) -> None:
        self.stage, self.templates, self.flow = stage, templates, flow
        self.forward = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.results: dict[TiledRegion, list[fx.Node]] = {}
        self.pieces = dict.fromkeys(step.node for step in flow.steps if isinstance(step, Piece))

    def run(self) -> DifferentiatedStage:
        by_name = {node.name: node for node in self.stage.module.graph.nodes}
        bound, arguments = ([by_name[name] for name in names] for names in (self.stage.bound, self.stage.arguments))
        for node in (*bound, *arguments):
            self.values[node] = self.forward.placeholder(node.name)
            self.values[node].meta = dict(node.meta)
        for step in self.flow.steps:
            self._compute(step)
        outputs = tuple(self.values[node] for node in returned_nodes(self.stage.module.graph))
        given = tuple(node.name for node in self.flow.outputs)
        of_bound, of_arguments = ([node for node in nodes if node in self.flow.dependence] for nodes in (bound, arguments))
        label = f"Stage{self.stage.index}"
        if not of_bound and not of_arguments:
            forward = _module(self.forward, (*outputs, ()), f"{label}Forward")
            return DifferentiatedStage(forward, outputs_with_gradient=given)
        read, saved = self._kept(set(bound))
        return DifferentiatedStage(
            forward=_module(self.forward, (*outputs, tuple(saved)), f"{label}Forward"),
            backward=_Backward(self, read, saved).run(of_arguments, of_bound, f"{label}Backward"),
            backward_bound=tuple(node.name for node in read),
            outputs_with_gradient=given,
            arguments_with_gradient=tuple(node.name for node in of_arguments),
            parameters_with_gradient=tuple(node.name for node in of_bound),
            saved_values=tuple(node.meta["val"] for node in saved),
            dependence={node.name: self.flow.dependence[node] for node in (*of_bound, *of_arguments)},
            received=tuple(range(len(of_bound))),
        )

    # -- forward -------------------------------------------------------------------------------------------------------------------

    def _compute(self, step: Step) -> None:
        if isinstance(step, TiledRegion) and step in self.flow.templates:
            template = self.flow.templates[step]
            given = [self.values[node] for node in self.templates.inputs(step)]
            found = write_out(self.forward, template.training.forward.graph, given, step.tile)
            count = len(step.outputs)
            self.values.update(zip(step.outputs, found[:count], strict=True))
            self.results[step] = found[count:]
            return
        for node in step.nodes if isinstance(step, TiledRegion) else (step.node,):
            self.values[node] = self.forward.node_copy(node, self.values.__getitem__)

    def _kept(self, bound: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the placeholders of parameters and buffers that the backward reads, and the values that the forward saves for it."""
        read: dict[fx.Node, None] = {}
        saved: dict[fx.Node, None] = {self.values[self.batch]: None} if self.batch is not None else {}
        places = {new: old for old, new in self.values.items()}
        for step in reversed(self.flow.steps):
            if not isinstance(step, TiledRegion) or step not in self.flow.templates:
                continue
            inputs = self.templates.inputs(step)
            of_template = self.flow.templates[step].training.backward_bound
            names = self.flow.templates[step].stage.bound
            read.update(dict.fromkeys(inputs[names.index(name)] for name in of_template))
            for node in self.results[step]:
                source = self.whole(places[node])[0] if node in places else None
                if source is not None and source in bound:
                    read[source] = None
                else:
                    saved[node if source is None else self.values[source]] = None
        return [node for node in self.stage.module.graph.nodes if node in read], list(saved)

    @property
    def batch(self) -> fx.Node | None:
        return next((node for node in self.values if node.name == "batch"), None) if self.stage.has_batch else None

    def whole(self, node: fx.Node) -> tuple[fx.Node, list[tuple[int, int, int]]]:
        """Return the whole value that a piece is sliced from, and the (dimension, start, stop) of the slices."""
        return slices_of(node, self.pieces.__contains__)


def _module(graph: fx.Graph, results: tuple[Argument, ...], name: str) -> fx.GraphModule:
    graph.output(results)
    graph.lint()
    return LazyGraphModule({}, graph, class_name=name)


class _Backward:
    """Writes the backward of a tiled stage.

    Args:
        forward: the writer of its forward.
        read: placeholders of parameters and buffers that it reads.
        saved: values that the forward saves for it.
    """

    def __init__(self, forward: _Writer, read: Sequence[fx.Node], saved: Sequence[fx.Node]) -> None:
        self.forward, self.flow, self.templates = forward, forward.flow, forward.templates
        self.target = fx.Graph()
        self.given: list[fx.Node] = []
        self.cut = {forward.values[node]: node for node in forward.pieces}
        self.values: dict[fx.Node, fx.Node] = {}
        for node in (*(forward.values[each] for each in read), *saved):
            self.values[node] = self._placeholder(node.name, node)
        batch = forward.batch
        symbol = batch.meta["val"].node.expr if batch is not None and isinstance(batch.meta["val"], torch.SymInt) else None
        rows = None if batch is None else self.values[forward.values[batch]]
        self.write = GradientWriter(
            self.target, lambda size: emit_size(self.target, size, symbol, 0 if rows is None else rows), forward.stage.device
        )
        for node in self.flow.outputs:
            self.write.gradients[node] = self._placeholder(f"{node.name}_gradient", node, of_its_own=True)

    def _placeholder(self, name: str, node: fx.Node, *, of_its_own: bool = False) -> fx.Node:
        """Add a placeholder like a node: it aliases the same memory, or (``of_its_own``, for gradients) memory that no other value has."""
        placeholder = self.target.placeholder(name)
        placeholder.meta = {key: value for key, value in node.meta.items() if key in ("val", "nn_module_stack")}
        keys = tuple(key for _, key in memory_keys(node))
        placeholder.meta[OWN_MEMORY] = tuple(object() for _ in keys) if of_its_own else keys
        self.given.append(placeholder)
        return placeholder

    def run(self, arguments: Sequence[fx.Node], parameters: Sequence[fx.Node], name: str) -> fx.GraphModule:
        """Return the graph of the backward, which returns ``(*gradients of arguments, (*gradients of parameters,))``."""
        for step in reversed(self.flow.steps):
            self._differentiate(step)
        gradients = self.write.results([*arguments, *parameters], self.given)
        of_arguments, of_parameters = gradients[: len(arguments)], gradients[len(arguments) :]
        return _module(self.target, (*of_arguments, tuple(of_parameters)), name)

    def _differentiate(self, step: Step) -> None:
        """Write the backward of one step: a region's template; a slice adds to its source; a tile's write gives the tile its gradient."""
        if isinstance(step, TiledRegion):
            if step in self.flow.templates:
                self._region(step, self.flow.templates[step])
            return
        if isinstance(step, Piece) and step.node in self.write.gradients:
            self.write.add_piece(*self.forward.whole(step.node), self.write.gradients.pop(step.node))
        if isinstance(step, Put) and step.tile in self.flow.requiring:
            whole, slices = step.place
            if whole in self.write.gradients:
                self.write.add(step.tile, self.write.part(self.write.gradients[whole], slices, f"{step.tile.name}_gradient"))

    def _region(self, region: TiledRegion, template: Template) -> None:
        training, stage = template.training, template.stage
        if training.backward is None:
            return
        inputs = self.templates.inputs(region)
        of_name = dict(zip((*stage.bound, *stage.arguments), inputs, strict=True))
        outputs = dict(zip(stage.outputs, region.outputs, strict=True))
        given = [self.values[self.forward.values[of_name[name]]] for name in training.backward_bound]
        given += [self._saved(node) for node in self.forward.results[region]]
        given += [self.write.gradients[outputs[name]] for name in training.outputs_with_gradient]
        found = write_out(self.target, training.backward.graph, given, f"{region.tile}_backward" if region.tile else "")
        names = (*training.arguments_with_gradient, *training.parameters_with_gradient)
        for name, gradient in zip(names, found, strict=True):
            self.write.add(of_name[name], gradient)
        for node in region.outputs:
            self.write.gradients.pop(node, None)

    def _saved(self, node: fx.Node) -> fx.Node:
        """Return a value of the forward: a saved one, or a slice of a saved one."""
        if node in self.values:
            return self.values[node]
        old = self.cut[node]
        whole, slices = self.forward.whole(old)
        return self.write.part(self.values[self.forward.values[whole]], slices, old.name)
