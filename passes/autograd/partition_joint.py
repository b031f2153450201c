"""Cut a joint graph into the graphs that a schedule runs: forward, backward, and the two halves of the backward.

    joint      (parameters, x | dy)  ->  y, dx, dw

    forward         F   (parameters, x)          -> y, (saved...)
    backward        B   (parameters, saved, dy)  -> dx, (dw,)
    input gradient  I   (parameters, saved, dy)  -> dx, (kept...)       what earlier stages wait for
    weight gradient W   (parameters, kept)       -> (dw,)               not waited for

What the forward saves is the policy of ``recompute`` (``passes.autograd.recompute``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from passes.analysis.axes import is_item
from passes.autograd.joint_graph import computed_by
from passes.autograd.recompute import Recompute, kept_values
from passes.autograd.trace_joint import Joint
from passes.graph.aliasing import mutated_arguments
from passes.graph.buffer_writes import verify_writes
from passes.graph.dependencies import with_ancestors
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.schemas import draws
from passes.ir.comm.functional import AGAIN, makes_memory

aten = torch.ops.aten


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
        received: which gradients of parameters may share memory that is in use elsewhere: results of collectives.
        gathers: bound -> (parameters that the forward takes gathered, after the bound ones...); None: it takes none.
        scatters: (sums of gradients of parameters over microbatches...) -> (gradients...); None: they are those sums.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None = None
    backward_input: fx.GraphModule | None = None
    backward_weight: fx.GraphModule | None = None
    backward_bound: tuple[str, ...] = ()
    weight_bound: tuple[str, ...] = ()
    outputs_with_gradient: tuple[str, ...] = ()
    arguments_with_gradient: tuple[str, ...] = ()
    parameters_with_gradient: tuple[str, ...] = ()
    saved_values: tuple[object, ...] = ()
    dependence: Mapping[str, frozenset[str]] = field(default_factory=dict)
    received: tuple[int, ...] = ()
    gathers: fx.GraphModule | None = None
    scatters: fx.GraphModule | None = None


def split_backward(joint: Joint, recompute: Recompute) -> DifferentiatedStage:
    """Cut the joint graph; see the module's text."""
    cut = _Cut(joint, recompute)
    stage = joint.stage
    arguments = tuple(name for name in stage.arguments if name in joint.gradients)
    parameters = tuple(name for name in stage.parameters if name in joint.gradients)
    label = f"Stage{stage.index}"
    if not joint.gradients:
        forward = cut.graph(cut.nodes.inputs, cut.forward_body(joint.outputs), joint.outputs, (), f"{label}Forward")
        return DifferentiatedStage(forward, outputs_with_gradient=joint.outputs_with_gradient)

    of_arguments = [joint.gradients[name] for name in arguments]
    of_parameters = [joint.gradients[name] for name in parameters]
    whole = cut.backward_nodes([*of_arguments, *of_parameters], set())
    saved = [node for node in cut.read_by(whole, [*of_arguments, *of_parameters]) if node not in cut.nodes.tangents]
    bound = cut.bound_read_by(whole, [*of_arguments, *of_parameters])
    given = [*bound, *saved, *joint.gradient_placeholders]
    first = cut.with_overwritten_readers(cut.backward_nodes(of_arguments, set()), whole)
    first = cut.with_smaller_values(cut.with_items(first, whole), whole)
    second = whole - first
    kept = cut.read_by(second, of_parameters)
    shared = cut.shared(of_parameters, of_arguments)
    weight_bound = cut.bound_read_by(second, of_parameters)
    return DifferentiatedStage(
        forward=cut.graph(cut.nodes.inputs, cut.forward_body([*joint.outputs, *saved]), joint.outputs, saved, f"{label}Forward"),
        backward=cut.graph(given, whole, of_arguments, of_parameters, f"{label}Backward", shared),
        backward_input=cut.graph(given, first, of_arguments, kept, f"{label}BackwardInput"),
        backward_weight=cut.graph([*weight_bound, *kept], second, (), of_parameters, f"{label}BackwardWeight", shared),
        backward_bound=tuple(node.name for node in bound),
        weight_bound=tuple(node.name for node in weight_bound),
        outputs_with_gradient=joint.outputs_with_gradient,
        arguments_with_gradient=arguments,
        parameters_with_gradient=parameters,
        saved_values=tuple(node.meta["val"] for node in saved),
        dependence=_dependence(joint),
        received=tuple(index for index, node in enumerate(of_parameters) if cut.is_received(node) and node not in shared),
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
    """The joint graph, and the values of its forward that the policy saves."""

    def __init__(self, joint: Joint, recompute: Recompute) -> None:
        self.joint = joint
        self.nodes, self.keep = kept_values(joint, recompute)

    def is_given(self, node: fx.Node) -> bool:
        """Return whether the backward gets the node's value from outside: an input, a gradient, or saved by the forward."""
        return node.op == "placeholder" or node in self.keep

    def backward_nodes(self, results: Iterable[fx.Node], done: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes that must run to get the results, without given or finished ones; in-place writers included."""
        return self.nodes.needed(results, lambda node: self.is_given(node) or node in done, in_backward=True)

    def forward_body(self, results: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the nodes of the forward graph: those that the results need, and every effect of the forward."""
        effects = [node for node in self.nodes.forward if draws(node) or mutated_arguments(node)]
        return self.nodes.needed([*results, *effects], lambda node: node.op == "placeholder")

    def with_overwritten_readers(self, first: set[fx.Node], whole: set[fx.Node]) -> set[fx.Node]:
        """Add to the first half what must read memory before the first half overwrites it."""
        position, writers = self.nodes.position, self.nodes.writers
        while True:
            late = [
                node
                for node in whole - first
                if any(
                    writer in first and position[writer] > position[node] for source in node.all_input_nodes for writer in writers(source)
                )
            ]
            if not late:
                return first
            first = first | self.backward_nodes(late, first)

    def with_items(self, first: set[fx.Node], whole: set[fx.Node]) -> set[fx.Node]:
        """Add the items of tuples that the first half computes, so that no tuple is kept for the sake of one of its items."""
        return first | {node for node in whole if is_item(node) and node.args[0] in first}

    def with_smaller_values(self, first: set[fx.Node], whole: set[fx.Node]) -> set[fx.Node]:
        """Add recomputed values and casts that are smaller than the values that they alone read: operands in a narrower type.

        They are kept for the second half instead of these values. Gradients of weights stay in it.
        """
        nodes, found = self.nodes, set(first)
        reads = {node: nodes.read_in_backward([node]) for node in whole}
        readers: dict[fx.Node, set[fx.Node]] = {}
        for node, sources in reads.items():
            for source in sources:
                readers.setdefault(source, set()).add(node)
        results = set(self.joint.gradients.values())
        for node in sorted(whole - first, key=nodes.position.__getitem__):
            is_cheap = node in nodes.forward or node.target is aten._to_copy.default  # noqa: SLF001  the operator's own name
            if not is_cheap or getattr(node.target, "namespace", "") != "aten" or mutated_arguments(node) or nodes.is_view(node):
                continue
            calls = self._with_views(node, reads, found)
            bases = set[fx.Node]().union(*(reads[call] for call in calls)) & found - results
            freed = sum(nodes.bytes_of(base) for base in bases if readers[base] <= found | calls)
            if calls and nodes.bytes_of(node) < freed:
                found |= calls
        return found

    def _with_views(self, node: fx.Node, reads: Mapping[fx.Node, set[fx.Node]], found: set[fx.Node]) -> set[fx.Node]:
        """Return a node with the views that it needs of ``found`` and of what the backward is given; empty if it needs other calls."""
        calls, pending = {node}, [node]
        while pending:
            late = {source for source in reads[pending.pop()] if source in reads and source not in found} - calls
            if not all(map(self.nodes.is_view, late)):
                return set()
            calls |= late
            pending += late
        return calls

    def read_by(self, nodes: set[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the values from outside that the nodes read or that are results, in graph order, without bound placeholders."""
        read = self.nodes.read_in_backward(nodes) | set(results)
        outside = (node for node in read if node not in nodes and node not in self.nodes.bound)
        return sorted(outside, key=self.nodes.position.__getitem__)

    def bound_read_by(self, nodes: set[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
        read = {source for node in nodes for source in node.all_input_nodes} | set(results)
        return [node for node in self.nodes.inputs if node in self.nodes.bound and node in read]

    def shared(self, gradients: Sequence[fx.Node], others: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the gradients that share memory with another value: they are copied, since ``.grad`` is added to in place."""
        return {node for node in gradients if self._shares_memory(node, gradients, others) or _overlaps(node)}

    def _shares_memory(self, gradient: fx.Node, gradients: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
        elsewhere = [*(node for node in gradients if node is not gradient), *others, *self.nodes.inputs, *self.nodes.tangents]
        return gradients.count(gradient) > 1 or any(self.nodes.share_memory(gradient, other) for other in elsewhere)

    def is_received(self, gradient: fx.Node) -> bool:
        """Return whether a gradient is a view of the result of a collective, or a user's operator: its memory may be in use elsewhere."""
        node = computed_by(gradient)
        while self.nodes.is_view(node):
            node = computed_by(node.all_input_nodes[0])
        return not makes_memory(node)

    def graph(
        self,
        inputs: Sequence[fx.Node],
        body: set[fx.Node],
        values: Sequence[fx.Node],
        group: Sequence[fx.Node],
        name: str,
        shared: Collection[fx.Node] = (),
    ) -> fx.GraphModule:
        """Build the graph from the inputs through the body. Output: the values, then the group as one tuple, with shared ones copied."""
        target = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = target.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        again = {} if inputs is self.nodes.inputs else self.nodes.again
        for node in self._in_order(body, is_backward=inputs is not self.nodes.inputs):
            copies[node] = target.node_copy(node, lambda argument: copies[again.get(argument, argument)])
            if again is self.nodes.again and node in self.nodes.forward:
                copies[node].meta[AGAIN] = True
        collected = []
        for source in group:
            copied = copies[source]
            if source in shared:
                copied = target.call_function(aten.clone.default, (copied,))
                copied.meta = dict(source.meta)
            collected.append(copied)
        target.output((*(_dense(target, node, copies[node]) for node in values), tuple(collected)))
        target.lint()
        verify_writes(target, "splitting the backward")
        return LazyGraphModule({}, target, class_name=name)

    def _in_order(self, body: set[fx.Node], *, is_backward: bool) -> list[fx.Node]:
        """Return the body in running order: a recomputed value comes directly before its first reader, so that it is short-lived.

        Graphs with in-place writes keep their order, since readers depend on it.
        """
        ordered = sorted(body, key=self.nodes.position.__getitem__)
        if not is_backward or any(mutated_arguments(node) for node in ordered):
            return ordered
        placed: dict[fx.Node, None] = {}
        for node in ordered:
            if node not in self.nodes.forward:
                self._place(node, body, placed)
        for node in ordered:
            self._place(node, body, placed)
        return list(placed)

    def _place(self, node: fx.Node, body: set[fx.Node], placed: dict[fx.Node, None]) -> None:
        """Place a node after the nodes that it reads, and all items of a tuple with it: a later item would keep the others alive."""

        def unplaced(nodes: Iterable[fx.Node]) -> list[fx.Node]:
            return [each for each in nodes if each in body and each not in placed]

        missing = with_ancestors(unplaced([node]), lambda reader: unplaced(self.nodes.read_in_backward([reader])))
        missing |= {user for each in missing for user in unplaced(each.users) if is_item(user)}
        placed.update(dict.fromkeys(sorted(missing, key=self.nodes.position.__getitem__)))


def _overlaps(node: fx.Node) -> bool:
    """Return whether elements of a value share memory, as in an expanded tensor."""
    return any(stride == 0 for stride in node.meta["val"].stride())


def _dense(target: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
    """Return a value that leaves the stage, with the strides that its reader was traced with."""
    if node.meta["val"].is_contiguous():
        return copied
    dense = target.call_function(aten.clone.default, (copied,), {"memory_format": torch.contiguous_format})
    dense.meta = {**node.meta, "val": node.meta["val"].contiguous()}
    return dense
