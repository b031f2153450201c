"""The search space of ``mode="auto"``: meshes, and for each of them recomputation policies, microbatch counts and schedules.

All meshes of the devices are tried: the number of ranks that shard the batch, the stages and axes of parameters, and their nesting.

    8 devices    {"data": 8}, {"fsdp": 8}, {"pipeline": 8}, {"tensor": 8}, {"data": 4, "tensor": 2}, {"data": 4, "pipeline": 2}, ...

The dimension that sends most is innermost, where links are fastest: tensor inside of data. Stages send least; both nestings of stages and
batch are tried if links differ. ``"zero2"`` has the layouts of ``"zero1"`` and is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cost_models.hardware.clusters import Cluster, Link
from partitioner.options.limits import written_buffers
from partitioner.planner.constraints.axes import named_dimensions
from partitioner.planner.constraints.tile_grid import factorizations
from partitioner.planner.costs.links import LinkTable, stages_length
from partitioner.planner.pipeline.candidates import Candidate, microbatch_choices, schedules
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.sharding.model import CuttableModel
from partitioner.schedules.catalog import SCHEDULES, find_schedule
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import STAGES, TILE, WIDTH, Mesh


def allowed_shapes(model: CuttableModel, graph: ModelGraph, cluster: Cluster, request: PlanRequest) -> Iterator[Mesh]:
    """Yield the meshes that fit the devices, the batch and the user's constraints.

    A device_map names ranks, so all ranks are stages. A schedule, or stages on each device, requires a pipeline.
    """
    n_devices = len(cluster.devices)
    is_heterogeneous = len(set(cluster.devices)) > 1
    shapes = mesh_shapes(n_devices, graph.batch_size, levels=is_heterogeneous or not isinstance(cluster.links, Link))
    yield from _allowed(itertools.chain(shapes, _hybrid_sharding(n_devices, graph.batch_size, cluster)), model, request)


def replicas_of_few_rows(model: CuttableModel, graph: ModelGraph, cluster: Cluster, request: PlanRequest) -> Iterator[Mesh]:
    """Yield the mesh of replicas for a batch of fewer rows than devices, if the user allows it: each computes all rows."""
    n_devices = len(cluster.devices)
    if graph.batch_size < n_devices:
        yield from _allowed([Mesh((("data", n_devices),))], model, request)


def _allowed(shapes: Iterable[Mesh], model: CuttableModel, request: PlanRequest) -> Iterator[Mesh]:
    """Yield the meshes that fit the model and the user's constraints."""
    wants_stages = request.schedule is not None or request.stages_per_rank is not None
    wants_stages |= any(value is not None for value in (request.constraints.split_spec, request.constraints.pin))
    named = named_dimensions(request.constraints)
    n_devices = len(request.devices)
    for mesh in shapes:
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


def _hybrid_sharding(n_devices: int, batch_size: int, cluster: Cluster) -> Iterator[Mesh]:
    """Yield the mesh that shards parameters in a node and replicates them over nodes (HSDP), if there are several nodes."""
    per_node = _devices_of_node(cluster)
    if 1 < per_node < n_devices <= batch_size and n_devices % per_node == 0:
        yield Mesh((("data", n_devices // per_node), ("fsdp", per_node)))


def _devices_of_node(cluster: Cluster) -> int:
    """Return the number of devices of a node; 0 if there is none, all devices if links have no levels."""
    return min((level.size for level in cluster.links), default=0) if isinstance(cluster.links, tuple) else len(cluster.devices)


def allowed_tiles(model: CuttableModel, graph: ModelGraph, cluster: Cluster, request: PlanRequest, *, tight: bool) -> Iterator[Mesh]:
    """Yield the allowed meshes with tiles, for a model with space on at most ``MANY`` devices; ``tight`` as for ``tile_shapes``."""
    constraints, n_devices = request.constraints, len(cluster.devices)
    wants_stages = request.schedule is not None or request.stages_per_rank is not None
    wants_stages |= any(each is not None for each in (constraints.split_spec, constraints.pin, constraints.device_map))
    if wants_stages or not 1 < n_devices <= MANY or not model.has_space:
        return
    for mesh in tile_shapes(n_devices, graph.batch_size, tight=tight):
        if named_dimensions(constraints) <= set(mesh.names):
            try:
                yield model.with_grid(mesh)
            except ConfigError:  # the space is too small for this many tiles
                continue


def usual_meshes(meshes: Iterable[Mesh], cluster: Cluster) -> list[Mesh]:
    """Return those of some meshes that people choose by hand: one dimension, or the devices of a node innermost.

    fsdp 64      data 8 x tensor 8      pipeline 8 x fsdp 8      pipeline 2 x data 4 x tensor 8      of 8 nodes of 8 devices
    """
    per_node = _devices_of_node(cluster)
    return [mesh for mesh in meshes if len(mesh.names) == 1 or (mesh.names[-1] in _IN_NODE and mesh.dimensions[-1][1] == per_node)]


def without_equal_nestings(meshes: Iterable[Mesh], links: LinkTable) -> list[Mesh]:
    """Return the first of meshes that differ in the nesting of their dimensions alone, and have the same links and devices.

    pipeline 2 x data 4 x tensor 8   =   data 4 x pipeline 2 x tensor 8      on nodes of 8 devices: only tensor is inside a node
    """
    found: dict[Hashable, Mesh] = {}
    for mesh in meshes:
        places = links.places(mesh)
        between = frozenset(places.links.items()) if isinstance(places.links, Mapping) else places.links
        key = frozenset(mesh.dimensions), frozenset(links.of(mesh).items()), tuple(places.devices), between
        found.setdefault(key, mesh)
    return list(found.values())


_IN_NODE = ("tensor", "fsdp")
"""The mesh dimensions that send most, over the devices of a node."""


def allowed_sharing(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Yield the divisions of a pipeline's positions among round-robin replicated stages: (2, 1, 1) for 4 positions, ...; on few devices."""
    n_places, most = stages_length(mesh), _most_replicas(graph, cluster, request, mesh)
    if most < 2 or named_dimensions(request.constraints):
        return
    for n_stages in range(2, n_places if n_places <= _FEW_SHARING else _MOST_SHARED_STAGES + 1):
        for replicas in _divisions(n_places, n_stages):
            if max(replicas) <= most:
                yield replicas


def _most_replicas(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> int:
    """Return the most ranks of a round-robin replicated stage, each with at least one microbatch; 1 if no stage can be replicated."""
    kinds = [find_schedule(request.schedule)] if request.schedule is not None else list(SCHEDULES.values())
    can_replicate = any(kind.has_replicas for kind in kinds) and request.stages_per_rank in (None, 1)
    if len(cluster.devices) > _MOST_SHARING or not can_replicate or request.constraints.device_map is not None:
        return 1
    if graph.mixing or written_buffers(graph):
        return 1
    return max(microbatch_choices(replace(graph, batch_size=-(-graph.batch_size // mesh.n_row_parts)), request, stages_length(mesh)))


def allowed_widths(graph: ModelGraph, cluster: Cluster, request: PlanRequest, mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Yield the meshes with a tensor-parallel degree for each stage, made from the positions of a mesh's pipeline; on few devices.

    Returns:
        Pairs (mesh, number of replicas of each stage; empty if no stage has several).
    """
    constraints, n_devices = request.constraints, len(cluster.devices)
    if n_devices > _MOST_SHARING or constraints.device_map is not None or any(name not in ("data", *STAGES) for name in mesh.names):
        return
    most, named = _most_replicas(graph, cluster, request, mesh), named_dimensions(constraints)
    for submeshes, replicas in submesh_shapes(mesh):
        if named <= set(submeshes.names) and max(replicas, default=1) <= most:
            yield submeshes, replicas


_MOST_SHARING, _FEW_SHARING, _MOST_SHARED_STAGES = 8, 4, 3
"""The most devices for stages on different numbers of ranks; positions for which all numbers of stages are tried; most stages beyond."""


def candidates_of(problem: MeshProblem, counts: Sequence[int]) -> Iterator[tuple[Recompute, Candidate]]:
    """Yield the combinations of policy, microbatch count (of ``counts``) and schedule on a mesh, the simplest first."""
    at_least = max(problem.request.replicas, default=1)
    for policy in problem.policies:
        for count in (count for count in counts if count >= at_least):
            for name, stages_per_rank in schedules(problem.request):
                yield policy, Candidate(name, stages_per_rank, count, problem.request.replicas)


# -- all meshes of a number of devices ---------------------------------------------------------------------------------------------


ROW_KINDS = ("data", "zero1", "fsdp")
"""Storage of parameters by replicas: whole, sharded and gathered once a microbatch, or gathered for every use."""

INNER = (("tensor",), ("sequence",), ("sequence", "tensor"))
"""The mesh dimensions inside of replicas and stages, outermost first."""

MANY = 64
"""Devices above which only the commonest dimensions are combined: replicas, pipeline, tensor."""


def mesh_shapes(n_devices: int, batch_size: int, *, levels: bool) -> Iterator[Mesh]:
    """Yield all meshes, those with fewer dimensions first.

    Args:
        batch_size: a multiple of the ranks that shard the batch.
        levels: whether links differ, so that the order of stages and replicas matters.
    """
    meshes: dict[Mesh, None] = {}
    for rows, stages, inner in factorizations(n_devices, 3):
        if batch_size % rows:
            continue
        for kind in ROW_KINDS if rows > 1 else ROW_KINDS[:1]:
            for within in _inner(inner, INNER if n_devices <= MANY else INNER[:1]):
                outer = [(kind, rows), ("pipeline", stages)]
                for order in itertools.permutations(outer) if levels else (outer,):
                    dimensions = tuple((name, size) for name, size in (*order, *within) if size > 1)
                    meshes[Mesh(dimensions or (("pipeline", 1),))] = None
    yield from sorted(meshes, key=lambda mesh: (len(mesh.dimensions), mesh.names, mesh.dimensions))


def tile_shapes(n_devices: int, batch_size: int, *, tight: bool) -> Iterator[Mesh]:
    """Yield meshes with tiles inside of replicas and stages: ``{"tile": 4}``, ``{"data": 2, "tile": 2}``, ``{"pipeline": 2, "tile": 2}``.

    Args:
        batch_size: a multiple of the ranks that shard the batch.
        tight: whether to include tiles that only save memory: as many replicas could divide the batch, as fast and without halos.
    """
    for rows, stages, tiles in factorizations(n_devices, 3):
        if tiles > 1 and batch_size % rows == 0 and (tight or batch_size % (rows * tiles)):
            for kind in ROW_KINDS if rows > 1 else ROW_KINDS[:1]:
                outer = ((kind, rows), ("pipeline", stages), (TILE, tiles))
                yield Mesh(tuple((name, size) for name, size in outer if size > 1))


def submesh_shapes(mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Yield meshes whose stages have several of a pipeline's ranks each: as tensor-parallel ranks, as round-robin replicas, or both.

    {"pipeline": 4}      tensor 2 | 1 | 1;  tensor 3 | 1;  2 replicas | tensor 2;  ...

    Pipelines of more than four ranks are divided into two stages of powers of two.

    Args:
        mesh: replicas and a pipeline, without a dimension ``WIDTH``.

    Returns:
        Pairs (mesh, number of replicas of each stage; empty if no stage has several).
    """
    n_places = mesh.length(_PIPELINE)
    few = n_places <= _FEW
    for n_stages in range(2, n_places if few else 3):
        for sizes in _divisions(n_places, n_stages):
            if not few and any(size & (size - 1) for size in sizes):
                continue
            for replicas in itertools.product(*([count for count in range(1, size + 1) if size % count == 0] for size in sizes)):
                widths = [size // count for size, count in zip(sizes, replicas, strict=True)]
                if len(set(widths)) > 1:
                    width_of_place = tuple(width for width, count in zip(widths, replicas, strict=True) for _ in range(count))
                    outer = tuple((name, len(width_of_place) if name == _PIPELINE else size) for name, size in mesh.dimensions)
                    yield Mesh((*outer, (WIDTH, max(widths))), width_of_place), replicas if max(replicas) > 1 else ()


def _divisions(n_places: int, n_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide positions among stages, in order: (1, 3), (2, 2), (3, 1) for four positions and two stages."""
    for ends in itertools.combinations(range(1, n_places), n_stages - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *ends, n_places)))


_PIPELINE = "pipeline"

_FEW = 4
"""Positions up to which all divisions are tried."""


def _inner(count: int, inners: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the inner mesh dimensions, which shard axes of parameters, over ``count`` ranks."""
    if count == 1:
        yield ()
        return
    for names in inners:
        for sizes in factorizations(count, len(names)):
            if 1 not in sizes:
                yield tuple(zip(names, sizes, strict=True))
