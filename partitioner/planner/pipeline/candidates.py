"""The choices on a mesh: microbatch counts and schedules."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.planner.request import PlanRequest
from partitioner.schedules.catalog import SCHEDULES, find_schedule
from partitioner.schedules.gpipe import GPIPE
from partitioner.schedules.kind import MOST_FORWARDS
from partitioner.schedules.one_f_one_b import ONE_F_ONE_B
from passes.analysis.row_statistics import values_per_channel
from passes.ir.graph import ModelGraph

DEFAULT_SCHEDULE = ONE_F_ONE_B.name


@dataclass(frozen=True)
class Candidate:
    """One way to run the pipeline.

    Attributes:
        n_microbatches: microbatches a step.
        replicas: for each stage, how many ranks run it round-robin; empty: one rank each.
    """

    schedule: str
    stages_per_rank: int
    n_microbatches: int
    replicas: tuple[int, ...] = ()

    def n_stages(self, n_ranks: int) -> int:
        """Return the number of stages on ``n_ranks`` ranks."""
        return len(self.replicas) or n_ranks * self.stages_per_rank


def schedules(request: PlanRequest) -> list[tuple[str, int]]:
    """Return the (schedule, stages per rank) that the request allows, the default first."""
    if request.mode == "model":
        return [(GPIPE.name, 1)]
    if request.schedule is not None:
        kind = find_schedule(request.schedule)
        return [(kind.name, request.stages_per_rank or kind.default_stages_per_rank)]
    if len(request.devices) == 1 and request.stages_per_rank is None:
        return [(DEFAULT_SCHEDULE, 1)]
    names = sorted(SCHEDULES, key=lambda name: name != DEFAULT_SCHEDULE)
    names = [name for name in names if SCHEDULES[name].has_replicas or not request.replicas]
    wanted = request.stages_per_rank
    return [(name, wanted or SCHEDULES[name].default_stages_per_rank) for name in names if wanted is None or SCHEDULES[name].allows(wanted)]


def may_cut_batch(graph: ModelGraph, request: PlanRequest) -> bool:
    """Return whether the planner may choose microbatches: not if results, or statistics unless ``batchnorm="local"``, would differ."""
    if graph.batch is None or graph.mixed:
        return False
    return request.batchnorm == "local" or not graph.mixing.normalizations


def with_statistics(graph: ModelGraph, counts: list[int]) -> list[int]:
    """Return the ascending microbatch counts that leave BatchNorm in training more than one value per channel; [1] if none does."""
    if not graph.mixing.normalizations:
        return counts
    kept = (count for count in counts if all(values > 1 for _, values in values_per_channel(graph, graph.batch_size // count)))
    return list(kept) or [1]


def microbatch_size(batch_size: int, n_microbatches: int) -> int:
    """Return the rows of the largest microbatch."""
    return -(-batch_size // n_microbatches)


def microbatch_choices(graph: ModelGraph, request: PlanRequest, n_places: int) -> list[int]:
    """Return the microbatch counts to choose from, ascending: divisors of the rank's batch, of which a step has few enough forwards.

    Args:
        graph: with the batch of one rank.
        n_places: ranks of the pipeline. One rank needs microbatches only for its memory.
    """
    if request.n_microbatches is not None:
        return [request.n_microbatches]
    if not may_cut_batch(graph, request):
        return [1]
    rows = graph.batch_size
    most = _MOST_MICROBATCHES * n_places
    longest = MOST_FORWARDS // (n_places * max(stages_per_rank for _, stages_per_rank in schedules(request)))
    counts = [count for count in range(1, min(rows, max(longest, 1)) + 1) if rows % count == 0]
    allowed = with_statistics(graph, [count for count in counts if count <= most or count == rows])
    if len(allowed) <= _MOST_COUNTS:
        return allowed
    spread = [allowed[0]]
    for count in allowed[1:]:
        if count >= 2 * spread[-1] or count == rows:
            spread.append(count)
    return spread


_MOST_COUNTS = 8
"""Number of microbatch counts up to which all are tried; of more, each is at least twice the one before."""

_MOST_MICROBATCHES = 8
"""Microbatches for each rank of a pipeline beyond which the bubble is too small to matter."""
