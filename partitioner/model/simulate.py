"""``pm.simulate()``: the programs of a partitioned model on the clock of a cluster."""

from __future__ import annotations

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from cost_models.simulator.simulate import Representatives, simulate_programs
from partitioner.model.inspected_programs import InspectedPrograms
from partitioner.model.session import Session
from partitioner.options.arguments import read_cluster
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import ConfigError
from passes.ir.plan import Plan

__all__ = ["is_inlined", "simulate"]

_MOST_NODES = 100_000
"""Programs that are written out with more nodes are simulated by representatives, their stages left as calls."""


@gc_paused()
def simulate(session: Session, inspected: InspectedPrograms, cluster: Cluster | str | None) -> Simulation:
    """Simulate the programs of a plan.

    Args:
        session: the plan, and what holds where nothing else is said.
        inspected: its programs.
        cluster: another machine, ``"h100:8x8"`` or a ``Cluster``.

    Raises:
        ConfigError: the cluster has fewer devices than the plan has ranks.
    """
    plan, assumed = session.plan, session.assumed
    machine = read_cluster(cluster) or assumed.cluster
    if len(machine.devices) < plan.n_ranks:
        raise ConfigError(
            f"the plan has {plan.n_ranks} ranks and the cluster {len(machine.devices)} devices",
            remedy=f"pass a cluster of {plan.n_ranks} devices or more",
        )
    lowering, count, mesh = inspected.lowering, inspected.n_microbatches, plan.grid
    nodes = sum(len(stage.module.graph.nodes) for stage in lowering.stages.stages)
    if not is_inlined(plan, nodes, count):
        programs, of = lowering.representatives(inspected.differentiation, count, inspected.loss)
    else:
        programs, of = inspected.programs, {rank: rank for rank in range(mesh.size)}
    return simulate_programs(
        programs,
        machine,
        assumed.cost_model or Roofline(),
        plan.batch_size,
        optimizer=assumed.optimizer,
        n_row_parts=lowering.rows.count,
        representatives=Representatives(mesh, of),
    )


def is_inlined(plan: Plan, n_forward_nodes: int, n_microbatches: int) -> bool:
    """Whether the programs of a plan are short enough to be simulated with their stages written out.

    Args:
        plan: for a mesh; stages of a single pipeline are calls in any case.
        n_forward_nodes: of all stages of a pipeline. Each is written out once forward and about twice backward for each microbatch.
        n_microbatches: of a step.
    """
    n_pipelines = plan.grid.cutting.size
    return n_pipelines == 1 or 3 * n_forward_nodes * n_microbatches * n_pipelines <= _MOST_NODES
