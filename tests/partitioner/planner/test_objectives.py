"""The objective of a plan, and the time of its search, are the caller's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import format_bytes
from partitioner import PartitionedModel, partition
from partitioner.planner.request import PlanRequest
from partitioner.planner.search import best_first
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.search.least_memory import least_memory
from passes.ir.errors import ConfigError, InfeasiblePlanError
from passes.ir.plan import Plan

WIDTH, ROWS = 64, 32


def planned(mode: str | Mapping[str, int], devices: int = 4, rows: int = ROWS, **options: Any) -> PartitionedModel:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
    options = {"cluster": f"h100:1x{devices}", **options}
    return partition(model, devices, mode, example_inputs=(torch.randn(rows, WIDTH),), progress=False, **options)


@pytest.mark.parametrize("mode", [{"fsdp": 2}, *(pytest.param(mode, marks=pytest.mark.slow) for mode in ({"pipeline": 2}, "auto"))])
def test_no_plan_holds_much_less_than_that_of_least_memory(mode: str | Mapping[str, int]) -> None:
    fastest, least = planned(mode, 2).plan, planned(mode, 2, objective="memory").plan
    assert max(least.memory) <= max(fastest.memory)
    assert least.step_time >= fastest.step_time
    with pytest.raises(InfeasiblePlanError):
        planned(mode, 2, memory_limit=int(0.9 * max(least.memory)))


@pytest.mark.slow
def test_a_pipeline_of_least_memory_says_how_it_was_found() -> None:
    fastest, least = planned({"pipeline": 4}, rows=1024).plan, planned({"pipeline": 4}, rows=1024, objective="memory").plan
    assert max(least.memory) < max(fastest.memory)
    assert "limits of memory were tried, and none was found that needs less than" in least.prediction.searched


def test_rows_a_second_are_noted() -> None:
    plan = planned({"data": 2}, 2, objective="tokens_per_second_per_device").plan
    assert plan.notes[-1] == f"{ROWS / plan.step_time / 2:.3g} rows a second on each device."


def test_the_price_of_a_step_is_noted() -> None:
    priced = dataclasses.replace(Cluster.preset("h100").devices[0], price_per_hour=3.0)
    cluster = Cluster([priced] * 2, links=Cluster.preset("h100", nodes=1, devices_per_node=2).links)
    plan = planned({"data": 2}, 2, cluster=cluster, objective="cost").plan
    assert plan.step_time == planned({"data": 2}, 2).plan.step_time
    step = 6.0 * plan.step_time / 3600
    assert plan.notes[-1] == f"A step costs {step:.3g}, at 6.00 an hour for all devices: {1000 * step / ROWS:.3g} for 1,000 rows."


def test_a_limit_of_time_ends_a_search_with_its_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock passes the limit as soon as there is a plan."""
    solve, plans = best_first.PlanSearch._solve, list[best_first.Option]()

    def recorded(search: best_first.PlanSearch, *arguments: Any) -> None:
        solve(search, *arguments)
        if search.best is not None:
            plans.append(search.best[0])

    monkeypatch.setattr(best_first.PlanSearch, "_solve", recorded)
    is_over: Any = property(lambda _: bool(plans))
    monkeypatch.setattr(Deadline, "is_over", is_over)
    plan = planned({"pipeline": 4}, time_limit=1.0).plan
    assert plan.prediction.searched.startswith("1 plan of this mesh was worked out")


def test_the_plan_of_least_memory_so_far_is_kept_when_time_is_over() -> None:
    """The second search has no time left to find a plan."""
    plan, requests = planned({"data": 2}, 2).plan, list[PlanRequest]()

    def solve(request: PlanRequest) -> Plan:
        requests.append(request)
        if len(requests) == 1:
            return plan
        time.sleep(0.06)
        raise ConfigError("no plan was found within the time limit", remedy="allow more")

    kept = least_memory(solve, PlanRequest("pipeline", ("cpu", "cpu"), time_limit=0.05))
    assert len(requests) == 2
    assert kept.memory == plan.memory


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"objective": "speed"}, "there is no objective='speed'(.|\n)*tokens_per_second_per_device"),
        ({"objective": "cost"}, "h100 has none(.|\n)*price_per_hour"),
        ({"time_limit": 0}, "time_limit must be more than 0, not 0(.|\n)*above 0"),
        ({"time_limit": 1e-6}, "no plan was found within time_limit=1e-06 seconds(.|\n)*allow more seconds"),
    ],
)
def test_bad_objectives_and_limits(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        planned({"pipeline": 2}, 2, **options)


@pytest.mark.filterwarnings("ignore::passes.ir.errors.PartitionWarning")
def test_plans_leave_room_in_the_memory_of_a_device() -> None:
    """A device holds a context of its runtime and buffers of messages besides."""
    needed = max(planned({"fsdp": 2}, 2).plan.memory)
    for share, fits in ((0.91, True), (0.95, False)):
        device = dataclasses.replace(Cluster.preset("h100").devices[0], memory_bytes=int(needed / share))
        cluster = Cluster([device] * 2, links=Cluster.preset("h100", nodes=1, devices_per_node=2).links)
        if fits:
            assert max(planned({"fsdp": 2}, 2, cluster=cluster).plan.memory) <= 0.92 * device.memory_bytes
        else:
            with pytest.raises(InfeasiblePlanError, match=f"devices of {format_bytes(0.92 * device.memory_bytes)}"):
                planned({"fsdp": 2}, 2, cluster=cluster, recompute="none")
