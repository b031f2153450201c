"""Stages that compute the same share their training graphs, unless they recompute other parts of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from partitioner.tracing.trace import trace
from passes.autograd.deduplicate import form_of
from passes.ir.graph import ModelGraph
from passes.ir.plan import Region
from passes.stages.split import StageGraph, split_stages

DEVICE = torch.device("cpu")


def stages(*policies: str) -> list[StageGraph]:
    """Return two equal stages of two layers, with a region and its policy for each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    graph = trace(model.train(), (torch.zeros(2, 4),), {})
    layers = [node.name for node in graph.computing_nodes() if node.name.startswith("linear")]
    regions = tuple(Region(name, policy) for name, policy in zip(layers, policies, strict=False))
    return list(split_stages(graph, (layers[0], layers[2]), (DEVICE, DEVICE), regions))


@pytest.mark.parametrize(
    ("policies", "is_shared"),
    [((), True), (("full", "none", "full", "none"), True), (("full", "none", "none", "full"), False), (("full",) * 3 + ("none",), False)],
)
def test_stages_share_graphs_if_they_recompute_alike(policies: tuple[str, ...], is_shared: bool) -> None:
    first, second = (form_of(stage, stage.parameters, stage.outputs) for stage in without_inputs(stages(*policies)))
    assert (first == second) == is_shared


def without_inputs(found: list[StageGraph]) -> list[StageGraph]:
    """Return stages whose input is a value of an earlier stage, in the first as in the second."""
    return [dataclasses.replace(stage, values=(*stage.model_inputs, *stage.values), model_inputs=()) for stage in found]


def test_stages_whose_weights_have_other_strides_share_no_graphs() -> None:
    """Bound tensors keep their strides in a stage, and the kernels that autograd picks depend on them."""
    convolutions = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)]
    alike = nn.Sequential(*convolutions)
    graph = trace(alike.train(), (torch.zeros(2, 4, 5, 5),), {})
    stages = split_two(graph)
    convolutions[1].weight.data = convolutions[1].weight.data.contiguous(memory_format=torch.channels_last)
    unlike = split_two(trace(alike.train(), (torch.zeros(2, 4, 5, 5),), {}))
    for found, is_shared in ((stages, True), (unlike, False)):
        first, second = (form_of(stage, stage.parameters, stage.outputs) for stage in without_inputs(found))
        assert (first == second) == is_shared


def split_two(graph: ModelGraph) -> list[StageGraph]:
    layers = [node.name for node in graph.computing_nodes() if node.name.startswith("conv")]
    return list(split_stages(graph, (layers[0], layers[1]), (DEVICE, DEVICE)))
