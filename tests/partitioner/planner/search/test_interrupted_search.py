"""An interrupt while progress is shown takes the best plan so far, with its bound; otherwise it ends everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.hardware.devices import Device
from cost_models.ops.work import Work
from partitioner import Plan, partition
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.best_first import ClosedMesh, PlanSearch
from partitioner.tracing.trace import trace
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from tests.partitioner.planner.search.test_auto_space import best_by_brute_force
from tests.support.models.zoo import case_named
from tests.support.planning.all_plans import instance

CLUSTER = Cluster.preset("l4", nodes=2, devices_per_node=2)


class Interrupts(Roofline):
    """Prices with an interrupt after so many requests."""

    def __init__(self, after: int) -> None:
        self.left = after

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Return seconds; interrupt at the chosen call."""
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt  # Python's reaction to the signal, which a shell's background jobs ignore
        return super().operation_time(work, device, dtype)


@cache
def gpt() -> ModelGraph:
    instance = case_named("gpt").build()
    return trace(instance.model, instance.args, dict(instance.kwargs), training=True)


def planned(prices: Roofline, tell: Callable[[str], None] | None) -> Plan:
    return plans_auto(gpt(), CLUSTER, PlanRequest("auto", tuple(f"cuda:{rank}" for rank in range(4))), prices, tell)[0]


@cache
def finished() -> tuple[Plan, int]:
    """Return the plan of a whole search, and its number of requested prices."""
    prices = Interrupts(0)
    return planned(prices, None), -prices.left


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 18, 13])
def test_whenever_it_is_interrupted_what_is_proved_is_true(seed: int) -> None:
    """The best of all plans, by brute force, is never below the bound; before there is a plan nothing can be taken."""
    given, every = instance(seed), Interrupts(0)
    plans_auto(given.graph, given.cluster, given.request, every)
    count, best = -every.left, best_by_brute_force(given)
    ended, taken = 0, list[Plan]()
    for after in range(count // 30, count, count // 30):
        try:
            taken.append(plans_auto(given.graph, given.cluster, given.request, Interrupts(after), lambda _: None)[0])
        except KeyboardInterrupt:
            ended += 1
    assert ended
    assert any(plan.gap for plan in taken)
    for plan in taken:
        assert plan.gap is not None
        assert plan.step_time * (1 - plan.gap) <= best * (1 + 1e-9)
        assert "before the search was interrupted" in plan.prediction.searched
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("proving", [False, True])
def test_what_was_under_way_may_be_as_fast_as_its_bound(proving: bool) -> None:
    def interrupted(_: ClosedMesh) -> None:
        raise KeyboardInterrupt

    search = PlanSearch(lambda _: None, interrupted)
    search.best = cast(Any, (None, SimpleNamespace(step_time=10.0)))
    alone = ClosedMesh(Mesh((("pipeline", 1),)), extra_axes=False, rows=1)
    search.add(3.0, alone)
    search.add(8.0, alone)
    if not proving:
        search.run()
    search.prove()
    assert search.interrupted
    assert (search.bound, search.gap) == (3.0, 0.7)


@pytest.mark.slow
def test_who_is_told_of_the_first_plan_may_take_it() -> None:
    def enough(_: str) -> None:
        raise KeyboardInterrupt

    whole, _ = finished()
    first = planned(Roofline(), enough)
    assert first.prediction.searched.startswith("1 plan ")
    assert first.gap is not None
    assert first.step_time * (1 - first.gap) <= whole.step_time


@pytest.mark.slow
def test_it_ends_everything_where_nobody_looks_on() -> None:
    _, count = finished()
    with pytest.raises(KeyboardInterrupt):
        planned(Interrupts(count - 1), None)


@pytest.mark.slow
def test_partition_takes_what_its_display_tells_of() -> None:
    instance = case_named("gpt").build()
    model = instance.model.to("meta")

    def found(prices: Interrupts, *, shown: bool) -> Plan:
        args, kwargs = instance.args, dict(instance.kwargs)
        return partition(model, 4, example_inputs=args, example_kwargs=kwargs, cluster=CLUSTER, cost_model=prices, progress=shown).plan

    prices = Interrupts(0)
    assert "interrupted" not in found(prices, shown=True).prediction.searched
    late = -prices.left - 1
    assert "before the search was interrupted" in found(Interrupts(late), shown=True).prediction.searched
    with pytest.raises(KeyboardInterrupt):
        found(Interrupts(late), shown=False)
