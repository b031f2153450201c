"""``pm.simulate()``: the programs of a partitioned model on the clock of a cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import torch

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from cost_models.simulator.simulate import Representatives, simulate_programs
from partitioner.model.inspected_programs import InspectedPrograms
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.options.devices import hardware_of
from partitioner.planner.pipeline.problem import memory_limits
from partitioner.planner.plan import PlanProblem
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.checked_arguments import checked_arguments
from passes.ir.errors import ConfigError
from passes.ir.plan import Plan

__all__ = ["Assumptions", "is_inlined", "simulate", "simulate_plan"]

_MOST_NODES = 100_000
"""Programs that are written out with more nodes are simulated by representatives, their stages left as calls."""


@dataclass(frozen=True)
class Assumptions:
    """What a model was planned for.

    Attributes:
        cluster: the machine.
        cost_model: prices; None: an analytic roofline.
        optimizer: whose state is held.
        problem: what the plan is the solution of; None: the plan was given.
    """

    cluster: Cluster
    cost_model: CostModel | None
    optimizer: str
    problem: PlanProblem | None = None

    @property
    def limits(self) -> tuple[float, ...]:
        """For each rank the bytes that it may hold; empty where the plan was given, for whatever hardware."""
        if self.problem is None:
            return ()
        request = self.problem.request
        return memory_limits(self.problem.cluster.first(len(request.devices)), request)

    def planned_for(self, plan: Plan) -> str:
        """Say for which hardware a plan was made: ``"2 x h100"``; empty where it is the hardware that runs it."""
        planned = self.cluster.first(plan.n_ranks)
        if planned == hardware_of([torch.device(name) for name in plan.devices]):
            return ""
        return " and ".join(f"{count} x {name}" for name, count in Counter(device.name for device in planned.devices).items())


class _Simulated(Protocol):
    """A partitioned model, as far as the simulator reads it."""

    _plan: Plan
    _assumed: Assumptions

    def inspected(self) -> InspectedPrograms:
        """Which programs are simulated."""


@checked_arguments(VALUES, EXAMPLES)
def simulate(self: _Simulated, cluster: Cluster | str | None = None) -> Simulation:
    """One step of the programs on a clock: time, bubble, memory, communication and a timeline; see ``cost_models.simulator``.

    Args:
        cluster: the machine; None: what the model was planned for.
    """
    return simulate_plan(self._plan, self.inspected(), self._assumed, cluster)


@gc_paused()
def simulate_plan(plan: Plan, shown: InspectedPrograms, assumed: Assumptions, cluster: Cluster | str | None) -> Simulation:
    """Simulate the programs of a plan.

    Args:
        plan: for the batch.
        shown: its programs.
        assumed: what holds where nothing else is said.
        cluster: another machine, ``"h100:8x8"`` or a ``Cluster``.

    Raises:
        ConfigError: the cluster has fewer devices than the plan has ranks.
    """
    machine = Cluster.parse(cluster) if isinstance(cluster, str) else cluster or assumed.cluster
    if len(machine.devices) < plan.n_ranks:
        raise ConfigError(
            f"the plan has {plan.n_ranks} ranks and the cluster {len(machine.devices)} devices",
            remedy=f"pass a cluster of {plan.n_ranks} devices or more",
        )
    lowering, count = shown.lowering, shown.n_microbatches
    mesh = plan.grid
    nodes = sum(len(stage.module.graph.nodes) for stage in lowering.stages.stages)
    if not is_inlined(plan, nodes, count):
        programs, of = lowering.representatives(shown.differentiation, count, shown.loss)
    else:
        differentiation = shown.differentiation
        whole = lowering.forward(count) if differentiation is None else lowering.train_step(differentiation, count, shown.loss)
        programs, of = whole.programs, {rank: rank for rank in range(mesh.size)}
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
