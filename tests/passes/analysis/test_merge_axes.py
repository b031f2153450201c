"""Axes that are too short for a mesh dimension are cut together with their neighbours: fewer heads of keys than ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, partition
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.analysis.merge_axes import merge_short_axes
from tests.support.running.slow_values import slow

HEADS, GROUP, HEAD = 2, 2, 5


class GroupedQueries(nn.Module):
    """Attention in which each head of keys and values serves a group of query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, HEADS * GROUP * HEAD)
        self.key, self.value = nn.Linear(8, HEADS * HEAD), nn.Linear(8, HEADS * HEAD)
        self.project = nn.Linear(HEADS * GROUP * HEAD, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, HEADS * GROUP, HEAD).transpose(1, 2)
        key, value = (layer(x).view(batch, length, HEADS, HEAD).transpose(1, 2) for layer in (self.key, self.value))
        key, value = (
            each[:, :, None].expand(batch, HEADS, GROUP, length, HEAD).reshape(batch, HEADS * GROUP, length, HEAD) for each in (key, value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.project(attended.transpose(1, 2).reshape(batch, length, HEADS * GROUP * HEAD))
        return result


def traced() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return GroupedQueries().double(), torch.rand(4, 5, 8, dtype=torch.float64)


def test_neighbours_become_one_axis_where_they_stand_side_by_side() -> None:
    model, x = traced()
    graph = trace(model, (x,), training=True)
    axes = find_axes(graph.graph)
    merged = merge_short_axes(graph, axes, 4)

    def sizes(name: str, found: object) -> list[object]:
        table = merged if found == "merged" else axes
        return [table.sizes[axis] for axis in table.of(name)[0]]

    assert sizes("p_query_weight", "before") == [HEADS, GROUP, HEAD]
    assert sizes("p_query_weight", "merged") == [HEADS * GROUP, HEAD]
    assert sizes("p_key_weight", "merged") == [HEADS, HEAD]
    assert merge_short_axes(graph, axes, 2) == axes


@pytest.mark.parametrize("devices", [2, *slow(3, 4)])
def test_queries_are_cut_over_more_ranks_than_there_are_heads_of_keys(devices: int) -> None:
    model, x = traced()
    pm = partition(model, devices=devices, mode="tensor", example_inputs=(x,), constraints=Constraints(axes={"heads": "tensor"}))
    reference = copy.deepcopy(model)
    expected, result = reference(x), pm(x)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    expected.square().mean().backward()
    result.square().mean().backward()
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13, msg=name)
    held = [dict(pm.named_parts(rank))["query.weight"].shape[0] for rank in range(devices)]
    assert sum(held) == HEADS * GROUP * HEAD
    assert len(held) == devices
