"""Differentiate a tiled stage: the backward visits the tiles of every sweep in reverse order, and recomputes each.

Forward                                   Backward

    c[.., 0:16] = conv2d(x[.., 0:19], w)      c_gradient                                      a whole value, so a whole gradient
    c[.., 16:32] = conv2d(x[.., 13:32], w)    dx, dw = backward of tile 1 (x[.., 13:32], c_gradient[.., 16:32])
                                              x_gradient[.., 13:32] += dx
                                              dx, dw_1 = backward of tile 0 (x[.., 0:19], c_gradient[.., 0:16])
                                              x_gradient[.., 0:19] += dx                      overlaps are added
                                              w_gradient = dw + dw_1

Every region (``passes.tiling.steps``) is a stage of its own, traced by ``passes.autograd.trace_joint`` and cut by
``passes.autograd.partition_joint``, tiles with full recomputation: a forward saves only whole values. Regions also compute the statistics
of a normalization. The gradient of a statistic is summed over the tiles that it normalizes. The backward visits the sweep of the statistics
like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.recompute import Recompute
from passes.autograd.trace_joint import contiguous_like, example_of, returned_nodes
from passes.graph.aliasing import OWN_MEMORY, memory_keys
from passes.graph.fake_tensors import fake_mode
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.symbolic_sizes import emit_size
from passes.stages.split import StageGraph
from passes.tiling.backward_builder import GradientWriter, copy_template
from passes.tiling.steps import Piece, Put, Step, TiledRegion, slices_of, steps_of, templates_of


@dataclass(frozen=True)
class _Template:
    """The template of a region.

    Attributes:
        stage: the region as a stage.
        training: its training graphs.
    """

    stage: StageGraph
    training: DifferentiatedStage


@dataclass(frozen=True)
class _GradientFlow:
    """The flow of gradients in a tiled stage.

    Attributes:
        steps: of the stage, in order.
        requiring: the values that require a gradient.
        templates: the template of each region that a gradient flows through.
        outputs: the stage's outputs whose gradients the backward gets.
        dependence: value -> the outputs whose gradients its gradient is computed from.
    """

    steps: tuple[Step, ...]
    requiring: frozenset[fx.Node]
    templates: Mapping[TiledRegion, _Template]
    outputs: tuple[fx.Node, ...]
    dependence: Mapping[fx.Node, frozenset[str]]


def tiles_requiring_gradient(stage: StageGraph, differentiable: Collection[str]) -> frozenset[str]:
    """Return the outputs of a tiled stage that require a gradient."""
    requiring = _values_requiring_gradient(stage, _placeholders(stage, differentiable))
    return frozenset(node.name for node in requiring) & frozenset(stage.outputs)


def differentiate_tiles(
    stage: StageGraph, differentiable: frozenset[str], outputs_with_gradient: frozenset[str], recompute: Recompute
) -> DifferentiatedStage:
    """Return the training graphs of a tiled stage.

    Args:
        differentiable: placeholders whose gradients are wanted.
        outputs_with_gradient: outputs whose gradients the backward gets.
        recompute: for regions that are computed whole. Tiles are always recomputed: their backward reads the inputs of the tile.
    """
    outputs = tuple(node for node in returned_nodes(stage.module.graph) if node.name in outputs_with_gradient)
    flow = _gradient_flow(stage, recompute, _placeholders(stage, differentiable), outputs)
    with fake_mode(stage.module.graph):
        return _StageWriter(stage, flow).run()


def _inputs(stage: StageGraph, region: TiledRegion) -> list[fx.Node]:
    """Return the inputs of a region in the order of its template."""
    return templates_of(stage.module).inputs(stage, region)


def _examples(stage: StageGraph, region: TiledRegion) -> dict[fx.Node, Any]:
    """Return fake tensors like the inputs of a region: pieces are copied, so they are contiguous."""
    with fake_mode(stage.module.graph):
        return {node: example_of(node, node.target in stage.bound, stage.device) for node in region.inputs}


def _template(
    stage: StageGraph, region: TiledRegion, recompute: Recompute, differentiable: Collection[fx.Node], with_gradient: Sequence[fx.Node]
) -> _Template:
    """Return the template of a region.

    Args:
        differentiable: inputs whose gradients are wanted.
        with_gradient: outputs whose gradients the backward gets.
    """
    with fake_mode(stage.module.graph):
        given = {node: contiguous_like(node.meta["val"], stage.device) for node in with_gradient}
    policy: Recompute = "full" if region.tile else recompute
    found = templates_of(stage.module).template(stage, region, _examples(stage, region), differentiable, given, policy)
    assert found.training is not None
    return _Template(found.joint.stage, found.training)


def _placeholders(stage: StageGraph, names: Collection[str]) -> frozenset[fx.Node]:
    return frozenset(node for node in stage.module.graph.nodes if node.op == "placeholder" and node.name in names)


def _values_requiring_gradient(stage: StageGraph, differentiable: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Propagate ``requires_grad`` from the differentiable placeholders through all steps."""
    requiring = set(differentiable)
    for step in steps_of(stage.module.graph):
        if isinstance(step, TiledRegion):
            results = templates_of(stage.module).run(stage, step, _examples(stage, step), requiring)
            tracked = (isinstance(value, Tensor) and value.requires_grad for value in results)
            requiring.update(node for node, is_tracked in zip(step.outputs, tracked, strict=True) if is_tracked)
        elif isinstance(step, Put):
            if step.tile in requiring:
                whole, _ = step.place
                requiring.add(whole)
        elif any(source in requiring for source in step.node.all_input_nodes):
            requiring.add(step.node)
    return frozenset(requiring)


def _gradient_flow(
    stage: StageGraph, recompute: Recompute, differentiable: frozenset[fx.Node], outputs: tuple[fx.Node, ...]
) -> _GradientFlow:
    """Follow gradients from the outputs back to the differentiable placeholders."""
    steps, requiring = steps_of(stage.module.graph), _values_requiring_gradient(stage, differentiable)
    outputs = tuple(node for node in outputs if node in requiring)
    dependence: dict[fx.Node, frozenset[str]] = {node: frozenset({node.name}) for node in outputs}
    template_of: dict[TiledRegion, _Template] = {}

    def add_dependence(node: fx.Node, *more: frozenset[str]) -> None:
        dependence[node] = dependence.get(node, frozenset()).union(*more)

    for step in reversed(steps):
        if isinstance(step, TiledRegion):
            with_gradient = [node for node in step.outputs if node in dependence]
            if not with_gradient:
                continue
            template = template_of[step] = _template(stage, step, recompute, requiring, with_gradient)
            output_of = dict(zip(template.stage.outputs, step.outputs, strict=True))
            input_names = (*template.stage.bound, *template.stage.arguments)
            for name, node in zip(input_names, _inputs(stage, step), strict=True):
                if name in template.training.dependence:
                    add_dependence(node, *(dependence[output_of[output]] for output in template.training.dependence[name]))
        elif isinstance(step, Put):
            whole = step.place[0] if step.tile in requiring else None
            if step.tile is not None and whole in dependence:
                add_dependence(step.tile, dependence[whole])
        elif step.node in dependence:
            for source in step.node.all_input_nodes:
                if source in requiring:
                    add_dependence(source, dependence[step.node])
    return _GradientFlow(tuple(steps), requiring, template_of, outputs, dependence)


class _StageWriter:
    """Writes the training graphs of a stage: the forward, then the backward.

    Attributes:
        values: node of the tiled graph -> its copy in the forward.
        saved: region -> the values of the forward that its backward reads.
        pieces: slices of whole values: the backward slices the whole values again.
    """

    def __init__(self, stage: StageGraph, flow: _GradientFlow) -> None:
        self.stage, self.flow = stage, flow
        self.forward = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.saved: dict[TiledRegion, list[fx.Node]] = {}
        self.pieces = dict.fromkeys(step.node for step in flow.steps if isinstance(step, Piece))

    def run(self) -> DifferentiatedStage:
        by_name = {node.name: node for node in self.stage.module.graph.nodes}
        bound, arguments = ([by_name[name] for name in names] for names in (self.stage.bound, self.stage.arguments))
        for node in (*bound, *arguments):
            self.values[node] = self.forward.placeholder(node.name)
            self.values[node].meta = dict(node.meta)
        for step in self.flow.steps:
            self._write_forward(step)
        outputs = tuple(self.values[node] for node in returned_nodes(self.stage.module.graph))
        outputs_with_gradient = tuple(node.name for node in self.flow.outputs)
        bound_with_gradient = [node for node in bound if node in self.flow.dependence]
        arguments_with_gradient = [node for node in arguments if node in self.flow.dependence]
        label = f"Stage{self.stage.index}"
        if not bound_with_gradient and not arguments_with_gradient:
            forward = _module(self.forward, (*outputs, ()), f"{label}Forward")
            return DifferentiatedStage(forward, outputs_with_gradient=outputs_with_gradient)
        backward_bound, saved = self._backward_inputs(set(bound))
        return DifferentiatedStage(
            forward=_module(self.forward, (*outputs, tuple(saved)), f"{label}Forward"),
            backward=_BackwardWriter(self, backward_bound, saved).run(arguments_with_gradient, bound_with_gradient, f"{label}Backward"),
            backward_bound=tuple(node.name for node in backward_bound),
            outputs_with_gradient=outputs_with_gradient,
            arguments_with_gradient=tuple(node.name for node in arguments_with_gradient),
            parameters_with_gradient=tuple(node.name for node in bound_with_gradient),
            saved_values=tuple(node.meta["val"] for node in saved),
            dependence={node.name: self.flow.dependence[node] for node in (*bound_with_gradient, *arguments_with_gradient)},
            received=tuple(range(len(bound_with_gradient))),
        )

    def _write_forward(self, step: Step) -> None:
        """Copy a step; a region with a gradient from its template, whose forward also returns the values to save."""
        if isinstance(step, TiledRegion) and step in self.flow.templates:
            template = self.flow.templates[step]
            inputs = [self.values[node] for node in _inputs(self.stage, step)]
            results = copy_template(self.forward, template.training.forward.graph, inputs, step.tile)
            n_outputs = len(step.outputs)
            self.values.update(zip(step.outputs, results[:n_outputs], strict=True))
            self.saved[step] = results[n_outputs:]
            return
        for node in step.nodes if isinstance(step, TiledRegion) else (step.node,):
            self.values[node] = self.forward.node_copy(node, self.values.__getitem__)

    def _backward_inputs(self, bound: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the parameters and buffers that the backward reads, and the values that the forward saves: of a slice, the whole."""
        read: dict[fx.Node, None] = {}
        saved: dict[fx.Node, None] = {self.values[self.batch]: None} if self.batch is not None else {}
        tiled_node = {copy: node for node, copy in self.values.items()}
        for step in reversed(self.flow.steps):
            if not isinstance(step, TiledRegion) or step not in self.flow.templates:
                continue
            template, inputs = self.flow.templates[step], _inputs(self.stage, step)
            read.update(dict.fromkeys(inputs[template.stage.bound.index(name)] for name in template.training.backward_bound))
            for node in self.saved[step]:
                whole = self.whole_and_slices(tiled_node[node])[0] if node in tiled_node else None
                if whole is not None and whole in bound:
                    read[whole] = None
                else:
                    saved[node if whole is None else self.values[whole]] = None
        return [node for node in self.stage.module.graph.nodes if node in read], list(saved)

    @property
    def batch(self) -> fx.Node | None:
        """The placeholder of the batch size in the tiled graph."""
        return next((node for node in self.values if node.name == "batch"), None) if self.stage.has_batch else None

    def whole_and_slices(self, node: fx.Node) -> tuple[fx.Node, list[tuple[int, int, int]]]:
        """Return the whole value that a piece is sliced from, and the (dimension, start, stop) of the slices."""
        return slices_of(node, self.pieces.__contains__)


def _module(graph: fx.Graph, results: tuple[Argument, ...], name: str) -> fx.GraphModule:
    graph.output(results)
    graph.lint()
    return LazyGraphModule({}, graph, class_name=name)


class _BackwardWriter:
    """Writes the backward of a tiled stage.

    Args:
        forward: the writer of its forward.
        bound: placeholders of parameters and buffers that it reads.
        saved: values that the forward saves for it.

    Attributes:
        values: node of the forward -> the placeholder that receives it.
        piece_of: node of the forward -> the piece of the tiled graph that it is a copy of.
    """

    def __init__(self, forward: _StageWriter, bound: Sequence[fx.Node], saved: Sequence[fx.Node]) -> None:
        self.forward, self.flow = forward, forward.flow
        self.target = fx.Graph()
        self.placeholders: list[fx.Node] = []
        self.piece_of = {forward.values[node]: node for node in forward.pieces}
        self.values: dict[fx.Node, fx.Node] = {}
        for node in (*(forward.values[placeholder] for placeholder in bound), *saved):
            self.values[node] = self._placeholder(node.name, node)
        batch = forward.batch
        symbol = batch.meta["val"].node.expr if batch is not None and isinstance(batch.meta["val"], torch.SymInt) else None
        batch_size: int | fx.Node = 0 if batch is None else self.values[forward.values[batch]]
        self.write = GradientWriter(self.target, lambda size: emit_size(self.target, size, symbol, batch_size), forward.stage.device)
        for node in self.flow.outputs:
            self.write.gradients[node] = self._placeholder(f"{node.name}_gradient", node, owns_memory=True)

    def _placeholder(self, name: str, node: fx.Node, *, owns_memory: bool = False) -> fx.Node:
        """Add a placeholder like a node: it aliases the same memory, or (``owns_memory``, for gradients) memory that no other value has."""
        placeholder = self.target.placeholder(name)
        placeholder.meta = {key: value for key, value in node.meta.items() if key in ("val", "nn_module_stack")}
        keys = tuple(key for _, key in memory_keys(node))
        placeholder.meta[OWN_MEMORY] = tuple(object() for _ in keys) if owns_memory else keys
        self.placeholders.append(placeholder)
        return placeholder

    def run(self, arguments: Sequence[fx.Node], parameters: Sequence[fx.Node], name: str) -> fx.GraphModule:
        """Return the graph of the backward, which returns ``(*gradients of arguments, (*gradients of parameters,))``."""
        for step in reversed(self.flow.steps):
            self._differentiate(step)
        gradients = self.write.results([*arguments, *parameters], self.placeholders)
        of_arguments, of_parameters = gradients[: len(arguments)], gradients[len(arguments) :]
        return _module(self.target, (*of_arguments, tuple(of_parameters)), name)

    def _differentiate(self, step: Step) -> None:
        """Write the backward of one step: a region's template; a slice adds to its source; a tile's write gives the tile its gradient."""
        if isinstance(step, TiledRegion):
            if step in self.flow.templates:
                self._differentiate_region(step, self.flow.templates[step])
            return
        if isinstance(step, Piece) and step.node in self.write.gradients:
            self.write.add_piece(*self.forward.whole_and_slices(step.node), self.write.gradients.pop(step.node))
        if isinstance(step, Put) and step.tile in self.flow.requiring:
            whole, slices = step.place
            if whole in self.write.gradients:
                self.write.add(step.tile, self.write.part(self.write.gradients[whole], slices, f"{step.tile.name}_gradient"))

    def _differentiate_region(self, region: TiledRegion, template: _Template) -> None:
        """Copy the backward of the region's template, and add its results to the gradients of the region's inputs."""
        training, stage = template.training, template.stage
        if training.backward is None:
            return
        input_of = dict(zip((*stage.bound, *stage.arguments), _inputs(self.forward.stage, region), strict=True))
        output_of = dict(zip(stage.outputs, region.outputs, strict=True))
        arguments = [self.values[self.forward.values[input_of[name]]] for name in training.backward_bound]
        arguments += [self._saved_value(node) for node in self.forward.saved[region]]
        arguments += [self.write.gradients[output_of[name]] for name in training.outputs_with_gradient]
        label = f"{region.tile}_backward" if region.tile else ""
        gradients = copy_template(self.target, training.backward.graph, arguments, label)
        names = (*training.arguments_with_gradient, *training.parameters_with_gradient)
        for name, gradient in zip(names, gradients, strict=True):
            self.write.add(input_of[name], gradient)
        for node in region.outputs:
            self.write.gradients.pop(node, None)

    def _saved_value(self, node: fx.Node) -> fx.Node:
        """Return the value of a node of the forward: a placeholder, or a slice of one."""
        if node in self.values:
            return self.values[node]
        piece = self.piece_of[node]
        whole, slices = self.forward.whole_and_slices(piece)
        return self.write.part(self.values[self.forward.values[whole]], slices, piece.name)
