"""Cut a joint graph into the graphs that a schedule runs: forward, backward, and the two halves of the backward.

    joint      (parameters, x | dy)  ->  y, dx, dw

    forward         F   (parameters, x)          -> y, (saved...)
    backward        B   (parameters, saved, dy)  -> dx, (dw,)
    input gradient  I   (parameters, saved, dy)  -> dx, (kept...)       what earlier stages wait for
    weight gradient W   (parameters, kept)       -> (dw,)               what nobody waits for

What the forward saves is the policy of ``recompute``:

    "none"        every value that the backward reads
    "selective"   results of weight contractions and of collectives (dear to compute); norms, activations and the attention core are
                  computed again
    "full"        the stage's arguments; everything else is computed again

Whatever the policy, results of random operations and of operations that write to buffers are saved: computing them again would draw
other numbers or update twice. Views of parameters are taken again, never saved.
(Selective: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from passes.aliasing import aliasing, mutated_arguments
from passes.differentiate import Joint
from passes.ir.collectives import COLLECTIVES, all_gather, replicate
from passes.lazy_graph_module import LazyGraphModule
from passes.operators import draws

__all__ = ["DifferentiatedStage", "Recompute", "split_backward"]

aten = torch.ops.aten

Recompute = Literal["none", "selective", "full"]
"""What the backward computes again instead of keeping it."""

DEAR = frozenset({aten.addmm.default, aten.mm.default, aten.convolution.default, aten.mkldnn_rnn_layer.default, *COLLECTIVES})
"""What ``"selective"`` keeps: contractions with weights, and what came from other ranks."""

GATHERED_AGAIN = ("fsdp",)
"""Mesh dimensions over which the backward gathers parameters a second time, so that no rank keeps them whole in between."""


@dataclass(frozen=True)
class DifferentiatedStage:
    """The graphs of one stage in training.

    Attributes:
        forward: bound, arguments -> outputs..., (saved...).
        backward: backward_bound, saved, gradients of outputs -> gradients of arguments..., (gradients of parameters...).
            None: no gradient flows.
        backward_input: the same arguments -> gradients of arguments..., (kept...).
        backward_weight: weight_bound, kept -> ((gradients of parameters...),).
        backward_bound, weight_bound: which bound placeholders they read.
        outputs_with_gradient: outputs whose gradients the backward takes, in order.
        arguments_with_gradient: arguments whose gradients it gives, in order.
        parameters_with_gradient: parameters whose gradients it gives, in order.
        saved_values: the fake tensors (or ints) that the forward saves: their bytes are the activation memory.
        dependence: argument or parameter -> the outputs whose gradients its gradient is computed from.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    backward_input: fx.GraphModule | None
    backward_weight: fx.GraphModule | None
    backward_bound: tuple[str, ...]
    weight_bound: tuple[str, ...]
    outputs_with_gradient: tuple[str, ...]
    arguments_with_gradient: tuple[str, ...]
    parameters_with_gradient: tuple[str, ...]
    saved_values: tuple[object, ...]
    dependence: Mapping[str, frozenset[str]]


def split_backward(joint: Joint, recompute: Recompute) -> DifferentiatedStage:
    """Cut the joint graph; see the module's text."""
    cut = _Cut(joint, recompute)
    stage = joint.stage
    arguments = tuple(name for name in stage.arguments if name in joint.gradients)
    parameters = tuple(name for name in stage.parameters if name in joint.gradients)
    label = f"Stage{stage.index}"
    if not joint.gradients:
        forward = cut.graph(cut.inputs, cut.forward_body(joint.outputs), joint.outputs, (), f"{label}Forward")
        return DifferentiatedStage(forward, None, None, None, (), (), joint.outputs_with_gradient, (), (), (), {})

    of_arguments = [joint.gradients[name] for name in arguments]
    of_parameters = [joint.gradients[name] for name in parameters]
    whole = cut.backward_nodes([*of_arguments, *of_parameters], set())
    saved = [node for node in cut.read_by(whole, [*of_arguments, *of_parameters]) if node not in cut.tangents]
    bound = cut.bound_read_by(whole, [*of_arguments, *of_parameters])
    given = [*bound, *saved, *joint.gradient_placeholders]
    first = cut.with_items(cut.with_overwritten_readers(cut.backward_nodes(of_arguments, set()), whole), whole)
    second = whole - first
    kept = cut.read_by(second, of_parameters)
    weight_bound = cut.bound_read_by(second, of_parameters)
    return DifferentiatedStage(
        forward=cut.graph(cut.inputs, cut.forward_body([*joint.outputs, *saved]), joint.outputs, saved, f"{label}Forward"),
        backward=cut.graph(given, whole, of_arguments, cut.owned(of_parameters), f"{label}Backward"),
        backward_input=cut.graph(given, first, of_arguments, kept, f"{label}BackwardInput"),
        backward_weight=cut.graph([*weight_bound, *kept], second, (), cut.owned(of_parameters), f"{label}BackwardWeight"),
        backward_bound=tuple(node.name for node in bound),
        weight_bound=tuple(node.name for node in weight_bound),
        outputs_with_gradient=joint.outputs_with_gradient,
        arguments_with_gradient=arguments,
        parameters_with_gradient=parameters,
        saved_values=tuple(node.meta["val"] for node in saved),
        dependence=_dependence(joint),
    )


def _dependence(joint: Joint) -> dict[str, frozenset[str]]:
    reached: dict[fx.Node, frozenset[str]] = dict(
        zip(joint.gradient_placeholders, (frozenset({name}) for name in joint.outputs_with_gradient), strict=True)
    )
    for node in joint.graph.nodes:
        if node not in reached:
            reached[node] = frozenset[str]().union(*(reached[source] for source in node.all_input_nodes))
    return {name: reached[node] for name, node in joint.gradients.items()}


class _Cut:
    """The joint graph with its nodes sorted into forward and backward, and what the policy keeps."""

    def __init__(self, joint: Joint, recompute: Recompute) -> None:
        self.joint = joint
        nodes = list(joint.graph.nodes)
        self.position = {node: index for index, node in enumerate(nodes)}
        self.inputs = [node for node in nodes if node.op == "placeholder" and node not in joint.gradient_placeholders]
        self.tangents = set(joint.gradient_placeholders)
        self.bound = set(self.inputs[: len(joint.stage.bound)])
        self.aliasing = aliasing(joint.graph)
        self.by_name = {node.name: node for node in nodes}
        start = _first_backward(nodes, self.tangents)
        computing = [node for node in nodes if node.op not in ("placeholder", "output")]
        self.forward_nodes = {node for node in computing if self.position[node] < start}
        self.backward_region = {node for node in computing if self.position[node] >= start}
        self.bound_views = self._bound_views(computing)
        self.keep = {"none": self._always, "selective": self._is_dear, "full": self._never}[recompute]

    def _always(self, node: fx.Node) -> bool:
        return node not in self.bound_views

    def _is_dear(self, node: fx.Node) -> bool:
        return (_computed_by(node).target in DEAR and node not in self.bound_views) or self._never(node)

    def _never(self, node: fx.Node) -> bool:
        return self._cannot_repeat(node)

    def _cannot_repeat(self, node: fx.Node) -> bool:
        """Whether computing the node again would give another value or write a buffer again."""
        source = _computed_by(node)
        if any(draws(writer) or self._writes_input(writer) for writer in (source, *self._writers(source))):
            return True
        read_writers = (writer for value in source.all_input_nodes for writer in self._writers(value))
        return any(self.position[writer] > self.position[source] for writer in read_writers)

    def _writes_input(self, node: fx.Node) -> bool:
        return any(self._same_memory(written, placeholder) for written in mutated_arguments(node) for placeholder in self.inputs)

    def _writers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that write in place in the memory of the node's value."""
        memory = self.aliasing.storages[node.name]
        return [self.by_name[name] for storage in sorted(memory) for name in self.aliasing.writers.get(storage, ())]

    def _same_memory(self, one: fx.Node, other: fx.Node) -> bool:
        return not self.aliasing.storages[one.name].isdisjoint(self.aliasing.storages[other.name])

    def _is_view(self, node: fx.Node) -> bool:
        own = self.aliasing.storages[node.name]
        return bool(own) and own <= frozenset[int]().union(*(self.aliasing.storages[source.name] for source in node.all_input_nodes))

    def _bound_views(self, computing: Sequence[fx.Node]) -> set[fx.Node]:
        """Views of what stays with the stage, and what is gathered from ranks that hold parts of it: whole for as long as it is read."""
        views: set[fx.Node] = set()
        for node in computing:
            sources = node.all_input_nodes
            of_bound = bool(sources) and all(source in self.bound or source in views for source in sources)
            if node in self.forward_nodes and of_bound and (self._is_view(node) or _is_gathered_again(node)):
                views.add(node)
        return views

    def is_given(self, node: fx.Node) -> bool:
        """Whether the backward gets the node's value from outside: an input, a gradient, or saved by the forward."""
        return node.op == "placeholder" or (node in self.forward_nodes and self.keep(node))

    def backward_nodes(self, results: Iterable[fx.Node], done: set[fx.Node]) -> set[fx.Node]:
        """The nodes that must run to get the results, without those that are given or done; in-place writers included."""
        return self._closure(results, lambda node: self.is_given(node) or node in done)

    def forward_body(self, results: Sequence[fx.Node]) -> set[fx.Node]:
        """The nodes of the forward graph: what the results need, and every effect of the forward."""
        effects = [node for node in self.forward_nodes if draws(node) or mutated_arguments(node)]
        return self._closure([*results, *effects], lambda node: node.op == "placeholder")

    def _closure(self, results: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        stack = [node for node in results if not stop(node)]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += [source for source in [*node.all_input_nodes, *self._earlier_writers(node)] if not stop(source)]
        return needed

    def _earlier_writers(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the same region that wrote the memory that this node reads, before it reads."""
        region = self.forward_nodes if node in self.forward_nodes else self.backward_region
        writers = {writer for source in node.all_input_nodes for writer in self._writers(source)}
        return [writer for writer in writers if writer in region and self.position[writer] < self.position[node]]

    def with_overwritten_readers(self, first: set[fx.Node], whole: set[fx.Node]) -> set[fx.Node]:
        """Add to the first half what must read memory before the first half overwrites it."""
        while True:
            late = [
                node
                for node in whole - first
                if any(
                    writer in first and self.position[writer] > self.position[node]
                    for source in node.all_input_nodes
                    for writer in self._writers(source)
                )
            ]
            if not late:
                return first
            first = first | self.backward_nodes(late, first)

    def with_items(self, first: set[fx.Node], whole: set[fx.Node]) -> set[fx.Node]:
        """Add the items of what the first half computes, so that no tuple is kept for the sake of one of its items."""
        return first | {node for node in whole if _is_getitem(node) and node.args[0] in first}

    def read_by(self, nodes: set[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
        """What the nodes (and the results themselves) read from outside, in graph order; bound placeholders left out."""
        read = {source for node in nodes for source in node.all_input_nodes} | set(results)
        return sorted((node for node in read if node not in nodes and node not in self.bound), key=self.position.__getitem__)

    def bound_read_by(self, nodes: set[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
        read = {source for node in nodes for source in node.all_input_nodes} | set(results)
        return [node for node in self.inputs if node in self.bound and node in read]

    def owned(self, gradients: Sequence[fx.Node]) -> list[_Result]:
        """The gradients, those marked that share memory with another value: ``.grad`` must be nobody else's memory."""
        return [_Result(node, self._shares_memory(node, gradients)) for node in gradients]

    def _shares_memory(self, gradient: fx.Node, gradients: Sequence[fx.Node]) -> bool:
        others = [node for node in gradients if node is not gradient]
        placeholders = [*self.inputs, *self.tangents]
        return gradients.count(gradient) > 1 or any(self._same_memory(gradient, other) for other in [*others, *placeholders])

    def graph(
        self,
        inputs: Sequence[fx.Node],
        body: set[fx.Node],
        values: Sequence[fx.Node],
        group: Sequence[fx.Node | _Result],
        name: str,
    ) -> fx.GraphModule:
        """The graph from the inputs through the body. Output: the values, then the group as one tuple."""
        target = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = target.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in sorted(body, key=self.position.__getitem__):
            copies[node] = target.node_copy(node, lambda argument: copies[argument])
        collected = []
        for result in group:
            source = result.node if isinstance(result, _Result) else result
            copied = copies[source]
            if isinstance(result, _Result) and result.shared:
                copied = target.call_function(aten.clone.default, (copied,))
                copied.meta = dict(source.meta)
            collected.append(copied)
        target.output((*(_dense(target, node, copies[node]) for node in values), tuple(collected)))
        target.lint()
        return LazyGraphModule({}, target, class_name=name)


@dataclass(frozen=True)
class _Result:
    """A gradient that leaves the graph, and whether it needs a copy to own its memory."""

    node: fx.Node
    shared: bool


def _dense(target: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
    """A value that leaves the stage, laid out as its reader was traced with."""
    if node.meta["val"].is_contiguous():
        return copied
    dense = target.call_function(aten.clone.default, (copied,), {"memory_format": torch.contiguous_format})
    dense.meta = dict(node.meta)
    return dense


def _first_backward(nodes: Sequence[fx.Node], gradients: set[fx.Node]) -> int:
    """Position of the first node that depends on a gradient: autograd runs nothing of the backward before it."""
    for index, node in enumerate(nodes):
        if node.op == "call_function" and any(source in gradients for source in node.all_input_nodes):
            return index
    return len(nodes)


def _is_gathered_again(node: fx.Node) -> bool:
    return node.target in (all_gather, replicate) and node.args[2] in GATHERED_AGAIN


def _computed_by(node: fx.Node) -> fx.Node:
    """The operation that computes a value: of an item, the operation that returns the tuple."""
    source = node.args[0] if _is_getitem(node) else node
    assert isinstance(source, fx.Node)
    return source


def _is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem
