"""What ``mode="auto"`` chooses from: meshes, and on each of them recomputation policies, microbatch counts and schedules."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cost_models.hardware import Cluster, Link
from partitioner.planner.candidates import Candidate, microbatch_choices, schedules
from partitioner.planner.constrained_axes import named_dimensions
from partitioner.planner.cuttable_model import CuttableModel
from partitioner.planner.mesh_links import stages_length
from partitioner.planner.mesh_problem import MeshProblem, policies
from partitioner.planner.mesh_shapes import MANY, mesh_shapes, tile_shapes, unlike_shapes
from partitioner.planner.plan_request import PlanRequest
from partitioner.schedules.catalog import SCHEDULES
from partitioner.shared_stages import written_buffers
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, STAGES, Mesh
from passes.recompute import Recompute

__all__ = ["allowed_shapes", "allowed_sharing", "allowed_tiles", "allowed_widths", "candidates_of"]


def allowed_shapes(model: CuttableModel, graph: ModelGraph, cluster: Cluster, request: PlanRequest) -> Iterator[Mesh]:
    """The meshes that fit the devices, the batch and what the user said.

    A device_map names ranks, so the stages have all of them. A schedule, or stages on each device, asks for a pipeline.
    """
    n_devices = len(cluster.devices)
    unlike = len(set(cluster.devices)) > 1
    wants_stages = request.schedule is not None or request.stages_per_rank is not None
    wants_stages |= any(value is not None for value in (request.constraints.split_spec, request.constraints.pin))
    named = named_dimensions(request.constraints)
    for mesh in mesh_shapes(n_devices, graph.batch_size, levels=unlike or not isinstance(cluster.links, Link)):
        stages = stages_length(mesh)
        if not named <= set(mesh.names):
            continue
        if request.constraints.device_map is not None and stages < n_devices:
            continue
        if "sequence" in mesh.names and not model.has_sequence:
            continue
        if wants_stages and stages == 1 and n_devices > 1:
            continue
        yield mesh


def allowed_tiles(model: CuttableModel, graph: ModelGraph, cluster: Cluster, request: PlanRequest, *, tight: bool) -> Iterator[Mesh]:
    """The meshes of tiles that fit the same, for a model that has space, on up to so many devices as all kinds are combined on.

    Args:
        tight: whether also those that are worth it for their memory alone.
    """
    constraints, n_devices = request.constraints, len(cluster.devices)
    wants_stages = request.schedule is not None or request.stages_per_rank is not None
    wants_stages |= any(each is not None for each in (constraints.split_spec, constraints.pin, constraints.device_map))
    if wants_stages or not 1 < n_devices <= MANY or not model.has_space:
        return
    for mesh in tile_shapes(n_devices, graph.batch_size, tight=tight):
        if named_dimensions(constraints) <= set(mesh.names):
            with contextlib.suppress(ConfigError):  # space is too small for so many
                yield model.with_grid(mesh)


def allowed_sharing(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """How many places of a mesh's pipeline each stage could have, some more than one: on few devices, of a batch that can be cut."""
    n_places, most = stages_length(mesh), _most_turns(graph, cluster, request, mesh)
    if most < 2 or named_dimensions(request.constraints):
        return
    for n_stages in range(2, n_places if n_places <= _FEW_SHARING else _MOST_SHARED_STAGES + 1):
        for ends in itertools.combinations(range(1, n_places), n_stages - 1):
            replicas = tuple(end - start for start, end in itertools.pairwise((0, *ends, n_places)))
            if max(replicas) <= most:
                yield replicas


def _most_turns(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> int:
    """How many ranks could take turns at a stage."""
    kinds = [SCHEDULES[request.schedule]] if request.schedule is not None else list(SCHEDULES.values())
    is_shared = any(kind.has_one_stage for kind in kinds) and request.stages_per_rank in (None, 1)
    if len(cluster.devices) > _MOST_SHARING or not is_shared or request.constraints.device_map is not None:
        return 1
    if graph.mixing or written_buffers(graph):
        return 1
    rows = math.prod(size for name, size in mesh.dimensions if name in ROWS)
    return max(microbatch_choices(replace(graph, batch_size=-(-graph.batch_size // rows)), request, stages_length(mesh)))


def allowed_widths(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """The meshes of unlike width that the places of a mesh's pipeline could make, alone or beside replicas, on few devices.

    Returns:
        Each with the turns of its stages, empty where there are none.
    """
    constraints, n_devices = request.constraints, len(cluster.devices)
    if n_devices > _MOST_SHARING or constraints.device_map is not None or any(name not in ("data", *STAGES) for name in mesh.names):
        return
    most, named = _most_turns(graph, cluster, request, mesh), named_dimensions(constraints)
    for unlike, turns in unlike_shapes(mesh):
        if named <= set(unlike.names) and max(turns, default=1) <= most:
            yield unlike, turns


_MOST_SHARING, _FEW_SHARING, _MOST_SHARED_STAGES = 8, 4, 3
"""Devices up to which stages on unlike numbers of ranks are proposed; places of a pipeline up to which there are as many stages as may be;
how many for more."""


def candidates_of(problem: MeshProblem, counts: Sequence[int]) -> Iterator[tuple[Recompute, Candidate]]:
    """Everything that is open on a mesh, the plainest first.

    Args:
        problem: the mesh.
        counts: the microbatch counts to choose from.
    """
    at_least = max(problem.request.replicas, default=1)
    for policy in policies(problem.request, differentiate=problem.differentiate):
        for count in (count for count in counts if count >= at_least):
            for name, stages_per_rank in schedules(problem.request):
                yield policy, Candidate(name, stages_per_rank, count, problem.request.replicas)
