"""``mode="auto"``: the plan that is found trains as the model does, is the fastest by its own prices, and says how it was found."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.hardware.clusters import Cluster, Device, Level, Link
from cost_models.hardware.units import parse_bytes
from partitioner import ConfigError, Constraints, InfeasiblePlanError, Plan, partition
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.tracing.trace import trace
from passes.ir.graph import ModelGraph
from passes.ir.mesh import STAGES, Mesh
from tests import ROOT
from tests.support.models.case import Case
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.slow_values import slow
from tests.support.running.transparency import compare, partitioned_steps, reference_steps

CASES = [pytest.param(case, id=case.name, marks=() if case.name == "perceptron" else pytest.mark.slow) for case in ZOO]


def traced(name: str) -> ModelGraph:
    instance = case_named(name).build()
    return trace(instance.model, instance.args, dict(instance.kwargs), training=True)


def request(count: int, mode: str = "auto", **fields: Any) -> PlanRequest:
    return PlanRequest(mode, tuple(f"cuda:{rank}" for rank in range(count)), **fields)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_that_is_found_trains_as_the_model_does(case: Case) -> None:
    """Batch normalisation among them: no batch is cut where that would change the numbers.

    Losses and gradients of two steps; what AdamW makes of gradients that are rounding, whichever axes are cut, is left aside.
    """
    reference = reference_steps(case, n_steps=2)
    found = partitioned_steps(case, n_steps=2, devices=4)
    assert compare(reference, dataclasses.replace(found, state=reference.state), case.tolerance) is None


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["cpu", "a100-80gb"])
@pytest.mark.parametrize("name", ["perceptron", "gpt"])
def test_no_mesh_is_faster(name: str, preset: str) -> None:
    graph, cluster = traced(name), Cluster.preset(preset, 2, 2)
    best = plans_auto(graph, cluster, request(4))[0]
    assert best.gap == 0.0 or name != "perceptron"  # other cuts of more operations are too many to try all
    for sizes in ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)):
        for kind in ("data", "fsdp", "zero1"):
            dimensions = tuple((each, size) for each, size in zip((kind, "pipeline", "tensor"), sizes, strict=True) if size > 1)
            mesh = Mesh(dimensions)
            mode = next((each for each in mesh.names if each in STAGES), "model")
            assert best.step_time <= plan_mesh(graph, cluster, request(4, mode), None, mesh).step_time * (1 + 1e-9), dimensions


@pytest.mark.slow
def test_equal_inputs_give_equal_plans_that_survive_json() -> None:
    cluster = Cluster.preset("v100", 1, 4)
    first, second = (plans_auto(traced("perceptron"), cluster, request(4))[0] for _ in range(2))
    assert first == second
    assert first.prediction == second.prediction
    read = Plan.from_json(first.to_json())
    assert (read, read.prediction) == (first, first.prediction)


@pytest.mark.slow
def test_a_saved_plan_lowers_to_the_same_programs() -> None:
    instance = case_named("perceptron").build()
    found = partition(instance.model, devices=2, example_inputs=instance.args, progress=False)
    again = partition(instance.model, devices=2, example_inputs=instance.args, progress=False, plan=Plan.from_json(found.plan.to_json()))
    assert [graph.code for graph in found.graphs] == [graph.code for graph in again.graphs]


HASHED = """
import hashlib, torch
from partitioner import partition
from tests.support.models.zoo import case_named
instance = case_named("gpt").build()
pm = partition(instance.model, devices=4, example_inputs=instance.args, cluster="v100:2x2", progress=False)
programs = "".join(graph.code for graph in pm.graphs)
print(pm.plan.hash, hashlib.sha256(programs.encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_and_programs_are_the_same_in_every_process() -> None:
    """Sets of strings are in another order in each: nothing that is decided or written may depend on it."""
    printed = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", HASHED]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True, env=environment)
        printed.add(finished.stdout.strip())
    assert len(printed) == 1
    assert len(printed.pop().split()) == 2


@pytest.mark.parametrize("devices", [1, 2, *slow(3)])
@pytest.mark.parametrize("training", [True, False])
def test_any_number_of_devices_in_training_and_evaluation(devices: int, training: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).train(training)
    x = torch.rand(6, 8)
    pm = partition(model, devices=devices, example_inputs=(x,), progress=False)
    torch.testing.assert_close(pm(x), model(x))
    assert pm.plan.grid.size == devices


@pytest.mark.parametrize("rows", [1, 5])
def test_few_rows_of_a_small_model_on_many_devices(rows: int) -> None:
    """No axis of the model has a part for each device, nor has the batch: all compute all rows."""
    model, x = nn.Linear(3, 2), torch.randn(rows, 3)
    pm = partition(model, 8, "auto", example_inputs=x, progress=False)
    assert pm.plan.mesh == (("data", 8),)
    with pytest.warns(UserWarning, match=f"a batch of {rows} rows does not divide over 8 ranks: each computes all of it"):
        torch.testing.assert_close(pm(x), model(x))
    with pytest.raises(ConfigError, match=r"(?s)cut into .* parts.*remedy: pass fewer devices, or name a mode"):
        partition(model, 8, "auto", example_inputs=x, schedule="1F1B", progress=False)


def test_a_model_that_computes_nothing() -> None:
    """Its planned step takes no time, of which no fraction can be saved."""
    x = torch.randn(6, 6)
    pm = partition(nn.Identity(), 2, example_inputs=(x,), progress=False)
    assert torch.equal(pm(x), x)
    assert pm.plan.gap == 0.0


def test_a_model_without_a_batch() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(6, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.weight @ x) @ x

    model, x = Outer(), torch.rand(5, 5)
    torch.testing.assert_close(partition(model, devices=2, example_inputs=(x,), progress=False)(x), model(x))


@pytest.mark.slow
def test_memory_decides_that_parameters_are_held_in_parts() -> None:
    graph = traced("perceptron")
    cluster = Cluster.preset("a100-80gb", 1, 4)
    free = plans_auto(graph, cluster, request(4))[0]
    tight = plans_auto(graph, cluster, request(4, memory_limit=int(max(free.memory) * 0.6)))[0]
    assert max(tight.memory) <= 0.6 * max(free.memory)
    assert tight.step_time >= free.step_time


def test_what_does_not_fit_is_refused_with_what_is_missing_and_what_would_do() -> None:
    graph = traced("perceptron")
    with pytest.raises(InfeasiblePlanError, match=r"lacks [\d.]+ \w+") as raised:
        plans_auto(graph, Cluster.preset("a100-80gb", 1, 2), request(2, memory_limit=8_000))
    enough = int(str(raised.value).split("remedy: ")[1].split()[0])
    assert enough > 2
    plan = plans_auto(graph, Cluster.preset("a100-80gb", 1, enough), request(enough, memory_limit=8_000))[0]
    assert max(plan.memory) <= 8_000
    larger = re.search(r"or 2 devices of ([\d.]+ \w+)", str(raised.value))
    assert larger is not None
    assert parse_bytes(larger[1]) > 8_000
    plans_auto(graph, Cluster.preset("a100-80gb", 1, 2), request(2, memory_limit=larger[1]))


@pytest.mark.parametrize(
    ("constraints", "names"),
    [
        pytest.param({"axes": {"heads": "tensor"}}, {"tensor"}, marks=pytest.mark.slow),
        ({"axes": {"batch": "fsdp"}}, {"fsdp"}),
    ],
)
def test_constraints_narrow_the_search(constraints: Mapping[str, Any], names: set[str]) -> None:
    plan = plans_auto(traced("gpt"), Cluster.preset("a100-80gb", 1, 2), request(2, constraints=Constraints(**constraints)))[0]
    assert names <= {name for name, _ in plan.mesh}


@pytest.mark.slow
def test_a_schedule_asks_for_a_pipeline() -> None:
    plan = plans_auto(traced("gpt"), Cluster.preset("a100-80gb", 1, 2), request(2, schedule="GPipe"))[0]
    assert (plan.schedule, dict(plan.mesh)["pipeline"]) == ("GPipe", 2)


@pytest.mark.slow
def test_slow_links_lie_between_stages() -> None:
    """Two nodes of two devices, and almost no link between the nodes: what crosses it is what stages send, once a microbatch."""
    device = Device("d", {"float64": 1e9}, 2**40, 1e12, launch_overhead=1e-7)
    cluster = Cluster([device] * 4, [Level(2, Link(1e-7, 1e11)), Level(4, Link(1e-7, 3e7))])
    plan = plans_auto(traced("gpt"), cluster, request(4))[0]
    assert plan.mesh[0] == ("pipeline", 2), plan.mesh


@pytest.mark.slow
def test_the_runner_up_and_the_reason_are_told() -> None:
    plan = plans_auto(traced("perceptron"), Cluster.preset("cpu", 1, 4), request(4))[0]
    assert plan.prediction.bound_by
    assert "slower" in plan.prediction.runner_up or "as fast" in plan.prediction.runner_up
