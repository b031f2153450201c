"""Equal regions are run and differentiated once, under the names of the first of them.

h_1 = block 0 of h                       template: x -> block -> y; the gradient of y -> that of x, of the block's parameters
h_2 = block 1 of h_1                     the same template

c2_tile0_1, c2_tile0_2, c2_tile1_1 ...   tiles in the middle of an image: one template
c2_tile0_0                               a tile in a corner, with padding on two sides: another
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.autograd.partition_joint import DifferentiatedStage, split_backward
from passes.autograd.recompute import Recompute
from passes.autograd.regions import Region, RegionStep, region_module, region_stage, regions_of
from passes.autograd.trace_joint import Joint, differentiate_from
from passes.graph.equivalence import LAID_OUT, graph_key
from passes.graph.fake_tensors import fake_mode
from passes.stages.split import StageGraph


@dataclass(frozen=True)
class RegionTemplate:
    """A region as a stage of its own. Inputs, nodes and outputs of equal regions correspond by their order.

    Attributes:
        joint: its forward and backward.
        training: its training graphs, if they were asked for.
        region: the region that was traced.
        places: node of the forward -> index of the node of the region that it computes.
    """

    joint: Joint
    training: DifferentiatedStage | None
    region: Region
    places: Mapping[fx.Node, int]


class RegionTemplates:
    """Cache of the results and templates of regions.

    Its key is the ``graph_key`` of a region with the layout of its inputs, whether each is a parameter, a buffer or a value, the device,
    the values that autograd tracks, those that the backward recomputes, and the layouts of the gradients that it is given. It assumes that
    inputs which no call of the region writes may share memory or not.

    Args:
        with_batch: whether every region is given the size of the batch. Otherwise it derives sizes from its inputs.
    """

    def __init__(self, *, with_batch: bool = True) -> None:
        self._with_batch = with_batch
        self._known: dict[Hashable, Any] = {}

    def steps(self, stage: StageGraph) -> tuple[RegionStep, ...]:
        """Return the regions of a stage, and the size computations between them."""
        key = "steps", id(stage.module)
        if key not in self._known:
            self._known[key] = stage, regions_of(stage.module.graph)
        found: tuple[RegionStep, ...] = self._known[key][1]
        return found

    def inputs(self, stage: StageGraph, region: Region) -> list[fx.Node]:
        """Return the inputs of a region in the order of a stage: parameters, buffers and constants, the size of the batch, the rest."""
        is_passed = self._with_batch and stage.has_batch
        batch = [node for node in stage.module.graph.nodes if node.target == "batch"] if is_passed else []
        return sorted(dict.fromkeys((*batch, *region.inputs)), key=lambda node: _kind(stage, node))

    def run(self, stage: StageGraph, region: Region, examples: Mapping[fx.Node, Any], differentiable: Collection[fx.Node]) -> list[Any]:
        """Return the outputs of a region as fake values, tensors with ``requires_grad`` where autograd tracks them.

        Args:
            examples: fake tensors or sizes like its inputs.
            differentiable: values that autograd tracks.
        """
        key = self._key(stage, region, examples, differentiable)
        if key not in self._known:
            inputs = self.inputs(stage, region)
            with fake_mode(stage.module.graph), torch.enable_grad():
                given = [_fresh(examples[node], node in differentiable) for node in inputs]
                self._known[key] = list(fx.Interpreter(region_module(inputs, region)).run(*given))
        found: list[Any] = self._known[key]
        return found

    def template(
        self,
        stage: StageGraph,
        region: Region,
        examples: Mapping[fx.Node, Any],
        differentiable: Collection[fx.Node],
        given: Mapping[fx.Node, Tensor],
        recompute: Recompute | None = None,
    ) -> RegionTemplate:
        """Return the template of a region: traced once for all regions of equal keys.

        Args:
            examples, differentiable: as for ``run``.
            given: outputs, and inputs that later regions read, -> fake tensors like their gradients.
            recompute: the recomputation of its training graphs; None: there are none.
        """
        inputs = self.inputs(stage, region)
        boundary = {node: place for place, node in enumerate((*inputs, *region.outputs))}
        gradient_keys = tuple((boundary[node], LAID_OUT(like)) for node, like in given.items())
        key = self._key(stage, region, examples, differentiable), gradient_keys, recompute
        if key not in self._known:
            names = [[node.name for node in inputs if _kind(stage, node) == kind] for kind in range(3)]
            alone = region_stage(stage, region, region_module(inputs, region), *names)
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
            training = None if recompute is None else split_backward(joint, recompute)
            self._known[key] = RegionTemplate(joint, training, region, sources)
        found: RegionTemplate = self._known[key]
        return found

    def _key(self, stage: StageGraph, region: Region, examples: Mapping[fx.Node, Any], differentiable: Collection[fx.Node]) -> Hashable:
        inputs = self.inputs(stage, region)
        keys = {node: (LAID_OUT(examples[node]), node in differentiable, _kind(stage, node)) for node in inputs}
        return str(stage.device), graph_key(keys, region.nodes, region.outputs, lambda node: node.name in stage.recomputed)


def _kind(stage: StageGraph, node: fx.Node) -> int:
    """Return 0 for a parameter, 1 for a buffer or constant, 2 for any other value."""
    if node.op != "placeholder" or node.target not in stage.bound:
        return 2
    return 0 if node.target in stage.parameters else 1


def _fresh(value: Any, requires_grad: bool) -> Any:
    """Return a fake tensor (inside ``fake_mode``) with the strides of another; sizes are returned unchanged."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device).requires_grad_(requires_grad)
