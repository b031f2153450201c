"""``pm.simulate()``: the programs of a partitioned model on the clock of a cluster."""

from __future__ import annotations

from typing import Literal

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from cost_models.simulator.simulate import Representatives, simulate_programs
from partitioner.options.arguments import read_cluster
from partitioner.reports.sources import InspectedPrograms
from partitioner.specialize.simulate_plan import is_inlined
from partitioner.specialize.trace import Trace
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import ConfigError
from passes.normalize.randomness.fused_attention import attention_with_dropout

Step = Literal["train_step", "forward_backward"]
"""How a step is called: ``pm.train_step(...)``, or ``pm(...)`` and ``backward()``, which runs all forwards first."""


@gc_paused()
def simulate(trace: Trace, inspected: InspectedPrograms, cluster: Cluster | str | None, step: Step = "train_step") -> Simulation:
    """Simulate the programs of a plan.

    Args:
        trace: the plan, and the hardware, cost model and optimizer that it was made for.
        inspected: its programs; those of a step by ``train_step``.
        cluster: the machine, ``"h100:8x8"`` or a ``Cluster``; None: the one that the plan was made for.
        step: one of ``Step``.

    Raises:
        ConfigError: the cluster has fewer devices than the plan has ranks.
    """
    if step == "forward_backward":
        inspected = InspectedPrograms.of_call(trace)
    plan, assumed = trace.plan, trace.assumed
    machine = machine_of(trace, cluster)
    sharded, request, mesh = inspected.sharded, inspected.request, plan.grid

    def run() -> Simulation:
        n_nodes = sum(len(stage.module.graph.nodes) for stage in sharded.stages.stages)
        is_lowered_on_cpu = all(device.type == "cpu" for device in sharded.devices)
        if machine.has_accelerators and is_lowered_on_cpu and mesh.cutting.size == 1 and attention_with_dropout(trace.graph):
            programs, representative_of = sharded.representatives(request, fused_attention=True)
        elif is_inlined(plan, n_nodes, request.n_microbatches):
            programs, representative_of = inspected.programs, {rank: rank for rank in range(mesh.size)}
        else:
            programs, representative_of = sharded.representatives(request)
        return simulate_programs(
            programs,
            machine,
            assumed.cost_model or Roofline(),
            plan.batch_size,
            optimizer=assumed.optimizer,
            n_row_parts=sharded.rows.count,
            representatives=Representatives(mesh, representative_of),
            limits=assumed.problem.limits_on(machine) if assumed.problem is not None else (),
        )

    return trace.reported(("simulation", step, request), (sharded, machine), run)


def machine_of(trace: Trace, cluster: Cluster | str | None) -> Cluster:
    """Return the hardware to simulate on.

    Raises:
        ConfigError: it has fewer devices than the plan has ranks.
    """
    machine = read_cluster(cluster) or trace.assumed.cluster
    if len(machine.devices) < trace.plan.n_ranks:
        raise ConfigError(
            f"the plan has {trace.plan.n_ranks} ranks and the cluster {len(machine.devices)} devices",
            remedy=f"pass a cluster of {trace.plan.n_ranks} devices or more",
        )
    return machine
