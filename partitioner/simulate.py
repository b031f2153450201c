"""``pm.simulate()``: the programs of a partitioned model on the clock of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware import Cluster
from cost_models.simulator.simulate import simulate_programs
from cost_models.simulator.simulation import Simulation
from partitioner.lowering import Lowering
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.program import Program

__all__ = ["Assumptions", "simulate", "simulate_plan"]


@dataclass(frozen=True)
class Assumptions:
    """What a model was planned for.

    Attributes:
        cluster: the machine.
        cost_model: prices; None: an analytic roofline.
        optimizer: whose state is held.
    """

    cluster: Cluster
    cost_model: CostModel | None
    optimizer: str


class _Simulated(Protocol):
    """A partitioned model, as far as the simulator reads it."""

    _plan: Plan
    _assumed: Assumptions

    def programs(self) -> tuple[Program, ...]:
        """One for each rank."""

    def lowering_for(self, batch: int) -> tuple[int, Lowering]:
        """How a batch of this size is served."""


def simulate(self: _Simulated, cluster: Cluster | str | None = None) -> Simulation:
    """One step of the programs on a clock: time, bubble, memory, communication and a timeline; see ``cost_models.simulator``.

    Args:
        cluster: the machine; None: what the model was planned for.
    """
    rows = self.lowering_for(self._plan.batch_size)[1].rows.count
    return simulate_plan(self._plan, self.programs(), rows, self._assumed, cluster)


def simulate_plan(
    plan: Plan, programs: Sequence[Program], n_row_parts: int, assumed: Assumptions, cluster: Cluster | str | None
) -> Simulation:
    """Simulate the programs of a plan.

    Args:
        plan: for the batch.
        programs: one for each rank.
        n_row_parts: into how many parts ranks cut the batch.
        assumed: what holds where nothing else is said.
        cluster: another machine, ``"h100:8x8"`` or a ``Cluster``.

    Raises:
        ConfigError: the cluster has fewer devices than the plan has ranks.
    """
    machine = Cluster.parse(cluster) if isinstance(cluster, str) else cluster or assumed.cluster
    if len(machine.devices) < plan.n_ranks:
        raise ConfigError(
            f"the plan has {plan.n_ranks} ranks and the cluster {len(machine.devices)} devices",
            remedy=f"pass a cluster of {Mesh(plan.mesh).size} devices or more",
        )
    cost_model = assumed.cost_model or Roofline()
    return simulate_programs(programs, machine, cost_model, plan.batch_size, optimizer=assumed.optimizer, n_row_parts=n_row_parts)
