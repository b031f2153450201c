"""The planning problem: a model, the hardware and the user's request. Its solution is the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import format_bytes
from partitioner.planner.constraints.halos import check_halos
from partitioner.planner.pipeline.problem import memory_limits
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.search.least_memory import least_memory
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.planner.sequential_tiling import plan_stream
from partitioner.planner.sharding.shared_models import SharedModels
from partitioner.planner.simulated_ranking import MOST_SIMULATED, Simulated, fastest_simulated
from partitioner.schedules.catalog import interleaves
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh, ranks_at_places
from passes.ir.plan import Plan
from passes.normalize.loss_alone import own_loss

_FOR_SIMULATIONS = 0.3
"""Fraction of a time limit that a search over all meshes leaves for the simulations of its best plans."""


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """A model to be planned, for the objective of its request.

    Attributes:
        cluster: the hardware, at least as many devices as the request names.
        cost_model: prices work and messages; None: an analytic roofline.
        mesh: the mesh that the user named; None: the planner chooses.
        sequential_tiles: number or grid of tiles that one device computes one after the other; None: no tiling.
        models: what plans of the same graph share; give several problems the same to solve them faster.
    """

    graph: ModelGraph
    cluster: Cluster
    request: PlanRequest
    cost_model: CostModel | None
    mesh: Mesh | None
    sequential_tiles: int | tuple[int, ...] | None = None
    models: SharedModels = field(default_factory=SharedModels, repr=False)

    @property
    def limits(self) -> tuple[float, ...]:
        """The memory limit of each rank in bytes."""
        return self.limits_on(self.cluster)

    def limits_on(self, cluster: Cluster) -> tuple[float, ...]:
        """Return the memory limit of each rank in bytes on another machine: without one in the request, that of its devices."""
        return memory_limits(cluster.first(len(self.request.devices)), self.request)

    def solve(self, tell: Callable[[str], None] | None = None, simulated: Simulated | None = None) -> Plan:
        """Return the plan: of sequential tiles on one device, of the named mesh, or the fastest of all meshes.

        Args:
            tell: called with the progress of a search; an interrupt then keeps the best plan. None: an interrupt is raised.
            simulated: returns the simulated step of a plan: the best plans of a search over all meshes are ranked by it. None: they are
                ranked by the prices of the search.

        Raises:
            ConfigError: the request does not fit the model, the cluster or itself.
            InfeasiblePlanError: no plan fits the memory; says how much is missing and what would fit.
        """
        check_halos(self.request.constraints, self.mesh if self.sequential_tiles is None else None)
        objective = self.request.objective
        if objective == "memory":
            return least_memory(lambda request: self._fastest(request, tell), self.request)
        price = _price_per_hour(self.cluster.first(len(self.request.devices))) if objective == "cost" else 0.0
        plan = self._fastest(self.request, tell, simulated)
        reported = () if objective == "step_time" else (_objective_words(plan, price),)
        return plan.predicted(notes=(*plan.notes, *reported))

    def _fastest(self, request: PlanRequest, tell: Callable[[str], None] | None, simulated: Simulated | None = None) -> Plan:
        """Return the plan with the shortest step."""
        deadline = Deadline.after(request.time_limit)  # before anything that takes time
        graph = self.models.graph_of_step(self.graph)
        problem = (graph, self.cluster, request, self.cost_model)
        if self.sequential_tiles is not None:
            plan = plan_stream(graph, self.sequential_tiles, *problem[1:])
        elif self.mesh is not None:
            plan = plan_mesh(graph, self.cluster, replace(request, names_mesh=True), self.cost_model, self.mesh, self.models, deadline)
        elif simulated is None or len(request.devices) == 1:
            plan = plans_auto(*problem, tell, self.models, deadline)[0]
        else:
            deadline = replace(deadline, reserve=_FOR_SIMULATIONS)
            plans = plans_auto(*problem, tell, self.models, deadline, most=MOST_SIMULATED)
            least = min(self.limits)

            def smaller(plan: Plan, fraction: float) -> Plan:
                within = replace(request, most_bytes=fraction * least, time_limit=deadline.left)
                return plan_mesh(graph, self.cluster, within, self.cost_model, plan.grid, self.models, deadline)

            plan = fastest_simulated(plans, simulated, self.limits, deadline, interruptible=tell is not None, smaller=smaller)
        return _with_calls(plan, self.graph).predicted(sizes=tuple(self.graph.proven_sizes.items()))


def _price_per_hour(cluster: Cluster) -> float:
    """Return the price of all devices for an hour; raise ConfigError if that of one is not known."""
    for device in cluster.devices:
        if device.price_per_hour is None:
            raise ConfigError(
                f'objective="cost" needs the price of a device for an hour, and {device.name} has none',
                remedy=f"write price_per_hour = 2.5 under [devices.{device.name}] in the TOML file of a cluster, or pass a Cluster of such "
                "Devices",
            )
    return sum(device.price_per_hour or 0.0 for device in cluster.devices)


def _objective_words(plan: Plan, price_per_hour: float) -> str:
    """Say what a step costs, or without a price how many rows a device computes in a second."""
    if price_per_hour:
        step, rows = price_per_hour * plan.step_time / 3600, plan.batch_size
        return f"A step costs {step:.3g}, at {price_per_hour:,.2f} an hour for all devices: {1000 * step / rows:.3g} for 1,000 rows."
    return f"{plan.batch_size / plan.step_time / plan.n_ranks:.3g} rows a second on each device."


def _with_calls(plan: Plan, graph: ModelGraph) -> Plan:
    """Count the results in the peaks of ``pm(...)`` and ``backward()``, and note where these peaks are not those of the schedule.

    Every rank gets the results of the batch, and the caller's loss gives their gradients; those on the ranks of the last stage are counted.
    """
    if not graph.training:
        return plan.predicted(call_memory=())
    results = [node.meta["val"] for node in graph.graph.nodes if node.name in graph.returned]
    sizes = [(bytes_of(value, graph.batch, plan.batch_size), value.is_floating_point()) for value in results if isinstance(value, Tensor)]
    own, differentiated = sum(size for size, _ in sizes), sum(size for size, is_float in sizes if is_float)
    places, last = ranks_at_places(plan.grid), plan.stage_ranks[-1]
    with_loss = {rank for place in last for rank in places[place]}
    gradients = 0 if own_loss(graph) is not None else differentiated
    peaks = [peak + own + (0 if rank in with_loss else gradients) for rank, peak in enumerate(plan.call_memory)]
    counted = plan.predicted(call_memory=tuple(peaks))
    if not interleaves(plan):
        return counted
    rank = max(range(plan.n_ranks), key=lambda rank: peaks[rank] - plan.memory[rank])
    note = (
        f"pm(...) and backward() run all forwards first, and hold all {plan.n_microbatches} microbatches: {format_bytes(peaks[rank])} are "
        f"predicted on rank {rank}, where train_step(), by {plan.schedule}, needs {format_bytes(plan.memory[rank])}."
    )
    return counted.predicted(notes=(*plan.notes, note))
