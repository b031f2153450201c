"""Stages of different width: what is planned for them, how they are asked for, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from partitioner import Constraints, partition
from partitioner.options.mode import mode_text, parse_mode, without_rest
from partitioner.planner.costs.links import LinkTable
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.sharding.stage_submeshes import submesh_parts
from partitioner.planner.solvers.stage_problem import Gathered
from partitioner.tracing.trace import trace
from passes.graph.repeated_subgraphs import Folded
from passes.ir.errors import ConfigError, InfeasiblePlanError
from passes.ir.mesh import Mesh
from tests.support.models.zoo import case_named
from tests.support.planning.small_pipelines import ALIKE, inputs, perceptron, planned_and_simulated
from tests.support.planning.unlike_widths import Widths, mode, on
from tests.support.running.slow_values import slow

# -- plans -------------------------------------------------------------------------------------------------------------------------


def test_a_stage_of_twice_the_work_is_as_fast_on_twice_the_ranks() -> None:
    """Three layers on widths 2 + 1: two of them on two ranks, half of each on either.

    Of M microbatches, each takes f forward and 2 f back on the second stage, which begins after the first forward, of f, and works
    without a pause; then the first stage ends: 1.5 f, since one of its two layers has no gradient of its input.
    """
    count = 16
    planned, simulated, forward = planned_and_simulated(mode((2, 1)), count)
    expected = forward + count * 3 * forward + 1.5 * forward
    assert (planned, simulated) == pytest.approx((expected, expected), rel=0.02)


@pytest.mark.parametrize("widths", [*slow((2, 1)), (1, 2)])
@pytest.mark.parametrize("recompute", ["none", *slow("full")])
@pytest.mark.parametrize(
    ("cut", "within"), [pytest.param("6", 0.08, id="whole", marks=pytest.mark.slow), pytest.param("5", 0.12, id="in_parts")]
)
def test_planned_memory_and_time_are_those_of_the_simulation(cut: str, within: float, widths: Widths, recompute: str) -> None:
    """Layers of 64 -> 256 -> 64: after a pair of them a value is replicated, inside of one sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))))
    arguments: dict[str, Any] = {"n_microbatches": 4, "schedule": "1F1B", "recompute": recompute, "cluster": ALIKE, "progress": False}
    split = Constraints(split_spec={cut: "beginning"})
    pm = partition(model, 3, mode(widths), example_inputs=(torch.randn(256, 64),), constraints=split, **arguments)
    simulation = pm.simulate()
    for planned, simulated in zip(pm.plan.memory, simulation.peak_memory, strict=True):
        assert planned == pytest.approx(simulated, rel=within)
    assert pm.plan.step_time == pytest.approx(simulation.step_time, rel=within)


@pytest.mark.parametrize(
    ("mesh", "count", "words"),
    [({"pipeline": 2, "tensor": 2}, 4, "pipeline 2 x tensor 2"), (mode((2, 1)), 3, r"pipeline 2 x tensor 2 \+ 1")],
    ids=["equal", "different"],
)
def test_what_does_not_fit_is_told_of_devices_not_of_places(mesh: Mapping[str, Any], count: int, words: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=rf"no plan fits {count} devices of 1.95 KiB: in the closest, {words} with"):
        partition(perceptron(), count, mesh, example_inputs=inputs(12)[:1], memory_limit=2000, progress=False)


def test_borders_in_repeated_blocks_cost_what_they_cost_in_a_model_that_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut between the layers of a perceptron makes whole what two ranks have halves of."""
    layers = [module for _ in range(6) for module in (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU())]
    graph = trace(nn.Sequential(*layers), (torch.rand(64, 64),), training=True)

    def gathered() -> list[Gathered]:
        model = CuttableModel(graph, PlanRequest("pipeline", ("cuda",) * 3))
        cluster, mesh = Cluster.parse("h100:1x3"), Mesh((("pipeline", 2), ("tensor", 2)), (2, 1))
        links = LinkTable(cluster)
        places = links.places(mesh)
        cut = model.cut(mesh.cutting)
        assert (cut.part.source.unfolding is None) == is_whole
        parts = submesh_parts(cut, mesh, "sync", links)
        kinds = tuple(dict.fromkeys(places.devices))
        return sorted(parts.prices(kinds, places.devices, Roofline(), "adamw", "none").at(16).units.gathered_values)

    is_whole = False
    folded = gathered()
    monkeypatch.setattr("partitioner.planner.sharding.model.fold_repeats", lambda whole, _: Folded(whole, {}, {}))
    is_whole = True
    assert folded == gathered() != []


@pytest.mark.slow
def test_plans_are_those_of_equal_widths_where_all_are_equal() -> None:
    plans = [on((2, 2)).plan, partition(perceptron(), 4, {"pipeline": 2, "tensor": 2}, example_inputs=inputs(12)[:1], progress=False).plan]
    assert plans[0] == plans[1]


# -- modes -------------------------------------------------------------------------------------------------------------------------


def test_modes_as_text() -> None:
    assert mode_text({"pp": 2, "tensor": (2, 1)}) == "pp=2,tensor=2+1"
    assert parse_mode("pipeline=2,tensor=2+1") == {"pipeline": 2, "tensor": (2, 1)}
    assert without_rest({"pipeline": 2, "tensor": (2, 1), "data": -1}, 12) == {"pipeline": 2, "tensor": (2, 1), "data": 4}
    assert without_rest({"pipeline": 2, "tensor": (2, 1)}, 4) is None
    assert json.loads(on((2, 1)).plan.to_json())["widths"] == [2, 1]


@pytest.mark.parametrize(
    ("given", "devices", "message"),
    [
        ({"pipeline": 2, "tensor": (2, 1)}, 4, "has 3 devices and 4 were given"),
        ({"pipeline": 2, "tensor": (2, 0)}, 3, "a size is a number of ranks"),
        ({"pipeline": 3, "tensor": (2, 1)}, 4, "gives 2 stages a number of ranks, and has 3"),
        ({"tensor": (2, 1)}, 3, "gives 2 stages a number of ranks, and has 1"),
        ({"pipeline": 2, "data": (2, 1)}, 3, "only stages have different numbers of ranks"),
    ],
)
def test_meshes_that_cannot_be(given: dict[str, Any], devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(perceptron(), devices, given, example_inputs=inputs(12)[:1], progress=False)


@pytest.mark.slow
def test_a_parameter_of_stages_of_unlike_width_is_refused_by_name() -> None:
    instance = case_named("gpt").build()
    with pytest.raises(ConfigError, match=r"is shared by stages with tensor-parallel degree (1 and 2|2 and 1)") as refusal:
        partition(instance.model, 3, mode((2, 1)), example_inputs=instance.args, progress=False)
    assert "token" in str(refusal.value) or "embedding" in str(refusal.value)
    options: dict[str, Any] = {"example_inputs": instance.args, "progress": False}
    plan = partition(instance.model, 4, {"pipeline": 2, "tensor": 2}, schedule="1F1B", **options).plan
    shorter = plan.predicted(memory=plan.memory[:3], call_memory=plan.prediction.call_memory[:3])
    unlike = dataclasses.replace(shorter, devices=plan.devices[:3], widths=(2, 1))
    with pytest.raises(ConfigError, match="degrees must match"):
        partition(instance.model, 3, plan=unlike, **options)


def test_a_parameter_that_would_be_shared_wherever_stages_are_cut_is_refused_by_name() -> None:
    layers = [nn.Linear(8, 8) for _ in range(6)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[1], nn.Tanh()).double()
    split = Constraints(split_spec={"4": "beginning"})
    with pytest.raises(ConfigError, match=r"2\.weight is shared by stages with tensor-parallel degree 1 and 2"):
        partition(model, 3, mode((2, 1)), example_inputs=inputs(12)[:1], constraints=split, schedule="1F1B", progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (2, 1, 1)}, "widths.* do not fit the mesh"),
        pytest.param({"widths": (2,)}, "widths.* do not fit the mesh", marks=pytest.mark.slow),
        pytest.param({"widths": (3, 0)}, "widths.* do not fit the mesh", marks=pytest.mark.slow),
        ({"mesh": (("pipeline", 2), ("tensor", 4))}, "have no dimension of 4"),
        pytest.param({"mesh": (("pipeline", 2),)}, "widths.* do not fit the mesh", marks=pytest.mark.slow),
        pytest.param({"widths": ()}, "mesh: it has 4 ranks, and the plan names 3 devices", marks=pytest.mark.slow),
    ],
)
def test_plans_that_do_not_fit_themselves(changes: dict[str, Any], message: str) -> None:
    plan = dataclasses.replace(on((2, 1)).plan, **changes)
    with pytest.raises(ConfigError, match=message):
        partition(perceptron(), 3, plan=plan, example_inputs=inputs(12)[:1], progress=False)
