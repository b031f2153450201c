"""Choose the halo strategy of each segment of calls of a cut: the cheapest, or the one that the user fixed."""

from __future__ import annotations

import math

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from partitioner.planner.constraints.halos import asked_strategies
from partitioner.planner.costs.links import LinkTable, places_of
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.halo_strategy import choose_halos
from partitioner.planner.sharding.mesh_cut import MeshCut
from partitioner.planner.sharding.model import CuttableModel
from passes.ir.mesh import TILES, Mesh
from passes.ir.plan import ATTENTION


def cut_with_halos(
    model: CuttableModel,
    mesh: Mesh,
    cluster: Cluster,
    request: PlanRequest,
    cost_model: CostModel,
    *,
    extra_axes: bool,
    limit: float = math.inf,
    attention: str = ATTENTION[0],
) -> MeshCut:
    """Return the sharding of a mesh; if it has tile dimensions, with the cheapest halo strategies.

    Args:
        cluster: at least as many devices as the mesh has ranks.
        extra_axes, limit, attention: as for ``CuttableModel.cut``.
    """
    plain = model.cut(mesh.cutting, extra_axes=extra_axes, limit=limit, attention=attention)
    if not any(name in TILES for name in mesh.names):
        return plain
    used = cluster.first(mesh.size)
    asked = asked_strategies(request.constraints, plain.part.graph, request.modules)
    rows = -(-plain.part.batch_size // (request.n_microbatches or 1))
    device = places_of(mesh, used).devices[0]
    halos = choose_halos(plain.part, plain.assigned, LinkTable(used).of(mesh), device, cost_model, rows, asked)
    return model.cut(mesh.cutting, extra_axes=extra_axes, limit=limit, halos=halos, attention=attention)
