"""Prices of stages of different widths: each kind takes the numbers of its own list, and stages are described by them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from cost_models.collectives.algorithms import group_links
from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster, Device, Level, Link
from partitioner.planner.costs.unit_costs import MicrobatchCosts, UnitCosts, stack
from partitioner.planner.pipeline.candidate import StagedModel, describe_stages, stage_model
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.pipeline.problem import PipelineProblems
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.describe import bound_by
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.sharding.rank_shard import ModelPart
from partitioner.planner.solvers.min_max_dp import solve
from partitioner.planner.solvers.stage_memory import Integers
from partitioner.planner.solvers.stage_problem import Gathered, Uses, stages_of
from partitioner.tracing.trace import trace
from passes.ir.mesh import Mesh

ROWS = 2
"""Rows of each microbatch, of four."""

KINDS = tuple(Device(name, {"float32": flops}, 2**30, 1e10, launch_overhead=1e-6) for name, flops in (("two", 1e10), ("one", 2e10)))
CLUSTER = Cluster(list(KINDS), [Level(2, Link(1e-5, 1e9))])
OF_KIND = (1, 0)
"""Two ranks share a stage on a device of the first kind."""

CANDIDATE = Candidate("1F1B", 1, 4)


class Widths(NamedTuple):
    """A model, whole and cut in two, and what stages of both widths make of it."""

    whole: ModelPart
    lists: tuple[UnitCosts, UnitCosts]
    unlike: UnitCosts


def borders(rows: int) -> tuple[tuple[Gathered, ...], tuple[Gathered, ...]]:
    nothing = (0.0, 0.0)
    gathered = Gathered((rows * 0.5, 0.0), nothing, 0, (4,)), Gathered((rows * 0.25, 0.0), nothing, 3, (7,))
    return gathered, (Gathered((0.0, rows * 0.125), nothing, 3, (5, 7)),)


def widths(policy: str = "none") -> Widths:
    layers = [module for _ in range(3) for module in (nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.LayerNorm(16))]
    graph = trace(nn.Sequential(*layers), (torch.rand(8, 16),), training=True)
    request = PlanRequest("pipeline", ("two", "one"), recompute=policy)
    model = CuttableModel(graph, request)
    links = {"tensor": group_links((0, 1), CLUSTER)}
    parts = (model.whole, model.cut(Mesh((("tensor", 2),))).part)
    one, two = (part.prices(KINDS, Roofline(), "adamw", "full" if policy == "full" else "none", links) for part in parts)
    return Widths(model.whole, (one, two), stack(OF_KIND, (one, two), one, borders))


@pytest.fixture(scope="module")
def both() -> Widths:
    return widths()


def of_kinds(lists: tuple[UnitCosts, UnitCosts]) -> list[MicrobatchCosts]:
    """Return the prices of each kind."""
    return [lists[place].at(ROWS) for place in OF_KIND]


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_stage_of_each_kind_holds_what_its_list_says(policy: str) -> None:
    _, lists, unlike = widths(policy)
    found = unlike.at(ROWS).units
    n_units = len(found)
    for starts in ((0,), (0, 5), (0, 1, 6, 9)):
        stage_of, n_stages = stages_of(starts, n_units), len(starts)
        for name in ("fixed_uses", "kept_uses", "gradient_uses", "replicated_uses"):
            wanted = [held(getattr(each.units, name), stage_of, n_stages, kind) for kind, each in enumerate(of_kinds(lists))]
            for kinds in itertools.product((0, 1), repeat=n_stages):
                got = getattr(found, name).per_stage(stage_of, n_stages, kinds)
                assert got.tolist() == [wanted[kind][stage] for stage, kind in enumerate(kinds)], name
        for kind, each in enumerate(of_kinds(lists)):
            wanted_working = each.units.working_of_stages(starts, (0,) * n_stages)
            np.testing.assert_array_equal(found.working_of_stages(starts, (kind,) * n_stages), wanted_working)


def held(uses: Uses, stage_of: Integers, n_stages: int, kind: int) -> list[float]:
    found: list[float] = uses.per_stage(stage_of, n_stages, (kind,) * n_stages).tolist()
    return found


def test_times_are_those_of_the_list_of_each_kind(both: Widths) -> None:
    prices = both.unlike.at(ROWS)
    for kind, place in enumerate(OF_KIND):
        each = both.lists[place].at(ROWS)
        np.testing.assert_array_equal(prices.halves[:, :, kind], each.halves[:, :, kind])
        np.testing.assert_array_equal(both.unlike.times(ROWS).seconds[:, kind], both.lists[place].times(ROWS).seconds[:, kind])
        np.testing.assert_array_equal(both.unlike.starting()[:, kind], both.lists[place].starting()[:, kind])
        assert prices.flops_of(range(2, 6), kind) == each.flops[2:6].sum()
        assert both.unlike.times(ROWS).waiting_of(range(6), kind) == both.lists[place].times(ROWS).waiting_of(range(6))
        assert both.unlike.limit_of(range(6), ROWS, kind) == both.lists[place].limit_of(range(6), ROWS, kind)
    assert both.unlike.times(ROWS).waiting_of(range(6), 0) > both.unlike.times(ROWS).waiting_of(range(6), 1) == 0
    assert prices.units.summed == max(each.at(ROWS).units.summed for each in both.lists)
    assert prices.units.values == both.lists[0].at(ROWS).units.values


def test_what_all_kinds_hold_alike_is_one_number(both: Widths) -> None:
    alike = stack((0, 0), both.lists, both.lists[0]).at(ROWS)
    one = both.lists[0].at(ROWS)
    assert alike.units.fixed == one.units.fixed
    assert alike.units.kept == one.units.kept
    assert alike.units.kept_uses.amount.ndim == alike.flops.ndim == 1
    assert alike.units.working is one.units.working
    assert any(isinstance(item.amount, tuple) for item in both.unlike.at(ROWS).units.fixed)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_no_mixture_of_kinds_holds_less_or_is_faster_than_the_bounds(policy: str) -> None:
    unlike = widths(policy).unlike
    prices, units = unlike.at(ROWS), unlike.at(ROWS).units
    shares, whole = unlike.times(ROWS).fractions, unlike.times(ROWS).seconds.min(axis=1).sum()
    for kinds in itertools.product((0, 1), repeat=3):
        for starts in ((0, 3, 8), (0, 1, 2), (0, 6, 9)):
            stage_of = stages_of(starts, len(units))
            assert units.kept_uses.per_stage(stage_of, 3, kinds).sum() >= unlike.times(ROWS).kept.least > 0
            assert units.fixed_uses.per_stage(stage_of, 3, kinds).sum() >= unlike.fixed_bytes > 0
            assert units.gradient_uses.per_stage(stage_of, 3, kinds).sum() >= unlike.gradients.least > 0
            forward, inputs, weights = np.add.reduceat(prices.halves, starts, axis=1)[:, np.arange(3), kinds].sum(axis=1)
            assert shares.forward[0] - 1e-9 <= forward / (forward + inputs + weights) <= shares.forward[1] + 1e-9
            assert forward + inputs >= whole * shares.through * (1 - 1e-9)


def problems_of(both: Widths, prices: UnitCosts) -> PipelineProblems:
    return PipelineProblems(both.whole.graph, CLUSTER, PlanRequest("pipeline", ("two", "one")), both.whole.points, prices, Roofline())


def test_stages_are_described_by_the_prices_of_their_kinds(both: Widths) -> None:
    problems, start = problems_of(both, both.unlike), 5
    assert problems.kinds(CANDIDATE) == (0, 1)
    staged = stage_model(problems, CANDIDATE, (0, start))
    two, one = of_kinds(both.lists)
    runs = (range(start), range(start, len(one.units)))
    gathered, parted = borders(ROWS)
    paid = sum(item.seconds[0] for item in gathered if item.producer < start <= item.readers[-1])
    assert staged.times[0].forward == pytest.approx(two.halves[0, :start, 0].sum() + paid)
    assert staged.times[1].forward == pytest.approx(one.halves[0, start:, 1].sum())
    assert staged.times[1].backward_input == pytest.approx(one.halves[1, start:, 1].sum() + parted[0].seconds[1])
    assert staged.times[0].backward_weight == pytest.approx(two.halves[2, :start, 0].sum())
    stages, stage_of = describe_stages(problems, staged), stages_of((0, start), len(one.units))
    for stage, run, place in zip(stages, runs, OF_KIND, strict=True):
        prices = both.lists[place]
        assert stage.flops == pytest.approx(prices.at(ROWS).flops[run.start : run.stop].sum())
        assert stage.activation_bytes == int(prices.at(ROWS).units.kept_uses.per_stage(stage_of, 2)[int(run.start > 0)])
        assert stage.parameter_bytes == bytes_read(both.whole.graph.parameters, prices, run)
    assert stages[0].parameter_bytes < bytes_read(both.whole.graph.parameters, both.lists[0], runs[0])
    assert bound_by(problems, staged).startswith("stage ")
    for rank, place in enumerate(OF_KIND):
        alike = problems_of(both, stack((place, place), both.lists, both.lists[0]))
        assert staged.memory[rank] == stage_model(alike, CANDIDATE, (0, start)).memory[rank]


def bytes_read(parameters: Iterable[str], prices: UnitCosts, run: range) -> int:
    """Return the bytes of the parameters that some units read."""
    return sum(prices.held_bytes[0][name] for name in parameters if set(prices.users[name]) & set(run))


def test_cuts_are_the_best_of_all_where_memory_is_tight(both: Widths) -> None:
    problems = problems_of(both, both.unlike)
    problem, n_units = problems.problem(CANDIDATE), len(both.whole.points.units)
    every = {start: stage_model(problems, CANDIDATE, (0, start)) for start in range(1, n_units)}
    for start in (2, 5, n_units - 2):
        limit = float(max(every[start].memory))
        found = solve(dataclasses.replace(problem, limit=(limit, limit)))
        fitting = {at: slowest(staged) for at, staged in every.items() if max(staged.memory) <= limit}
        assert found is not None
        assert found.bottleneck == pytest.approx(min(fitting.values()), rel=1e-3)
        assert fitting[found.starts[1]] == pytest.approx(min(fitting.values()), rel=1e-3)


def slowest(staged: StagedModel) -> float:
    return max(each.forward + each.backward_input + each.backward_weight + each.send + each.send_gradient for each in staged.times)
