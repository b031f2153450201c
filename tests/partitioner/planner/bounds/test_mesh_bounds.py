"""The lower bound by which a search leaves out a mesh never exceeds the simulated step of its plan."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from benchmarks.transformer import gpt
from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from partitioner import partition
from partitioner.planner.bounds.mesh_bounds import MeshBounds
from partitioner.planner.costs.links import clock_rate_of
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.sharding.shared_models import SharedModels
from passes.ir.mesh import Mesh
from tests.support.running.slow_values import all_but

MESHES: tuple[Mapping[str, int], ...] = (
    {"data": 8},
    {"zero1": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"pipeline": 8},
    {"data": 2, "tensor": 4},
    {"fsdp": 4, "tensor": 2},
    {"pipeline": 4, "data": 2},
    {"pipeline": 2, "zero1": 4},
    {"zero1": 2, "pipeline": 2, "tensor": 2},
    {"pipeline": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "fsdp": 4},
)


@pytest.mark.parametrize("sizes", all_but(({"zero1": 8}, {"pipeline": 4, "data": 2}, {"fsdp": 4, "tensor": 2}), MESHES), ids=str)
def test_bounds_of_meshes_are_below_the_simulation_of_their_plans(sizes: Mapping[str, int]) -> None:
    """Two nodes of four devices; parameters that ZeRO-1 gathers once are also cast once, not in every microbatch."""
    cluster = Cluster.preset("h100", nodes=2, devices_per_node=4)
    with torch.device("meta"):
        model, tokens = gpt(2, 256), torch.zeros(32, 64, dtype=torch.int64)
    pm = partition(model, 8, sizes, example_inputs=(tokens,), cluster=cluster, precision="bf16-mixed", progress=False)
    graph = SharedModels().graph_of_step(pm.traced.graph)
    request = PlanRequest(mode="auto", devices=("cpu",) * 8)
    rate = clock_rate_of(graph, cluster, asked=False)
    bounds = MeshBounds(CuttableModel(graph, request, clock_rate=rate), cluster, request, Roofline())
    assert bounds.step_bound(Mesh(tuple(sizes.items()))) <= pm.simulate().step_time
