"""A mesh that is asked for by name: its plan against brute force over all cuts, and beside what ``mode="auto"`` makes of the same mesh."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.hardware.clusters import Cluster
from partitioner import Constraints, InfeasiblePlanError, partition
from partitioner.planner.costs.links import clock_rate_of
from partitioner.planner.pipeline.candidate import stage_model
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.request import PlanRequest
from partitioner.planner.search import auto
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.planner.sharding.model import CuttableModel
from partitioner.schedules.catalog import SCHEDULES
from partitioner.tracing.trace import trace
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from tests.support.models.attention.gpt import Gpt
from tests.support.models.vision.unet import UNet
from tests.support.planning.all_plans import Instance, instance, meshes, price, problem_of, shared, unlike_widths
from tests.support.running.slow_values import all_but


def with_stages(seed: int) -> tuple[Instance, Mesh]:
    """Return a small model, and a mesh of it that has a pipeline."""
    draw, given = random.Random(seed), instance(seed)
    n_devices = len(given.request.devices)
    could_halve = n_devices % 2 == 0 and n_devices > 2 and given.graph.batch_size % 2 == 0
    rows = draw.choice((1, 2) if could_halve else (1,))
    dimensions = ((draw.choice(("data", "zero1", "fsdp")), rows), ("pipeline", n_devices // rows))
    layers = sorted({name.rpartition(".")[0] for name in given.graph.parameters.values()})
    split = {draw.choice(layers): draw.choice(("beginning", "end"))} if layers and draw.random() < 1 / 2 else None
    request = dataclasses.replace(given.request, mode="pipeline", constraints=Constraints(split_spec=split))
    return dataclasses.replace(given, request=request), Mesh(tuple((name, size) for name, size in dimensions if size > 1))


def with_shapes(seed: int) -> tuple[Instance, list[tuple[int, ...]]]:
    """Return a small model, and its possible stage shapes with different numbers of ranks: none with several stages a rank."""
    given = instance(seed)
    return given, [shape for shape in shared(given, Mesh((("pipeline", len(given.request.devices)),))) if max(shape) > 1]


def open_candidates(given: Instance, problem: MeshProblem) -> Iterator[tuple[Recompute, Candidate]]:
    """Yield policies, microbatch counts that divide the batch, and schedules."""
    request, rows = given.request, problem.part.graph.batch_size
    counts = [count for count in range(1, rows + 1) if rows % count == 0]
    if request.n_microbatches or problem.n_places == 1:
        counts = [request.n_microbatches or 1]
    policies: tuple[Recompute, ...] = ("none", "selective", "full")
    for policy in [each for each in policies if request.recompute in (None, each)]:
        for count, name in itertools.product(counts, [request.schedule] if request.schedule else list(SCHEDULES)):
            if not request.replicas or (SCHEDULES[name].default_stages_per_rank == 1 and count >= max(request.replicas)):
                yield policy, Candidate(name, SCHEDULES[name].default_stages_per_rank, count, request.replicas)


def forced_unit(given: Instance, problem: MeshProblem) -> int | None:
    """Return the unit that must begin a stage."""
    if not given.request.constraints.split_spec:
        return None
    ((layer, where),) = given.request.constraints.split_spec.items()
    owners = {node.name: str(node.meta.get("nn_module_stack", "")) for node in problem.part.graph.computing_nodes()}
    units = problem.part.points.units
    inside = [index for index, unit in enumerate(units) if any(f"'{layer}'" in owners[name] for name in unit)]
    assert inside
    return inside[0] if where == "beginning" else inside[-1] + 1


def best_by_brute_force(given: Instance, mesh: Mesh) -> float:
    """Return seconds of the fastest of all plans of the mesh; inf where none fits."""
    model = CuttableModel(given.graph, given.request, clock_rate=clock_rate_of(given.graph, given.cluster, asked=True))
    problem, best = problem_of(given, model, mesh, given.request), math.inf
    forced = forced_unit(given, problem)
    for policy, candidate in open_candidates(given, problem):
        problems = problem.problems(policy)
        n_stages, n_units = candidate.n_stages(problem.n_places), len(problems.points.units)
        for cuts in itertools.combinations(range(1, n_units), n_stages - 1):
            if forced is None or forced in cuts:
                best = min(best, price(problem, problems, stage_model(problems, candidate, (0, *cuts))))
    return best


def best_plan(given: Instance, mesh: Mesh) -> Plan | None:
    """Return the plan of the mesh, checked to be as fast as the fastest of all; None where there is none."""
    try:
        best = best_by_brute_force(given, mesh)
    except ConfigError:  # the mesh cannot cut the model
        best = math.inf
    if best == math.inf:
        with pytest.raises((InfeasiblePlanError, ConfigError)):
            plan_mesh(given.graph, given.cluster, given.request, None, mesh)
        return None
    plan = plan_mesh(given.graph, given.cluster, given.request, None, mesh)
    assert plan.step_time == pytest.approx(best, rel=1e-9)
    assert plan.gap == 0.0
    return plan


@pytest.mark.parametrize("seed", all_but((0, 1, 3, 4, 7, 10, 13, 14, 15), range(70)))
def test_the_plan_is_the_best_of_all_cuts(seed: int) -> None:
    given, mesh = with_stages(seed)
    best_plan(given, mesh)


@pytest.mark.parametrize("seed", all_but((0, 8), range(40)))
def test_the_plan_is_the_best_of_all_cuts_of_stages_that_ranks_share(seed: int) -> None:
    draw = random.Random(seed)
    given, shapes = next(found for found in map(with_shapes, itertools.count(seed, 1000)) if found[1])
    request = dataclasses.replace(given.request, mode="pipeline", replicas=draw.choice(shapes), n_microbatches=None)
    given, mesh = dataclasses.replace(given, request=request), Mesh((("pipeline", len(request.devices)),))
    plan = best_plan(given, mesh)
    assert plan is None or plan.replicas == request.replicas


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.slow) for seed in range(40)])
def test_the_plan_is_the_best_of_all_cuts_of_stages_of_unlike_width(seed: int) -> None:
    draw = random.Random(seed)
    given, shapes = next(found for found in map(with_widths, itertools.count(seed, 1000)) if found[1])
    mesh, turns = draw.choice(shapes)
    count = None if turns else given.request.n_microbatches
    request = dataclasses.replace(given.request, mode="pipeline", replicas=turns, n_microbatches=count)
    given = dataclasses.replace(given, request=request)
    plan = best_plan(given, mesh)
    assert plan is None or (plan.replicas, plan.widths) == (turns, mesh.widths)


def with_widths(seed: int) -> tuple[Instance, list[tuple[Mesh, tuple[int, ...]]]]:
    """Return an instance, and the meshes of different widths that its devices make, with or without rows."""
    given = instance(seed)
    return given, [found for mesh in meshes(given) if mesh.length("pipeline") > 2 for found in unlike_widths(given, mesh)]


GPT = (Gpt(depth=2), (torch.zeros(16, 8, dtype=torch.long),))
WIDER = (nn.Sequential(*(nn.Sequential(nn.Linear(24, 24 * each), nn.GELU(), nn.Linear(24 * each, 24)) for each in (1, 2, 4, 8))),)
PERCEPTRON = (*WIDER, (torch.randn(16, 24),))
IMAGES = (UNet(), (torch.randn(8, 1, 12, 12),))

SETTINGS: dict[str, tuple[tuple[nn.Module, Any], dict[str, int], str, int]] = {
    "gpt, 1F1B": (GPT, {"pipeline": 4}, "1F1B", 8),
    "gpt, ZB1P": (GPT, {"data": 2, "pipeline": 2}, "ZB1P", 4),
    "gpt, ZBV": (GPT, {"pipeline": 2, "fsdp": 2}, "ZBV", 4),
    "gpt, interleaved": (GPT, {"pipeline": 4}, "Interleaved1F1B", 4),
    "gpt, DualPipeV": (GPT, {"pipeline": 2, "data": 2}, "DualPipeV", 4),
    "perceptron, GPipe": (PERCEPTRON, {"pipeline": 4}, "GPipe", 4),
    "perceptron, ZB1P": (PERCEPTRON, {"pipeline": 2}, "ZB1P", 1),
    "U-Net, 1F1B": (IMAGES, {"pipeline": 2}, "1F1B", 2),
}


def only(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let automatic plans choose from one mesh alone."""
    monkeypatch.setattr(auto, "allowed_shapes", lambda *_: iter([mesh]))
    monkeypatch.setattr(auto, "allowed_tiles", lambda *_, tight: iter([]))
    monkeypatch.setattr(auto, "allowed_sharing", lambda *_: iter([]))
    monkeypatch.setattr(auto, "allowed_widths", lambda *_: iter([]))


@pytest.mark.parametrize("name", all_but(("perceptron, GPipe",), SETTINGS))
def test_no_plan_of_the_mesh_in_auto_is_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it takes little time to find out: there are a few cuts and one schedule."""
    (model, inputs), mode, schedule, count = SETTINGS[name]
    graph, mesh, size = trace(model, inputs, {}, training=True), Mesh(tuple(mode.items())), math.prod(mode.values())
    only(mesh, monkeypatch)
    asked = PlanRequest("pipeline", tuple(f"cuda:{rank}" for rank in range(size)), schedule=schedule, n_microbatches=count)
    for preset in ("cpu", "v100", "a100-80gb"):
        cluster, start = Cluster.preset(preset, 1, size), time.process_time()
        named = plan_mesh(graph, cluster, asked, None, mesh)
        assert time.process_time() - start < 5
        searched = auto.plans_auto(graph, cluster, dataclasses.replace(asked, mode="auto"))[0]
        assert searched.mesh == named.mesh
        assert named.step_time <= searched.step_time * (1 + 1e-9), preset


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_nor_is_it_when_programs_are_simulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, inputs), mode, schedule, count = SETTINGS[name]
    size = math.prod(mode.values())
    same: dict[str, Any] = {"example_inputs": inputs, "cluster": f"v100:1x{size}", "schedule": schedule, "n_microbatches": count}
    named = partition(model, size, mode, progress=False, **same).simulate()
    only(Mesh(tuple(mode.items())), monkeypatch)
    searched = partition(model, size, progress=False, **same).simulate()
    assert named.step_time <= searched.step_time * (1 + 1e-9)


def test_without_microbatches_stages_are_equal_shares() -> None:
    """No cuts make a step of ``"model"`` shorter but by what they send: what is asked for is that devices share the model."""
    layers = nn.Sequential(nn.Linear(64, 64), *(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 1))
    graph = trace(layers, (torch.randn(8, 64),), {}, training=True)
    plan = plan_mesh(graph, Cluster.preset("v100", 1, 4), PlanRequest("model", ("cpu",) * 4), None, Mesh((("model", 4),)))
    assert [stage.modules for stage in plan.stages] == [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")]
