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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from cost_models.hardware.clusters import Cluster, Level, Link
from cost_models.simulator.simulate import Representatives
from partitioner.experiments.run.subject import Subject
from partitioner.model.simulate import is_written_out
from partitioner.options.batch_rows import RowParts
from partitioner.schedules.catalog import schedule_of
from partitioner.tracing.trace import trace
from passes.autograd.recompute import Recompute
from passes.autograd.staged_model import Differentiation, LoweredStages
from passes.emit.place_on_mesh import place_on_mesh
from passes.emit.programs import LossForm, emit_forward, emit_train_step
from passes.graph.lazy_graph_module import nothing_collected
from passes.ir.graph import ModelGraph, Results
from passes.ir.mesh import Mesh, homes, pipelines
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.normalize.specialize_batch import fix_batch
from passes.pipeline import StagedCut, cut_by_plan, cut_stages, differentiate_stages, values_requiring_gradient
from passes.spmd.mean_to_sum import with_totals

__all__ = ["Timed", "is_uniform", "lower_for_timing"]


@dataclass(frozen=True)
class Timed:
    """Programs to be timed.

    Attributes:
        programs: of some ranks.
        representatives: for whom each of them stands.
        n_row_parts: into how many parts ranks cut the batch.
    """

    programs: tuple[Program, ...]
    representatives: Representatives
    n_row_parts: int


@nothing_collected()
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
    cut = cut_by_plan(graph, plan, results, rows=RowParts(plan.grid).divides(plan.batch_size))
    trainable = {name for name, original in subject.graph.parameters.items() if subject.made.model.get_parameter(original).requires_grad}
    found = next((tensor.device for tensor in subject.made.model.parameters()), torch.device("cpu"))
    # As ``partition`` lowers it: not every operator can be differentiated on the meta device.
    device = torch.device("cpu") if found.type == "meta" else found
    mesh = plan.grid
    ranks = pipelines(mesh)
    standing = _standing(cut, each_rank=each_rank)
    programs: list[Program] = []
    home = homes(mesh)
    for number in dict.fromkeys(standing):
        parts = cut.parts[number]
        stages = cut_stages(parts, plan, [device] * len(plan.stages))
        nodes = sum(len(stage.module.graph.nodes) for stage in stages.stages)
        written_out = is_written_out(plan, nodes, plan.n_microbatches)
        for each in _emitted(stages, plan, frozenset(trainable), [device] * len(ranks[number])):
            if home[ranks[number][each.rank]] == number:
                place = each.rank
                is_alone = len(cut.parts) == 1
                programs.append(each if is_alone else place_on_mesh(each, parts[place], mesh, ranks[number], written_out=written_out))
    of = {rank: ranks[first][place] for first, pipeline in zip(standing, ranks, strict=True) for place, rank in enumerate(pipeline)}
    if mesh.widths:
        of = {rank: rank for rank in of}
    return Timed(tuple(programs), Representatives(mesh, of), cut.parts[0][0].part.n_row_parts)


def _of_microbatch(subject: Subject, plan: Plan, *, means: bool) -> ModelGraph:
    """The model for the size of one microbatch over all ranks; for any size where microbatches are not all equal."""
    graph = subject.graph
    size, rest = divmod(plan.batch_size, plan.n_microbatches)
    if graph.batch is not None and not rest:
        graph = fix_batch(graph, size)
    elif graph.batch is None and size != graph.batch_size:
        made = subject.made
        graph = trace(made.model, made.args, made.kwargs if made.args is not None else None, graph.training, size)
    in_parts = plan.n_microbatches > 1 or RowParts(plan.grid).count > 1
    return with_totals(graph) if means and in_parts else graph


def _emitted(stages: LoweredStages, plan: Plan, trainable: frozenset[str], devices: Sequence[torch.device]) -> tuple[Program, ...]:
    """The programs of one pipeline."""
    requiring = values_requiring_gradient(stages, trainable) if stages.graph.training else frozenset()
    outputs = frozenset(stages.returned) & requiring
    if not outputs:
        return emit_forward(stages, plan.n_microbatches, devices, training=False)
    differentiation = Differentiation(outputs, frozenset(), trainable)
    lowered: LoweredStages = differentiate_stages(stages, differentiation, cast(Recompute, plan.recompute), share=True)
    return emit_train_step(lowered, schedule_of(plan, plan.n_microbatches), LossForm(), devices)


def _standing(cut: StagedCut, *, each_rank: bool) -> list[int]:
    """For each pipeline the one that stands for it: the first with the same parts, unless stages of unlike width send to unlike ranks."""
    kinds = [tuple(map(id, parts)) for parts in cut.parts]
    return [number if each_rank or cut.mesh.widths else kinds.index(kind) for number, kind in enumerate(kinds)]


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
