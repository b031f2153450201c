"""The programs of a placement on a clock, from a model that is traced already and nothing that runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cost_models.cost_model import Roofline
from cost_models.hardware import Cluster
from cost_models.simulator.simulate import simulate_programs
from cost_models.simulator.simulation import Simulation
from partitioner.experiments.lowered import Timed
from passes.ir.plan import Plan

__all__ = ["Predicted", "predict"]


@dataclass(frozen=True)
class Predicted:
    """What a simulated step comes to.

    Attributes:
        step_time: seconds.
        bubble_fraction: of all ranks' time.
        peak_memory: bytes on the fullest device.
        communication: bytes that all ranks send.
    """

    step_time: float
    bubble_fraction: float
    peak_memory: int
    communication: int


def predict(timed: Timed, plan: Plan, cluster: Cluster, optimizer: str) -> Predicted:
    """What ``partition(..., plan=plan).simulate(cluster)`` tells, from the programs of one rank of each kind."""
    simulation = simulate_programs(timed.programs, cluster, Roofline(), plan.batch_size, optimizer=optimizer, n_row_parts=timed.n_row_parts)
    sent: Counter[int] = Counter()
    for (source, _), size in simulation.communication.items():
        sent[source] += size
    return Predicted(
        simulation.step_time,
        _bubble(timed, simulation),
        max(simulation.peak_memory),
        sum(sent[rank] * count for rank, count in timed.counts.items()),
    )


def _bubble(timed: Timed, simulation: Simulation) -> float:
    """The part of all ranks' time in which they compute nothing, every rank counted as often as there are such."""
    busy = sum((each.end - each.start) * timed.counts[each.rank] for each in simulation.timeline.computed)
    return 1.0 - busy / (simulation.step_time * sum(timed.counts.values())) if simulation.step_time else 0.0
