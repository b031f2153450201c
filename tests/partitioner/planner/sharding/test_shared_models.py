"""Plans that share what they have in common are those that are made alone, whatever was planned before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cost_models.hardware.clusters import Cluster
from partitioner import Constraints
from partitioner.options.mode import resolve_mode
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.shared_models import SharedModels
from passes.ir.errors import PartitionError
from passes.ir.plan import Plan
from tests.support.planning.fixed_options import CLUSTERS, MODES, graph_of

REQUESTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"batchnorm": "local"},
    {"optimizer": "sgd"},
    {"memory_limit": "40GiB"},
    {"constraints": Constraints(axes={"ffn": "tensor"})},
    {"constraints": Constraints(axes={"heads": "tensor"}), "recompute": "full"},
    {"n_microbatches": 2},
    {},
)
"""One after the other."""


def plan_of(name: str, mode: Any, cluster: str, models: SharedModels, **options: Any) -> Plan | str:
    hardware = Cluster.parse(cluster)
    mesh = resolve_mode(mode, len(hardware.devices))
    of_stages = "auto" if mesh is None else "pipeline" if "pipeline" in mesh.names or options.get("n_microbatches") else "model"
    request = PlanRequest(of_stages, ("cuda:0",) * len(hardware.devices), **options)
    try:
        return PlanProblem(graph_of(name), hardware, request, None, mesh, models=models).solve()
    except PartitionError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("narrowing perceptron", "pipeline x tensor"),
        ("tables", "tensor"),
        ("small GPT", "tensor"),
        ("convolutions", "tile"),
        ("small GPT", "pipeline x tensor"),
        ("GPT-2", "auto"),
    ],
)
def test_plans_are_those_made_alone(name: str, mode: str) -> None:
    """Over two alternating clusters, so that each plan comes after others of the same graph."""
    models = SharedModels()
    of_cluster = {cluster: [plan_of(name, MODES[mode], cluster, SharedModels(), **options) for options in REQUESTS] for cluster in CLUSTERS}
    for cluster in (*CLUSTERS, *CLUSTERS):
        for options, alone in zip(REQUESTS, of_cluster[cluster], strict=True):
            shared = plan_of(name, MODES[mode], cluster, models, **options)
            assert shared == alone, options
            if isinstance(shared, Plan) and isinstance(alone, Plan):
                assert shared.prediction == alone.prediction, options
