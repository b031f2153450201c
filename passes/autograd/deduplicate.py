"""Stages that compute alike: the blocks of a deep model, cut into equal runs, need be differentiated once.

stage 3   blocks 12..15    h_12 -> ... -> h_16          the same graph but for the names of its nodes
stage 4   blocks 16..19    h_16 -> ... -> h_20
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from passes.autograd.partition_joint import DifferentiatedStage
from passes.graph.schemas import argument_form
from passes.graph.symbolic_sizes import traced_size
from passes.stages.split import StageGraph

__all__ = ["form_of", "renamed"]


def form_of(stage: StageGraph, differentiable: Collection[str], given: Collection[str]) -> Hashable:
    """Return a key that is equal for stages whose training graphs differ by names alone.

    Args:
        differentiable: placeholders whose gradients are wanted.
        given: outputs whose gradients are there.
    """
    places = {node: index for index, node in enumerate(stage.module.graph.nodes)}
    regions: dict[int, int] = {}  # numbered from the stage's first
    nodes = tuple(
        (
            node.op,
            str(node.target) if node.op == "call_function" else "",
            argument_form((node.args, node.kwargs), places.__getitem__),
            _described(node.meta.get("val")),
            node.op == "placeholder" and node.name in differentiable,
            stage.policies.get(node.name),
            regions.setdefault(stage.regions[node.name], len(regions)) if node.name in stage.regions else None,
        )
        for node in stage.module.graph.nodes
    )
    counts = tuple(map(len, (stage.parameters, stage.buffers, stage.constants, stage.model_inputs, stage.values)))
    return nodes, counts, tuple(name in given for name in stage.outputs), stage.has_batch, str(stage.device)


def renamed(found: DifferentiatedStage, of: StageGraph, stage: StageGraph) -> DifferentiatedStage:
    """Return the training graphs of one stage for another of equal form. They are shared: inner names are those of the first."""
    names = dict(zip((*of.bound, *of.arguments, *of.outputs), (*stage.bound, *stage.arguments, *stage.outputs), strict=True))
    fields = ("backward_bound", "weight_bound", "outputs_with_gradient", "arguments_with_gradient", "parameters_with_gradient")
    changed: dict[str, Any] = {field: tuple(names[name] for name in getattr(found, field)) for field in fields}
    dependence = {names[name]: frozenset(names[output] for output in outputs) for name, outputs in found.dependence.items()}
    return dataclasses.replace(found, **changed, dependence=dependence)


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(traced_size(size) for size in value.shape), str(value.dtype), value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(_described(part) for part in value)
    return traced_size(value) if isinstance(value, torch.SymInt) else str(value)
