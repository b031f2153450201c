"""The programs of a plan that are needed to time it: those of one rank of each kind.

    plan ─> graph for the microbatch's size ─> cut ─> stages ─> programs

                 tensor 0   tensor 1
    data 0       rank 0     rank 1          four ranks of one kind: rank 0 is lowered, and counts four times
    data 1       rank 2     rank 3

Pipelines are of one kind if they compute on parts of the same sizes, on equal devices, over links of the same speed: they keep the same
time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from cost_models.hardware import Cluster, Level, Link
from partitioner.experiments.subject import Subject
from partitioner.rows import RowParts
from partitioner.schedules.catalog import make_schedule
from partitioner.tracing.trace import trace
from passes.cut_axes import CutModel, cut_by_plan
from passes.emit_programs import LossForm, emit_forward, emit_train_step
from passes.fix_batch import fix_batch
from passes.ir.graph import ModelGraph, Results
from passes.ir.mesh import Mesh, pipelines
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.loss_totals import with_totals
from passes.lower import Differentiation, LoweredStages, cut_stages, differentiate_stages, values_requiring_gradient
from passes.place_on_mesh import place_on_mesh
from passes.split_backward import Recompute

__all__ = ["Timed", "is_uniform", "lower_for_timing"]


@dataclass(frozen=True)
class Timed:
    """Programs to be timed.

    Attributes:
        programs: of some ranks.
        counts: for each of them, how many ranks it stands for.
        n_row_parts: into how many parts ranks cut the batch.
    """

    programs: tuple[Program, ...]
    counts: Mapping[int, int]
    n_row_parts: int


def lower_for_timing(subject: Subject, plan: Plan, *, each_rank: bool = False) -> Timed:
    """The programs that ``pm.graphs`` shows, of a training step or a forward, without anything that runs them.

    Args:
        each_rank: lower every rank's, also where ranks are of one kind.

    Raises:
        PartitionError: the plan cannot be lowered.
    """
    kinds = {output.combine for output in subject.graph.outputs}
    results: Results = "rows" if kinds & {"mean", "sum"} else "whole" if "mixed" in kinds else "loss"
    if not subject.graph.training:
        results = "rows"
    graph = _of_microbatch(subject, plan, means="mean" in kinds)
    cut = cut_by_plan(graph, plan, results, rows=RowParts(Mesh(plan.mesh)).divides(plan.batch_size))
    trainable = {name for name, original in subject.graph.parameters.items() if subject.made.model.get_parameter(original).requires_grad}
    device = next((tensor.device for tensor in subject.made.model.parameters()), torch.device("cpu"))
    mesh = Mesh(plan.mesh)
    programs: list[Program] = []
    counts: dict[int, int] = {}
    for number, count in _kinds(cut, each_rank=each_rank):
        ranks = pipelines(mesh)[number]
        part = cut.parts[number]
        for program in _emitted(part, plan, frozenset(trainable), [device] * len(ranks)):
            placed = program if len(cut.parts) == 1 else place_on_mesh(program, part, mesh, ranks)
            programs.append(placed)
            counts[placed.rank] = count
    return Timed(tuple(programs), counts, cut.parts[0].part.n_row_parts)


def _of_microbatch(subject: Subject, plan: Plan, *, means: bool) -> ModelGraph:
    """The model for the size of one microbatch over all ranks; for any size where microbatches are not all equal."""
    graph = subject.graph
    size, rest = divmod(plan.batch_size, plan.n_microbatches)
    if graph.batch is not None and not rest:
        graph = fix_batch(graph, size)
    elif graph.batch is None and size != graph.batch_size:
        made = subject.made
        graph = trace(made.model, made.args, made.kwargs if made.args is not None else None, graph.training, size)
    in_parts = plan.n_microbatches > 1 or RowParts(Mesh(plan.mesh)).count > 1
    return with_totals(graph) if means and in_parts else graph


def _emitted(part: ModelGraph, plan: Plan, trainable: frozenset[str], devices: Sequence[torch.device]) -> tuple[Program, ...]:
    """The programs of one pipeline."""
    stages = cut_stages(part, plan, devices)
    requiring = values_requiring_gradient(stages.stages, trainable) if part.training else frozenset()
    outputs = frozenset(stages.returned) & requiring
    if not outputs:
        return emit_forward(stages, plan.n_microbatches, devices, training=False)
    lowered: LoweredStages = differentiate_stages(
        stages, Differentiation(outputs, frozenset(), trainable), cast(Recompute, plan.recompute), devices
    )
    schedule = make_schedule(plan.schedule, len(devices), plan.n_microbatches, len(plan.stages) // len(devices))
    return emit_train_step(lowered, schedule, LossForm(), devices)


def _kinds(cut: CutModel, *, each_rank: bool) -> Iterator[tuple[int, int]]:
    """The pipelines to lower, each with how many it stands for."""
    parts = [id(part) for part in cut.parts]
    first: dict[int, int] = {}
    for number, part in enumerate(parts):
        first.setdefault(number if each_rank else part, number)
    yield from ((number, 1 if each_rank else parts.count(parts[number])) for number in first.values())


def is_uniform(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether all groups along the same mesh dimensions are joined alike, and all their devices are equal."""
    if any(device != cluster.devices[0] for device in cluster.devices[: mesh.size]):
        return False
    if isinstance(cluster.links, Link):
        return True
    if isinstance(cluster.links, Mapping):
        return False
    for count in range(1, len(mesh.names) + 1):
        for names in itertools.combinations(mesh.names, count):
            groups = {mesh.group(rank, names) for rank in range(mesh.size)}
            if len({_levels(group, cluster.links) for group in groups}) > 1:
                return False
    return True


def _levels(group: Sequence[int], levels: Sequence[Level]) -> tuple[int, ...]:
    """Which level of links joins each rank of a group with the next, around the ring."""
    pairs = zip(group, (*group[1:], group[0]), strict=True)
    return tuple(next(index for index, level in enumerate(levels) if one // level.size == other // level.size) for one, other in pairs)
