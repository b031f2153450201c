"""Choose the halo strategy of each segment of calls of a cut: the cheapest, or what the user fixed."""

from __future__ import annotations

from collections.abc import Callable

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from partitioner.planner.constraints.halos import asked_strategies
from partitioner.planner.costs.links import LinkTable, places_of
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.halo_strategy import choose_halos
from partitioner.planner.sharding.model import MeshCut
from passes.ir.comm.halo_strategy import HaloSegment
from passes.ir.mesh import TILES, Mesh

__all__ = ["with_paid_halos"]


def with_paid_halos(
    cut: Callable[[tuple[HaloSegment, ...]], MeshCut], mesh: Mesh, cluster: Cluster, request: PlanRequest, cost_model: CostModel
) -> MeshCut:
    """The cut of a mesh; of tiles, with the choice of how halos move.

    Args:
        cut: makes it, with segments of calls that do otherwise than exchange each halo and wait.
        cluster: at least as many devices as the mesh has ranks.
    """
    plain = cut(())
    if not any(name in TILES for name in mesh.names):
        return plain
    used = cluster.first(mesh.size)
    asked = asked_strategies(request.constraints, plain.part.graph, request.modules)
    rows = -(-plain.part.batch_size // (request.n_microbatches or 1))
    device = places_of(mesh, used).devices[0]
    return cut(choose_halos(plain.part, plain.assigned, LinkTable(used).of(mesh), device, cost_model, rows, asked))
