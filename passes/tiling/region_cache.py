"""Regions as stages of their own, differentiated once for all that compute alike: the tiles of a sweep that are of equal size.

    c2_tile0_1, c2_tile0_2, c2_tile1_1 ...   in the middle of the image: one template
    c2_tile0_0                               in a corner, with padding on two sides: another

A tile is recomputed: its backward reads what the tile read. What is computed whole keeps what the plan's recomputation says.
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
from passes.graph.fake_tensors import fake_mode
from passes.graph.schemas import argument_form
from passes.graph.symbolic_sizes import size_of
from passes.stages.split import StageGraph
from passes.tiling.steps import TEMPLATES, TILE, TiledRegion

__all__ = ["Template", "Templates"]


@dataclass(frozen=True)
class Template:
    """A region as a stage; inputs and outputs stand in the same places as those of every region like it.

    Attributes:
        stage: its forward.
        training: its training graphs.
    """

    stage: StageGraph
    training: DifferentiatedStage


class Templates:
    """All templates of a streamed stage.

    Args:
        recompute: recomputation of regions that are computed whole.
    """

    def __init__(self, stage: StageGraph, recompute: Recompute) -> None:
        self._stage = stage
        self._recompute = recompute
        self._kinds: Mapping[str, int] = {
            name: kind for kind, names in enumerate((stage.parameters, (*stage.buffers, *stage.constants))) for name in names
        }
        self._known: dict[Hashable, Any] = stage.module.meta.setdefault(TEMPLATES, {})

    def inputs(self, region: TiledRegion) -> list[fx.Node]:
        """The inputs of a region in the order of a stage: parameters, buffers and constants, the rest."""
        return sorted(region.inputs, key=self._kind)

    def _kind(self, node: fx.Node) -> int:
        return self._kinds.get(node.name, 2) if node.op == "placeholder" else 2

    def requiring(self, region: TiledRegion, differentiable: Collection[fx.Node]) -> tuple[bool, ...]:
        """Return for each output of a region whether it requires a gradient if the ``differentiable`` inputs do."""
        form = self._form(region, differentiable, ())
        if form not in self._known:
            inputs = self.inputs(region)
            module = region_module(inputs, region, without=(OWN_MEMORY, TILE))
            with fake_mode(self._stage.module.graph), torch.enable_grad():
                given = []
                for node in inputs:
                    value = node.meta["val"]
                    if isinstance(value, Tensor):
                        value = contiguous_like(value, self._stage.device)
                        value.requires_grad_(node in differentiable)
                    given.append(value)
                results = fx.Interpreter(module).run(*given)
            self._known[form] = tuple(isinstance(result, Tensor) and result.requires_grad for result in results)
        requiring: tuple[bool, ...] = self._known[form]
        return requiring

    def template(self, region: TiledRegion, differentiable: Collection[fx.Node], given: Collection[fx.Node]) -> Template:
        """The region's training graphs, under the names of the first region like it.

        Args:
            differentiable: inputs whose gradients are wanted.
            given: outputs whose gradients are there.
        """
        recompute: Recompute = "full" if region.tile else self._recompute
        form = (recompute, self._form(region, differentiable, given))
        if form not in self._known:
            inputs = self.inputs(region)
            parameters, buffers, values = ([node.name for node in inputs if self._kind(node) == kind] for kind in range(3))
            module = region_module(inputs, region, without=(OWN_MEMORY, TILE))
            stage = region_stage(self._stage, region, module, parameters, values, buffers)
            joint = differentiate(
                stage,
                frozenset(node.name for node in inputs if node in differentiable),
                frozenset(node.name for node in given),
                self._stage.device,
            )
            self._known[form] = Template(stage, split_backward(joint, recompute))
        found: Template = self._known[form]
        return found

    def _form(self, region: TiledRegion, differentiable: Collection[fx.Node], given: Collection[fx.Node]) -> Hashable:
        inputs = self.inputs(region)
        places = {node: place for place, node in enumerate((*inputs, *region.nodes))}
        read = tuple((self._kind(node), _described(node.meta["val"]), node in differentiable) for node in inputs)
        calls = tuple((node.target, argument_form((node.args, node.kwargs), places.__getitem__)) for node in region.nodes)
        return str(self._stage.device), read, calls, tuple((places[node], node in given) for node in region.outputs)


def _described(value: Any) -> Hashable:
    """Return the properties of an input by which regions with equal calls may differ."""
    if isinstance(value, Tensor):
        return tuple(size_of(size) for size in value.shape), value.dtype, value.device
    return size_of(value) if isinstance(value, torch.SymInt) else str(value)
