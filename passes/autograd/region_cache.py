"""Regions that compute alike are run and differentiated once, under the names of the first of them.

h_1 = block 0 of h       template: x -> block -> y; the gradient of y -> that of x, of the block's parameters
h_2 = block 1 of h_1     the same template
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.autograd.regions import Region, RegionStep, region_module, region_stage, regions_of
from passes.autograd.trace_joint import Joint, differentiate_from
from passes.graph.equivalence import argument_key
from passes.graph.fakes.fake_tensors import fake_mode
from passes.graph.symbolic_sizes import traced_size
from passes.stages.split import StageGraph

__all__ = ["RegionTemplate", "RegionTemplates"]


@dataclass(frozen=True)
class RegionTemplate:
    """A region as a stage of its own; what it reads, computes and gives stands in the same places as in every region like it.

    Attributes:
        joint: its forward and backward.
        region: which it was traced from.
        places: node of the forward -> the place among the region's nodes of the node that it computes.
    """

    joint: Joint
    region: Region
    places: Mapping[fx.Node, int]


class RegionTemplates:
    """Cache of differentiated regions, by structure."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def steps(self, stage: StageGraph) -> tuple[RegionStep, ...]:
        """Return the regions of a stage, and the size computations between them."""
        key = "steps", id(stage.module)
        if key not in self._known:
            self._known[key] = stage, regions_of(stage.module.graph)
        found: tuple[RegionStep, ...] = self._known[key][1]
        return found

    def inputs(self, stage: StageGraph, region: Region) -> list[fx.Node]:
        """Return the inputs of a region in the order of a stage: bound tensors, the size of the batch, the rest."""
        batch = [node for node in stage.module.graph.nodes if node.target == "batch" and stage.has_batch]
        bound = [node for node in region.inputs if _is_bound(stage, node)]
        return list(dict.fromkeys((*bound, *batch, *region.inputs)))

    def run(self, stage: StageGraph, region: Region, examples: Mapping[fx.Node, Any], differentiable: Collection[fx.Node]) -> list[Tensor]:
        """Return the region's outputs as fake tensors, with ``requires_grad`` where autograd tracks them.

        Args:
            examples: of what it reads.
            differentiable: values that autograd tracks.
        """
        form = self._form(stage, region, examples, differentiable)
        if form not in self._known:
            inputs = self.inputs(stage, region)
            module = region_module(inputs, region)
            with fake_mode(stage.module.graph), torch.enable_grad():
                given = [_fresh(examples[node], node in differentiable) for node in inputs]
                self._known[form] = list(fx.Interpreter(module).run(*given))
        found: list[Tensor] = self._known[form]
        return found

    def template(
        self,
        stage: StageGraph,
        region: Region,
        examples: Mapping[fx.Node, Any],
        differentiable: Collection[fx.Node],
        given: Mapping[fx.Node, Tensor],
    ) -> RegionTemplate:
        """Return the region's joint graph: traced once for all regions of equal computation and input layouts.

        Args:
            given: outputs, and inputs that later regions read, -> fake tensors like their gradients.
        """
        inputs = self.inputs(stage, region)
        boundary = {node: place for place, node in enumerate((*inputs, *region.outputs))}
        form = (
            self._form(stage, region, examples, differentiable),
            tuple((boundary[node], _form_of_value(like)) for node, like in given.items()),
        )
        if form not in self._known:
            names = [node.name for node in inputs]
            n_bound = sum(_is_bound(stage, node) for node in inputs)
            alone = region_stage(stage, region, region_module(inputs, region), names[:n_bound], names[n_bound:])
            with fake_mode(stage.module.graph):
                examined = [_fresh(examples[node], False) for node in inputs]
                gradients = {node.name: _fresh(like, False) for node, like in given.items()}
            joint = differentiate_from(
                alone,
                frozenset(node.name for node in inputs if node in differentiable),
                examined,
                gradients,
                [node.name for node in given if node in inputs],
            )
            place_of = {node.name: place for place, node in enumerate(region.nodes)}
            sources = {node: place_of[name] for node, name in joint.sources.items() if name in place_of}
            self._known[form] = RegionTemplate(joint, region, sources)
        found: RegionTemplate = self._known[form]
        return found

    def _form(self, stage: StageGraph, region: Region, examples: Mapping[fx.Node, Any], differentiable: Collection[fx.Node]) -> Hashable:
        inputs = self.inputs(stage, region)
        places = {node: place for place, node in enumerate((*inputs, *region.nodes))}
        read = tuple((_form_of_value(examples[node]), node in differentiable, _is_bound(stage, node)) for node in inputs)
        calls = tuple((node.target, argument_key((node.args, node.kwargs), places.__getitem__)) for node in region.nodes)
        return str(stage.device), read, calls, tuple(places[node] for node in region.outputs)


def _is_bound(stage: StageGraph, node: fx.Node) -> bool:
    return node.op == "placeholder" and node.target in stage.bound


def _form_of_value(value: Any) -> Hashable:
    """Return a key of all that tracing may depend on in a value: shape, strides, dtype and device of a tensor."""
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return id(value)
    if isinstance(value, Tensor):
        sizes: Sequence[Any] = (*value.shape, *value.stride())
        return tuple(traced_size(size) for size in sizes), value.dtype, value.device
    return traced_size(value) if isinstance(value, torch.SymInt) else (type(value), value)


def _fresh(value: Any, requires_grad: bool) -> Any:
    """Return a fake tensor (inside ``fake_mode``) with the strides of another; sizes are returned unchanged."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device).requires_grad_(requires_grad)
