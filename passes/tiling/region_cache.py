"""Differentiate each kind of region once, as a stage of its own: tiles of equal size in one sweep share a template.

    c2_tile0_1, c2_tile0_2, c2_tile1_1 ...   in the middle of the image: one template
    c2_tile0_0                               in a corner, with padding on two sides: another

A tile is recomputed: its backward reads the inputs of the tile. Regions that are computed whole follow the plan's recomputation policy.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.autograd.partition_joint import DifferentiatedStage, split_backward
from passes.autograd.recompute import Recompute
from passes.autograd.regions import region_module, region_stage
from passes.autograd.trace_joint import contiguous_like, differentiate
from passes.graph.aliasing import OWN_MEMORY
from passes.graph.equivalence import argument_key
from passes.graph.fakes.fake_tensors import fake_mode
from passes.graph.symbolic_sizes import size_of
from passes.stages.split import StageGraph
from passes.tiling.steps import TEMPLATES, TILE, TiledRegion

__all__ = ["Template", "Templates"]


@dataclass(frozen=True)
class Template:
    """A region as a stage, for all regions that compute alike: their inputs and outputs have the same order.

    Attributes:
        stage: its forward, under the names of the first such region.
        training: its training graphs.
    """

    stage: StageGraph
    training: DifferentiatedStage


class Templates:
    """Cache of all templates of a tiled stage.

    Args:
        recompute: recomputation of regions that are computed whole.
    """

    def __init__(self, stage: StageGraph, recompute: Recompute) -> None:
        self._stage = stage
        self._recompute = recompute
        state_names = (*stage.buffers, *stage.constants)
        self._kinds: Mapping[str, int] = {**dict.fromkeys(stage.parameters, 0), **dict.fromkeys(state_names, 1)}
        self._cache: dict[Hashable, Any] = stage.module.meta.setdefault(TEMPLATES, {})

    def inputs(self, region: TiledRegion) -> list[fx.Node]:
        """Return the inputs of a region in the order of a stage: parameters, buffers and constants, values."""
        return sorted(region.inputs, key=self._kind)

    def _kind(self, node: fx.Node) -> int:
        """Return 0 for a parameter, 1 for a buffer or constant, 2 for any other value."""
        return self._kinds.get(node.name, 2) if node.op == "placeholder" else 2

    def outputs_requiring_gradient(self, region: TiledRegion, differentiable: Collection[fx.Node]) -> tuple[bool, ...]:
        """Return for each output of a region whether it requires a gradient if the ``differentiable`` inputs do."""
        signature = self._signature(region, differentiable, ())
        if signature not in self._cache:
            inputs = self.inputs(region)
            module = region_module(inputs, region, without=(OWN_MEMORY, TILE))
            with fake_mode(self._stage.module.graph), torch.enable_grad():
                arguments = []
                for node in inputs:
                    value = node.meta["val"]
                    if isinstance(value, Tensor):
                        value = contiguous_like(value, self._stage.device)
                        value.requires_grad_(node in differentiable)
                    arguments.append(value)
                results = fx.Interpreter(module).run(*arguments)
            self._cache[signature] = tuple(isinstance(result, Tensor) and result.requires_grad for result in results)
        requiring: tuple[bool, ...] = self._cache[signature]
        return requiring

    def template(self, region: TiledRegion, differentiable: Collection[fx.Node], with_gradient: Collection[fx.Node]) -> Template:
        """Return the template of a region: differentiate it unless a region like it was.

        Args:
            differentiable: inputs whose gradients are wanted.
            with_gradient: outputs whose gradients the backward gets.
        """
        recompute: Recompute = "full" if region.tile else self._recompute
        key = (recompute, self._signature(region, differentiable, with_gradient))
        if key not in self._cache:
            inputs = self.inputs(region)
            parameters, buffers, values = ([node.name for node in inputs if self._kind(node) == kind] for kind in range(3))
            module = region_module(inputs, region, without=(OWN_MEMORY, TILE))
            stage = region_stage(self._stage, region, module, parameters, values, buffers)
            joint = differentiate(
                stage,
                frozenset(node.name for node in inputs if node in differentiable),
                frozenset(node.name for node in with_gradient),
                self._stage.device,
            )
            self._cache[key] = Template(stage, split_backward(joint, recompute))
        template: Template = self._cache[key]
        return template

    def _signature(self, region: TiledRegion, differentiable: Collection[fx.Node], with_gradient: Collection[fx.Node]) -> Hashable:
        """Return a key that is equal for regions that compute alike: it numbers nodes in place of naming them."""
        inputs = self.inputs(region)
        number = {node: index for index, node in enumerate((*inputs, *region.nodes))}
        read = tuple((self._kind(node), _input_properties(node.meta["val"]), node in differentiable) for node in inputs)
        calls = tuple((node.target, argument_key((node.args, node.kwargs), number.__getitem__)) for node in region.nodes)
        outputs = tuple((number[node], node in with_gradient) for node in region.outputs)
        return str(self._stage.device), read, calls, outputs


def _input_properties(value: Any) -> Hashable:
    """Return the properties of an input by which regions with equal calls may differ: shape, dtype and device; or its number."""
    if isinstance(value, Tensor):
        return tuple(size_of(size) for size in value.shape), value.dtype, value.device
    return size_of(value) if isinstance(value, torch.SymInt) else str(value)
