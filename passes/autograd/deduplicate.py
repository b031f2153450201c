"""Equal stages: the blocks of a deep model, cut into equal runs, need be differentiated once.

stage 3   blocks 12..15    h_12 -> ... -> h_16          the same graph but for the names of its nodes
stage 4   blocks 16..19    h_16 -> ... -> h_20
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable
from typing import Any

from torch import fx

from passes.autograd.partition_joint import DifferentiatedStage
from passes.graph.equivalence import TRACED, ValueKey, graph_key
from passes.stages.split import StageGraph

_BOUND = ValueKey(strides=True, requires_grad=True)
"""Parameters, buffers and constants: they keep their strides, where the other inputs of a stage are contiguous."""


def form_of(stage: StageGraph, differentiable: Collection[str], given: Collection[str]) -> Hashable:
    """Return a key that is equal for stages whose training graphs differ by names alone.

    Args:
        differentiable: placeholders whose gradients are wanted.
        given: outputs whose gradients are there.
    """
    graph, regions = stage.module.graph, dict[int, int]()  # numbered from the stage's first

    def input_key(node: fx.Node) -> Hashable:
        key = _BOUND if node.target in stage.bound else TRACED
        return key(node.meta.get("val")), node.name in differentiable

    def own(node: fx.Node) -> Hashable:
        region = regions.setdefault(stage.regions[node.name], len(regions)) if node.name in stage.regions else None
        return TRACED(node.meta.get("val")), stage.policies.get(node.name), node.name in stage.recomputed, region

    inputs = {node: input_key(node) for node in graph.nodes if node.op == "placeholder"}
    key = graph_key(inputs, [node for node in graph.nodes if node not in inputs], (), own)
    counts = tuple(map(len, (stage.parameters, stage.buffers, stage.constants, stage.model_inputs, stage.values)))
    return key, counts, tuple(name in given for name in stage.outputs), stage.has_batch, str(stage.device)


def renamed(found: DifferentiatedStage, of: StageGraph, stage: StageGraph) -> DifferentiatedStage:
    """Return the training graphs of one stage for another of equal form. They are shared: inner names are those of the first."""
    names = dict(zip((*of.bound, *of.arguments, *of.outputs), (*stage.bound, *stage.arguments, *stage.outputs), strict=True))
    fields = ("backward_bound", "weight_bound", "outputs_with_gradient", "arguments_with_gradient", "parameters_with_gradient")
    changed: dict[str, Any] = {field: tuple(names[name] for name in getattr(found, field)) for field in fields}
    dependence = {names[name]: frozenset(names[output] for output in outputs) for name, outputs in found.dependence.items()}
    return dataclasses.replace(found, **changed, dependence=dependence)
