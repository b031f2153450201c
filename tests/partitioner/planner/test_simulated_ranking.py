"""``mode="auto"`` ranks its best plans by their simulated steps, and reports those."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from partitioner import ConfigError, Plan, partition
from partitioner.planner.bounds.mesh_bounds import MeshBounds
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.best_first import ClosedMesh, PlanSearch
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.simulated_ranking import fastest_simulated
from partitioner.tracing.trace import trace
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh

CLUSTER = Cluster.preset("a100-80gb", 1, 4)
REQUEST = PlanRequest("auto", tuple(f"cuda:{rank}" for rank in range(4)))
NO_LIMIT = (float("inf"),) * 4
FREE = Deadline.after(None)


def model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))), torch.randn(16, 64)


def graph() -> ModelGraph:
    net, x = model()
    return trace(net, (x,), {}, training=True)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return plans_auto(graph(), CLUSTER, REQUEST, most=3)


@pytest.fixture(scope="module")
def step() -> Simulation:
    net, x = model()
    return partition(net, 4, "data", example_inputs=(x,), cluster=CLUSTER, progress=False).simulate()


def lasting(step: Simulation, seconds: Mapping[Plan, float]) -> Callable[[Plan], Simulation]:
    return lambda plan: dataclasses.replace(step, step_time=seconds[plan])


def test_the_plan_has_its_simulated_step() -> None:
    net, x = model()
    pm = partition(net, 4, example_inputs=(x,), cluster=CLUSTER, progress=False)
    assert pm.plan.step_time == pm.simulate().step_time
    assert pm.plan.prediction.contenders[0].step_time == pm.plan.step_time
    assert "simulated" in pm.plan.prediction.searched
    torch.testing.assert_close(pm(x), net(x))


def test_the_row_of_the_chosen_plan_has_its_memory_and_recomputation() -> None:
    net, x = (
        nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))),
        torch.randn(512, 64),
    )
    plain, least = (
        partition(net, 2, "data", example_inputs=(x,), cluster=CLUSTER, recompute=each, progress=False) for each in ("none", "full")
    )
    limit = (max(plain.plan.memory) + max(least.plan.memory)) // 2
    plan = partition(net, 2, "data", example_inputs=(x,), cluster=CLUSTER, memory_limit=limit, progress=False).plan
    chosen = plan.prediction.contenders[0]
    assert plan.recompute == "by region"
    assert (chosen.step_time, chosen.memory) == (plan.step_time, max(plan.memory))
    assert re.search(r", recompute .*\d+ .* of \d+ regions$", chosen.words)


def test_plans_of_a_search_are_of_unlike_meshes(plans: list[Plan]) -> None:
    assert plans[0] == plans_auto(graph(), CLUSTER, REQUEST)[0]
    assert 1 < len(plans) <= 3
    assert len({plan.grid.names for plan in plans}) == len(plans)
    for plan in plans:  # each is described as the chosen one
        assert plan.prediction.contenders[0].step_time == plan.step_time
        assert plans[0].step_time <= plan.step_time <= 1.15 * plans[0].step_time


def test_the_fastest_by_simulation_is_taken(plans: list[Plan], step: Simulation) -> None:
    seconds = {plan: 1.0 + len(plans) - place for place, plan in enumerate(plans)}  # the last is the fastest
    taken = fastest_simulated(plans, lasting(step, seconds), NO_LIMIT, FREE)
    assert taken == plans[-1]
    assert taken.step_time == 2.0
    times = [contender.step_time for contender in taken.prediction.contenders]
    assert times[: len(plans)] == sorted(seconds.values())
    assert taken.prediction.runner_up.startswith(taken.prediction.contenders[1].words)
    assert "50.0 % slower" in taken.prediction.runner_up
    assert taken.prediction.searched.endswith(f"the best {len(plans)} were simulated")


def test_a_plan_that_cannot_be_lowered_is_left_out(plans: list[Plan], step: Simulation) -> None:
    def simulated(plan: Plan) -> Simulation:
        if plan == plans[0]:
            raise ConfigError("it cannot be lowered", remedy="nothing")
        return step

    taken = fastest_simulated(plans, simulated, NO_LIMIT, FREE)
    only = fastest_simulated(plans[:1], simulated, NO_LIMIT, FREE)
    assert taken != plans[0]
    assert only == plans[0]
    words = plans[0].prediction.contenders[0].words
    assert all(f"Left out, as it cannot be lowered: {words}: it cannot be lowered." in plan.notes for plan in (taken, only))


def test_a_plan_whose_simulated_memory_fits_comes_first(plans: list[Plan], step: Simulation) -> None:
    seconds = {plan: 1.0 + place for place, plan in enumerate(plans)}
    peak = max(step.peak_memory)

    def simulated(plan: Plan) -> Simulation:
        times = 1.0 if plan == plans[0] else 0.25
        memory = tuple(dataclasses.replace(each, activations=int(each.activations + times * 2**30)) for each in step.memory)
        return dataclasses.replace(step, step_time=seconds[plan], memory=memory)

    limits = (peak + 2.0**29,) * 4
    taken = fastest_simulated(plans, simulated, limits, FREE)
    assert taken == plans[1]
    above = [each.words for each in taken.prediction.contenders if "more than its memory in simulation" in each.words]
    assert above == [f"{plans[0].prediction.contenders[0].words}, more than its memory in simulation"]
    only = fastest_simulated(plans[:1], simulated, limits, FREE)
    assert any(
        re.match(r"The simulated peak of rank \d, .* exceeds its limit of .* by .*: a lower memory_limit=", note) for note in only.notes
    )


def test_a_mesh_that_exceeds_its_memory_by_little_is_planned_again(plans: list[Plan], step: Simulation) -> None:
    """Its simulated peak is 2 % above the limit: the mesh is planned within what its planned peak is of that, and is still the fastest."""
    peak = max(step.peak_memory)
    planned = plans[0].predicted(memory=(int(0.99 * peak),) * 4)
    plans = [planned, *plans[1:]]
    again = dataclasses.replace(planned, batch_size=planned.batch_size + 1)
    fractions = []

    def simulated(plan: Plan) -> Simulation:
        more = int(0.02 * peak) if plan == planned else 0
        memory = tuple(dataclasses.replace(each, activations=each.activations + more) for each in step.memory)
        return dataclasses.replace(step, step_time=1.0 if plan in (plans[0], again) else 2.0, memory=memory)

    def smaller(plan: Plan, fraction: float) -> Plan:
        assert plan == planned
        fractions.append(fraction)
        return again

    limits = (float(peak),) * 4
    taken = fastest_simulated(plans, simulated, limits, FREE, smaller=smaller)
    assert taken == again
    assert taken.prediction.searched.startswith(plans[0].prediction.searched)
    assert fractions == [pytest.approx(0.99 / 1.02, rel=1e-3)]
    assert fastest_simulated(plans, simulated, limits, FREE) == plans[1]

    def refuse(_: Plan, __: float) -> Plan:
        raise ConfigError("nothing fits", remedy="nothing")

    other = fastest_simulated(plans, simulated, limits, FREE, smaller=refuse)
    assert other == plans[1]
    assert any("Exceeds its memory by 2.0%" in note and note.endswith("nothing fits.") for note in other.notes)


def test_a_mesh_is_planned_again_until_its_simulated_peak_fits(plans: list[Plan], step: Simulation) -> None:
    """Of three plans that all exceed the limit in simulation, and a fourth that fits; of two alone, the one that exceeds it by less."""
    peak = max(step.peak_memory)
    limits, excess = (float(peak),) * 4, {1: 1.03, 2: 1.04, 3: 1.01, 4: 1.0}
    first = dataclasses.replace(plans[0].predicted(memory=(peak,) * 4), batch_size=1)
    fractions = list[float]()

    def simulated(plan: Plan) -> Simulation:
        more = int((excess[plan.batch_size] - 1) * peak)
        memory = tuple(dataclasses.replace(each, activations=each.activations + more) for each in step.memory)
        return dataclasses.replace(step, step_time=1.0, memory=memory)

    def smaller(_: Plan, fraction: float) -> Plan:
        fractions.append(fraction)
        if len(fractions) > most:
            raise ConfigError("nothing fits", remedy="nothing")
        return dataclasses.replace(first.predicted(memory=(int(fraction * peak),) * 4), batch_size=1 + len(fractions))

    for most, taken in ((3, 4), (2, 3), (1, 1)):
        fractions.clear()
        assert fastest_simulated([first], simulated, limits, FREE, smaller=smaller).batch_size == taken
        expected = [1 / 1.03, 1 / 1.03 / 1.04, 1 / 1.03 / 1.04 / 1.01][: most + 1]
        assert fractions == [pytest.approx(fraction, rel=1e-3) for fraction in expected]


def test_nothing_is_simulated_once_the_time_is_over(plans: list[Plan]) -> None:
    def refuse(_: Plan) -> Simulation:
        raise AssertionError("a simulation began after the end")

    found = fastest_simulated(plans, refuse, NO_LIMIT, Deadline(1.0, 0.0))
    assert found == plans[0]
    assert found.prediction.searched.endswith("none was simulated within the time limit")


def test_an_interrupt_keeps_what_is_simulated_where_progress_is_shown(plans: list[Plan], step: Simulation) -> None:
    def interrupted(plan: Plan) -> Simulation:
        if plan is not plans[0]:
            raise KeyboardInterrupt
        return dataclasses.replace(step, step_time=7.0)

    found = fastest_simulated(plans, interrupted, NO_LIMIT, FREE, interruptible=True)
    assert found.step_time == 7.0
    assert found.prediction.searched.endswith("the best was simulated before the search was interrupted")
    with pytest.raises(KeyboardInterrupt):
        fastest_simulated(plans, interrupted, NO_LIMIT, FREE)


def test_the_end_of_the_time_keeps_the_plan_of_the_search() -> None:
    """Usual meshes that are solved for the ranking alone have no plan then, and need none."""
    request = dataclasses.replace(REQUEST, time_limit=60.0)
    search = PlanSearch(None, None, 1.0, Deadline(60.0, 0.0), is_optional=True)
    search.add(1.0, ClosedMesh(Mesh((("fsdp", 4),)), extra_axes=False, rows=16))
    search.run()
    assert search.best is None
    assert plans_auto(graph(), CLUSTER, request, most=6)


def test_meshes_are_left_out_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock passes the limit with the first plan: no mesh gets a bound afterwards, and the gap says that these were left out."""
    opened, found = list[Mesh](), list[bool]()
    step_bound, solve = MeshBounds.step_bound, PlanSearch._solve

    def counted(bounds: MeshBounds, mesh: Mesh, **options: Any) -> float:
        assert not found
        opened.append(mesh)
        return step_bound(bounds, mesh, **options)

    def solved(search: PlanSearch, *arguments: Any) -> None:
        solve(search, *arguments)
        found.extend([True] if search.best is not None else [])

    monkeypatch.setattr(MeshBounds, "step_bound", counted)
    monkeypatch.setattr(PlanSearch, "_solve", solved)
    is_over: Any = property(lambda _: bool(found))
    monkeypatch.setattr(Deadline, "is_over", is_over)
    monkeypatch.setattr(Deadline, "is_half_over", True)
    (plan,) = plans_auto(graph(), CLUSTER, dataclasses.replace(REQUEST, time_limit=60.0), most=6)
    assert len(opened) < 8  # of about 40
    assert plan.gap
