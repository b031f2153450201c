"""``mode="auto"`` against brute force: every mesh, policy, microbatch count, schedule and cut, each priced from the definition."""

from __future__ import annotations

import itertools
import math

import pytest

from partitioner import InfeasiblePlanError
from partitioner.planner.auto import plan_auto
from partitioner.planner.cuttable_model import CuttableModel
from partitioner.planner.pace import pace_of
from partitioner.planner.staged_model import stage_model
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh
from tests.all_plans import Instance, candidates, instance, mesh_problem, meshes, price, shared, unlike_widths


def best_by_brute_force(given: Instance) -> float:
    """Seconds of the fastest of all plans; inf where none fits."""
    model = CuttableModel(given.graph, given.request, differentiate=True, pace=pace_of(given.graph, given.cluster, asked=False))
    best = math.inf
    pipeline = Mesh((("pipeline", len(given.request.devices)),))
    beside_others = [mesh for mesh in meshes(given) if mesh.length("pipeline") > 1 and mesh.cutting.size > 1]
    every = [
        *((mesh, beside, ()) for mesh in meshes(given) for beside in (False, True)),
        *((mesh, False, each) for mesh in (pipeline, *beside_others) for each in shared(given, mesh)),
        *((other, False, turns) for mesh in (pipeline, *beside_others) for other, turns in unlike_widths(given, mesh)),
    ]
    for mesh, beside, replicas in every:
        problem = mesh_problem(given, model, mesh, beside=beside, replicas=replicas)
        if problem is None:
            continue
        for policy, candidate in candidates(given, problem):
            problems = problem.problems(policy)
            n_stages, n_units = candidate.n_stages(problem.n_places), len(problems.points.units)
            for cuts in itertools.combinations(range(1, n_units), n_stages - 1):
                best = min(best, price(problem, problems, stage_model(problems, candidate, (0, *cuts))))
    return best


_QUICK = {*range(8), 13, 18}
"""Instances of every run: in the last two, stages on several ranks each are bounded beside parameters that ranks hold in parts."""


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed in _QUICK else pytest.mark.slow) for seed in range(200)])
def test_the_plan_is_the_best_of_all_plans(seed: int) -> None:
    given = instance(seed)
    best = best_by_brute_force(given)
    if best == math.inf:
        with pytest.raises((InfeasiblePlanError, ConfigError)):
            plan_auto(given.graph, given.cluster, given.request)
        return
    plan = plan_auto(given.graph, given.cluster, given.request)
    assert plan.gap is not None
    assert plan.step_time * (1 - plan.gap) <= best * (1 + 1e-9)
    assert plan.step_time == pytest.approx(best, rel=1e-9)
    assert plan.gap == 0.0
