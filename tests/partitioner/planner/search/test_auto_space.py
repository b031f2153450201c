"""``mode="auto"`` against brute force: every mesh, policy, microbatch count, schedule and cut, each priced from the definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import nn

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster, Device, Link
from partitioner import InfeasiblePlanError
from partitioner.planner.bounds.mesh_bounds import MeshBounds
from partitioner.planner.costs.links import LinkTable, clock_rate_of
from partitioner.planner.pipeline.candidate import stage_model
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.planner.search.space import allowed_shapes, mesh_shapes, usual_meshes, without_equal_nestings
from partitioner.planner.sharding.model import CuttableModel
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError
from passes.ir.mesh import ROWS, Mesh, mesh_words
from tests.support.planning.all_plans import (
    Instance,
    candidates,
    held_at_most,
    instance,
    mesh_problem,
    meshes,
    price,
    shared,
    unlike_widths,
)


def best_by_brute_force(given: Instance) -> float:
    """Return the seconds of the fastest of all plans; inf where none fits. Bounds of a mesh hold for each of its plans."""
    model = CuttableModel(given.graph, given.request, clock_rate=clock_rate_of(given.graph, given.cluster, asked=False))
    bounds = MeshBounds(model, given.cluster, given.request, Roofline())
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
        if problem is not None:
            fastest = min(plans(given, problem), default=math.inf)
            bound = bounds.step_bound(mesh, extra_axes=beside, replicas=replicas, limit=held_at_most(given, mesh))
            assert bound <= fastest, (mesh, beside, replicas)
            best = min(best, fastest)
    return best


def plans(given: Instance, problem: MeshProblem) -> Iterator[float]:
    """Yield seconds of every plan of a mesh."""
    for policy, candidate in candidates(given, problem):
        problems = problem.problems(policy)
        n_stages, n_units = candidate.n_stages(problem.n_places), len(problems.points.units)
        for cuts in itertools.combinations(range(1, n_units), n_stages - 1):
            yield price(problem, problems, stage_model(problems, candidate, (0, *cuts)))


_QUICK = {2, 3, 4, 7, 67}
"""Instances of every run; in 67, only parameters and results of the model have gradients."""


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed in _QUICK else pytest.mark.slow) for seed in range(80)])
def test_the_plan_is_the_best_of_all_plans(seed: int) -> None:
    given = instance(seed)
    best = best_by_brute_force(given)
    if best == math.inf:
        with pytest.raises((InfeasiblePlanError, ConfigError)):
            plans_auto(given.graph, given.cluster, given.request)
        return
    plan = plans_auto(given.graph, given.cluster, given.request)[0]
    assert plan.gap is not None
    assert plan.step_time * (1 - plan.gap) <= best * (1 + 1e-9)
    assert plan.step_time == pytest.approx(best, rel=1e-9)
    assert plan.gap == 0.0


class Sliced(nn.Module):
    """A table of which a piece is read: the gradient of that piece alone is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.zeros(65536, 64)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 4, 64) to (B, 4, 64)."""
        given: torch.Tensor = self.layer(x + self.table[:4])
        return given


def light_and_heavy(width: int) -> nn.Module:
    """Return a convolution that takes all the time, and a product that has all the parameters."""
    layers = nn.Conv2d(8, 8, 9, padding=4, bias=False), nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(512, width, bias=False)
    return nn.Sequential(*layers)


class Attending(nn.Module):
    """Attention of few numbers over a sequence, and a narrow perceptron: little to compute for what is exchanged."""

    def __init__(self, heads: int, size: int, inside: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(256, 3 * heads * size, bias=False), nn.Linear(heads * size, 256, bias=False)
        self.up, self.down = nn.Linear(256, inside, bias=False), nn.Linear(inside, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, 256) to the same."""
        q, k, v = self.into(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def products() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))


UNLIKE_STAGES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[tuple[str, int], ...], tuple[int, ...]]] = {
    "exchanged_where_little_is_computed": (lambda: light_and_heavy(256), (8, 8, 96, 96), (("pipeline", 2), ("tensor", 4)), ()),
    "gathered_where_little_is_computed": (lambda: light_and_heavy(512), (16, 8, 128, 128), (("fsdp", 2), ("pipeline", 2)), ()),
    "scattered_where_little_is_computed": (lambda: light_and_heavy(512), (16, 8, 128, 128), (("pipeline", 2), ("zero1", 2)), ()),
    "gathered_by_ranks_in_turn": (products, (32, 2048), (("fsdp", 2), ("pipeline", 4)), (2, 2)),
    "scattered_by_ranks_in_turn": (products, (32, 2048), (("pipeline", 3), ("zero1", 2)), (2, 1)),
    "a_piece_of_a_table_summed": (Sliced, (8, 4, 64), (("data", 2),), ()),
    "a_piece_of_a_table_scattered": (Sliced, (8, 4, 64), (("fsdp", 2),), ()),
    "parts_of_a_sequence_by_channels": (lambda: Attending(1, 4, 32), (8, 256, 256), (("sequence", 2), ("tensor", 8)), ()),
    "channels_by_parts_of_a_sequence": (lambda: Attending(1, 4, 256), (8, 256, 256), (("sequence", 8), ("tensor", 2)), ()),
    "fewer_heads_than_ranks": (lambda: Attending(2, 64, 32), (8, 64, 256), (("data", 2), ("tensor", 4)), ()),
    "fewer_heads_than_ranks_of_stages": (lambda: Attending(2, 64, 32), (8, 64, 256), (("pipeline", 2), ("tensor", 4)), ()),
    "too_short_to_be_held_in_parts": (lambda: nn.Linear(8, 1, bias=False), (8, 8), (("fsdp", 2), ("tensor", 6)), ()),
    "nothing_trained": (lambda: nn.Linear(512, 512).requires_grad_(False), (8, 512), (("data", 2),), ()),
}
"""Model, input, mesh and ranks of each stage."""


def schedules_of(name: str) -> tuple[str, ...]:
    """Return the schedules that the stages of a case can have."""
    _, _, dimensions, replicas = UNLIKE_STAGES[name]
    if "pipeline" not in dict(dimensions):
        return ("1F1B",)
    return ("GPipe", "1F1B", "ZB1P") if replicas else ("GPipe", "1F1B", "ZB1P", "ZBV", "Interleaved1F1B")


_LONG = {
    ("parts_of_a_sequence_by_channels", "1F1B"),
    ("fewer_heads_than_ranks", "1F1B"),
    *(("fewer_heads_than_ranks_of_stages", schedule) for schedule in schedules_of("fewer_heads_than_ranks_of_stages")),
}

_BOUNDED = [
    pytest.param(name, schedule, marks=pytest.mark.slow if (name, schedule) in _LONG else ())
    for name in UNLIKE_STAGES
    for schedule in schedules_of(name)
]


@pytest.mark.parametrize(("name", "schedule"), _BOUNDED)
def test_no_plan_of_a_mesh_beats_its_bound(name: str, schedule: str) -> None:
    """One stage may wait for what it exchanges while another one computes."""
    make, shape, dimensions, replicas = UNLIKE_STAGES[name]
    mesh = Mesh(dimensions)
    with torch.device("meta"):
        graph = trace(make(), (torch.zeros(shape),), {}, training=True)
    device = Device("slow", {"float32": 1e11}, 2**40, 1e13, compute_efficiency=1.0)
    for count, link in itertools.product((2, 8), (Link(0.0, 1e9), Link(1e-4, 1e9))):
        request = PlanRequest(
            "auto", tuple(f"cuda:{rank}" for rank in range(mesh.size)), recompute="none", schedule=schedule, n_microbatches=count
        )
        given = Instance(graph, Cluster([device] * mesh.size, link), request)
        model = CuttableModel(graph, request, clock_rate=clock_rate_of(graph, given.cluster, asked=False))
        problem = mesh_problem(given, model, mesh, beside=False, replicas=replicas)
        if problem is not None and (fastest := min(plans(given, problem), default=math.inf)) < math.inf:
            assert MeshBounds(model, given.cluster, request, Roofline()).step_bound(mesh, replicas=replicas) <= fastest, (count, link)


def test_usual_meshes_have_one_dimension_or_a_node_innermost() -> None:
    shapes = list(mesh_shapes(16, 32, levels=True))
    usual = {mesh_words(mesh) for mesh in usual_meshes(shapes, Cluster.parse("h100:2x8"))}
    assert usual >= {"fsdp 16", "data 16", "pipeline 16", "data 2 x tensor 8", "pipeline 2 x tensor 8", "pipeline 2 x fsdp 8"}
    assert not usual & {"data 4 x tensor 4", "fsdp 8 x pipeline 2", "tensor 4"}
    one_node = {mesh_words(mesh) for mesh in usual_meshes(mesh_shapes(8, 32, levels=False), Cluster.parse("h100:1x8"))}
    assert one_node >= {"fsdp 8", "tensor 8", "pipeline 8"}
    assert all(" x " not in words for words in one_node)


def test_hybrid_sharding_is_searched_over_several_nodes_alone() -> None:
    """Parameters are sharded in a node and replicated over nodes; the bound of the mesh is below its plan."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)))
    graph = trace(net, (torch.randn(64, 512),), {}, training=True)
    hybrid = Mesh((("data", 2), ("fsdp", 2)))
    for text, is_searched in (("h100:2x2", True), ("h100:1x4", False), ("h100:4x1", False)):
        cluster = Cluster.parse(text)
        request = PlanRequest("auto", ("cuda",) * 4)
        model = CuttableModel(graph, request, clock_rate=clock_rate_of(graph, cluster, asked=False))
        assert (hybrid in set(allowed_shapes(model, graph, cluster, request))) is is_searched
        bound = MeshBounds(model, cluster, request, Roofline()).step_bound(hybrid)
        assert 0 < bound <= plan_mesh(graph, cluster, request, None, hybrid).step_time


def test_the_best_plan_of_each_family_comes_before_the_second_of_any() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4))), torch.zeros(8192, 2048)
    graph = trace(net, (x,), {}, training=True)
    found = plans_auto(graph, Cluster.parse("h100:2x2"), PlanRequest("auto", ("cuda",) * 4), most=6)
    families = [frozenset("rows" if name in ROWS else name for name in plan.grid.names) for plan in found]
    n_families = len(set(families))
    assert len(found) > n_families
    assert len(set(families[:n_families])) == n_families
    assert found[0].step_time == min(plan.step_time for plan in found)
    assert all(0 <= (plan.gap or 0.0) < 1 for plan in found)


def test_nestings_with_the_same_links_are_searched_once() -> None:
    """Outside of a node, stages and replicas have the same links in either order; inside of one, the inner ones have faster links."""
    links = LinkTable(Cluster.preset("h100", nodes=4, devices_per_node=8))
    outside = [Mesh((("data", 2), ("pipeline", 2), ("tensor", 8))), Mesh((("pipeline", 2), ("data", 2), ("tensor", 8)))]
    inside = [Mesh((("data", 4), ("pipeline", 8))), Mesh((("pipeline", 8), ("data", 4)))]
    assert without_equal_nestings([*outside, *inside], links) == [outside[0], *inside]


def test_parameters_are_also_gathered_once_on_many_devices() -> None:
    meshes = [mesh for mesh in mesh_shapes(256, 256, levels=True) if dict(mesh.dimensions) == {"pipeline": 8, "zero1": 8, "tensor": 4}]
    assert [mesh.names for mesh in meshes] == [("pipeline", "zero1", "tensor"), ("zero1", "pipeline", "tensor")]
