"""Run the emitted programs of a step on the clock of a cluster.

programs -> steps, each node priced       read_program
         -> events on streams and links   events
         -> memory over time, timeline    memory, timeline
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster, Device
from cost_models.memory.optimizer_state import training_bytes
from cost_models.ops.fusion import Fusion
from cost_models.simulator.contention import Passages
from cost_models.simulator.events import RankRun, Slice, run_ranks
from cost_models.simulator.memory import memory_of
from cost_models.simulator.pricing import NodePrices
from cost_models.simulator.read_program import RankWork, Templates, read_program
from cost_models.simulator.result import Simulation
from cost_models.simulator.timeline import Timeline
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.mesh import Mesh
from passes.ir.program import Program

Group: TypeAlias = tuple[int, ...]
Pair: TypeAlias = tuple[int, int]

_FIRST_FORWARD = re.compile(r"(\d+)F0")


@dataclass(frozen=True)
class Representatives:
    """Ranks that represent others with equal work on other parts of the model.

    Attributes:
        mesh: of all ranks.
        of: rank -> its representative.
    """

    mesh: Mesh
    of: Mapping[int, int]

    @staticmethod
    def everybody(n_ranks: int) -> Representatives:
        """Return representatives in which every rank represents itself."""
        return Representatives(Mesh((("rank", n_ranks),)), {rank: rank for rank in range(n_ranks)})


@gc_paused()
def simulate_programs(
    programs: Sequence[Program],
    cluster: Cluster,
    cost_model: CostModel,
    batch: int,
    *,
    optimizer: str = "none",
    n_row_parts: int = 1,
    representatives: Representatives | None = None,
    fusion: Fusion = "none",
    mixed_precision: bool = False,
    limits: Sequence[float] = (),
) -> Simulation:
    """Simulate one step.

    Args:
        programs: one for each rank, or for each representative.
        cluster: the machine; its first devices are the ranks.
        cost_model: prices nodes and messages.
        batch: rows of the whole batch.
        optimizer: whose state every rank holds for the parameters that it trains.
        n_row_parts: into how many parts ranks cut the batch.
        representatives: rank -> its representative; None: every rank is simulated.
        fusion: which operators one kernel does together, as compiled or hand-written code does.
        mixed_precision: whether the optimizer keeps 16-bit parameters and gradients in float32, too.
        limits: the memory limit of each device in bytes; empty: none is known.
    """
    representatives = representatives or Representatives.everybody(len(programs))
    prices: dict[Device, NodePrices] = {}
    templates: dict[Device, Templates] = {}
    work = []
    for program in programs:
        device = cluster.devices[program.rank]
        price = prices.setdefault(device, NodePrices(device, cost_model, fusion, copies=cluster.copies))
        work.append(read_program(program, batch // n_row_parts, price, templates.setdefault(device, {}), representatives.mesh))
    runs, traffic = run_ranks(work, Passages(cluster, cost_model).of)
    step_time = max(max(run.finish, *(each.end for each in run.transferred), 0.0) for run in runs.values())
    memory = {each.rank: memory_of(runs[each.rank], each.stays, _optimizer_bytes(each, optimizer, mixed=mixed_precision)) for each in work}
    busy = sum(runs[rank].busy for rank in representatives.of.values())
    return Simulation(
        step_time=step_time,
        bubble_fraction=1 - busy / (len(representatives.of) * step_time) if step_time else 0.0,
        memory=tuple(memory[representatives.of[rank]][0] for rank in sorted(representatives.of)),
        communication=_traffic(traffic, representatives),
        timeline=Timeline(
            "simulated",
            tuple(runs),
            tuple(each for run in runs.values() for each in _merge_slices_of_actions(run.computed)),
            tuple(each for run in runs.values() for each in sorted(run.transferred, key=lambda one: one.start)),
            tuple(curve for _, curve in memory.values()),
            step_time,
        ),
        rows=batch,
        latency=_latency(runs),
        limits=limits,
    )


def _traffic(traffic: Mapping[Group, Mapping[Pair, float]], everybody: Representatives) -> dict[Pair, int]:
    """Return the bytes between all pairs of ranks: those of each representative's group, shifted to the groups that it stands for."""
    totals: dict[Pair, float] = {}
    for group, sizes in traffic.items():
        anchor = next(member for member in group if everybody.of[member] == member)
        represented = [rank for rank, other in everybody.of.items() if other == anchor]
        for others in _shifted_groups(everybody.mesh, group, anchor, represented):
            place = dict(zip(group, others, strict=True))
            for (source, destination), size in sizes.items():
                pair = place[source], place[destination]
                totals[pair] = totals.get(pair, 0.0) + size
    return {pair: round(size) for pair, size in sorted(totals.items())}


def _shifted_groups(mesh: Mesh, group: Sequence[int], anchor: int, ranks: Sequence[int]) -> list[list[int]]:
    """Return the groups that are to some ranks as ``group`` is to ``anchor`` (``Mesh.shifted``), equal sets of ranks once."""
    if mesh.widths:
        places = np.array([[mesh.shifted(member, anchor, rank) for member in group] for rank in ranks])
    else:
        shape = [size for _, size in mesh.dimensions]
        starts, members, at = (np.stack(np.unravel_index(each, shape)) for each in ([anchor], group, ranks))  # coordinates
        coordinates = (at[:, :, None] + (members - starts)[:, None, :]) % np.array(shape)[:, None, None]
        places = np.ravel_multi_index(tuple(coordinates), shape)
    _, first = np.unique(np.sort(places, axis=1), axis=0, return_index=True)
    found: list[list[int]] = places[np.sort(first)].tolist()
    return found


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


def _optimizer_bytes(work: RankWork, optimizer: str, *, mixed: bool) -> int:
    """Return the bytes of optimizer state for the parameters that a rank trains."""
    return sum(training_bytes(size, dtype, optimizer, mixed=mixed) for size, dtype in work.trained)


def _merge_slices_of_actions(slices: Sequence[Slice]) -> list[Slice]:
    """Merge consecutive nodes of one section without a gap into one slice each."""
    found: list[Slice] = []
    for each in slices:
        last = found[-1] if found else None
        if last is not None and each.section and last.section == each.section and each.start <= last.end:
            found[-1] = Slice(last.rank, last.name, last.section, last.start, each.end, last.kind)
        else:
            found.append(each)
    return found
