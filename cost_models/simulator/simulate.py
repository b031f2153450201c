"""Run the emitted programs of a step on the clock of a cluster.

programs -> steps, each node priced       read_program
         -> events on streams and links   events
         -> memory over time, timeline    memory, timeline
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.cost_model import CostModel
from cost_models.hardware import Cluster, Device
from cost_models.memory import optimizer_states
from cost_models.simulator.events import RankRun, Slice, run_ranks
from cost_models.simulator.links import passage_of
from cost_models.simulator.memory import memory_of
from cost_models.simulator.pricing import NodePrices
from cost_models.simulator.read_program import RankWork, read_program
from cost_models.simulator.simulation import Simulation
from cost_models.simulator.stage_template import StageTemplate
from cost_models.simulator.timeline import Timeline
from passes.ir.program import Program

__all__ = ["simulate_programs"]

_FIRST_FORWARD = re.compile(r"(\d+)F0")


def simulate_programs(
    programs: Sequence[Program], cluster: Cluster, cost_model: CostModel, batch: int, *, optimizer: str = "none", n_row_parts: int = 1
) -> Simulation:
    """Simulate one step.

    Args:
        programs: one for each rank.
        cluster: the machine; its first devices are the ranks.
        cost_model: prices nodes and messages.
        batch: rows of the whole batch.
        optimizer: whose state every rank holds for the parameters that it trains.
        n_row_parts: into how many parts ranks cut the batch.
    """
    prices: dict[Device, NodePrices] = {}
    templates: dict[Device, dict[Any, StageTemplate]] = {}
    work = []
    for program in programs:
        device = cluster.devices[program.rank]
        price = prices.setdefault(device, NodePrices(device, cost_model))
        work.append(read_program(program, batch // n_row_parts, price, templates.setdefault(device, {})))
    runs, traffic = run_ranks(work, lambda transfer: passage_of(transfer, cluster, cost_model))
    step_time = max(run.finish for run in runs.values())
    step_time = max(step_time, max((each.end for run in runs.values() for each in run.transferred), default=0.0))
    found = [memory_of(runs[each.rank], each.stays, _optimizer_bytes(each, optimizer)) for each in work]
    return Simulation(
        step_time=step_time,
        bubble_fraction=1 - sum(run.busy for run in runs.values()) / (len(runs) * step_time) if step_time else 0.0,
        memory=tuple(memory for memory, _ in found),
        communication={pair: round(size) for pair, size in sorted(traffic.items())},
        timeline=Timeline(
            "simulated",
            len(runs),
            tuple(each for run in runs.values() for each in _actions(run.computed)),
            tuple(each for run in runs.values() for each in sorted(run.transferred, key=lambda one: one.start)),
            tuple(curve for _, curve in found),
        ),
        rows=batch,
        latency=_latency(runs),
    )


def _latency(runs: Mapping[int, RankRun]) -> float:
    """When the last stage has computed its first microbatch forward."""
    ends: dict[int, float] = {}
    for run in runs.values():
        for each in run.computed:
            match = _FIRST_FORWARD.fullmatch(each.section)
            if match is not None:
                stage = int(match[1])
                ends[stage] = max(ends.get(stage, 0.0), each.end)
    return ends[max(ends)] if ends else 0.0


def _optimizer_bytes(work: RankWork, optimizer: str) -> int:
    """The optimizer's state for the parameters that a rank trains."""
    return optimizer_states(optimizer) * sum(size for size, _ in work.trained)


def _actions(slices: Sequence[Slice]) -> list[Slice]:
    """Nodes that follow each other without a gap in one section, as one slice each."""
    found: list[Slice] = []
    for each in slices:
        last = found[-1] if found else None
        if last is not None and each.section and last.section == each.section and each.start <= last.end:
            found[-1] = Slice(last.rank, last.name, last.section, last.start, each.end, last.kind)
        else:
            found.append(each)
    return found
