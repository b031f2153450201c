"""What ``mode="auto"`` chooses from: meshes, and on each of them recomputation policies, microbatch counts and schedules.

Every mesh of so many devices: how many ranks cut rows, the graph, and axes of the parameters, and how these dimensions nest.

    8 devices    {"data": 8}, {"fsdp": 8}, {"pipeline": 8}, {"tensor": 8}, {"data": 4, "tensor": 2}, {"data": 4, "pipeline": 2}, ...

What sends most stands innermost, where links are fastest: tensor inside of rows. Stages send least; whether they stand outside of rows or
inside is a choice where links differ. ``"zero2"`` lies as ``"zero1"`` does and is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cost_models.hardware.clusters import Cluster, Link
from partitioner.options.limits import written_buffers
from partitioner.planner.constraints.axes import named_dimensions
from partitioner.planner.costs.links import stages_length
from partitioner.planner.pipeline.candidates import Candidate, microbatch_choices, schedules
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.tile_grid import factorizations
from partitioner.schedules.catalog import SCHEDULES
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, STAGES, TILE, WIDTH, Mesh

__all__ = ["allowed_shapes", "allowed_sharing", "allowed_tiles", "allowed_widths", "candidates_of", "tile_shapes"]


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
        for replicas in _divisions(n_places, n_stages):
            if max(replicas) <= most:
                yield replicas


def _most_turns(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> int:
    """How many ranks a round-robin replicated stage could have."""
    kinds = [SCHEDULES[request.schedule]] if request.schedule is not None else list(SCHEDULES.values())
    is_shared = any(kind.has_one_stage for kind in kinds) and request.stages_per_rank in (None, 1)
    if len(cluster.devices) > _MOST_SHARING or not is_shared or request.constraints.device_map is not None:
        return 1
    if graph.mixing or written_buffers(graph):
        return 1
    rows = math.prod(size for name, size in mesh.dimensions if name in ROWS)
    return max(microbatch_choices(replace(graph, batch_size=-(-graph.batch_size // rows)), request, stages_length(mesh)))


def allowed_widths(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """The meshes with a degree for each stage that the places of a mesh's pipeline could make, alone or beside replicas, on few devices.

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
        counts: the microbatch counts to choose from.
    """
    at_least = max(problem.request.replicas, default=1)
    for policy in problem.policies:
        for count in (count for count in counts if count >= at_least):
            for name, stages_per_rank in schedules(problem.request):
                yield policy, Candidate(name, stages_per_rank, count, problem.request.replicas)


# -- every mesh of so many devices -------------------------------------------------------------------------------------------------


ROW_KINDS = ("data", "zero1", "fsdp")
"""How replicas hold parameters: whole, in parts that are gathered once a microbatch, or gathered for every use."""

INNER = (("tensor",), ("sequence",), ("sequence", "tensor"))
"""What may be cut beside rows and stages, outermost first."""

MANY = 64
"""Devices above which only the commonest dimensions are combined: data or fsdp, pipeline, tensor."""


def mesh_shapes(n_devices: int, batch_size: int, *, levels: bool) -> Iterator[Mesh]:
    """The meshes, those with fewer dimensions first.

    Args:
        batch_size: rows; the ranks that cut them must divide it.
        levels: whether links differ, so that the order of stages and rows matters.
    """
    found: dict[Mesh, None] = {}
    for rows, stages, inner in factorizations(n_devices, 3):
        if batch_size % rows:
            continue
        kinds, inners = (ROW_KINDS, INNER) if n_devices <= MANY else (("data", "fsdp"), INNER[:1])
        for kind in kinds if rows > 1 else kinds[:1]:
            for within in _inner(inner, inners):
                outer = [(kind, rows), ("pipeline", stages)]
                for order in itertools.permutations(outer) if levels else (outer,):
                    dimensions = tuple((name, size) for name, size in (*order, *within) if size > 1)
                    found[Mesh(dimensions or (("pipeline", 1),))] = None
    yield from sorted(found, key=lambda mesh: (len(mesh.dimensions), mesh.names, mesh.dimensions))


def tile_shapes(n_devices: int, batch_size: int, *, tight: bool) -> Iterator[Mesh]:
    """The meshes of tiles, rows and stages outside of them: ``{"tile": 4}``, ``{"data": 2, "tile": 2}``, ``{"pipeline": 2, "tile": 2}``.

    Args:
        batch_size: rows; the ranks that cut them must divide it.
        tight: for their memory: also where the batch could be cut into as many equal parts over the ranks of a stage, which is as little
            work for each, without halos.
    """
    for rows, stages, tiles in factorizations(n_devices, 3):
        if tiles > 1 and batch_size % rows == 0 and (tight or batch_size % (rows * tiles)):
            for kind in ROW_KINDS if rows > 1 else ROW_KINDS[:1]:
                outer = ((kind, rows), ("pipeline", stages), (TILE, tiles))
                yield Mesh(tuple((name, size) for name, size in outer if size > 1))


def unlike_shapes(mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Yield the ways to give the places of a pipeline to fewer stages: each stage on some ranks together, or replicated on some.

    {"pipeline": 4}      2 | 1 | 1 together;  3 | 1 together;  2 round-robin | 2 together;  ...

    Of more than four places two stages are made, on powers of two.

    Args:
        mesh: rows and a pipeline, no dimension of ``WIDTH``.

    Returns:
        Meshes, and how many replicas each stage has; empty where one.
    """
    n_places = mesh.length(_PIPELINE)
    few = n_places <= _FEW
    for n_stages in range(2, n_places if few else 3):
        for sizes in _divisions(n_places, n_stages):
            if not few and any(size & (size - 1) for size in sizes):
                continue
            for turns in itertools.product(*([count for count in range(1, size + 1) if size % count == 0] for size in sizes)):
                widths = [size // count for size, count in zip(sizes, turns, strict=True)]
                if len(set(widths)) > 1:
                    of_places = tuple(width for width, count in zip(widths, turns, strict=True) for _ in range(count))
                    outer = tuple((name, len(of_places) if name == _PIPELINE else size) for name, size in mesh.dimensions)
                    yield Mesh((*outer, (WIDTH, max(widths))), of_places), turns if max(turns) > 1 else ()


def _divisions(n_places: int, n_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide places among stages: how many each has."""
    for ends in itertools.combinations(range(1, n_places), n_stages - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *ends, n_places)))


_PIPELINE = "pipeline"

_FEW = 4
"""Places up to which all ways are tried."""


def _inner(count: int, inners: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the inner mesh dimensions, which shard axes of parameters, over ``count`` ranks."""
    if count == 1:
        yield ()
        return
    for names in inners:
        for sizes in factorizations(count, len(names)):
            if 1 not in sizes:
                yield tuple(zip(names, sizes, strict=True))
