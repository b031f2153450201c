"""Differentiate a stage region by region; equal regions are traced once.

    stage       h -> block 0 -> h_1 -> block 1 -> h_2                          two regions, one template
    joint       (parameters, h | h_2_gradient)
                -> forward of block 0, forward of block 1 | backward of block 1, backward of block 0

The joint graph is the one that the stage as a whole gives: autograd runs backward what ran last first, so regions come out one after the
other. A value that several regions read has a gradient from each; its partial sum goes into an earlier region's backward, and autograd
adds to it there, in its own order.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.autograd.region_cache import RegionTemplate, RegionTemplates
from passes.autograd.regions import Region
from passes.autograd.trace_joint import Joint, contiguous_like, example_of, returned_nodes
from passes.graph.aliasing import OWN_MEMORY, memory_keys, new_memory
from passes.graph.buffer_writes import verify_writes
from passes.graph.canonicalize import simplify
from passes.graph.fake_tensors import fake_mode
from passes.stages.split import StageGraph


@dataclass(frozen=True)
class _Values:
    """The values of a stage.

    Attributes:
        examples: of each a fake tensor (or a size) with its strides.
        tracked: those that autograd tracks.
    """

    examples: Mapping[fx.Node, Any]
    tracked: frozenset[fx.Node]


@dataclass(frozen=True)
class _Use:
    """A region and its template.

    Attributes:
        region: which.
        template: of all like it.
        inputs: what the template is given.
        given: the values whose gradients the backward is given.
    """

    region: Region
    template: RegionTemplate
    inputs: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]


def tracked_outputs(stage: StageGraph, differentiable: frozenset[str], templates: RegionTemplates) -> frozenset[str]:
    """Return the outputs that autograd tracks.

    Args:
        differentiable: placeholders that it tracks.
    """
    return frozenset(node.name for node in _values(stage, differentiable, templates).tracked) & frozenset(stage.outputs)


def differentiate_regions(
    stage: StageGraph, differentiable: frozenset[str], outputs_with_gradient: frozenset[str], templates: RegionTemplates
) -> Joint:
    """Return the stage's joint graph; see ``passes.autograd.trace_joint``."""
    values = _values(stage, differentiable, templates)
    given = [node for node in returned_nodes(stage.module.graph) if node.name in outputs_with_gradient]
    sizes = [step for step in templates.steps(stage) if isinstance(step, fx.Node)]
    return _Writer(stage, sizes, values, _uses(stage, values, given, templates)).run(given)


def _values(stage: StageGraph, differentiable: frozenset[str], templates: RegionTemplates) -> _Values:
    examples: dict[fx.Node, Any] = {}
    tracked: set[fx.Node] = set()
    with fake_mode(stage.module.graph):
        for node in stage.module.graph.nodes:
            if node.op == "placeholder":
                examples[node] = example_of(node, node.target in stage.bound, stage.device)
                tracked.update([node] if node.target in differentiable and isinstance(examples[node], Tensor) else [])
    for step in templates.steps(stage):
        if isinstance(step, fx.Node):
            examples[step] = step.meta["val"]
            continue
        results = templates.run(stage, step, examples, tracked)
        examples.update(zip(step.outputs, results, strict=True))
        tracked.update(node for node, result in zip(step.outputs, results, strict=True) if result.requires_grad)
    return _Values(examples, frozenset(tracked))


def _uses(stage: StageGraph, values: _Values, outputs: Sequence[fx.Node], templates: RegionTemplates) -> dict[Region, _Use]:
    """Choose each region's template, last region first: the gradients from later regions decide what it differentiates."""
    with fake_mode(stage.module.graph):
        gradients: dict[fx.Node, Tensor] = {node: contiguous_like(node.meta["val"], stage.device) for node in outputs}
    found = {}
    for region in reversed([step for step in templates.steps(stage) if isinstance(step, Region)]):
        inputs = tuple(templates.inputs(stage, region))
        of_outputs = {node: gradients[node] for node in region.outputs if node in gradients}
        so_far = {node: gradients[node] for node in inputs if node in gradients} if of_outputs else {}
        template = templates.template(stage, region, values.examples, values.tracked, {**of_outputs, **so_far})
        found[region] = _Use(region, template, inputs, (*of_outputs, *so_far))
        of_name = dict(zip((*template.joint.stage.bound, *template.joint.stage.arguments), inputs, strict=True))
        gradients.update((of_name[name], node.meta["val"]) for name, node in template.joint.gradients.items())
    return dict(reversed(found.items()))


class _Writer:
    """Writes templates out for the regions that they stand for: all forwards, then all backwards."""

    def __init__(self, stage: StageGraph, sizes: Sequence[fx.Node], values: _Values, uses: Mapping[Region, _Use]) -> None:
        self.stage, self.sizes, self.examples, self.uses = stage, sizes, values.examples, uses
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.gradients: dict[fx.Node, fx.Node] = {}
        self.sources: dict[fx.Node, str] = {}
        self._copies: dict[Region, _Copies] = {}
        self._sizes: dict[Hashable, fx.Node] = {}

    def run(self, outputs: Sequence[fx.Node]) -> Joint:
        """Write the joint graph.

        Args:
            outputs: those whose gradients are given.
        """
        with fake_mode(self.stage.module.graph):
            tangents = [contiguous_like(node.meta["val"], self.stage.device) for node in outputs]
        placeholders = [node for node in self.stage.module.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self.values[node] = self._placeholder(str(node.target), self.examples[node])
        for node, tangent in zip(outputs, tangents, strict=True):
            self.gradients[node] = self._placeholder(f"{node.name}_gradient", tangent)
        for node in self.sizes:
            self.values[node] = self.graph.node_copy(node, self.values.__getitem__)
        for use in self.uses.values():
            self._forward(use)
        for use in reversed([*self.uses.values()]):
            self._backward(use)
        return self._joint(outputs, placeholders)

    def _joint(self, outputs: Sequence[fx.Node], placeholders: Sequence[fx.Node]) -> Joint:
        returned = [self.values[node] for node in returned_nodes(self.stage.module.graph)]
        found = {str(node.target): self.gradients[node] for node in placeholders if node in self.gradients}
        self.graph.output((*returned, *found.values()))
        simplify(self.graph)
        self.graph.lint()
        verify_writes(self.graph, f"differentiating stage {self.stage.index} by regions")
        results = returned_nodes(self.graph)
        gradients = dict(zip(found, results[len(returned) :], strict=True))
        names = tuple(node.name for node in outputs)
        return Joint(self.stage, self.graph, tuple(results[: len(returned)]), gradients, names, self.sources)

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        placeholder = self.graph.placeholder(name)
        placeholder.meta["val"] = value
        return placeholder

    def _forward(self, use: _Use) -> None:
        joint = use.template.joint
        copies = self._copies[use.region] = _Copies(self.graph, use, self._sizes)
        copies.bind(joint.inputs, [self.values[node] for node in use.inputs])
        for node in joint.graph.nodes:
            if node in joint.sources:
                self.sources.setdefault(copies.write(node), use.region.nodes[use.template.places[node]].name)
        self.values.update(zip(use.region.outputs, map(copies.of, joint.outputs), strict=True))

    def _backward(self, use: _Use) -> None:
        joint, copies = use.template.joint, self._copies[use.region]
        copies.bind(joint.gradient_placeholders, [self.gradients[node] for node in use.given])
        for node in joint.graph.nodes:
            if node.op == "call_function" and node not in joint.sources:
                copies.write(node)
        of_name = dict(zip((*joint.stage.bound, *joint.stage.arguments), use.inputs, strict=True))
        self.gradients.update((of_name[name], copies.of(node)) for name, node in joint.gradients.items())


class _Copies:
    """The nodes of a template as a region has them.

    Args:
        graph: where they are written.
        use: the region.
        sizes: what counts sizes in the graph already, by target and arguments: each is counted once.
    """

    def __init__(self, graph: fx.Graph, use: _Use, sizes: dict[Hashable, fx.Node]) -> None:
        self._graph, self._use, self._sizes = graph, use, sizes
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._memory: dict[Any, Any] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node of the template."""
        return self._nodes[node]

    def bind(self, placeholders: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> None:
        """Map placeholders of the template to nodes of this graph, and their memory to that of the nodes."""
        for placeholder, node in zip(placeholders, nodes, strict=True):
            self._nodes[placeholder] = node
            for (_, inside), (_, outside) in zip(memory_keys(placeholder), memory_keys(node), strict=True):
                self._memory[inside] = outside

    def write(self, node: fx.Node) -> fx.Node:
        """Copy a node; it comes from where its counterpart in this region does, and has memory of its own."""
        arguments, keywords = fx.map_arg((node.args, node.kwargs), self.of)
        size = (node.target, arguments) if isinstance(node.meta.get("val"), torch.SymInt) else None
        if size in self._sizes:
            self._nodes[node] = self._sizes[size]
            return self._sizes[size]
        copy = self._nodes[node] = self._graph.create_node(node.op, node.target, arguments, keywords, name=node.name)
        if size is not None:
            self._sizes[size] = copy
        copy.meta = {**node.meta, OWN_MEMORY: tuple(self._memory.setdefault(key, new_memory()) for _, key in memory_keys(node))}
        region, template = self._use.region, self._use.template
        if region is not template.region:
            self._copy_provenance(copy, node)
        return copy

    def _copy_provenance(self, copy: fx.Node, node: fx.Node) -> None:
        """Give a copy the provenance of its own region; in the backward, the ``custom`` entries of the forward's nodes."""
        region, template = self._use.region, self._use.template
        place = template.places.get(node)
        if place is not None:
            theirs, own = template.region.nodes[place].meta, region.nodes[place].meta
            copy.meta.update({key: own[key] for key in node.meta if key in own and key in theirs and key not in _OF_TRACING})
        elif "custom" in node.meta:
            copy.meta["custom"] = {key: self._custom_counterparts.get(id(value), value) for key, value in node.meta["custom"].items()}

    @functools.cached_property
    def _custom_counterparts(self) -> dict[int, Any]:
        """Metadata of a node of the template's region, by identity -> metadata of its counterpart."""
        pairs = zip(self._use.template.region.nodes, self._use.region.nodes, strict=True)
        customs = ((node.meta.get("custom", {}), own.meta.get("custom", {})) for node, own in pairs)
        return {id(value): own[key] for theirs, own in customs for key, value in theirs.items() if key in own}


_OF_TRACING = ("val", "tensor_meta", "original_aten", "seq_nr", OWN_MEMORY)
"""Keys of ``meta`` that describe the traced operation, not its origin."""
